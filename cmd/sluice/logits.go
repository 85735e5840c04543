package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"

	"sluice/cmd/engine"
	"sluice/internal/safetensors"
	"sluice/moe"
)

func logitsCommand(ctx context.Context, s streams, args []string) error {
	m := newModelFlags(s, "logits", "write logits [T, vocab] and hidden_last [T, dim] (before the final norm) of T given tokens, and with --hidden the states of all layers")
	idsFile := m.set.String("ids", "", "a file with a JSON array of token ids")
	mtp := m.set.Int("mtp", 0, "also write mtp1_logits [T-1, vocab] to mtpN_logits [T-N, vocab] of the drafting layer, each step from the hidden states of the one before, 1 to 8")
	out := m.set.StringP("output", "o", "", "the safetensors file to write")
	states := m.set.Bool("hidden", false, "also write hidden [layers+1, T, dim]: what goes into each layer, and last what the head reads, behind the final norm")
	force := m.set.Bool("force", false, "replace a file that logits has not written")
	if err := m.parse(args); err != nil {
		return err
	}
	if *m.explain {
		return explainCounters(s.out)
	}
	o, err := m.options(m.set.Args())
	if err != nil {
		return err
	}
	if *mtp < 0 || *mtp > maxMTP {
		return usagef("--mtp %d: use 1 to %d steps, or 0 for none", *mtp, maxMTP)
	}
	o.Drafts = *mtp
	if !*m.printConfig && (*idsFile == "" || *out == "") {
		return usagef("logits needs --ids FILE and -o OUT.safetensors")
	}
	var ids []int32
	if *idsFile != "" {
		if ids, err = readIDs(ctx, s, *idsFile); err != nil {
			return err
		}
	}
	if *mtp > 0 && *idsFile != "" && len(ids) <= *mtp {
		return fmt.Errorf("%s: --mtp %d needs at least %d token ids, it has %d", *idsFile, *mtp, *mtp+1, len(ids))
	}
	o.NoText = true
	p, err := engine.Prepare(o)
	if err != nil {
		return err
	}
	m.settle(p, o.Path)
	if *m.printConfig {
		defer p.Close()
		return printConfig(s.out, p.Settings, *m.json)
	}
	w, err := createLogits(p, ids, *idsFile, *out, *states, *force)
	if err != nil {
		p.Close()
		return err
	}
	defer w.Abort()
	e, err := m.load(ctx, s, p)
	if err != nil {
		return err
	}
	defer e.Close()
	defer drives(s, e)
	if err := writeLogits(ctx, e, ids, w, *states); err != nil {
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
			"settings": e.Settings.Map(), "counters": count, "load_ns": e.LoadNanos, "output": *out,
			"resident_announced_bytes": e.Announced,
		})
	}
	words := ""
	for i := range *mtp {
		words += fmt.Sprintf(", %s [%d, %d]", mtpName(i), len(ids)-1-i, e.Spec.Vocab)
	}
	if *states {
		words += fmt.Sprintf(", hidden [%d, %d, %d]", e.Spec.Layers+1, len(ids), e.Spec.Hidden)
	}
	s.notice("wrote %s: logits [%d, %d], hidden_last [%d, %d]%s", *out, len(ids), e.Spec.Vocab, len(ids), e.Spec.Hidden, words)
	return nil
}

func readIDs(ctx context.Context, s streams, path string) ([]int32, error) {
	text, err := readFile(ctx, s, path)
	if err != nil {
		return nil, fmt.Errorf("read the ids: %w", err)
	}
	var numbers []*int32 // nil: a null
	if err := json.Unmarshal(text, &numbers); err != nil {
		return nil, fmt.Errorf("%s: want a JSON array of token ids, such as [12, 7, 512]: %w", path, err)
	}
	if len(numbers) == 0 {
		return nil, fmt.Errorf("%s: the array of token ids is empty", path)
	}
	ids := make([]int32, len(numbers))
	for i, n := range numbers {
		if n == nil {
			return nil, fmt.Errorf("%s: id %d of the array is null: want a token id", path, i)
		}
		ids[i] = *n
	}
	return ids, nil
}

