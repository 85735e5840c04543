package moe

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"sluice/backends"
	"sluice/tiers"
)

// A Spec is what a model's headers say of it: enough to plan its memory, to
// describe it and to open it. Sizes are counts of elements.
type Spec struct {
	Arch, Name    string
	Layers        int // decoder layers that run
	LeadingDense  int // of them, those at the start that have no router
	Nextn         int // drafting (MTP) layers behind them, not run by decoding
	Hidden, Vocab int
	Heads         int // query heads
	KVHeads       int
	HeadDim       int
	RopeDims      int
	FF            int // width of the dense feed-forward, 0: none
	ExpertFF      int // width of a routed expert
	Experts       int // routed experts of a layer; 0: the model is dense, and has no TopK, no Roles
	TopK          int // chosen for each token
	SharedExperts int // of a layer; they are one feed-forward
	SharedFF      int // its width, 0: none
	Ctx           int // positions it was trained for
	Dense         []tiers.Tensor
	Roles         []tiers.ExpertLayer  // one for each layer with a router, ascending
	Kinds         [][3]backends.Matrix // of Roles: gate, up and down of an expert, types and shapes alone
	NextnDense    []tiers.Tensor       // what drafting layers add to Dense
	NextnRoles    []tiers.ExpertLayer  // the same for drafting layers
	NextnKinds    [][3]backends.Matrix // of NextnRoles
	MadeBytes     int64                // what tensors of decoding become that are not used as they are: see Made
	NextnErr      error                // why drafting layers cannot be run; nil: they can, if there are any

	file    *tiers.Model
	asked   []asked // of Dense and NextnDense: how
	fam     family
	cache   backends.KVShape // of the key-value cache, but for its positions and type
	vectors []int            // widths of the vectors that the page asked for
	gqa     gqaVectors
	floats  int64 // bytes of floats that are made of resident tensors

	delta        backends.DeltaShape // of gated delta net layers; no layers: none
	deltaAt      deltaVectors
	deltaOne     bool // one projection makes the inputs and the gates of a gated delta net
	deltaOneRate bool // one makes its rates

	index     backends.KVShape // of the indexers' cache, as cache; no layers: there is none
	chosen    int              // keys that a position sees at most, of those that indexers choose; 0: all
	headInput int              // floats of a position that MatMulHeads takes at most

	nextnMade int64 // MadeBytes of drafting layers

	drafting bool // the drafting layers are opened too

	embedScale float32 // times the embedding, 1: as it is
	logitScale float32 // times the logits
}

// A vecID is a vector of a family page's own, one for all its layers: state.vec
// holds it, for as many positions as a batch has.
type vecID int

// vector asks for a vector of the given width.
func (s *Spec) vector(width int) vecID {
	s.vectors = append(s.vectors, width)
	return vecID(len(s.vectors) - 1)
}

// opened is how many layers a page opens: those that decode, and behind them
// the drafting ones if they are wanted.
func (s *Spec) opened() int {
	if s.drafting {
		return s.Layers + s.Nextn
	}
	return s.Layers
}

// A family is one page: it reads a model's layers from the loader, and fills
// in the numbers of the Spec. A page that opens Spec.opened layers has drafting
// layers too, where the file has them.
type family struct {
	arch    string   // as GGUF names it
	hf      []string // as config.json names it: model_type, without a "_text" at its end
	hfNames naming   // of hf: what differs from hfNaming
	open    func(l *loader, spec *Spec, positions int) layers
}

// layers runs one decoder layer after another.
type layers interface {
	// run takes the residual stream s.x through layer l, in place.
	run(ctx context.Context, l int, s *state) error
	// warm runs each kind of attention once over whatever is in its vectors, one
	// query at position last, so that what a backend allocates is there.
	warm(s *state, last int)
}

