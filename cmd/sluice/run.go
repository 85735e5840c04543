package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"strings"

	"sluice/cmd/engine"
	"sluice/internal/atomicfile"
	"sluice/moe"
	"sluice/moe/chat"
	"sluice/storage"
	"sluice/tiers"
)

// samplingFlags are the flags of the sampler; what is not given comes from the
// model's general.sampling.* keys, else from the defaults below.
type samplingFlags struct {
	m       *modelFlags
	temp    *float64
	topK    *int
	topP    *float64
	minP    *float64
	penalty *float64
	seed    *uint64
}

func newSamplingFlags(m *modelFlags) samplingFlags {
	return samplingFlags{m,
		m.set.Float64("temp", 0.8, "temperature; 0 is greedy"),
		m.set.Int("top-k", 40, "sample among the k likeliest tokens; 0: all"),
		m.set.Float64("top-p", 0.95, "sample among the likeliest tokens that reach this probability; 1: all"),
		m.set.Float64("min-p", 0.05, "drop tokens below this share of the likeliest; 0: none"),
		m.set.Float64("repeat-penalty", 1, "divide the logits of the last 64 tokens by this; 1: off"),
		m.set.Uint64("seed", 0, "seed of the sampler; the same seed gives the same text"),
	}
}

// repeatLast is the window of the repetition penalty.
const repeatLast = 64

// check refuses flags out of range.
func (f samplingFlags) check() error {
	s := moe.Sampling{Temp: *f.temp, TopK: *f.topK, TopP: *f.topP, MinP: *f.minP, RepeatPenalty: *f.penalty}
	if err := s.Check(); err != nil {
		return usagef("%v", err)
	}
	return nil
}

// resolve settles each value and notes where it came from.
func (f samplingFlags) resolve(p *engine.Plan) (moe.Sampling, error) {
	of, err := readSampling(p.File.Meta)
	if err != nil {
		return moe.Sampling{}, err
	}
	settle := func(flag string, value any, file *float64) float64 {
		origin := givenOr(f.m, flag)
		number, whole := value.(float64)
		if !whole {
			number = float64(value.(int))
		}
		if file != nil && origin == engine.FromDefault {
			origin, number = engine.FromFile, *file
			if value = number; !whole {
				value = int(number)
			}
		}
		p.Settings.Set(engine.Setting{Name: flag, Value: value, Origin: origin})
		return number
	}
	s := moe.Sampling{
		Temp:          settle("temp", *f.temp, of.temp),
		TopP:          settle("top-p", *f.topP, of.topP),
		MinP:          settle("min-p", *f.minP, of.minP),
		RepeatPenalty: settle("repeat-penalty", *f.penalty, of.penalty),
		RepeatLast:    repeatLast,
		TopK:          int(settle("top-k", *f.topK, of.topK)),
		Seed:          *f.seed,
	}
	p.Settings.Set(engine.Setting{Name: "seed", Value: s.Seed, Origin: givenOr(f.m, "seed")})
	if err := s.Check(); err != nil {
		return s, fmt.Errorf("the model's %s out of range: %w, by the flag of that name", of.where, err)
	}
	return s, nil
}

