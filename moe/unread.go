package moe

import "fmt"

// contradictions refuses what a file says that no page reads, where to go on
// without it would give another model: a stretch of rotations without its kind, and
// weights of shared experts that by the metadata are none.
func (l *loader) contradictions(s *Spec) {
	if kind, _ := l.text("rope.scaling.type"); kind == "" {
		for _, key := range []string{"rope.scaling.factor", "rope.scale_linear"} {
			if v := l.float(key, 0); v != 0 && v != 1 { // 0 is written for none
				l.fail("%s is %v, but %s is absent: it does not say how positions are stretched; set it to none or to the kind that the model was trained with, or convert the model again", l.key(key), v, l.key("rope.scaling.type"))
			}
		}
	}
	read := make(map[string]bool, len(l.asked))
	for _, a := range l.asked {
		read[a.name] = true
	}
	for i := range s.Layers {
		for _, part := range []string{"gate", "up", "down"} {
			if name := fmt.Sprintf("blk.%d.ffn_%s_shexp.weight", i, part); l.has(name) && !read[name] {
				l.fail("the file has %s, of a shared expert, but by its metadata (%s, %s) this layer has none: one of them is wrong; convert the model again", name, l.key("expert_shared_count"), l.key("expert_shared_feed_forward_length"))
			}
		}
	}
}
