package moe

import (
	"testing"

	"sluice/tiers"
)

// Unions counts what consecutive positions share, and forgets what was rewound.
func TestUnions(t *testing.T) {
	m := &Model{}
	r := &m.s.routes
	r.init(&Spec{TopK: 2, Layers: 2, Experts: 8, Roles: []tiers.ExpertLayer{{Layer: 1}}})
	missed := make([]bool, 8)
	run := func(pos int, ids ...int32) {
		r.note(1, pos, ids, missed)
		r.ran(pos, len(ids)/2)
	}
	wants := func(n int, experts, loads float64, ok bool) {
		t.Helper()
		if a, b, c := m.Unions(n); a != experts || b != loads || c != ok {
			t.Errorf("%d positions: %v %v %v, want %v %v %v", n, a, b, c, experts, loads, ok)
		}
	}
	wants(1, 0, 0, false)
	run(0, 0, 1)
	missed[2] = true
	run(1, 1, 2)
	run(2, 2, 3) // by then 2 is marked as missed again: one load for two positions
	wants(1, 1, 1, true)
	wants(2, 1.5, 1, true)
	wants(3, 2, 1.5, true)
	wants(4, 0, 0, false)
	m.s.pos = 3
	m.Rewind(2)
	wants(2, 1.5, 2, true)
	wants(3, 0, 0, false)
	missed[2] = false
	run(2, 6, 7, 0, 1) // a batch
	wants(2, 2, 2, true)
	wants(4, 2.5, 4, true)
	for p := 4; p < 40; p++ {
		run(p, int32(p%8), int32((p+1)%8))
	}
	wants(9, 4, 9, true)
	wants(17, 0, 0, false)
}
