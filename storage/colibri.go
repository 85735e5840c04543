package storage

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"sluice/internal/quant"
)

// A colibri container is a directory like that of a Hugging Face model, with its
// config.json and its names. Its files of safetensors may have any names. A
// quantized tensor is a pair: NAME, bytes of codes without a shape, and NAME.qs,
// f32 scales. The shape follows from config.json, and what the codes are from the
// two sizes, or from a stamp in a header, which must agree with them.

// coliMost is the most files of a container.
const coliMost = 512

// coliFiles lists the files of the container in dir, nil if it is none: any
// number of files, of no set of shards, one of which has scales.
func coliFiles(dir, named string) ([]string, error) {
	if named == hfWhole || hfShard.MatchString(named) {
		return nil, nil
	}
	if _, err := os.Stat(filepath.Join(dir, hfWhole)); err == nil {
		return nil, nil
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, fmt.Errorf("storage: %w", err)
	}
	var names []string
	for _, e := range entries {
		if strings.HasSuffix(e.Name(), ".safetensors") && !hfShard.MatchString(e.Name()) {
			names = append(names, e.Name())
		}
	}
	if len(names) > coliMost {
		return nil, &FormatError{File: dir, Off: -1, Msg: fmt.Sprintf("there are %d files of safetensors in it, %d are the limit", len(names), coliMost)}
	}
	for _, name := range names {
		if scaled, err := hasScales(filepath.Join(dir, name)); err != nil || scaled {
			return names, err
		}
	}
	return nil, nil
}

// hasScales says whether a file's header names a tensor as a colibri container
// names scales. A damaged one is for others to tell.
func hasScales(path string) (bool, error) {
	fi, err := os.Stat(path)
	if err != nil || !fi.Mode().IsRegular() {
		return false, nil
	}
	f, err := openUnwaiting(path)
	if err != nil {
		return false, fmt.Errorf("storage: open model: %w", err)
	}
	defer f.Close()
	var length [8]byte
	if _, err := f.ReadAt(length[:], 0); err != nil {
		return false, nil
	}
	n := binary.LittleEndian.Uint64(length[:])
	if n > uint64(max(0, fi.Size()-8)) || n > maxIndex {
		return false, nil
	}
	b := make([]byte, n)
	if _, err := f.ReadAt(b, 8); err != nil {
		return false, nil
	}
	return bytes.Contains(b, []byte(`.qs"`)), nil
}

// coliStamp is the entry of a header's metadata that names formats.
const coliStamp = "colibri.fmt"

// coliStamps is what a header says of formats, nil if nothing.
func coliStamps(header []byte) ([]byte, error) {
	if !bytes.Contains(header, []byte(coliStamp)) {
		return nil, nil
	}
	var h struct {
		Meta map[string]string `json:"__metadata__"`
	}
	if err := json.Unmarshal(header, &h); err != nil {
		return nil, fmt.Errorf("its header's metadata: %w", err)
	}
	if s, ok := h.Meta[coliStamp]; ok {
		return []byte(s), nil
	}
	return nil, nil
}

// stamps reads those of all files.
func (c *composer) stamps() error {
	for i := range c.m.Files {
		f := &c.m.Files[i]
		if f.stamps == nil {
			continue
		}
		var of map[string]string
		if err := json.Unmarshal(f.stamps, &of); err != nil {
			return &FormatError{File: f.Path, Off: -1, Msg: fmt.Sprintf("its %s is no JSON object of names: %v; convert the model again", coliStamp, err)}
		}
		for name, kind := range of {
			c.fmts[name] = kind
		}
		f.stamps = nil
	}
	return nil
}

// A coliFormat is a way in which the codes of a matrix may be written.
type coliFormat struct {
	name  string // in a stamp
	weave weave
	group int64 // columns that have a scale in common
	high  int64 // rows that do
	codes int64 // bytes
	scale int64 // f32 numbers
}

const coliLattice = "e8-iq3-lattice"

