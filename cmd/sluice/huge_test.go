package main

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"sluice/internal/quant"
	"sluice/storage"
)

// TestHugeModel: a split model of 700 GB, all of it holes, opens, and is planned
// and described in under a second of CPU time.
func TestHugeModel(t *testing.T) {
	const layers, hidden, experts, topK, ff, shards = 94, 4096, 372, 8, 1536, 14
	const heads, kvHeads, headDim = 64, 4, 128
	vocab, err := storage.Open(demo)
	if err != nil {
		t.Fatal(err)
	}
	defer vocab.Close()
	words, _ := vocab.Meta.Strings("tokenizer.ggml.tokens")
	meta := []storage.KV{{Key: "general.architecture", Value: "qwen3moe"}, {Key: "general.name", Value: "Huge"}}
	for key, v := range map[string]uint32{
		"block_count": layers, "context_length": 32768, "embedding_length": hidden, "feed_forward_length": ff, "expert_feed_forward_length": ff,
		"attention.head_count": heads, "attention.head_count_kv": kvHeads, "attention.key_length": headDim, "attention.value_length": headDim,
		"rope.dimension_count": headDim, "expert_count": experts, "expert_used_count": topK,
	} {
		meta = append(meta, storage.KV{Key: "qwen3moe." + key, Value: v})
	}
	meta = append(meta, storage.KV{Key: "qwen3moe.attention.layer_norm_rms_epsilon", Value: float32(1e-6)})
	for _, key := range vocab.Meta.Keys() {
		if strings.HasPrefix(key, "tokenizer.") {
			meta = append(meta, storage.KV{Key: key, Value: vocab.Meta.Value(key)})
		}
	}
	var specs []storage.TensorSpec
	add := func(name string, typ quant.Type, dims ...int64) {
		specs = append(specs, storage.TensorSpec{Name: name + ".weight", Type: typ, Dims: dims})
	}
	add("token_embd", quant.Q8_0, hidden, int64(len(words)))
	add("output", quant.Q8_0, hidden, int64(len(words)))
	add("output_norm", quant.F32, hidden)
	for l := range layers {
		p := fmt.Sprintf("blk.%d.", l)
		add(p+"attn_norm", quant.F32, hidden)
		add(p+"attn_q", quant.Q8_0, hidden, heads*headDim)
		add(p+"attn_k", quant.Q8_0, hidden, kvHeads*headDim)
		add(p+"attn_v", quant.Q8_0, hidden, kvHeads*headDim)
		add(p+"attn_q_norm", quant.F32, headDim)
		add(p+"attn_k_norm", quant.F32, headDim)
		add(p+"attn_output", quant.Q8_0, heads*headDim, hidden)
		add(p+"ffn_norm", quant.F32, hidden)
		add(p+"ffn_gate_inp", quant.F32, hidden, experts)
		add(p+"ffn_gate_exps", quant.Q8_0, hidden, ff, experts)
		add(p+"ffn_up_exps", quant.Q8_0, hidden, ff, experts)
		add(p+"ffn_down_exps", quant.Q8_0, ff, hidden, experts)
	}
	dir, total := t.TempDir(), int64(0)
	for i := range shards {
		own := []storage.KV{{Key: "split.no", Value: uint16(i)}, {Key: "split.count", Value: uint16(shards)}, {Key: "split.tensors.count", Value: int32(len(specs))}}
		if i == 0 {
			own = append(own, meta...)
		}
		header, size := ggufHeader(t, own, specs[i*len(specs)/shards:(i+1)*len(specs)/shards])
		total += size
		path := filepath.Join(dir, fmt.Sprintf("huge-%05d-of-%05d.gguf", i+1, shards))
		if err := os.WriteFile(path, header, 0o666); err != nil {
			t.Fatal(err)
		}
		if err := os.Truncate(path, size); err != nil {
			t.Skipf("needs a file system with sparse files of %d bytes (set TMPDIR): %v", size, err)
		}
	}
	if total < 700e9 {
		t.Fatalf("the model has %d bytes", total)
	}
	first, last := filepath.Join(dir, fmt.Sprintf("huge-%05d-of-%05d.gguf", 1, shards)), filepath.Join(dir, fmt.Sprintf("huge-%05d-of-%05d.gguf", shards, shards))
	timed := func(args ...string) map[string]any {
		t.Helper()
		start, cpu := time.Now(), cpuNanos(t)
		o := mustRun(t, args...).object(t)
		// Wall time is the machine's affair; what is done is ours.
		spent := cpuNanos(t) - cpu
		t.Logf("%s: %v, CPU %v", args[0], time.Since(start), time.Duration(spent))
		if spent > 1e9 {
			t.Errorf("%s takes %v of CPU time", args[0], time.Duration(spent))
		}
		return o
	}
	const expert = 3 * hidden * ff / 32 * 34
	o := timed("inspect", last, "--json")
	for key, want := range map[string]int64{"file_bytes": total, "files": shards, "layers": layers, "experts": experts, "bytes_per_expert": expert,
		"expert_bytes": expert * layers * experts, "bytes_per_token": expert * layers * topK} {
		if got := number(t, o, key); got != want {
			t.Errorf("%s is %d, want %d", key, got, want)
		}
	}
	for _, storage := range []string{"slab", "pread", "mmap"} {
		o := timed("plan", first, "--json", "--ctx", "512", "--storage", storage, "--drive-rate", "3")
		if got := number(t, o, "bytes_per_token"); got != expert*layers*topK {
			t.Errorf("plan: %d bytes a token, want %d", got, expert*layers*topK)
		}
		if got := number(t, o, "cap"); got < 0 || got > experts {
			t.Errorf("plan: cap %d", got)
		}
	}
}

