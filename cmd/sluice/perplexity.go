package main

import (
	"cmp"
	"context"
	"fmt"
	"slices"

	"sluice/cmd/engine"
	"sluice/moe"
)

// perplexityChunk is the default --ctx of perplexity: the chunk that the
// field's figures are measured with.
const perplexityChunk = 512

func perplexityCommand(ctx context.Context, s streams, args []string) error {
	m := newModelFlags(s, "perplexity", "measure how well a model predicts a text, in chunks of --ctx tokens (default 512), the second half of each scored")
	if err := m.parse(args); err != nil {
		return err
	}
	if *m.explain {
		return explainCounters(s.out)
	}
	// FILE is the last argument but a CAP: [MODEL] FILE [CAP].
	rest := m.set.Args()
	at := 0
	if *m.model == "" && len(rest) > 1 && !isCap(rest[1]) {
		at = 1
	}
	file := ""
	switch {
	case len(rest) > at:
		file = rest[at]
		rest = slices.Delete(rest, at, at+1)
	case !*m.printConfig:
		return usagef("no text to measure: give FILE")
	}
	o, err := m.options(rest)
	if err != nil {
		return err
	}
	if o.Ctx != 0 && o.Ctx < 4 {
		return usagef("--ctx %d: chunks have at least 4 tokens, the second half of which are scored", o.Ctx)
	}
	o.Ctx = cmp.Or(o.Ctx, perplexityChunk)
	var text []byte
	if !*m.printConfig {
		if text, err = readFile(ctx, s, file); err != nil {
			return fmt.Errorf("read the text: %w", err)
		}
	}
	p, err := engine.Prepare(o)
	if err != nil {
		return err
	}
	m.settle(p, o.Path)
	if *m.printConfig {
		defer p.Close()
		return printConfig(s.out, p.Settings, *m.json)
	}
	e, err := m.load(ctx, s, p)
	if err != nil {
		return err
	}
	defer e.Close()
	defer drives(s, e)
	ids, err := e.Tokens.Encode(string(text), false)
	if err != nil {
		return err
	}
	bos, add := e.Tokens.BOS()
	if add {
		ids = append([]int32{bos}, ids...)
	} else {
		bos = -1
	}
	r, err := moe.MeasurePerplexity(ctx, e.Model, ids, e.Config.Ctx, bos, func(done, of int, so moe.Perplexity) {
		progress(s, "chunk %d of %d: perplexity %.4f", done, of, so.Value)
	})
	if err != nil {
		if r.Chunks > 0 {
			s.notice("perplexity so far: %.4f +/- %.4f (%d of %d chunks)", r.Value, r.Error, r.Chunks, len(ids)/e.Config.Ctx)
		}
		return finish(s, e, err)
	}
	if err := finish(s, e, nil); err != nil {
		return err
	}
	if *m.json {
		count, err := counters(e, 0)
		if err != nil {
			return err
		}
		return printJSON(s.out, map[string]any{
			"settings": e.Settings.Map(), "counters": count, "load_ns": e.LoadNanos,
			"perplexity": r.Value, "perplexity_error": r.Error, "chunks": r.Chunks, "scored_tokens": r.Tokens,
			"resident_announced_bytes": e.Announced, "drive_bytes_per_s": e.Drive.Rate, "drives": driveObjects(e),
		})
	}
	_, err = fmt.Fprintf(s.out, "perplexity %.4f +/- %.4f (%d chunks of %d tokens, %d scored)\n", r.Value, r.Error, r.Chunks, e.Config.Ctx, r.Tokens)
	return err
}