func runCommand(ctx context.Context, s streams, args []string) error {
	m := newModelFlags(s, "run", "continue a text, experts streaming under the cap")
	prompt := m.set.StringP("prompt", "p", "", "the text to continue; special tokens in it are parsed")
	file := m.set.StringP("file", "f", "", "read the text from a file, - for standard input")
	n := m.set.IntP("tokens", "n", 128, "most tokens to generate; -1: until the context is full")
	trace := m.set.String("trace", "", "write what the routers choose to this file, for replay")
	asChat := m.set.Bool("chat", false, "put the text as a user's message into the model's chat template")
	messages := m.set.String("messages", "", "render this JSON list of messages by the model's chat template, in place of a text; - for standard input")
	tools := m.set.String("tools", "", "a JSON list of the tools that a chat may call")
	sampling := newSamplingFlags(m)
	draft := newDraftFlags(m)
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
	if err := sampling.check(); err != nil {
		return err
	}
	if *n < -1 {
		return usagef("-n %d: use 0 or more tokens, or -1 until the context is full", *n)
	}
	if o.Draft, err = draft.options(ctx, s, *trace != ""); err != nil {
		return err
	}
	talk, err := readConversation(ctx, m, s, *asChat, *messages, *tools)
	if err != nil {
		return err
	}
	text := ""
	if talk == nil || talk.messages == nil {
		if text, err = promptText(ctx, m, s, *prompt, *file); err != nil {
			return err
		}
	}

	p, err := engine.Prepare(o)
	if err != nil {
		return err
	}
	opened := false
	defer func() {
		if !opened {
			p.Close()
		}
	}()
	m.settle(p, o.Path)
	sample, err := sampling.resolve(p)
	if err != nil {
		return err
	}
	p.Settings.Set(engine.Setting{Name: "tokens", Value: *n, Origin: givenOr(m, "tokens")})
	p.Settings.Set(engine.Setting{Name: "chat", Value: talk != nil, Origin: givenOr(m, "chat")})
	if *m.printConfig {
		return printConfig(s.out, p.Settings, *m.json)
	}
	ids, err := encodePrompt(ctx, p, text, talk)
	if err != nil {
		return err
	}
	if *trace != "" && p.Dense() {
		return usagef("--trace %s: the model is dense: it has no routers whose choices could be written", printable(*trace))
	}
	var record *atomicfile.File
	if *trace != "" { // before what takes long
		if err := mayReplace(*trace, "--trace", "a trace", false, begins("# route_trace v")); err != nil {
			return err
		}
		if record, err = atomicfile.Create(*trace); err != nil {
			return fmt.Errorf("--trace: %w", err)
		}
		defer record.Abort() // of what was not committed
	}
	opened = true
	e, err := m.load(ctx, s, p)
	if err != nil {
		return err
	}
	defer e.Close()
	defer drives(s, e)
	sampler := moe.NewSampler(sample, e.Spec.Vocab)
	if record == nil {
		return generate(ctx, s, e, m, sampler, ids, *n, func() {})
	}
	t := tiers.NewTraceWriter(record, e.TraceHeader(filepath.Base(o.Path)))
	e.Model.Trace(t)
	err = generate(ctx, s, e, m, sampler, ids, *n, t.Decodes)
	if err != nil && !errors.Is(err, errInterrupted) {
		return err
	}
	if terr := cmp.Or(t.Err(), record.Commit()); terr != nil {
		return fmt.Errorf("--trace: %w", terr)
	}
	return err
}

func givenOr(m *modelFlags, flag string) string {
	if m.set.Changed(flag) {
		return engine.FromFlag
	}
	return engine.FromDefault
}

// promptText is the text of -p or of the file of -f.
func promptText(ctx context.Context, m *modelFlags, s streams, prompt, file string) (string, error) {
	switch {
	case m.set.Changed("prompt") && file != "":
		return "", usagef("-p and -f both give the text: use one")
	case m.set.Changed("prompt") || *m.printConfig:
		return prompt, nil
	case file != "":
		b, err := readFile(ctx, s, file)
		if err != nil {
			return "", fmt.Errorf("read the text: %w", err)
		}
		return string(b), nil
	}
	return "", usagef("no text to continue: give one with -p TEXT or -f FILE")
}

// A conversation is what --chat, --messages and --tools give to a chat template.
type conversation struct {
	messages []chat.Message    // nil: the text of -p or -f is the only one
	tools    []json.RawMessage // nil: none
}

// readConversation is what the flags give; nil if the text is no chat.
func readConversation(ctx context.Context, m *modelFlags, s streams, asChat bool, messages, tools string) (*conversation, error) {
	switch {
	case messages != "" && (m.set.Changed("prompt") || m.set.Changed("file")):
		return nil, usagef("--messages is the whole conversation: leave out -p and -f")
	case messages == "" && !asChat && tools != "":
		return nil, usagef("--tools is for a chat: use it with --chat or --messages")
	case messages == "" && !asChat:
		return nil, nil
	case *m.printConfig:
		return &conversation{}, nil
	case messages == "-" && tools == "-":
		return nil, usagef("--messages and --tools cannot both be standard input")
	}
	var c conversation
	if messages != "" {
		b, err := readFile(ctx, s, messages)
		if err == nil {
			c.messages, err = chat.ReadMessages(b)
		}
		if err != nil {
			return nil, fmt.Errorf("--messages: %w", err)
		}
		if len(c.messages) == 0 {
			return nil, usagef("--messages: the list is empty: there is nothing to answer")
		}
	}
	if tools != "" {
		b, err := readFile(ctx, s, tools)
		if err == nil {
			c.tools, err = chat.ReadTools(b)
		}
		if err != nil {
			return nil, fmt.Errorf("--tools: %w", err)
		}
	}
	return &c, nil
}