// coliFormats are those of a matrix, in the order in which they are tried: where
// the sizes fit several, the first is meant.
func coliFormats(rows, cols int64) []coliFormat {
	up := func(n, by int64) int64 { return (n + by - 1) / by }
	all := []coliFormat{
		{coliLattice, unwoven, 256, 1, rows * up(cols, 256) * 98, 1},
		{"int8-row", coli8, cols, 1, rows * cols, rows},
		{"fp8-e4m3-b128", float8, 128, 128, rows * cols, up(rows, 128) * up(cols, 128)},
		{"int4-row", coli4, cols, 1, rows * up(cols, 2), rows},
	}
	for _, group := range [...]int64{16, 32, 48, 64, 96, 128, 192, 256} {
		if n := rows * up(cols, group); n > rows {
			all = append(all, coliFormat{"int4-grouped", coli4, group, 1, rows * up(cols, 2), n})
		}
	}
	return append(all,
		coliFormat{"int2-row", coli2, cols, 1, rows * up(cols, 4), rows},
		coliFormat{"int3-g64", coli3, 64, 1, rows * up(cols, 64) * 24, rows * up(cols, 64)})
}

// coliFormatOf is the format of a matrix with so many bytes of codes and so many
// scales; stamp is what the file says itself, or "".
func coliFormatOf(rows, cols, codes, scales int64, stamp string) (coliFormat, error) {
	all, known := coliFormats(rows, cols), stamp == ""
	for _, f := range all {
		known = known || f.name == stamp
		if f.codes != codes || f.scale != scales || stamp != "" && f.name != stamp {
			continue
		}
		switch {
		case f.name == coliLattice:
			return f, fmt.Errorf("is of the E8 lattice (format 6, %s), which is not supported: take the model in another quantization", coliLattice)
		case f.weave != float8 && (f.group%32 != 0 || cols%32 != 0):
			return f, fmt.Errorf("is a matrix [%d, %d] of %s with a scale for each %d columns: columns and groups must be multiples of 32", rows, cols, f.name, f.group)
		}
		return f, nil
	}
	if !known {
		return coliFormat{}, fmt.Errorf("has the stamp %.40q, which is not known", stamp)
	}
	as := ""
	if stamp != "" {
		as = ", which its stamp " + stamp + " does not fit"
	}
	return coliFormat{}, fmt.Errorf("has %d bytes of codes and %d bytes of scales%s; a matrix [%d, %d] has no format of these sizes: the file is damaged, or config.json is of another model", codes, 4*scales, as, rows, cols)
}

// directory says whether the model is of Hugging Face's layout.
func (m *Model) directory() bool { return m.Format == "safetensors" || m.Format == "colibri" }

// colibri makes the tensor of a pair of codes and scales.
func (c *composer) colibri(codes, scale *rawTensor) error {
	c.m.Format = "colibri"
	scale.used = true
	rows, cols, ok := coliShape(c.m.Meta, codes.Name)
	if !ok { // no tensor of a model that is known here; whoever asks for it is told
		c.put(Tensor{Name: codes.Name, Type: quant.I8, Dims: []int64{codes.Bytes}, File: codes.file, Off: codes.Off, Bytes: codes.Bytes}, codes)
		return nil
	}
	if scale.DType != "F32" {
		return c.bad(scale, "has the type %s, want F32", scale.DType)
	}
	if rows < 1 || cols < 1 || rows > maxColumns || cols > maxColumns {
		return c.bad(codes, "is a matrix [%d, %d] by config.json, which is none: config.json is incomplete", rows, cols)
	}
	f, err := coliFormatOf(rows, cols, codes.Bytes, scale.Bytes/4, c.fmts[codes.Name])
	if err != nil {
		return c.bad(codes, "%v", err)
	}
	typ := quant.F8_128
	if f.weave != float8 {
		typ = coliType(f.weave, f.group, cols)
	}
	across := (cols + f.group - 1) / f.group
	return c.made(codes.Name, typ, []int64{rows, cols}, form{weave: f.weave,
		scale: scales{rows: (rows + f.high - 1) / f.high, cols: across, high: f.high, wide: f.group, typ: quant.F32}}, codes, scale)
}

