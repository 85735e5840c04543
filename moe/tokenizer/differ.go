package tokenizer

// Differ is the first id that stands for another text in b than in a; -1 if
// none does. What is no text is left out: marks of a format, which a model may
// have renamed, and ids that one of them does not use.
func Differ(a, b *Tokenizer) int32 {
	for id := range min(len(a.pieces), len(b.pieces)) {
		if a.text(id) && b.text(id) && a.pieces[id] != b.pieces[id] {
			return int32(id)
		}
	}
	return -1
}

// text says whether an id stands for text.
func (t *Tokenizer) text(id int) bool { return t.types[id] == Normal || t.types[id] == Byte }