// encodePrompt turns the text, or the conversation, into ids that fit into the
// context.
func encodePrompt(ctx context.Context, p *engine.Plan, text string, talk *conversation) ([]int32, error) {
	encode := p.Tokens.EncodePrompt
	if talk != nil {
		var err error
		if text, err = chatText(ctx, p, text, talk); err != nil {
			return nil, err
		}
		encode = p.Tokens.EncodeChat
	}
	ids, err := encode(text)
	switch {
	case err != nil:
		return nil, err
	case len(ids) == 0:
		return nil, usagef("the text is empty: there is nothing to continue")
	case len(ids) > p.Config.Ctx:
		return nil, &moe.ContextError{Tokens: len(ids), Ctx: p.Config.Ctx}
	}
	return ids, nil
}

// chatText renders the conversation, or a user's message, by the template of the
// model.
func chatText(ctx context.Context, p *engine.Plan, text string, talk *conversation) (string, error) {
	source, err := chat.Find(p.File.Meta.String, talk.tools != nil)
	if err := cmp.Or(p.File.Meta.Err(), err); err != nil {
		return "", err
	}
	if source == "" && !p.File.Meta.Has("tokenizer.chat_template") {
		return "", fmt.Errorf("--chat: the model has no chat template (tokenizer.chat_template of a GGUF file, chat_template.jinja or tokenizer_config.json beside others): run it without --chat, on text in the model's own format")
	}
	bos, _ := p.Tokens.BOS()
	messages := talk.messages
	if messages == nil {
		messages = []chat.Message{{Role: "user", Content: text}}
	}
	return renderTemplate(ctx, source, messages, chat.Options{BOS: p.Tokens.Text(bos), EOS: p.Tokens.Text(p.Tokens.EOS()), AddGenerationPrompt: true, Tools: talk.tools})
}

// generate runs the loop, streams the text and prints the summary.
func generate(ctx context.Context, s streams, e *engine.Engine, m *modelFlags, sampler *moe.Sampler, ids []int32, n int, decodes func()) error {
	decoder := e.Tokens.NewDecoder(false)
	var text strings.Builder
	put := func(t string) error {
		text.WriteString(t)
		if *m.json {
			return nil
		}
		_, err := io.WriteString(s.out, t)
		return err
	}
	prefill := e.Cache.Stats()
	before, beforeErr := tiers.Memory{}.Usage()
	r, err := moe.Generate(ctx, e.Decoder(), sampler, moe.Generation{
		Prompt: ids,
		Tokens: n,
		Ctx:    e.Config.Ctx,
		Stop:   e.Tokens.IsStop,
		Emit:   func(id int32) error { return put(decoder.Add(id)) },
		Decodes: func() {
			prefill = e.Cache.Stats()
			decodes()
			before, beforeErr = tiers.Memory{}.Usage()
		},
	})
	if err = cmp.Or(err, beforeErr); err != nil {
		return finish(s, e, err)
	}
	if err := put(decoder.Flush()); err != nil {
		return err
	}
	if !*m.json {
		if _, err := io.WriteString(s.out, "\n"); err != nil {
			return err
		}
	}
	if err := finish(s, e, nil); err != nil {
		return err
	}
	if *m.json {
		if err := generatedJSON(s.out, e, ids, r, text.String(), prefill, before); err != nil {
			return err
		}
	} else {
		summary(s, e, r, prefill)
	}
	if r.Why == moe.WhyInterrupted {
		return errInterrupted
	}
	return nil
}

