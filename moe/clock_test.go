package moe

import "testing"

// Between two resets every nanosecond goes to one stage.
func TestClock(t *testing.T) {
	var c clock
	before := c.times
	whole := int64(0)
	for range 3 {
		c.reset()
		for s := range NumStages {
			c.lap(s)
			if c.times[s] < before[s] {
				t.Fatalf("%v went back: %v after %v", s, c.times, before)
			}
		}
		whole += int64(c.last)
	}
	if got := c.times.Sub(before).Sum(); got != whole {
		t.Errorf("the stages sum to %d of %d ns", got, whole)
	}
	if got := c.times.Sub(c.times); got != (Times{}) {
		t.Errorf("a reading without itself is %v", got)
	}

	names := map[string]bool{}
	for s := range NumStages {
		names[s.String()] = true
	}
	if len(names) != int(NumStages) {
		t.Errorf("%d stages have %d names", NumStages, len(names))
	}
}
