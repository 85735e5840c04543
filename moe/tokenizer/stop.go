package tokenizer

import "slices"

// endTexts are the texts of tokens that end generation, by the habits of the
// model families. They count only if the file says that they are not plain
// text, because "</s>" is also a piece of HTML.
var endTexts = map[string]bool{
	"</s>": true, "<eos>": true, "[EOS]": true, "<|endoftext|>": true, "<|end_of_text|>": true,
	"<｜end▁of▁sentence｜>": true, "<|im_end|>": true, "<|eot_id|>": true, "<|eom_id|>": true, "<|eot|>": true, "<|eom|>": true,
	"<|end|>": true, "<|return|>": true, "<|call|>": true, "<|calls|>": true, "<|flush|>": true,
	"<end_of_turn>": true, "<turn|>": true, "<EOT>": true, "_<EOT>": true, "[EOT]": true,
	"<end_of_utterance>": true, "[e~[": true,
	// What only stands between documents, or after the last.
	"<|fim_pad|>": true, "<fim-pad>": true, "<fim_pad>": true, "<|fim_repo|>": true, "<|repo_name|>": true,
	"<fim-repo>": true, "<reponame>": true, "<|file_sep|>": true,
}

// channelTexts are the marks inside an answer of the harmony format. Without
// them its channels run together, so they print as text.
var channelTexts = []string{"<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>"}

// initStops finds the tokens that end generation and those that do not print.
func (t *Tokenizer) initStops(v Vocab) {
	t.hidden = make([]bool, len(t.tokens))
	stop := make(map[int32]bool)
	for id, s := range t.tokens {
		k := t.types[id]
		t.hidden[id] = k == Control || k == Unknown
		if endTexts[s] && (k == Control || k == UserDefined) {
			stop[int32(id)] = true
		}
	}
	for _, id := range append([]int32{v.EOS, v.EOT, v.EOM}, v.EOSIDs...) {
		if id >= 0 {
			stop[id] = true
		}
	}
	if t.control("<|return|>") && t.control("<|call|>") || t.control("<|calls|>") && t.control("<|flush|>") {
		// Harmony: <|end|> ends one message of several, not the answer.
		for _, s := range channelTexts {
			if id, ok := t.ids[s]; ok {
				t.hidden[id] = false
			}
		}
		if id, ok := t.ids["<|end|>"]; ok && id != v.EOS && !slices.Contains(v.EOSIDs, id) {
			delete(stop, id)
		}
	}
	for id := range stop {
		t.stops = append(t.stops, id)
	}
	slices.Sort(t.stops)
}

func (t *Tokenizer) control(text string) bool {
	id, ok := t.ids[text]
	return ok && (t.types[id] == Control || t.types[id] == UserDefined)
}

// IsStop says whether generation ends with this token: any end that the file
// names (eos, eot, eom), and control tokens that are ends by their text.
func (t *Tokenizer) IsStop(id int32) bool {
	_, ok := slices.BinarySearch(t.stops, id)
	return ok
}

// Stops lists the tokens that end generation, ascending.
func (t *Tokenizer) Stops() []int32 { return slices.Clone(t.stops) }
