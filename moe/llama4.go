package moe

import (
	"context"
	"fmt"
	"math"

	"sluice/backends"
)

// Llama 4 (Meta's model card and published configurations of April 2025),
// architecture llama4 in GGUF; text alone.
//
//	x = embed(id)                                             [dim]
//	each layer:
//	  x = x + attention(RMSNorm(x))                           grouped-query, of one of two kinds, below
//	  h = RMSNorm(x)
//	  x = x + ffn(h)                                          layers without experts
//	  x = x + expert_i(w*h) + shared(h)                       every interleave_moe_layer_step-th layer, its last; one expert, w = sigmoid(its score)
//	logits = head(RMSNorm(x))
//
// Three of four layers are local: they see the keys of their chunk, rotate whole
// heads (neighbouring pairs), and then, in most models, norm each head of q and
// k without weights. The fourth sees all keys, does not rotate, and multiplies
// its queries by a temperature that grows with the position.
type llama4 struct {
	layer []llama4Layer
	eps   float32
}

type llama4Layer struct {
	attn        gqa       // its norms of q and k come after the rotation; nil rope: the layer sees all
	temperature []float32 // [positions] of the queries of a layer that sees all, nil: 1
	ffnNorm     []float32 // [dim], as ffn
	ffn         *dense    // nil: the layer has experts
	moe         experts
}

const (
	llama4Chunk = 8192 // keys of a chunk, which GGUF files do not tell
	llama4Every = 4    // of so many layers the last sees all keys; neither does this one
)

func openLlama4(l *loader, spec *Spec, positions int) layers {
	spec.headSizes(l)
	spec.routed(l)
	if spec.TopK != 1 {
		l.fail("%d experts used for each token: only 1 is supported, as in all published models", spec.TopK)
	}
	spec.SharedExperts = l.or("expert_shared_count", 1, 1)
	spec.SharedFF = spec.SharedExperts * spec.ExpertFF
	step := l.need("interleave_moe_layer_step", maxLayers)
	spec.LeadingDense = min(step-1, spec.Layers)
	if step > 1 {
		spec.FF = l.need("feed_forward_length", maxDim)
	}
	m := &llama4{eps: l.epsilon()}
	rope := l.llama4Rope(spec, positions)
	chunk := l.or("attention.sliding_window", llama4Chunk, maxCtx) // 0: every layer sees all keys and rotates
	global := l.llama4Global(spec.Layers, chunk != 0)
	l.llama4Layers(spec.Layers, step)
	var norm []float32                                            // of q and k, without weights
	if l.bool("attention.qk_norm", l.hf || spec.Experts != 128) { // a GGUF file has no such key; of the published models the one with 128 experts has no norm
		norm = make([]float32, spec.HeadDim)
		for i := range norm {
			norm[i] = 1
		}
	}
	temperature := l.llama4Temperature(positions)
	scaled := spec.vector(spec.Hidden)
	var before *experts
	for i := 0; i < spec.Layers && l.err == nil; i++ {
		w := llama4Layer{attn: spec.attention(l, i, m.eps, rope, false)}
		if l.has(fmt.Sprintf("blk.%d.attn_q_norm.weight", i)) {
			l.fail("blk.%d has weights for the norms of q and k: this is another variant of the architecture", i)
		}
		w.attn.qNorm, w.attn.kNorm, w.attn.how.Chunk = norm, norm, chunk
		if global[i] {
			w.attn.qNorm, w.attn.kNorm, w.attn.rope, w.attn.how.Chunk = nil, nil, nil, 0
			w.temperature = temperature
		}
		ffnNorm := fmt.Sprintf("blk.%d.ffn_norm.weight", i)
		if (i+1)%step != 0 {
			w.ffnNorm = l.vector(ffnNorm, spec.Hidden)
			ffn := spec.feedForward(l, i, spec.FF, "")
			w.ffn = &ffn
		} else {
			w.moe = spec.expertLayer(l, i, ffnNorm, m.eps, RouteChosenSigmoid)
			w.moe.scaled = &scaled
			if spec.SharedExperts > 0 {
				shared := spec.feedForward(l, i, spec.ExpertFF, "_shexp")
				w.moe.shared = &shared
			}
		}
		m.layer = append(m.layer, w)
	}
	for i := range m.layer {
		if e := &m.layer[i].moe; m.layer[i].ffn == nil {
			if before != nil {
				before.next = e
			}
			before = e
		}
	}
	return m
}

