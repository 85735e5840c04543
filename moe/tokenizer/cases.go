package tokenizer

import (
	"fmt"
	"io"
	"strings"
)

// caseEnd ends each case of an .inp file.
const caseEnd = "\n__ggml_vocab_test__\n"

// ReadCases reads the texts of an .inp file of llama.cpp's vocabulary tests:
// each is ended by a line feed and a line __ggml_vocab_test__, neither of
// which belongs to it.
func ReadCases(r io.Reader) ([]string, error) {
	b, err := io.ReadAll(r)
	if err != nil {
		return nil, fmt.Errorf("tokenizer: reading cases: %w", err)
	}
	cases := strings.Split(string(b), caseEnd)
	last := len(cases) - 1
	if cases[last] != "" {
		return nil, fmt.Errorf("tokenizer: cases: the last one, at byte %d, is not ended by %q", len(b)-len(cases[last]), caseEnd)
	}
	return cases[:last], nil
}