// families are the pages, by the architecture that a file names.
func families() []family {
	return []family{
		{arch: "deepseek2", hf: []string{"deepseek_v2", "deepseek_v3", "kimi_k2"}, hfNames: deepseekNaming(), open: openDeepSeek2},
		{arch: "deepseek32", hf: []string{"deepseek_v32"}, hfNames: deepseekNaming(), open: openDeepSeek32},
		{arch: "dots1", hf: []string{"dots1"}, open: openDots1},
		{arch: "ernie4_5-moe", hf: []string{"ernie4_5_moe"}, hfNames: ernieNaming(), open: openErnie},
		{arch: "glm-dsa", hf: []string{"glm_moe_dsa"}, hfNames: deepseekNaming(), open: openGLMDSA},
		{arch: "glm4", hf: []string{"glm4"}, hfNames: glm4Naming(), open: openDenseGLM4},
		{arch: "glm4moe", hf: []string{"glm4_moe"}, open: openGLM4},
		{arch: "gpt-oss", hf: []string{"gpt_oss"}, hfNames: gptOSSNaming(), open: openGPTOSS},
		{arch: "granitemoe", hf: []string{"granitemoe", "granitemoeshared"}, hfNames: graniteNaming(), open: openGranite},
		{arch: "hunyuan-moe", hf: []string{"hunyuan_v1_moe"}, hfNames: hunyuanNaming(), open: openHunyuan},
		{arch: "llama", hf: []string{"llama", "mistral"}, open: openLlama}, // of GGUF Mixtral too
		{arch: "llama", hf: []string{"mixtral"}, hfNames: mixtralNaming(), open: openMixtral},
		{arch: "llama4", hf: []string{"llama4"}, hfNames: llama4Naming(), open: openLlama4},
		{arch: "minimax-m2", hf: []string{"minimax_m2"}, hfNames: minimaxNaming(), open: openMinimax},
		{arch: "olmoe", hf: []string{"olmoe"}, hfNames: olmoeNaming(), open: openOlmoe},
		{arch: "qwen2", hf: []string{"qwen2"}, open: openDenseQwen2},
		{arch: "qwen2moe", hf: []string{"qwen2_moe"}, hfNames: qwen2Naming(), open: openQwen2},
		{arch: "qwen3", hf: []string{"qwen3"}, open: openDenseQwen3},
		{arch: "qwen35moe", hf: []string{"qwen3_5_moe"}, hfNames: qwen3NextNaming(), open: openQwen35},
		{arch: "qwen3moe", hf: []string{"qwen3_moe"}, open: openQwen3},
		{arch: "qwen3next", hf: []string{"qwen3_next"}, hfNames: qwen3NextNaming(), open: openQwen3Next},
	}
}

// An UnsupportedError names an architecture that has no page.
type UnsupportedError struct {
	Arch string
	HF   bool // it is the model_type of a config.json
}

func (e *UnsupportedError) Error() string {
	var have []string
	for _, f := range families() {
		if e.HF {
			have = append(have, f.hf...)
		} else {
			have = append(have, f.arch)
		}
	}
	have = slices.Compact(have)
	return fmt.Sprintf("moe: architecture %q is not supported; supported are %s", e.Arch, strings.Join(have, ", "))
}

// Describe reads a model's headers. No tensor is read; every tensor that the
// model will use is checked for its dims and type.
func Describe(file *tiers.Model) (*Spec, error) {
	arch, hf := modelType(file.Meta)
	ok := hf
	if !hf {
		arch, ok = file.Meta.String("general.architecture")
	}
	if err := file.Meta.Err(); err != nil {
		return nil, err
	}
	if !ok && file.Meta.Has("hf.config.json") {
		return nil, fmt.Errorf("moe: config.json lacks model_type: it is not that of a model, or incomplete; download it again")
	}
	if !ok {
		return nil, fmt.Errorf("moe: the file's metadata lacks general.architecture: it may hold a vocabulary or an adapter, not a model")
	}
	i := slices.IndexFunc(families(), func(f family) bool { return !hf && f.arch == arch || hf && slices.Contains(f.hf, arch) })
	if i < 0 {
		return nil, &UnsupportedError{arch, hf}
	}
	s := &Spec{file: file, fam: families()[i]}
	s.Arch = s.fam.arch
	s.Name, _ = file.Meta.String("general.name")
	l := newLoader(s, nil)
	open(l, s, 0)
	l.contradictions(s)
	if l.err != nil {
		return nil, l.err
	}
	s.Dense, s.asked, s.floats = l.dense, l.asked, l.floatBytes
	for i := s.Layers; i < s.Layers+s.Nextn; i++ {
		draft := newLoader(s, nil)
		role, kinds := draft.experts(i, s.Experts, s.Hidden, s.ExpertFF)
		if draft.err == nil { // not every file has its drafting layers, or of this shape
			s.NextnRoles, s.NextnKinds = append(s.NextnRoles, role), append(s.NextnKinds, kinds)
		}
	}
	s.describeNextn()
	return s, nil
}

