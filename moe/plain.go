package moe

import (
	"context"
	"fmt"
)

// plain is the layers of a dense family: attention, then one feed-forward that every
// token passes, each behind its own norm. Nothing is routed, so all of it is resident.
type plain struct {
	layer []plainLayer
	eps   float32
}

type plainLayer struct {
	attn gqa
	norm []float32 // [dim], before ffn
	ffn  dense
}

func (m *plain) run(ctx context.Context, l int, s *state) error {
	w := &m.layer[l]
	if err := w.attn.attend(ctx, l, s); err != nil {
		return err
	}
	w.ffn.add(s, w.norm, m.eps)
	return nil
}

func (m *plain) warm(s *state, last int) { m.layer[0].attn.warm(s, last) }

// denseSizes reads the numbers of a family without experts.
func (s *Spec) denseSizes(l *loader) {
	s.headSizes(l)
	if n, _ := l.uint("expert_count", maxExperts); n > 0 {
		l.fail("%s is %d: this family has no experts", l.key("expert_count"), n)
	}
	if name := "blk.0.ffn_gate_exps.weight"; l.has(name) {
		l.fail("the file has experts (%s), but by its metadata (%s) there are none: one of them is wrong; convert the model again", name, l.key("expert_count"))
	}
	s.FF = l.need("feed_forward_length", maxDim)
	s.LeadingDense = s.Layers
}

// plainFeedForward is the feed-forward of layer blk.l of a dense family, which has
// no biases.
func (s *Spec) plainFeedForward(l *loader, layer int) dense {
	for _, part := range []string{"gate", "up", "down"} {
		if name := fmt.Sprintf("blk.%d.ffn_%s.bias", layer, part); l.has(name) {
			l.fail("the file has %s: feed-forwards with biases are not supported for this family", name)
		}
	}
	return s.feedForward(l, layer, s.FF, "")
}
