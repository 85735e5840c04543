package main

import (
	"cmp"
	"context"
	"encoding/hex"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"

	"sluice/internal/quant"
	"sluice/moe"
	"sluice/moe/chat"
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
	roles       map[moe.Role]*roleCount // of what the model uses
	unused      int64                   // bytes of tensors that it does not use
	template    templateFound
	tokenizer   string
	format      string
	packed      *storage.Identity // of a slab: the model that it was made of
	requantized string            // and what of it; "": nothing
}

// roleCount counts the tensors of a role, a stack of experts as one.
type roleCount struct {
	typeCount
	Types map[string]typeCount `json:"types"`
}

func (r *roleCount) String() string {
	var of []string
	for _, name := range slices.SortedFunc(maps.Keys(r.Types), func(a, b string) int {
		return cmp.Or(cmp.Compare(r.Types[b].Bytes, r.Types[a].Bytes), strings.Compare(a, b))
	}) {
		of = append(of, fmt.Sprintf("%d of %s", r.Types[name].Tensors, name))
	}
	return fmt.Sprintf("%s: %s", size(r.Bytes), strings.Join(of, ", "))
}

// hitRates are those for which inspect says what a token reads.
var hitRates = [...]int{0, 50, 80, 90, 95, 99} // percent

type typeCount struct {
	Tensors int   `json:"tensors"`
	Bytes   int64 `json:"bytes"`
}