// weights is a whole model as its page loaded it.
type weights struct {
	embed  backends.Matrix
	layers layers
	norm   []float32
	head   backends.Linear
	eps    float32
	nextn  []nextn // nil: not opened
}

// Limits of what a header may claim; far above every published model, and far
// below what would overflow.
const (
	maxLayers  = 1 << 12
	maxDim     = 1 << 20
	maxExperts = 1 << 14
	maxCtx     = 1 << 27
)

// open reads what all families share, and the layers by their page, with
// rotations for so many positions.
func open(l *loader, s *Spec, positions int) weights {
	s.Layers = l.need("block_count", maxLayers)
	s.Nextn = l.or("nextn_predict_layers", 0, maxLayers)
	if l.hf {
		s.Layers += s.Nextn // they are not among num_hidden_layers
	}
	if s.Nextn >= s.Layers {
		l.fail("%d nextn layers of %d in all leave none to run", s.Nextn, s.Layers)
		return weights{}
	}
	s.Layers -= s.Nextn
	if act, ok := l.file.Meta.String(hfPrefix + "hidden_act"); l.hf && ok && act != "silu" && act != "swish" {
		l.fail("config.hidden_act is %q: feed-forwards with another activation than silu are not supported", act)
	}
	s.Hidden = l.need("embedding_length", maxDim)
	s.Ctx = l.need("context_length", maxCtx)
	s.Vocab = vocabulary(l)
	s.Roles, s.Kinds, s.vectors, s.MadeBytes = nil, nil, nil, 0
	s.embedScale, s.logitScale = 1, 1
	var w weights
	w.eps = l.epsilon()
	w.embed = l.matrix("token_embd.weight", s.Vocab, s.Hidden)
	w.norm = l.vector("output_norm.weight", s.Hidden)
	if l.tied() {
		w.head = backends.Linear{Matrix: w.embed}
	} else {
		w.head = l.linear("output", s.Vocab, s.Hidden)
	}
	if l.err == nil {
		w.layers = s.fam.open(l, s, positions)
	}
	for i := s.Layers; i < s.opened() && l.err == nil; i++ {
		w.nextn = append(w.nextn, s.nextn(l, i, &w))
	}
	return w
}

// tied says whether the head is the embedding: what a config.json says, and where
// nothing does, that the file has no head. A file may have one that is not used.
func (l *loader) tied() bool {
	if l.hf {
		if tied, ok := l.file.Meta.Bool(hfPrefix + "tie_word_embeddings"); ok {
			return tied
		}
	}
	return !l.has("output.weight")
}

// vocabulary is the number of tokens: the rows of the embedding, which the
// tokenizer's list must match where the file has one.
func vocabulary(l *loader) int {
	t, ok := l.find("token_embd.weight")
	if !ok || len(t.Dims) != 2 {
		l.fail("the file has no tensor token_embd.weight of two dims")
		return 1
	}
	if n, ok := l.file.Meta.Len("tokenizer.ggml.tokens"); ok && int64(n) != t.Dims[1] {
		l.fail("the vocabulary has %d tokens, token_embd.weight %d rows", n, t.Dims[1])
	}
	return int(t.Dims[1])
}

// heads reads the numbers of grouped-query attention with plain rotations.
func (s *Spec) heads(l *loader) {
	s.headSizes(l)
	if v, ok := l.text("rope.scaling.type"); ok && v != "none" {
		l.fail("RoPE scaling %q is not supported for this family", v)
	}
}

