package main

import (
	"context"
	"encoding/hex"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"

	"sluice/moe"
	"sluice/storage"
)

func inspectCommand(_ context.Context, s streams, args []string) error {
	f, asJSON := newFlags(s, "inspect", "describe a model from its headers")
	model := modelFlag(f)
	if err := parse(f, args); err != nil {
		return err
	}
	path, err := oneModel(*model, f.Args())
	if err != nil {
		return err
	}
	file, err := storage.Open(path)
	if err != nil {
		return err
	}
	defer file.Close()
	spec, err := moe.Describe(file)
	if err != nil {
		return err
	}
	d := describe(file, spec)
	if file.Format == "slab" {
		id, err := file.Identity()
		if err != nil {
			return err
		}
		d.packed, d.requantized = &id, file.Requantized()
	}
	if *asJSON {
		return printJSON(s.out, d.object(path))
	}
	return d.print(s, path)
}

// description is what inspect says beside the Spec.
type description struct {
	*moe.Spec
	files       int
	fileBytes   int64
	denseBytes  int64 // resident
	expertBytes int64 // of all routed experts
	nextnBytes  int64 // of layers behind those that run
	perExpert   int64 // of one expert; the largest, where layers differ
	perToken    int64 // read for a token when no expert is in memory
	types       map[string]typeCount
	template    bool
	format      string
	packed      *storage.Identity // of a slab: the model that it was made of
	requantized string            // and what of it; "": nothing
}

type typeCount struct {
	Tensors int   `json:"tensors"`
	Bytes   int64 `json:"bytes"`
}

func describe(file *storage.Model, spec *moe.Spec) description {
	d := description{Spec: spec, format: file.Format, files: len(file.Files), types: map[string]typeCount{}, template: hasTemplate(file.Meta)}
	for _, f := range file.Files {
		d.fileBytes += f.Size
	}
	for _, t := range file.Tensors {
		c := d.types[t.Type.String()]
		d.types[t.Type.String()] = typeCount{c.Tensors + 1, c.Bytes + t.Bytes}
	}
	for _, t := range spec.Dense {
		d.denseBytes += t.Bytes
	}
	for _, t := range file.Tensors {
		if spec.Nextn > 0 && layerOf(t.Name) >= spec.Layers {
			d.nextnBytes += t.Bytes
		}
	}
	for _, r := range spec.Roles {
		layer := int64(0)
		for _, part := range r.Parts {
			t, _ := file.Tensor(part)
			layer += t.Bytes
		}
		one := layer / int64(r.Experts)
		d.expertBytes += layer
		d.perToken += one * int64(spec.TopK)
		d.perExpert = max(d.perExpert, one)
	}
	return d
}

// layerOf is the layer that a tensor's name says, -1 if it says none: the number
// behind "blk." or "layers.".
func layerOf(name string) int {
	for _, word := range [...]string{"blk.", "layers."} {
		if _, rest, ok := strings.Cut(name, word); ok {
			no, _, _ := strings.Cut(rest, ".")
			if n, err := strconv.Atoi(no); err == nil {
				return n
			}
		}
	}
	return -1
}

// hasTemplate says whether a model brings a chat template.
func hasTemplate(meta storage.Meta) bool {
	if meta.Has("tokenizer.chat_template") || meta.Has("hf.chat_template.jinja") || meta.Has("hf.chat_template.json") {
		return true
	}
	config, ok := meta.Value("hf.tokenizer_config.json").(string)
	return ok && strings.Contains(config, `"chat_template"`)
}

func (d description) object(path string) map[string]any {
	object := map[string]any{
		"model": path, "format": d.format, "architecture": d.Arch, "name": d.Name, "files": d.files, "file_bytes": d.fileBytes,
		"layers": d.Layers, "moe_layers": len(d.Roles), "leading_dense_layers": d.LeadingDense, "nextn_layers": d.Nextn,
		"hidden": d.Hidden, "vocab": d.Vocab, "heads": d.Heads, "kv_heads": d.KVHeads, "head_dim": d.HeadDim,
		"experts": d.Experts, "top_k": d.TopK, "shared_experts": d.SharedExperts, "expert_ff": d.ExpertFF, "ctx": d.Ctx,
		"dense_bytes": d.denseBytes, "expert_bytes": d.expertBytes, "bytes_per_expert": d.perExpert, "nextn_bytes": d.nextnBytes, "bytes_per_token": d.perToken,
		"types": d.types, "chat_template": d.template,
	}
	if d.packed != nil {
		type file struct {
			Bytes  int64  `json:"bytes"`
			Time   string `json:"time"`
			Header string `json:"header_sha256"`
		}
		var files []file
		for _, f := range d.packed.Files {
			if !f.IsFile() {
				continue
			}
			files = append(files, file{f.Size, f.Stamp(), hex.EncodeToString(f.Header[:])})
		}
		id := d.packed.Hash()
		source := map[string]any{"identity": hex.EncodeToString(id[:]), "files": files}
		if d.requantized != "" {
			source["requantized"] = d.requantized
		}
		object["source"] = source
	}
	return object
}

func (d description) print(s streams, path string) error {
	t := tabwriter.NewWriter(s.out, 0, 0, 2, ' ', 0)
	row := func(name, format string, args ...any) { fmt.Fprintf(t, "%s\t%s\n", name, fmt.Sprintf(format, args...)) }
	row("model", "%s", printable(path))
	row("format", "%s", d.format)
	if d.packed != nil {
		id := d.packed.Hash()
		row("packed from", "a model with the identity %x", id[:8])
		for _, f := range d.packed.Files {
			if f.IsFile() {
				row("", "%s of %s, header %x", size(f.Size), f.Stamp(), f.Header[:8])
			}
		}
	}
	if d.requantized != "" {
		row("requantized", "%s: it gives other logits than that model", d.requantized)
	}
	row("architecture", "%s (%s)", d.Arch, printable(d.Name))
	row("files", "%d, %s", d.files, size(d.fileBytes))
	row("layers", "%d, %d of them with experts, %d nextn behind them", d.Layers, len(d.Roles), d.Nextn)
	row("sizes", "hidden %d, vocabulary %d, %d heads and %d key-value heads of %d, context %d", d.Hidden, d.Vocab, d.Heads, d.KVHeads, d.HeadDim, d.Ctx)
	row("experts", "%d per layer, top-%d, width %d, %d shared", d.Experts, d.TopK, d.ExpertFF, d.SharedExperts)
	row("resident", "%s of dense weights", size(d.denseBytes))
	each := "each"
	if d.expertBytes != d.perExpert*int64(d.Experts*len(d.Roles)) {
		each = "the largest" // layers differ in their types
	}
	row("streamed", "%s of routed experts, %s %s", size(d.expertBytes), size(d.perExpert), each)
	if d.nextnBytes > 0 {
		row("nextn", "%s of the drafting layers, not used by decoding", size(d.nextnBytes))
	}
	row("per token", "%s are read when no expert is in memory", size(d.perToken))
	for _, name := range slices.Sorted(maps.Keys(d.types)) {
		row(name, "%d tensors, %s", d.types[name].Tensors, size(d.types[name].Bytes))
	}
	row("chat template", "%v", d.template)
	return t.Flush()
}
