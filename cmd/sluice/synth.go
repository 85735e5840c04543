package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"strconv"
	"strings"

	"sluice/moe/synth"
	"sluice/storage"
)

func synthCommand(ctx context.Context, s streams, args []string) error {
	f, asJSON := newFlags(s, "synth", "write a valid random model of a given size, with the demo's vocabulary")
	out := f.StringP("output", "o", "", "the GGUF file to write")
	sizeText := f.String("size", "", "size of the file, such as 8GiB or 500MB; it chooses the number of layers")
	arch := f.String("arch", "glm4moe", "architecture: glm4moe, qwen3moe, or qwen3, which is dense")
	seed := f.Uint64("seed", 0, "seed of the weights; the same seed gives the same bytes")
	nextn := f.Int("nextn", 0, "drafting layers behind the others, 0 or 1 (glm4moe)")
	layers := f.Int("layers", 0, "number of layers; --size is not used then")
	hidden := f.Int("hidden", 0, "width of the residual stream")
	experts := f.Int("experts", 0, "routed experts of a layer")
	ff := f.Int("ff", 0, "width of a routed expert, or of a dense feed-forward")
	topK := f.Int("top-k", 0, "experts chosen for each token")
	force := f.Bool("force", false, "replace a file that synth has not written")
	vocab := f.String("vocab", "", "a GGUF file whose vocabulary is taken (default: the demo's)")
	if err := parse(f, args); err != nil {
		return err
	}
	if f.NArg() > 0 {
		return usagef("unexpected argument %q", f.Arg(0))
	}
	if *out == "" || (*sizeText == "" && *layers == 0) {
		return usagef("synth needs -o FILE, and --size or --layers")
	}
	for _, name := range []string{"layers", "hidden", "experts", "ff", "top-k"} {
		if n, err := f.GetInt(name); err != nil || n < 1 && f.Changed(name) { // 0 would stand for the shape's own
			return usagef("--%s %d: it must be at least 1", name, n)
		}
	}
	o := synth.Options{Arch: *arch, Seed: *seed, Nextn: *nextn, Layers: *layers, Hidden: *hidden, Experts: *experts, FF: *ff, TopK: *topK}
	if *sizeText != "" {
		n, err := parseSize(*sizeText)
		if err != nil {
			return usagef("--size: %v", err)
		}
		if *layers == 0 {
			o.Size = n
		} else {
			s.notice("--layers %d sets the number of layers: --size %s is not used", *layers, *sizeText)
		}
	}
	path, err := modelPath(*vocab)
	if err != nil {
		return fmt.Errorf("for the vocabulary (--vocab FILE): %w", err)
	}
	if err := notOver(*out, path); err != nil {
		return err
	}
	err = mayReplace(*out, "-o", "a model of synth", *force, func(path string, _ *os.File) bool {
		old, err := storage.Open(path)
		if err != nil {
			return false
		}
		defer old.Close()
		return synth.Wrote(old)
	})
	if err != nil {
		return err
	}
	file, err := storage.Open(path)
	if err != nil {
		return err
	}
	defer file.Close()
	err = synth.Write(ctx, *out, o, file)
	var option *synth.OptionError
	if errors.As(err, &option) {
		return usagef("%v", option)
	}
	if err != nil {
		return err
	}
	fi, err := os.Stat(*out)
	if err != nil {
		return err
	}
	if *asJSON {
		return printJSON(s.out, map[string]any{"output": *out, "file_bytes": fi.Size()})
	}
	s.notice("wrote %s: %s", *out, size(fi.Size()))
	return nil
}

// parseSize reads a number of bytes: 123, 8GiB, 500MB, 1.5TiB. K, M, G and T
// with iB are powers of 1024, with B or alone powers of 1000.
func parseSize(text string) (int64, error) {
	number := strings.TrimRight(text, "kKMGTiB ")
	unit := strings.TrimSpace(text[len(number):])
	scale := 1.0
	base := 1000.0
	switch {
	case strings.HasSuffix(unit, "iB"):
		base, unit = 1024, strings.TrimSuffix(unit, "iB")
		if unit == "" {
			return 0, fmt.Errorf("%q is no size: use a number of bytes, or one like 8GiB or 500MB", text)
		}
	case strings.HasSuffix(unit, "B"):
		unit = strings.TrimSuffix(unit, "B")
	}
	if i := strings.Index("KMGT", strings.ToUpper(unit)); len(unit) == 1 && i >= 0 {
		scale = math.Pow(base, float64(i+1))
	} else if unit != "" {
		return 0, fmt.Errorf("%q is no size: use a number of bytes, or one like 8GiB or 500MB", text)
	}
	n, err := strconv.ParseFloat(strings.TrimSpace(number), 64)
	if err != nil || !(n*scale >= 1 && n*scale <= 1<<60) {
		return 0, fmt.Errorf("%q is no size: use a number of bytes, or one like 8GiB or 500MB", text)
	}
	return int64(n * scale), nil
}
