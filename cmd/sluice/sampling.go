package main

import (
	"encoding/json"
	"fmt"
	"math"

	"sluice/storage"
)

// A fileSampling is how a model asks to be sampled; nil where it does not say.
type fileSampling struct {
	temp, topK, topP, minP, penalty *float64
	where                           string // the place of the values, and "are"
}

// readSampling reads general.sampling.* of a GGUF file, or the generation_config.json
// of a Hugging Face model, whose do_sample of false means greedy.
func readSampling(meta storage.Meta) (fileSampling, error) {
	if text, ok := meta.String("hf.generation_config.json"); ok {
		return generationSampling([]byte(text))
	}
	s := fileSampling{where: "general.sampling.* are"}
	for key, to := range map[string]**float64{"temp": &s.temp, "top_p": &s.topP, "min_p": &s.minP, "penalty_repeat": &s.penalty} {
		if v, ok := meta.Float("general.sampling." + key); ok {
			v = math.Round(v*1e6) / 1e6 // the file's float32, as it was meant
			*to = &v
		}
	}
	if v, ok := meta.Int("general.sampling.top_k"); ok {
		k := float64(max(0, min(v, math.MaxInt32)))
		s.topK = &k
	}
	return s, meta.Err()
}

func generationSampling(text []byte) (fileSampling, error) {
	s := fileSampling{where: "generation_config.json has values that are"}
	var g struct {
		Temperature       *float64 `json:"temperature"`
		TopK              *float64 `json:"top_k"`
		TopP              *float64 `json:"top_p"`
		MinP              *float64 `json:"min_p"`
		RepetitionPenalty *float64 `json:"repetition_penalty"`
		DoSample          *bool    `json:"do_sample"`
	}
	if err := json.Unmarshal(text, &g); err != nil {
		return s, fmt.Errorf("generation_config.json: %w", err)
	}
	s.temp, s.topK, s.topP, s.minP, s.penalty = g.Temperature, g.TopK, g.TopP, g.MinP, g.RepetitionPenalty
	if g.DoSample != nil && !*g.DoSample {
		s.temp = new(float64)
	}
	if k := s.topK; k != nil {
		if *k != math.Trunc(*k) {
			return s, fmt.Errorf("generation_config.json: top_k is %v, want a whole number", *k)
		}
		*k = max(0, min(*k, math.MaxInt32)) // -1 is written for all
	}
	return s, nil
}
