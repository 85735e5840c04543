package tokenizer

import "testing"

// Tokenizers of one vocabulary do not differ, however their files write it; a mark
// that was renamed is no difference, another text is.
func TestDiffer(t *testing.T) {
	make := func(pieces []string, types ...int32) *Tokenizer { return &Tokenizer{pieces: pieces, types: types} }
	a := make([]string{"<pad>", "a", "b", " c"}, Control, Normal, Normal, Normal)
	for _, tt := range []struct {
		name string
		b    *Tokenizer
		want int32
	}{
		{"itself", a, -1},
		{"a renamed mark, a padded end", make([]string{"<x>", "a", "b", " c", ""}, Control, Normal, Normal, Normal, Unused), -1},
		{"a mark for a text", make([]string{"<x>", "a", "<y>", " c"}, Control, Normal, UserDefined, Normal), -1},
		{"a byte", make([]string{"", "a", "b", " c"}, Unused, Byte, Normal, Normal), -1},
		{"two changed places", make([]string{"<pad>", "a", " c", "b"}, Control, Normal, Normal, Normal), 2},
		{"shorter", make([]string{"<pad>", "b"}, Control, Normal), 1},
	} {
		if got, back := Differ(a, tt.b), Differ(tt.b, a); got != tt.want || back != tt.want {
			t.Errorf("%s: %d and %d, want %d", tt.name, got, back, tt.want)
		}
	}
}