// llama4Naming is Hugging Face's: gate and up of an expert one behind the other,
// and transposed; or, in quantized files, each expert by itself.
func llama4Naming() naming {
	const ffn = "model.layers.N.feed_forward."
	return naming{
		tensors: map[string][]string{
			"blk.N.ffn_gate":             {ffn + "gate_proj"},
			"blk.N.ffn_up":               {ffn + "up_proj"},
			"blk.N.ffn_down":             {ffn + "down_proj"},
			"blk.N.ffn_gate_inp":         {ffn + "router"},
			"blk.N.ffn_gate_exps.weight": {ffn + "experts.*.gate_proj.weight", ffn + "experts.gate_up_proj[T0/2]"},
			"blk.N.ffn_up_exps.weight":   {ffn + "experts.*.up_proj.weight", ffn + "experts.gate_up_proj[T1/2]"},
			"blk.N.ffn_down_exps.weight": {ffn + "experts.*.down_proj.weight", ffn + "experts.down_proj[T]"},
			"blk.N.ffn_gate_shexp":       {ffn + "shared_expert.gate_proj"},
			"blk.N.ffn_up_shexp":         {ffn + "shared_expert.up_proj"},
			"blk.N.ffn_down_shexp":       {ffn + "shared_expert.down_proj"},
		},
		keys: map[string][]string{
			"feed_forward_length":           {"intermediate_size_mlp"},
			"expert_feed_forward_length":    {"intermediate_size"},
			"attention.sliding_window":      {"attention_chunk_size"},
			"attention.no_rope_interval":    {"no_rope_layer_interval"},
			"attention.temperature_scale":   {"attn_scale"},
			"attention.temperature_length":  {"floor_scale"},
			"attention.qk_norm":             {"use_qk_norm"},
			"rope.scaling.low_freq_factor":  {"rope_parameters.low_freq_factor", "rope_scaling.low_freq_factor"},
			"rope.scaling.high_freq_factor": {"rope_parameters.high_freq_factor", "rope_scaling.high_freq_factor"},
		},
	}
}

// llama4Global says which layers see all keys and do not rotate: of a model with
// chunks every fourth, or those that a config.json marks with 0 among its
// no_rope_layers.
func (l *loader) llama4Global(n int, chunks bool) []bool {
	global := make([]bool, n)
	every := l.or("attention.no_rope_interval", llama4Every, maxLayers)
	marks, told := l.file.Meta.Ints(hfPrefix + "no_rope_layers")
	if told && len(marks) != n || every < 1 {
		l.fail("no_rope_layers has %d entries for %d layers, or no_rope_layer_interval is %d: they must fit", len(marks), n, every)
		return global
	}
	for i := range global {
		global[i] = chunks && (told && marks[i] == 0 || !told && (i+1)%every == 0)
	}
	return global
}

// llama4Layers refuses a config.json that lists other layers with experts than
// every step-th.
func (l *loader) llama4Layers(n, step int) {
	have, told := l.file.Meta.Ints(hfPrefix + "moe_layers")
	for i := 0; told && i < max(len(have), n/step); i++ {
		if i >= len(have) || i >= n/step || have[i] != int64((i+1)*step-1) {
			l.fail("the layers with experts are %v of %d, not every one in %d: this is not supported", have, n, step)
			return
		}
	}
}

// llama4Rope is the rotations of neighbouring pairs, for long contexts stretched
// as Llama 3's.
func (l *loader) llama4Rope(spec *Spec, positions int) *backends.Rope {
	freq := ropeFrequencies(spec.RopeDims, l.ropeBase())
	switch kind, _ := l.text("rope.scaling.type"); {
	case l.divide(freq):
	case kind == "" || kind == "none":
	case kind == "llama3":
		l.llama3().stretch(freq)
	default:
		l.fail("RoPE scaling %q is not supported for this family: only llama3 is", kind)
	}
	rope := ropeTable(positions, freq, 1)
	rope.Interleaved = true
	return rope
}

// llama4Temperature is what multiplies a query at each position, in layers that
// see all keys: 1 + scale*ln(1 + floor((position+1)/length)); nil for a scale of 0.
func (l *loader) llama4Temperature(positions int) []float32 {
	scale, length := l.float("attention.temperature_scale", 0.1), l.or("attention.temperature_length", 8192, maxCtx)
	if l.hf { // where it may be switched off
		switch on := l.file.Meta.Value(hfPrefix + "attn_temperature_tuning"); on {
		case false, int64(0):
			scale = 0
		}
	}
	if scale == 0 {
		return nil
	}
	if !(scale > 0 && scale < 100) || length < 1 {
		l.fail("attention temperature scale %v for each %d positions: the scale must be from 0 to 100, the positions at least 1", scale, length)
		return nil
	}
	t := make([]float32, positions)
	for p := range t {
		t[p] = float32(1 + scale*math.Log1p(float64((p+1)/length)))
	}
	return t
}

func (m *llama4) run(ctx context.Context, l int, s *state) error {
	w := &m.layer[l]
	if err := w.attend(ctx, l, s); err != nil {
		return err
	}
	if w.ffn != nil {
		w.ffn.add(s, w.ffnNorm, m.eps)
		return nil
	}
	return w.moe.compute(ctx, s)
}

// attend adds the attention of layer l to the residual stream s.x.
func (w *llama4Layer) attend(ctx context.Context, l int, s *state) error {
	a := &w.attn
	q, k := a.project(s)
	if a.rope != nil {
		s.be.RoPE(q, a.headDim, a.rope, s.pos)
		s.be.RoPE(k, a.headDim, a.rope, s.pos)
	}
	if a.qNorm != nil {
		s.be.RMSNorm(q, q, a.qNorm, a.eps)
		s.be.RMSNorm(k, k, a.kNorm, a.eps)
	}
	if w.temperature != nil {
		s.be.ScaleRows(q, q, w.temperature[s.pos:s.pos+q.Len()])
	}
	return a.mix(ctx, l, s)
}

func (m *llama4) warm(s *state, last int) {
	for i := range m.layer { // of each kind one
		if a := &m.layer[i].attn; i == 0 || a.how.Chunk != m.layer[i-1].attn.how.Chunk {
			a.warm(s, last)
		}
	}
}
