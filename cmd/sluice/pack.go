package main

import (
	"context"
	"errors"
	"io"
	"os"
	"slices"
	"time"

	"sluice/moe"
	"sluice/storage"
)

func packCommand(ctx context.Context, s streams, args []string) error {
	f, asJSON := newFlags(s, "pack", "write a model as a slab: nothing is lost, and one read brings an expert")
	model := modelFlag(f)
	out := f.StringP("output", "o", "", "the slab to write (default: beside the model, where run finds it)")
	restart := f.Bool("restart", false, "throw away what an interrupted packing left")
	noVerify := f.Bool("no-verify", false, "do not read the written bytes back")
	if err := parse(f, args); err != nil {
		return err
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
	if *out == "" {
		*out = file.SlabPath()
	}
	start := time.Now()
	bar := newBar(s)
	r, err := storage.Pack(ctx, file, slices.Concat(spec.Roles, spec.NextnRoles), *out, storage.PackOptions{Restart: *restart, NoVerify: *noVerify, Progress: bar.show})
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
			"verified": r.Verified, "seconds": took.Seconds(), "pack_ns": took.Nanoseconds(),
		})
	}
	verified := "not read back"
	if r.Verified {
		verified = "read back and verified"
	}
	s.notice("wrote %s: %s, %d experts, %d other tensors, %s, in %.3g s", *out, size(r.Bytes), r.Experts, r.Tensors, verified, took.Seconds())
	if r.Resumed > 0 {
		s.notice("%s were there from an interrupted packing", size(r.Resumed))
	}
	return nil
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