// createLogits checks the ids and begins the file, so that what cannot work
// fails before a large model is loaded.
func createLogits(p *engine.Plan, ids []int32, idsFile, out string, states, force bool) (*safetensors.Writer, error) {
	if len(ids) > p.Config.Ctx {
		return nil, &moe.ContextError{Tokens: len(ids), Ctx: p.Config.Ctx}
	}
	if err := notOver(out, append(p.Paths(), idsFile)...); err != nil {
		return nil, err
	}
	for i, id := range ids {
		if id < 0 || int(id) >= p.Spec.Vocab {
			return nil, fmt.Errorf("%s: element %d is token id %d, but the model's vocabulary has ids 0 to %d", idsFile, i, id, p.Spec.Vocab-1)
		}
	}
	if err := mayReplace(out, "-o", "the output of logits", force, hasLogits); err != nil {
		return nil, err
	}
	specs := []safetensors.Spec{
		{Name: "logits", DType: "F32", Shape: []int64{int64(len(ids)), int64(p.Spec.Vocab)}},
		{Name: "hidden_last", DType: "F32", Shape: []int64{int64(len(ids)), int64(p.Spec.Hidden)}},
	}
	for i := range p.Config.Drafts {
		specs = append(specs, safetensors.Spec{Name: mtpName(i), DType: "F32", Shape: []int64{int64(len(ids) - 1 - i), int64(p.Spec.Vocab)}})
	}
	if states {
		specs = append(specs, safetensors.Spec{Name: "hidden", DType: "F32", Shape: []int64{int64(p.Spec.Layers + 1), int64(len(ids)), int64(p.Spec.Hidden)}})
	}
	return safetensors.Create(out, specs)
}

// hasLogits says whether path is a file of this command.
func hasLogits(path string, _ *os.File) bool {
	f, err := safetensors.Open(path)
	if err != nil {
		return false
	}
	defer f.Close()
	_, logits := f.Tensor("logits")
	_, hidden := f.Tensor("hidden_last")
	return logits && hidden
}

// maxMTP is the most steps of --mtp.
const maxMTP = 8

func mtpName(step int) string { return fmt.Sprintf("mtp%d_logits", step+1) }

// writeLogits runs the ids and writes the file as they come: first all logits,
// then the hidden states, then what the drafting layer says, then the states of
// all layers; these are kept until then.
func writeLogits(ctx context.Context, e *engine.Engine, ids []int32, w *safetensors.Writer, states bool) error {
	vocab, dim := e.Spec.Vocab, e.Spec.Hidden
	hidden := make([]float32, len(ids)*dim)
	row := make([]float32, vocab)
	drafts := make([][]float32, e.Config.Drafts) // logits by step
	var all, chunk []float32                     // [layers+1, len(ids), dim], the same of the positions of a chunk
	if states {
		all = make([]float32, (e.Spec.Layers+1)*len(ids)*dim)
	}
	for at := 0; at < len(ids); {
		n := min(len(ids)-at, e.Model.Chunk())
		if states {
			chunk = append(chunk[:0], make([]float32, (e.Spec.Layers+1)*n*dim)...)
			if err := e.Model.ForwardStates(ctx, ids[at:at+n], chunk); err != nil {
				return err
			}
			for l := range e.Spec.Layers + 1 {
				copy(all[(l*len(ids)+at)*dim:], chunk[l*n*dim:(l+1)*n*dim])
			}
		} else if err := e.Model.Forward(ctx, ids[at:at+n]); err != nil {
			return err
		}
		if err := e.Model.Hidden(hidden[at*dim : (at+n)*dim]); err != nil {
			return err
		}
		for i := range n {
			if err := e.Model.Logits(row, []int32{int32(i)}); err != nil {
				return err
			}
			if err := w.Floats(row); err != nil {
				return err
			}
		}
		if err := draftLogits(ctx, e, ids, at, n, drafts); err != nil {
			return err
		}
		at += n
	}
	if err := w.Floats(hidden); err != nil {
		return err
	}
	for _, rows := range drafts {
		if err := w.Floats(rows); err != nil {
			return err
		}
	}
	if err := w.Floats(all); err != nil {
		return err
	}
	return w.Finish()
}

// draftLogits appends to to[step] the drafting layer's logits after positions
// at to at+n-1 of ids, those of the last Forward: of each that has token step+1
// behind it, which it is told, so that it foretells the next. Every step has keys
// and values of its own.
func draftLogits(ctx context.Context, e *engine.Engine, ids []int32, at, n int, to [][]float32) error {
	vocab := e.Spec.Vocab
	rows := make([]int32, n)
	for i := range rows {
		rows[i] = int32(i)
	}
	for step := range to {
		rows = rows[:max(0, min(len(rows), len(ids)-1-step-at))]
		if len(rows) == 0 {
			return nil
		}
		err := e.Model.Draft(ctx, moe.DraftStep{
			Layer: min(step, e.Spec.Nextn-1), Cache: step, Pos: at, Recycle: step > 0,
			Rows: rows, IDs: ids[at+1+step:][:len(rows)],
		})
		if err != nil {
			return err
		}
		from := len(to[step])
		to[step] = append(to[step], make([]float32, len(rows)*vocab)...)
		if err := e.Model.DraftLogits(to[step][from:], rows); err != nil {
			return err
		}
	}
	return nil
}
