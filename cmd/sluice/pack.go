package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"sluice/internal/quant"
	"sluice/moe"
	"sluice/storage"
)

func packCommand(ctx context.Context, s streams, args []string) error {
	f, asJSON := newFlags(s, "pack", "write a model as a slab, so that one read brings an expert: nothing is lost, unless --quant makes weights smaller")
	model := modelFlag(f)
	out := f.StringP("output", "o", "", "the slab to write (default: beside the model, where run finds it)")
	restart := f.Bool("restart", false, "throw away what an interrupted packing left")
	force := f.Bool("force", false, "replace a file that is no slab")
	noVerify := f.Bool("no-verify", false, "do not read the written bytes back")
	experts := f.String("quant", "", "requantize the routed experts of F32, F16, BF16 or FP8: q4_k, q8_0, q4_0 or mxfp4. Such a slab is used only where it is named as MODEL")
	dense := f.String("quant-dense", "", "requantize the matrices that stay in memory too (default: as they are)")
	draft := f.String("quant-mtp", "", "requantize the drafting (MTP) layers too, their experts and matrices (default: as they are)")
	if err := parse(f, args); err != nil {
		return err
	}
	var want moe.Requantization
	for _, x := range [...]struct {
		to         *quant.Type
		flag, text string
	}{{&want.Experts, "quant", *experts}, {&want.Dense, "quant-dense", *dense}, {&want.Draft, "quant-mtp", *draft}} {
		var err error
		if !f.Changed(x.flag) {
			continue
		}
		if *x.to, err = quantType(x.text); err != nil {
			return usagef("--%s: %v", x.flag, err)
		}
	}
	path, err := oneModel(*model, f.Args())
	if err != nil {
		return err
	}
	file, err := storage.Open(path)
	if err != nil {
		return err
	}
	defer file.Close()
	spec, err := moe.Describe(file)
	if err != nil {
		return err
	}
	var types map[string]quant.Type
	if want != (moe.Requantization{}) {
		var notes []string
		if types, notes, err = spec.Requantize(want); err != nil {
			return err
		}
		for _, n := range notes {
			s.notice("%s", n)
		}
		sidecar := file.SlabPath()
		if *out == "" { // not where run looks for one that is lossless
			*out = strings.TrimSuffix(sidecar, ".slab") + "." + strings.ToLower(cmp.Or(*experts, *dense, *draft)) + ".slab"
		}
		if same(*out, sidecar) {
			return usagef("-o %s: there run looks for the slab that loses nothing: name the requantized one otherwise", *out)
		}
	}
	if *out == "" {
		*out = file.SlabPath()
	}
	for _, part := range file.Files {
		if err := notOver(*out, part.Path); err != nil {
			return err
		}
	}
	if err := mayReplace(*out, "-o", "a slab", *force, begins("SLUICESL")); err != nil {
		return err
	}
	start := time.Now()
	bar := newBar(s)
	r, err := storage.Pack(ctx, file, slices.Concat(spec.Roles, spec.NextnRoles), *out, storage.PackOptions{Restart: *restart, NoVerify: *noVerify, Progress: bar.show, Requantize: types})
	bar.end()
	if errors.Is(err, context.Canceled) {
		s.notice("%v", err)
		return errInterrupted
	}
	if err != nil {
		return err
	}
	took := time.Since(start)
	if *asJSON {
		return printJSON(s.out, map[string]any{
			"output": *out, "bytes": r.Bytes, "tensors": r.Tensors, "experts": r.Experts, "resumed_bytes": r.Resumed,
			"verified": r.Verified, "requantized": len(types), "seconds": took.Seconds(), "pack_ns": took.Nanoseconds(),
		})
	}
	verified := "not read back"
	if r.Verified {
		verified = "read back and verified"
	}
	s.notice("wrote %s: %s, %d experts, %d other tensors, %s, in %.3g s", *out, size(r.Bytes), r.Experts, r.Tensors, verified, took.Seconds())
	if len(types) > 0 {
		s.notice("%d tensors were requantized: it is used where it is named as MODEL, and gives other logits than %s", len(types), path)
	}
	if r.Resumed > 0 {
		s.notice("%s were there from an interrupted packing", size(r.Resumed))
	}
	return nil
}

// quantType is the type of that name, to which weights may be requantized.
func quantType(name string) (quant.Type, error) {
	switch strings.ToLower(name) {
	case "q4_k":
		return quant.Q4_K, nil
	case "q8_0":
		return quant.Q8_0, nil
	case "q4_0":
		return quant.Q4_0, nil
	case "mxfp4":
		return quant.MXFP4, nil
	}
	return 0, fmt.Errorf("%q is no type that weights are requantized to: use q4_k, q8_0, q4_0 or mxfp4", name)
}

// same says whether two paths name one place.
func same(a, b string) bool {
	x, err1 := filepath.Abs(a)
	y, err2 := filepath.Abs(b)
	return err1 == nil && err2 == nil && x == y
}

// A bar shows progress in one line of a terminal; logs stay clean.
type bar struct {
	w     io.Writer // nil: no terminal
	last  time.Time
	shown bool
}

func newBar(s streams) *bar {
	if f, ok := s.err.(*os.File); ok {
		if fi, err := f.Stat(); err == nil && fi.Mode()&os.ModeCharDevice != 0 {
			return &bar{w: f}
		}
	}
	return &bar{}
}

// show prints how far what is, some five times a second.
func (b *bar) show(what string, done, total int64) {
	if b.w == nil || time.Since(b.last) < 200*time.Millisecond {
		return
	}
	b.last, b.shown = time.Now(), true
	io.WriteString(b.w, "\r"+what+": "+size(done)+" of "+size(total)+"\x1b[K")
}

// end clears the line.
func (b *bar) end() {
	if b.shown {
		io.WriteString(b.w, "\r\x1b[K")
	}
}