func generatedJSON(w io.Writer, e *engine.Engine, prompt []int32, r moe.Result, text string, prefill tiers.Stats, before tiers.Usage) error {
	count, err := counters(e, len(r.IDs))
	if err != nil {
		return err
	}
	decode, err := decodeCounters(e, prefill, before)
	if err != nil {
		return err
	}
	object := map[string]any{
		"settings":                 e.Settings.Map(),
		"counters":                 count,
		"decode_counters":          decode,
		"text":                     text,
		"token_ids":                r.IDs,
		"prompt_ids":               prompt,
		"why":                      r.Why,
		"load_ns":                  e.LoadNanos,
		"prefill_ns":               r.Prefill.Nanos,
		"prefill_tokens":           r.Prefill.Tokens,
		"decode_ns":                r.Decode.Nanos,
		"decode_tokens":            r.Decode.Tokens,
		"tok_per_s":                r.Decode.Rate(),
		"prefill_tok_per_s":        r.Prefill.Rate(),
		"logits_crc32c":            fmt.Sprintf("%08x", r.Witness),
		"resident_announced_bytes": e.Announced,
		"drive_bytes_per_s":        e.Drive.Rate,
		"drives":                   driveObjects(e),
	}
	if e.Drafts != nil {
		object["draft"] = draftObject(e.Drafts.Report())
	}
	if r.StopID >= 0 {
		object["stop_id"] = r.StopID
	}
	stages(object, r.Decode.Times)
	return printJSON(w, object)
}

// summary prints what a generation did: rates, stages, where the experts of
// decoding came from (those of the prompt apart).
func summary(s streams, e *engine.Engine, r moe.Result, prefill tiers.Stats) {
	rate := "" // of the tokens after the first; there may be none
	if r.Decode.Tokens > 0 {
		rate = fmt.Sprintf(", %.4g tok/s", r.Decode.Rate())
	}
	s.notice("%d tok%s (prompt %d tok, %.4g tok/s), ended by %s, logits %08x",
		len(r.IDs), rate, r.Prefill.Tokens, r.Prefill.Rate(), r.Why, r.Witness)
	if total := r.Decode.Times.Sum(); r.Decode.Tokens > 0 && total > 0 {
		var b strings.Builder
		for st := range moe.NumStages {
			fmt.Fprintf(&b, " %s %.1f%%", st, 100*float64(r.Decode.Times[st])/float64(total))
		}
		s.notice("decode time:%s", b.String())
	}
	if e.Dense() {
		s.notice("experts: none, the model is dense: all of its weights are in RAM, and nothing is read from the drive")
	} else {
		s.notice("prompt %s", experts(prefill, tiers.Stats{}, e))
	}
	if now := e.Cache.Stats(); now.RoutedExperts > prefill.RoutedExperts {
		s.notice("decode %s", experts(now, prefill, e))
	}
	if words := marginal(e.Cache.Stats()); words != "" {
		s.notice("%s", words)
	}
	if e.Drafts != nil {
		for _, line := range e.Drafts.Report().Lines() {
			s.notice("%s", line)
		}
	}
	if words := prefetched(e.Cache.Stats().Prefetch); words != "" {
		s.notice("%s", words)
	}
	if e.Drive.Rate > 0 {
		s.notice("drive: %s/s at depth %d, measured while loading", size(int64(e.Drive.Rate)), e.Drive.Depth)
	}
	if all := e.Reader.Drives(); len(all) > 1 {
		for _, d := range all {
			s.notice("drive: %s gave %s of experts, %s/s of late, %d errors", d.Path, size(d.ReadBytes), size(int64(d.Rate)), d.Errors)
		}
	}
	beside := "the rest the program"
	if e.Source.Mode() == storage.MMap && !e.Dense() {
		beside += "; the experts' pages are the kernel's and not counted"
	}
	s.notice("memory: %s announced: dense %s, kv %s, scratch %s, staging %s, pinned %s, lru %s, %s", size(e.Announced),
		size(e.Ledger.Of(tiers.Dense)), size(e.Ledger.Of(tiers.KV)), size(e.Ledger.Of(tiers.Scratch)), size(e.Ledger.Of(tiers.Staging)),
		size(e.Ledger.Of(tiers.Pinned)), size(e.Ledger.Of(tiers.LRU)), beside)
}
