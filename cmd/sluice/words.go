package main

import (
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
)

// printable is text from outside, such as the name of a file, as one line may show
// it: what would move the cursor, recolour the terminal or turn the line round is
// written as an escape.
func printable(text string) string {
	clean := func(r rune) bool { return r != utf8.RuneError && (unicode.IsPrint(r) || r == '\t') }
	if strings.IndexFunc(text, func(r rune) bool { return !clean(r) }) < 0 {
		return text
	}
	var b strings.Builder
	for i := 0; i < len(text); {
		r, n := utf8.DecodeRuneInString(text[i:])
		if part := text[i : i+n]; clean(r) || r == utf8.RuneError && n > 1 {
			b.WriteString(part)
		} else {
			quoted := strconv.QuoteToASCII(part)
			b.WriteString(quoted[1 : len(quoted)-1])
		}
		i += n
	}
	return b.String()
}
