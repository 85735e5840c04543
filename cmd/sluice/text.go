package main

import (
	"context"
	"fmt"
	"io"
	"os"
)

// mostText bounds what is read whole: far more than any context holds.
const mostText = 256 << 20

// readFile reads a file whole, - being standard input. It gives up when ctx ends,
// whatever blocks: a pipe that nobody writes to must not hold up Ctrl-C. What
// waits then ends with the program.
func readFile(ctx context.Context, s streams, path string) ([]byte, error) {
	type result struct {
		text []byte
		err  error
	}
	done := make(chan result, 1)
	go func() {
		var r result
		defer func() { done <- r }()
		in := s.in
		if path != "-" {
			f, err := os.Open(path)
			if err != nil {
				r.err = err
				return
			}
			defer f.Close()
			in = f
		}
		if r.text, r.err = io.ReadAll(io.LimitReader(in, mostText+1)); r.err == nil && len(r.text) > mostText {
			r.text, r.err = nil, fmt.Errorf("%s has more than %s: cut it into pieces", name(path), size(mostText))
		}
	}()
	select {
	case r := <-done:
		return r.text, r.err
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func name(path string) string {
	if path == "-" {
		return "standard input"
	}
	return path
}

// notOver refuses an output that is one of the files that are read: writing it
// would destroy it.
func notOver(out string, inputs ...string) error {
	to, err := os.Stat(out)
	if err != nil {
		return nil // not there, or not to be written either
	}
	for _, in := range inputs {
		if from, err := os.Stat(in); err == nil && from.Mode().IsRegular() && os.SameFile(to, from) {
			return usagef("-o %s is %s, which is read: name another file", out, in)
		}
	}
	return nil
}

// mayReplace refuses an output that is a file of somebody else: one that is neither
// empty nor what the same command writes, as ours tells. So a command may be repeated,
// by hand or by make, and a mistyped name destroys nothing.
func mayReplace(out, flag, what string, force bool, ours func(path string, f *os.File) bool) error {
	fi, err := os.Stat(out)
	if force || err != nil || !fi.Mode().IsRegular() || fi.Size() == 0 {
		return nil // pipes and devices are written to; what cannot be written, its writer tells
	}
	f, err := os.Open(out)
	if err == nil {
		defer f.Close()
		if ours(out, f) {
			return nil
		}
	}
	how := "name another file, or remove it"
	if flag != "--trace" {
		how += ", or replace it with --force"
	}
	return usagef("%s %s is there already and is not %s: %s", flag, out, what, how)
}

// begins is for mayReplace: whether a file begins so.
func begins(text string) func(string, *os.File) bool {
	return func(_ string, f *os.File) bool {
		head := make([]byte, len(text))
		_, err := io.ReadFull(f, head)
		return err == nil && string(head) == text
	}
}