func describe(file *storage.Model, spec *moe.Spec) description {
	d := description{Spec: spec, format: file.Format, files: len(file.Files), types: map[string]typeCount{},
		roles: map[moe.Role]*roleCount{}, template: findTemplate(file.Meta), tokenizer: tokenizerOf(file.Meta)}
	for _, f := range file.Files {
		d.fileBytes += f.Size
	}
	byType := map[quant.Type]typeCount{} // there may be 100,000
	for _, t := range file.Tensors {
		c := byType[t.Type]
		byType[t.Type] = typeCount{c.Tensors + 1, c.Bytes + t.Bytes}
		d.unused += t.Bytes
	}
	for typ, c := range byType {
		d.types[typ.String()] = c
	}
	for _, w := range spec.Weights() {
		r := d.roles[w.Role]
		if r == nil {
			r = &roleCount{Types: map[string]typeCount{}}
			d.roles[w.Role] = r
		}
		c, name := r.Types[w.Type.String()], w.Type.String()
		r.Types[name] = typeCount{c.Tensors + 1, c.Bytes + w.Bytes}
		r.Tensors, r.Bytes = r.Tensors+1, r.Bytes+w.Bytes
		d.unused -= w.Bytes
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

// perTokenAt is what a token reads when so many percent of its experts are in memory.
func (d description) perTokenAt(percent int) int64 { return d.perToken * int64(100-percent) / 100 }

// A templateFound is the chat template of a model.
type templateFound struct {
	from string // the file or the key; "": there is none
	size int
	err  error // why it cannot be used
}

// findTemplate finds the chat template that --chat takes.
func findTemplate(meta storage.Meta) (f templateFound) {
	text := func(key string) (string, bool) { s, ok := meta.Value(key).(string); return s, ok }
	source, err := chat.Find(text, false)
	switch config, _ := text("hf.tokenizer_config.json"); {
	case meta.Has("hf.chat_template.jinja"):
		f.from = "chat_template.jinja"
	case meta.Has("hf.chat_template.json"):
		f.from = "chat_template.json"
	case strings.Contains(config, `"chat_template"`):
		f.from = "tokenizer_config.json"
	case meta.Has("tokenizer.chat_template"):
		f.from = "tokenizer.chat_template"
	default:
		return f
	}
	f.size, f.err = len(source), err // to parse what comes from elsewhere takes a process, see render
	return f
}

func (f templateFound) String() string {
	switch {
	case f.from == "":
		return "none: --chat is refused"
	case f.err != nil:
		return fmt.Sprintf("%s, which cannot be used: %s", f.from, printable(f.err.Error()))
	}
	return fmt.Sprintf("%s, %s", f.from, size(int64(f.size)))
}

// tokenizerKind is the type of the model in a tokenizer.json, found without decoding
// its tens of megabytes.
var tokenizerKind = regexp.MustCompile(`"model"\s*:\s*\{\s*"type"\s*:\s*"(\w{1,20})"`)

// tokenizerOf says which tokenizer a model brings.
func tokenizerOf(meta storage.Meta) string {
	text := func(key string) string { s, _ := meta.Value(key).(string); return s }
	if json := text("hf.tokenizer.json"); json != "" {
		if kind := tokenizerKind.FindStringSubmatch(json); kind != nil {
			return "tokenizer.json, " + kind[1]
		}
		return "tokenizer.json"
	}
	if text("hf.tiktoken.model") != "" {
		return "tiktoken.model"
	}
	kind := text("tokenizer.ggml.model")
	if kind == "" {
		return ""
	}
	if pre := text("tokenizer.ggml.pre"); pre != "" {
		kind += ", " + pre
	}
	return printable(kind)
}

func (d description) object(path string) map[string]any {
	roles, rates := map[string]*roleCount{}, map[string]int64{}
	for r, c := range d.roles {
		roles[r.String()] = c
	}
	for _, percent := range hitRates {
		rates[strconv.Itoa(percent)] = d.perTokenAt(percent)
	}
	object := map[string]any{
		"model": path, "format": d.format, "architecture": d.Arch, "name": d.Name, "files": d.files, "file_bytes": d.fileBytes,
		"layers": d.Layers, "moe_layers": len(d.Roles), "leading_dense_layers": d.LeadingDense, "nextn_layers": d.Nextn,
		"hidden": d.Hidden, "vocab": d.Vocab, "heads": d.Heads, "kv_heads": d.KVHeads, "head_dim": d.HeadDim,
		"experts": d.Experts, "top_k": d.TopK, "shared_experts": d.SharedExperts, "expert_ff": d.ExpertFF, "ctx": d.Ctx,
		"dense_bytes": d.denseBytes, "expert_bytes": d.expertBytes, "bytes_per_expert": d.perExpert, "nextn_bytes": d.nextnBytes, "bytes_per_token": d.perToken,
		"types": d.types, "roles": roles, "unused_bytes": d.unused, "bytes_per_token_at_hit_percent": rates,
		"chat_template": d.template.from != "", "chat_template_from": d.template.from, "tokenizer": d.tokenizer,
	}
	if d.template.err != nil {
		object["chat_template_error"] = d.template.err.Error()
	}
	if d.Nextn > 0 {
		object["mtp_usable"] = d.NextnErr == nil
		if d.NextnErr != nil {
			object["mtp_error"] = d.NextnErr.Error()
		}
	}
	if head, least, ok := d.NextnTypes(); ok {
		object["nextn_head_type"], object["nextn_least_type"] = head.String(), least.String()
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
	dense := len(d.Roles) == 0
	row("layers", "%d, %d of them with experts, %d nextn behind them", d.Layers, len(d.Roles), d.Nextn)
	row("sizes", "hidden %d, vocabulary %d, %d heads and %d key-value heads of %d, context %d", d.Hidden, d.Vocab, d.Heads, d.KVHeads, d.HeadDim, d.Ctx)
	if dense {
		row("experts", "none: the model is dense, its feed-forwards are %d wide", d.FF)
	} else {
		row("experts", "%d per layer, top-%d, width %d, %d shared", d.Experts, d.TopK, d.ExpertFF, d.SharedExperts)
	}
	row("resident", "%s of dense weights", size(d.denseBytes))
	each := "each"
	if d.expertBytes != d.perExpert*int64(d.Experts*len(d.Roles)) {
		each = "the largest" // layers differ in their types
	}
	if dense {
		row("streamed", "nothing: a token reads nothing from the drive")
	} else {
		row("streamed", "%s of routed experts, %s %s", size(d.expertBytes), size(d.perExpert), each)
		var rates []string
		for _, percent := range hitRates[1:] {
			rates = append(rates, fmt.Sprintf("%s at %d %%", size(d.perTokenAt(percent)), percent))
		}
		row("per token", "%s are read when no expert is in memory; of hits %s", size(d.perToken), strings.Join(rates, ", "))
	}
	for _, r := range slices.Sorted(maps.Keys(d.roles)) {
		row("  "+r.String(), "%v", d.roles[r])
	}
	if d.unused > 0 {
		row("  not used", "%s", size(d.unused))
	}
	switch {
	case d.Nextn == 0:
		row("MTP", "none")
	case d.NextnErr != nil:
		row("MTP", "%s in %d layers, which cannot draft: %s", size(d.nextnBytes), d.Nextn, printable(d.NextnErr.Error()))
	default:
		row("MTP", "%s in %d layers, taken into memory where they draft", size(d.nextnBytes), d.Nextn)
		if head, _, ok := d.NextnTypes(); ok {
			row("MTP head", "%v", head)
		}
		if words := d.NextnWarning(); words != "" {
			row("", "%s", words)
		}
	}
	row("tokenizer", "%s", cmp.Or(d.tokenizer, "none: text is refused"))
	row("chat template", "%v", d.template)
	return t.Flush()
}
