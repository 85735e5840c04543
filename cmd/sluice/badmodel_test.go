package main

import (
	"encoding/binary"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"sluice/internal/quant"
	"sluice/storage"
)

// onModel are the commands that open a model, ready but for its path, and the
// folder that they would write into.
func onModel(t *testing.T) (commands map[string][]string, outputs string) {
	dir, outputs := t.TempDir(), t.TempDir()
	for name, text := range map[string]string{"text": "some text", "ids": "[1,2]"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o666); err != nil {
			t.Fatal(err)
		}
	}
	return map[string][]string{
		"run":        {"-p", "a", "-n", "1", "--model"},
		"perplexity": {filepath.Join(dir, "text"), "--model"},
		"logits":     {"--ids", filepath.Join(dir, "ids"), "-o", filepath.Join(outputs, "out"), "--model"},
		"tokenize":   {"--model"},
		"inspect":    {"--model"},
		"synth":      {"-o", filepath.Join(outputs, "out"), "--layers", "3", "--vocab"},
	}, outputs
}

// TestNoModel: what is no model at all, for every command.
func TestNoModel(t *testing.T) {
	dir := t.TempDir()
	for name, text := range map[string]string{
		"text.gguf":        "once upon a time",
		"empty.gguf":       "",
		"short.gguf":       "GG",
		"page.gguf":        "<!doctype html>",
		"pointer.gguf":     "version https://git-lfs.github.com/spec/v1\n",
		"bigendian.gguf":   "FUGG\x00\x00\x00\x03",
		"safetensors.gguf": "\x02\x00\x00\x00\x00\x00\x00\x00{}",
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o666); err != nil {
			t.Fatal(err)
		}
	}
	commands, outputs := onModel(t)
	for _, c := range []struct{ file, want string }{
		{"absent.gguf", "no such file or directory"},
		{"", "is a directory: name the .gguf file in it"},
		{"text.gguf", `byte 0: not a GGUF file of 16 bytes: it begins with "once"`},
		{"empty.gguf", "byte 0: not a GGUF file of 0 bytes: it is empty"},
		{"short.gguf", "byte 0: not a GGUF file of 2 bytes: it is cut short"},
		{"page.gguf", "it looks like a web page: the download went wrong"},
		{"pointer.gguf", "it is a git-lfs pointer, not the model"},
		{"bigendian.gguf", "it is a big-endian GGUF"},
		{"safetensors.gguf", "it looks like safetensors: convert the model to GGUF first"},
		{"text.gguf/model.gguf", "not a directory"},
	} {
		path := filepath.Join(dir, c.file)
		for name, args := range commands {
			r := sluice("", append(append([]string{name}, args...), path)...)
			r.wants(t, exitError, "sluice "+name+": ", path, c.want)
		}
	}
	none(t, outputs)
	sluice("", "run", "/dev/null", "-p", "a").wants(t, exitError, "/dev/null is not a regular file")
}

var bytePosition = regexp.MustCompile(`byte \d+`)

// TestTruncated: a model cut anywhere is refused, with the byte at which it
// fails; the header is cut as often as the tensors.
func TestTruncated(t *testing.T) {
	data, err := os.ReadFile(tinyGLM4)
	if err != nil {
		t.Fatal(err)
	}
	m, err := storage.Open(tinyGLM4)
	if err != nil {
		t.Fatal(err)
	}
	header := m.Tensors[0].Off
	m.Close()
	const cuts = 200
	var sizes []int64 // falling
	for i := range int64(cuts / 2) {
		sizes = append(sizes, int64(len(data))-1-i*(int64(len(data))-header)/(cuts/2))
	}
	for i := range int64(cuts / 2) {
		sizes = append(sizes, header-1-i*(header-1)/(cuts/2-1))
	}
	path := file(t, "cut.gguf", string(data))
	commands, outputs := onModel(t)
	for i, size := range sizes {
		if err := os.Truncate(path, size); err != nil {
			t.Fatal(err)
		}
		names := []string{"run"}
		if i%20 == 0 {
			names = []string{"run", "perplexity", "logits", "tokenize", "inspect", "synth"}
		}
		for _, name := range names {
			r := sluice("", append(append([]string{name}, commands[name]...), path)...)
			r.wants(t, exitError, path)
			if !bytePosition.MatchString(r.err) {
				t.Errorf("%s, cut to %d bytes: no byte position in %s", name, size, r.err)
			}
			if t.Failed() {
				t.Fatalf("%s, cut to %d of %d bytes", name, size, len(data))
			}
		}
	}
	none(t, outputs)
}