// headSizes is heads for families that read how to rotate by themselves.
func (s *Spec) headSizes(l *loader) {
	s.Heads = l.need("attention.head_count", maxDim)
	s.KVHeads = l.or("attention.head_count_kv", s.Heads, maxDim)
	s.HeadDim = l.or("attention.key_length", s.Hidden/s.Heads, maxDim)
	if v := l.or("attention.value_length", s.HeadDim, maxDim); v != s.HeadDim {
		l.fail("keys of %d and values of %d elements: this family has equal ones", s.HeadDim, v)
	}
	s.RopeDims = l.or("rope.dimension_count", s.HeadDim, maxDim)
	if s.KVHeads < 1 || s.Heads%s.KVHeads != 0 || s.HeadDim < 1 || s.RopeDims%2 != 0 || s.RopeDims > s.HeadDim {
		l.fail("%d heads, %d key-value heads of %d elements, %d of them rotated: the heads must divide and the rotation fit", s.Heads, s.KVHeads, s.HeadDim, s.RopeDims)
	}
	s.cache = backends.KVShape{Layers: s.Layers, Heads: s.KVHeads, KeyDim: s.HeadDim, ValueDim: s.HeadDim}
	q, kv := s.Heads*s.HeadDim, s.KVHeads*s.HeadDim
	s.gqa = gqaVectors{q: s.vector(q), k: s.vector(kv), v: s.vector(kv), a: s.vector(q)}
}

// routed reads the numbers of the routed experts.
func (s *Spec) routed(l *loader) { s.routedOf(l, "expert_feed_forward_length") }

// routedOf is routed for a family that has the width of an expert under another
// key: where all layers are of experts, that of the feed-forward.
func (s *Spec) routedOf(l *loader, width string) {
	s.Experts = l.need("expert_count", maxExperts)
	s.TopK = l.need("expert_used_count", maxExperts)
	s.ExpertFF = l.need(width, maxDim)
	if s.TopK > s.Experts {
		l.fail("%d experts used of %d", s.TopK, s.Experts)
	}
	if g := l.or("expert_group_count", 1, maxExperts); g > 1 {
		l.fail("group-limited routing (%d groups) is not supported for this family", g)
	}
}

// routedInGroups is routed for a family that chooses among the experts of some
// groups alone.
func (s *Spec) routedInGroups(l *loader) Groups {
	s.Experts = l.need("expert_count", maxExperts)
	s.TopK = l.need("expert_used_count", maxExperts)
	s.ExpertFF = l.need("expert_feed_forward_length", maxDim)
	g := Groups{N: max(l.or("expert_group_count", 1, maxExperts), 1)}
	g.Keep = max(l.or("expert_group_used_count", g.N, maxExperts), 1)
	if g.N > maxGroups || g.Keep > g.N || s.Experts%g.N != 0 || s.Experts/g.N*g.Keep < s.TopK {
		l.fail("%d experts used of %d, in %d of %d groups: want at most %d groups that divide the experts, and as many experts in those used", s.TopK, s.Experts, g.Keep, g.N, maxGroups)
	}
	return g
}

// rope makes the rotations of heads, with the scalings that any family may have.
func (s *Spec) rope(l *loader, positions int) *backends.Rope {
	freq, magnitude := l.frequencies(s.RopeDims)
	return ropeTable(positions, freq, magnitude)
}

// sharedExperts reads the number and the width of the shared experts: absent
// experts of an expert's width, where the file does not say.
func (s *Spec) sharedExperts(l *loader, absent int) {
	s.SharedExperts = l.or("expert_shared_count", absent, maxExperts)
	s.SharedFF = l.or("expert_shared_feed_forward_length", s.SharedExperts*s.ExpertFF, maxDim)
}

// attention loads the projections of layer blk.l. The norms of q and k come
// together; normed says that the family always has them.
func (s *Spec) attention(l *loader, layer int, eps float32, rope *backends.Rope, normed bool) gqa {
	p := fmt.Sprintf("blk.%d.", layer)
	a := s.projections(l, p, eps, rope)
	if normed || l.has(p+"attn_q_norm.weight") || l.has(p+"attn_k_norm.weight") {
		a.qNorm = l.vector(p+"attn_q_norm.weight", s.HeadDim)
		a.kNorm = l.vector(p+"attn_k_norm.weight", s.HeadDim)
	}
	return a
}

