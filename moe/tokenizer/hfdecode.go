package tokenizer

import (
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"unicode/utf8"
)

// initDecoder makes the bytes of each token by the file's decoder. A decoder
// works on one token at a time but for what it leaves out at the start of a text,
// so that tokens can be printed as they come.
func (t *Tokenizer) initDecoder(p *pipeline, raw json.RawMessage) error {
	steps, err := flatDecoder(raw, 0)
	if err != nil {
		return err
	}
	if len(steps) == 0 {
		return fmt.Errorf("is absent: the file does not say how tokens become text")
	}
	var each []func(piece string, isByte bool) (string, bool)
	text := func(f func(string) string) { // for tokens that are not bytes yet
		each = append(each, func(s string, isByte bool) (string, bool) {
			if isByte {
				return s, true
			}
			return f(s), false
		})
	}
	bytesAsText := false
	fused := false // the tokens are one text by now
	for _, step := range steps {
		switch step.Type {
		case "ByteLevel":
			if fused {
				return fmt.Errorf("step ByteLevel after Fuse is not supported")
			}
			bytesAsText = true
			each = append(each, func(s string, isByte bool) (string, bool) {
				if isByte {
					return s, true
				}
				return unescapeBytes(s), true
			})
		case "ByteFallback":
			if fused {
				return fmt.Errorf("step ByteFallback after Fuse is not supported")
			}
			each = append(each, func(s string, isByte bool) (string, bool) {
				if b, ok := byteToken(s); ok && !isByte {
					return string([]byte{b}), true
				}
				return s, isByte
			})
		case "Fuse":
			fused = true
		case "Replace":
			if step.Pattern == nil || step.Pattern.String == nil || *step.Pattern.String == "" || len(step.Content) > maxReplace {
				return fmt.Errorf("step Replace of anything but a String, or by more than %d bytes, is not supported", maxReplace)
			}
			old := *step.Pattern.String
			if fused && utf8.RuneCountInString(old) > 1 {
				return fmt.Errorf("step Replace of several characters after Fuse is not supported")
			}
			text(func(s string) string { return strings.ReplaceAll(s, old, step.Content) })
		case "Metaspace":
			space, first, always, err := step.metaspace()
			if err != nil {
				return err
			}
			text(func(s string) string { return strings.ReplaceAll(s, string(space), " ") })
			if first || always {
				p.strip, p.stripMost = " ", 1
			}
		case "Strip":
			if _, n := utf8.DecodeRuneInString(step.Content); n == 0 || n != len(step.Content) || step.Start < 0 || step.Stop < 0 {
				return fmt.Errorf("step Strip: content %q is not one character, or a count is negative", step.Content)
			}
			switch {
			case fused && step.Stop > 0:
				return fmt.Errorf("step Strip at the end of the text is not supported")
			case fused:
				p.strip, p.stripMost = step.Content, step.Start
			default:
				text(func(s string) string {
					for i := 0; i < step.Start && strings.HasPrefix(s, step.Content); i++ {
						s = s[len(step.Content):]
					}
					for i := 0; i < step.Stop && strings.HasSuffix(s, step.Content); i++ {
						s = s[:len(s)-len(step.Content)]
					}
					return s
				})
			}
		default:
			return unsupported(step.Type, "ByteLevel, Metaspace, Replace, ByteFallback, Fuse, Strip, Sequence")
		}
	}
	t.pieces = make([]string, len(t.tokens))
	size := 0
	for id, s := range t.tokens {
		if t.types[id] != Unused {
			isByte := t.types[id] != Normal && bytesAsText // added tokens are not written so
			for _, step := range each {
				if s, isByte = step(s, isByte); len(s) > maxHFPiece {
					return fmt.Errorf("token %d becomes a text of %d bytes, at most %d are allowed", id, len(s), maxHFPiece)
				}
			}
		}
		if size += len(s); size > maxHFBytes {
			return fmt.Errorf("the tokens become texts of more than %d bytes", maxHFBytes)
		}
		t.pieces[id] = s
	}
	return nil
}

// Bounds of the text of one token and of what Replace may put into it.
const (
	maxHFPiece = 1 << 20
	maxReplace = 64
)

// flatDecoder lists the steps of a decoder, those of sequences in their place.
func flatDecoder(raw json.RawMessage, depth int) ([]*hfPart, error) {
	p, err := readPart(raw, depth)
	if p == nil || err != nil {
		return nil, err
	}
	if p.Type != "Sequence" {
		return []*hfPart{p}, nil
	}
	var list []*hfPart
	for i, raw := range p.Decoders {
		steps, err := flatDecoder(raw, depth+1)
		if err != nil {
			return nil, fmt.Errorf("decoders[%d]: %w", i, err)
		}
		list = append(list, steps...)
	}
	return list, nil
}

// byteToken is the byte that <0xXX> stands for.
func byteToken(s string) (byte, bool) {
	if len(s) != len("<0x00>") || !strings.HasPrefix(s, "<0x") || s[5] != '>' {
		return 0, false
	}
	b, err := strconv.ParseUint(s[3:5], 16, 8)
	return byte(b), err == nil
}
