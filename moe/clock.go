package moe

import "time"

// A Stage is a share of the time of a forward pass.
type Stage int

// The stages. What a step does between two laps counts for the later one, so
// the stages sum to the whole.
const (
	StageExpertWait Stage = iota // waiting for experts to come from a drive
	StageAttention               // norms, projections, rotation, KV cache, attention
	StageExperts                 // computing routed experts
	StageDense                   // embedding, dense and shared feed-forward, head
	StageRouter                  // router rows, top-k, classification, submission of reads
	StageSampling                // choosing the token
	StageReduction               // adding the experts' vectors in the router's order
	NumStages
)

func (s Stage) String() string {
	return [...]string{"expert_wait", "attention", "experts", "dense", "router", "sampling", "reduction"}[s]
}

// Times are nanoseconds by stage.
type Times [NumStages]int64

// Sum is the time of all stages.
func (t Times) Sum() (ns int64) {
	for _, v := range t {
		ns += v
	}
	return ns
}

// Sub is the time since an earlier reading.
func (t Times) Sub(before Times) Times {
	for i := range t {
		t[i] -= before[i]
	}
	return t
}

// clock gives the time since its last lap to a stage.
type clock struct {
	start time.Time
	last  time.Duration
	times Times
}

func (c *clock) reset() { c.start, c.last = time.Now(), 0 }

func (c *clock) lap(s Stage) {
	now := time.Since(c.start)
	c.times[s] += int64(now - c.last)
	c.last = now
}