// projections loads grouped-query attention without norms of queries and keys,
// from tensors whose names begin with p.
func (s *Spec) projections(l *loader, p string, eps float32, rope *backends.Rope) gqa {
	return gqa{
		norm:    l.vector(p+"attn_norm.weight", s.Hidden),
		q:       l.linear(p+"attn_q", s.Heads*s.HeadDim, s.Hidden),
		k:       l.linear(p+"attn_k", s.KVHeads*s.HeadDim, s.Hidden),
		v:       l.linear(p+"attn_v", s.KVHeads*s.HeadDim, s.Hidden),
		o:       l.linear(p+"attn_output", s.Hidden, s.Heads*s.HeadDim),
		headDim: s.HeadDim,
		eps:     eps,
		how:     backends.Attention{Scale: rsqrtOf(s.HeadDim)},
		rope:    rope,
		at:      s.gqa,
	}
}

// attentionNormedWhole is attention of a family that normalises the queries of
// all heads together, and the keys.
func (s *Spec) attentionNormedWhole(l *loader, layer int, eps float32, rope *backends.Rope) gqa {
	p := fmt.Sprintf("blk.%d.", layer)
	a := s.projections(l, p, eps, rope)
	a.qNorm = l.vector(p+"attn_q_norm.weight", s.Heads*s.HeadDim)
	a.kNorm = l.vector(p+"attn_k_norm.weight", s.KVHeads*s.HeadDim)
	return a
}

// expertLayer loads the router of layer blk.l with the norm before it, and notes
// its experts' roles.
func (s *Spec) expertLayer(l *loader, layer int, norm string, eps float32, route func(ids []int32, weights, scores []float32)) experts {
	role, kinds := l.experts(layer, s.Experts, s.Hidden, s.ExpertFF)
	s.Roles, s.Kinds = append(s.Roles, role), append(s.Kinds, kinds)
	return experts{
		layer:  layer,
		norm:   l.vector(norm, s.Hidden),
		eps:    eps,
		route:  route,
		router: backends.Linear{Matrix: l.matrix(fmt.Sprintf("blk.%d.ffn_gate_inp.weight", layer), s.Experts, s.Hidden)},
		kinds:  kinds,
	}
}

// feedForward loads a dense feed-forward of width ff, whose tensors are named
// gate, up and down with the suffix.
func (s *Spec) feedForward(l *loader, layer, ff int, suffix string) dense {
	p := fmt.Sprintf("blk.%d.ffn_", layer)
	return dense{backends.Expert{
		Gate: l.matrix(p+"gate"+suffix+".weight", ff, s.Hidden),
		Up:   l.matrix(p+"up"+suffix+".weight", ff, s.Hidden),
		Down: l.matrix(p+"down"+suffix+".weight", s.Hidden, ff),
	}}
}

// gatedFeedForward is feedForward with a gate for the whole output, gate_inp,
// whose value stands in the vector at.
func (s *Spec) gatedFeedForward(l *loader, layer, ff int, suffix string, at vecID) *gatedDense {
	name := fmt.Sprintf("blk.%d.ffn_gate_inp%s.weight", layer, suffix)
	d := &gatedDense{dense: s.feedForward(l, layer, ff, suffix), at: at}
	// A vector in most files, though its use is that of a matrix of one row.
	t, data := l.tensor(name, s.Hidden)
	d.gate = backends.Linear{Matrix: backends.Matrix{Type: t.Type, Rows: 1, Cols: s.Hidden, Data: data}}
	return d
}

// correctionBias is what layer blk.l adds to the router's scores to choose by,
// nil if it has none.
func (s *Spec) correctionBias(l *loader, layer int) []float32 {
	if name := fmt.Sprintf("blk.%d.exp_probs_b.bias", layer); l.has(name) {
		return l.vector(name, s.Experts)
	}
	return nil
}