func cpuNanos(t *testing.T) int64 {
	t.Helper()
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		t.Fatal(err)
	}
	return u.Utime.Nano() + u.Stime.Nano()
}

// ggufHeader is what comes before the data of a GGUF file, and the size of the
// whole file.
func ggufHeader(t *testing.T, meta []storage.KV, specs []storage.TensorSpec) (header []byte, size int64) {
	t.Helper()
	le := binary.LittleEndian
	text := func(b []byte, s string) []byte { return append(le.AppendUint64(b, uint64(len(s))), s...) }
	// The numbers by which GGUF names the types of values.
	types := map[string]uint32{"uint8": 0, "int8": 1, "uint16": 2, "int16": 3, "uint32": 4, "int32": 5, "float32": 6, "bool": 7, "string": 8, "uint64": 10, "int64": 11, "float64": 12}
	const array, align = 9, 32
	h := le.AppendUint64(le.AppendUint64(le.AppendUint32([]byte("GGUF"), 3), uint64(len(specs))), uint64(len(meta)))
	for _, kv := range meta {
		h = text(h, kv.Key)
		name, isList := strings.CutPrefix(fmt.Sprintf("%T", kv.Value), "[]")
		typ, ok := types[name]
		if !ok {
			t.Fatalf("%s is %T", kv.Key, kv.Value)
		}
		if isList {
			n, err := vocabLen(kv)
			if err != nil {
				t.Fatal(err)
			}
			h = le.AppendUint64(le.AppendUint32(le.AppendUint32(h, array), typ), uint64(n))
		} else {
			h = le.AppendUint32(h, typ)
		}
		switch v := kv.Value.(type) {
		case string:
			h = text(h, v)
		case []string:
			for _, s := range v {
				h = text(h, s)
			}
		default:
			var b bytes.Buffer
			if err := binary.Write(&b, le, v); err != nil {
				t.Fatalf("%s: %v", kv.Key, err)
			}
			h = append(h, b.Bytes()...)
		}
	}
	off := int64(0)
	for _, s := range specs {
		h = le.AppendUint32(text(h, s.Name), uint32(len(s.Dims)))
		for _, d := range s.Dims {
			h = le.AppendUint64(h, uint64(d))
		}
		h = le.AppendUint64(le.AppendUint32(h, uint32(s.Type)), uint64(off))
		off = (off + s.Bytes() + align - 1) &^ (align - 1)
	}
	h = append(h, make([]byte, -len(h)&(align-1))...)
	return h, int64(len(h)) + off
}

// vocabLen is the number of elements of an array.
func vocabLen(kv storage.KV) (int, error) {
	m, err := storage.NewMeta("test", []storage.KV{kv})
	if err != nil {
		return 0, err
	}
	n, _ := m.Len(kv.Key)
	return n, nil
}
