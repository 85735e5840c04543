package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"sluice/storage"
)

// A badPart is a finding of verify as JSON.
type badPart struct {
	File   string `json:"file"`
	Tensor string `json:"tensor,omitempty"`
	Layer  *int32 `json:"layer,omitempty"`
	Expert *int32 `json:"expert,omitempty"`
	Byte   int64  `json:"byte"`
	Error  string `json:"error"`
}

func verifyCommand(ctx context.Context, s streams, args []string) error {
	f, asJSON := newFlags(s, "verify", "read a model whole and name every expert or tensor that is bad")
	model := modelFlag(f)
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

	// A slab is compared with the model beside it, a model with the slab beside it.
	var slab, packed *storage.Model
	if file.Format == "slab" && file.Requantized() != "" {
		slab = file
		s.notice("%s was requantized (%s): its checksums are verified, and its bytes are not compared with those of the model", path, file.Requantized())
	} else if file.Format == "slab" {
		slab = file
		if packed, err = file.Unpacked(); err != nil {
			s.notice("the model beside %s cannot be opened: %v", path, err)
		}
		if packed != nil {
			defer packed.Close()
			packed = samePacked(s, slab, packed)
		}
	} else {
		var words string
		if slab, words = file.Sidecar(); words != "" {
			s.notice("%s", words)
		}
		if slab != nil {
			defer slab.Close()
			packed = file
		}
	}

	start := time.Now()
	bar := newBar(s)
	show := func(done, total int64) { bar.show("verifying", done, total) }
	var bad []badPart
	object := map[string]any{"model": path, "format": file.Format}
	check := func(name string, m, packed *storage.Model) error {
		v, err := storage.Verify(ctx, m, packed, show)
		bar.end()
		for _, x := range v.Bad {
			b := badPart{File: x.File, Tensor: x.Tensor, Byte: x.Off, Error: x.Err.Error()}
			var sum *storage.ChecksumError
			if errors.As(x.Err, &sum) { // whose own text names the place once more
				b.Error = fmt.Sprintf("its CRC-32C is %08x, not %08x: pack the model again", sum.Got, sum.Want)
			}
			if x.Key.Layer >= 0 {
				b.Layer = &x.Key.Layer
			}
			if x.Key.Expert >= 0 {
				b.Expert = &x.Key.Expert
			}
			bad = append(bad, b)
		}
		if err != nil {
			return err
		}
		object[name] = map[string]any{"file": m.Files[0].Path, "bytes": v.Bytes, "tensors": v.Tensors, "experts": v.Experts, "compared": v.Compared, "bad": len(v.Bad)}
		if !*asJSON {
			compared := ""
			if v.Compared {
				compared = ", compared with the model that was packed"
			}
			s.notice("%s: read %s, %d tensors, %d packed experts%s: %d bad", m.Files[0].Path, size(v.Bytes), v.Tensors, v.Experts, compared, len(v.Bad))
		}
		return nil
	}
	if file.Format != "slab" {
		err = check(file.Format, file, nil)
	}
	if err == nil && slab != nil {
		err = check("slab", slab, packed)
	}
	if err != nil {
		return err
	}
	object["bad"], object["verify_ns"] = bad, time.Since(start).Nanoseconds()
	if bad == nil {
		object["bad"] = []badPart{}
	}
	if *asJSON {
		if err := printJSON(s.out, object); err != nil {
			return err
		}
	} else {
		for _, b := range bad {
			fmt.Fprintln(s.out, b)
		}
	}
	if len(bad) > 0 {
		return fmt.Errorf("bad: %d", len(bad))
	}
	return nil
}

// String is a finding in a line.
func (b badPart) String() string {
	what := "bytes"
	if b.Tensor != "" {
		what = "tensor " + b.Tensor
	}
	if b.Expert != nil {
		what += fmt.Sprintf(" expert %d", *b.Expert)
	}
	if b.Layer != nil && b.Expert != nil {
		what = fmt.Sprintf("layer %d expert %d", *b.Layer, *b.Expert)
		if b.Tensor != "" {
			what += ", tensor " + b.Tensor
		}
	}
	return fmt.Sprintf("%s: %s, byte %d: %s", b.File, what, b.Byte, b.Error)
}

// samePacked is the model beside a slab if it can be compared with it, else nil,
// in words.
func samePacked(s streams, slab, beside *storage.Model) *storage.Model {
	was, err := slab.Identity()
	if err != nil {
		s.notice("%v", err)
		return nil
	}
	now, err := beside.Identity()
	if err != nil {
		s.notice("%v", err)
		return nil
	}
	words, timeOnly := was.Differs(now)
	switch {
	case timeOnly:
		s.notice("run does not use this slab in place of the model beside it, since %s; their bytes are compared", words)
	case words != "":
		s.notice("the model beside the slab is not the one that was packed, since %s: not compared", words)
		return nil
	}
	return beside
}