// coliType is the type with the longest blocks that divide both a group and a row.
func coliType(w weave, group, cols int64) quant.Type {
	types := []quant.Type{quant.INT4F_128, quant.INT4F_64, quant.INT4F_32}
	if w == coli8 {
		types = []quant.Type{quant.INT8F_128, quant.INT8F_32}
	}
	return types[slices.IndexFunc(types, func(t quant.Type) bool {
		elems, _ := t.Block()
		return group%int64(elems) == 0 && cols%int64(elems) == 0
	})]
}

// coliShape is the shape of a quantized tensor, as config.json has it.
func coliShape(meta Meta, name string) (rows, cols int64, ok bool) {
	n := func(key string) int64 {
		v, _ := toInt(meta.Value(configPrefix + key))
		return min(max(v, 0), math.MaxInt32)
	}
	or := func(a, b int64) int64 {
		if a > 0 {
			return a
		}
		return b
	}
	dim, heads := n("hidden_size"), n("num_attention_heads")
	head := or(n("head_dim"), dim/max(heads, 1))
	query, value := head, head
	if lora := n("kv_lora_rank"); lora > 0 {
		query, value = n("qk_nope_head_dim")+n("qk_rope_head_dim"), n("v_head_dim")
	}
	name, ok = strings.CutSuffix(name, ".weight")
	if !ok {
		return 0, 0, false
	}
	if at := strings.Index(name, "layers."); at >= 0 {
		if _, rest, ok := strings.Cut(name[at+len("layers."):], "."); ok {
			name = rest
		}
	} else {
		name = strings.TrimPrefix(strings.TrimPrefix(name, "language_model."), "model.")
	}
	ff := int64(0)
	part := name
	switch {
	case strings.HasPrefix(name, "mlp.experts."):
		ff = n("moe_intermediate_size")
		if _, part, ok = strings.Cut(strings.TrimPrefix(name, "mlp.experts."), "."); !ok {
			return 0, 0, false
		}
		part = "mlp." + part
	case strings.HasPrefix(name, "mlp.shared_experts."):
		ff, part = n("moe_intermediate_size")*or(n("n_shared_experts"), 1), "mlp."+strings.TrimPrefix(name, "mlp.shared_experts.")
	case strings.HasPrefix(name, "mlp."):
		ff = n("intermediate_size")
	}
	switch part {
	case "embed_tokens", "lm_head", "shared_head.head":
		return n("vocab_size"), dim, true
	case "mlp.gate_proj", "mlp.up_proj":
		return ff, dim, true
	case "mlp.down_proj":
		return dim, ff, true
	case "mlp.gate":
		return or(n("n_routed_experts"), n("num_experts")), dim, true
	case "self_attn.q_proj":
		return heads * query, dim, true
	case "self_attn.k_proj", "self_attn.v_proj":
		return or(n("num_key_value_heads"), heads) * head, dim, true
	case "self_attn.o_proj":
		return dim, heads * value, true
	case "self_attn.q_a_proj":
		return n("q_lora_rank"), dim, true
	case "self_attn.q_b_proj":
		return heads * query, n("q_lora_rank"), true
	case "self_attn.kv_a_proj_with_mqa":
		return n("kv_lora_rank") + n("qk_rope_head_dim"), dim, true
	case "self_attn.kv_b_proj":
		return heads * (n("qk_nope_head_dim") + value), n("kv_lora_rank"), true
	case "self_attn.indexer.wq_b":
		return n("index_n_heads") * n("index_head_dim"), n("q_lora_rank"), true
	case "self_attn.indexer.wk":
		return n("index_head_dim"), dim, true
	case "self_attn.indexer.weights_proj":
		return n("index_n_heads"), dim, true
	case "eh_proj":
		return dim, 2 * dim, true
	}
	return 0, 0, false
}

// coliBytes is the size of a row of so many codes, which begins at a byte.
func (w weave) coliBytes(cols int64) int64 {
	switch w {
	case coli8:
		return cols
	case coli4:
		return (cols + 1) / 2
	case coli3:
		return (cols + 63) / 64 * 24
	default:
		return (cols + 3) / 4
	}
}