// TestDamagedHeader: numbers that no file of this size can hold.
func TestDamagedHeader(t *testing.T) {
	data, err := os.ReadFile(tinyGLM4)
	if err != nil {
		t.Fatal(err)
	}
	u32 := func(n uint32) []byte { return binary.LittleEndian.AppendUint32(nil, n) }
	u64 := func(n uint64) []byte { return binary.LittleEndian.AppendUint64(nil, n) }
	firstValue := 24 + 8 + int(binary.LittleEndian.Uint64(data[24:])) // after the first key
	firstName := strings.Index(string(data), "output_norm.weight")    // of a tensor
	for _, c := range []struct {
		name string
		at   int
		with []byte
		want string
	}{
		{"magic", 0, []byte("GGML"), `it begins with "GGML"`},
		{"version 1", 4, u32(1), "byte 4: it is GGUF version 1"},
		{"version 9", 4, u32(9), "byte 4: it is GGUF version 9, which is not known here"},
		{"version 3, swapped", 4, u32(3 << 24), "byte 4: it is a big-endian GGUF"},
		{"tensors", 8, u64(1 << 40), "byte 8: it announces 1099511627776 tensors, but from here the file of"},
		{"all tensors", 8, u64(math.MaxUint64), "byte 8: it announces 18446744073709551615 tensors"},
		{"entries", 16, u64(1 << 62), "byte 16: it announces 4611686018427387904 metadata entries"},
		{"key length", 24, u64(1 << 33), "byte 24: a metadata key has a length of 8589934592"},
		{"no key", 24, u64(0), "byte 24: a metadata key has a length of 0"},
		{"value type", firstValue, u32(99), "has the value type 99, which GGUF does not have"},
		{"string length", firstValue + 4, u64(math.MaxInt64), "needs 9223372036854775807 bytes, but the file ends at byte"},
		{"dims", firstName + len("output_norm.weight"), u32(1 << 20), "output_norm.weight"},
		{"dim", firstName + len("output_norm.weight") + 4, u64(1 << 62), "output_norm.weight"},
		{"tensor type", firstName + len("output_norm.weight") + 12, u32(77), "77"},
		{"tensor position", firstName + len("output_norm.weight") + 16, u64(1 << 60), "output_norm.weight"},
	} {
		t.Run(c.name, func(t *testing.T) {
			bad := append([]byte{}, data...)
			copy(bad[c.at:], c.with)
			path := file(t, "bad.gguf", string(bad))
			for _, args := range [][]string{{"inspect", path}, {"run", path, "-p", "a"}} {
				sluice("", args...).wants(t, exitError, path, c.want)
			}
		})
	}
}

// TestUnfitModel: a sound GGUF file that is not a model to run.
func TestUnfitModel(t *testing.T) {
	entry := func(key string, v any) storage.KV { return storage.KV{Key: key, Value: v} }
	for _, c := range []struct {
		name string
		kv   storage.KV
		want []string
	}{
		{"another architecture", entry("general.architecture", "gpt2"), []string{`architecture "gpt2" is not supported`, "glm4moe", "qwen3moe"}},
		{"no architecture", entry("general.architecture", ""), []string{`architecture ""`, "glm4moe", "qwen3moe"}},
		{"architecture of a wrong type", entry("general.architecture", uint32(4)), []string{"general.architecture", "want a string"}},
		{"no layers", entry("glm4moe.block_count", uint32(0)), []string{"glm4moe.block_count"}},
		{"layers", entry("glm4moe.block_count", uint32(math.MaxUint32)), []string{"glm4moe.block_count is 4294967295"}},
		{"more layers than tensors", entry("glm4moe.block_count", uint32(9)), []string{"has no tensor blk."}},
		{"experts", entry("glm4moe.expert_count", uint32(17)), []string{"exps.weight has dims"}},
		{"top-k", entry("glm4moe.expert_used_count", uint32(17)), []string{"17 experts used of 16"}},
		{"width", entry("glm4moe.embedding_length", uint32(128)), []string{"has dims"}},
		{"heads", entry("glm4moe.attention.head_count", uint32(3)), []string{"heads"}},
		{"epsilon", entry("glm4moe.attention.layer_norm_rms_epsilon", float32(-1)), []string{"layer_norm_rms_epsilon is -1"}},
		{"rope scaling", entry("glm4moe.rope.scaling.type", "longrope"), []string{`"longrope"`}},
		{"vocabulary", entry("tokenizer.ggml.tokens", []string{"a", "b"}), []string{"vocabulary has 2 tokens"}},
		{"end token", entry("tokenizer.ggml.eos_token_id", uint32(512)), []string{"tokenizer.ggml.eos_token_id is 512"}},
		{"tokenizer", entry("tokenizer.ggml.model", "whisper"), []string{"whisper"}},
		{"pre-tokenizer", entry("tokenizer.ggml.pre", "nobody-knows"), []string{"nobody-knows"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			m := copyModel(t, tinyGLM4, with(c.kv))
			sluice("", "run", m, "-p", "a").wants(t, exitError, c.want...)
			if strings.HasPrefix(c.kv.Key, "tokenizer.ggml.") && c.kv.Key != "tokenizer.ggml.tokens" {
				sluice("a", "tokenize", m).wants(t, exitError, c.want...)
			} else {
				sluice("", "inspect", m).wants(t, exitError, c.want...)
			}
		})
	}
	t.Run("a vocabulary alone", func(t *testing.T) {
		path := filepath.Join(t.TempDir(), "vocab.gguf")
		w, err := storage.CreateGGUF(path, []storage.KV{entry("general.architecture", "glm4moe")}, []storage.TensorSpec{{Name: "x", Type: quant.F32, Dims: []int64{1}}})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write(make([]byte, 4)); err != nil {
			t.Fatal(err)
		}
		if err := w.Finish(); err != nil {
			t.Fatal(err)
		}
		sluice("", "run", path, "-p", "a").wants(t, exitError, "glm4moe")
		sluice("", "tokenize", path).wants(t, exitError, "tokenizer")
		sluice("", "synth", "-o", filepath.Join(t.TempDir(), "x"), "--layers", "3", "--vocab", path).wants(t, exitError, "has no vocabulary (tokenizer.ggml.tokens)")
	})
}
