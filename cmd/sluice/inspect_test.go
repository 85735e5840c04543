package main

import (
	"fmt"
	"os"
	"strings"
	"testing"
)

// TestInspect: the numbers of models that are known.
func TestInspect(t *testing.T) {
	for _, c := range []struct {
		model string
		want  map[string]any
	}{
		{tinyGLM4, map[string]any{
			"architecture": "glm4moe", "layers": 3, "moe_layers": 2, "leading_dense_layers": 1, "nextn_layers": 0, "hidden": 64, "vocab": 512, "heads": 4,
			"kv_heads": 2, "head_dim": 32, "experts": 16, "top_k": 4, "shared_experts": 1, "expert_ff": 48, "ctx": 128, "files": 1,
			// BF16: gate, up and down of 48 x 64.
			"bytes_per_expert": 3 * 48 * 64 * 2, "expert_bytes": 2 * 16 * 3 * 48 * 64 * 2, "bytes_per_token": 2 * 4 * 3 * 48 * 64 * 2, "chat_template": false,
		}},
		{tinyQwen3, map[string]any{"architecture": "qwen3moe", "layers": 3, "moe_layers": 3, "leading_dense_layers": 0, "experts": 16, "top_k": 4, "shared_experts": 0}},
		{demo, map[string]any{"architecture": "glm4moe", "layers": 7, "moe_layers": 6, "nextn_layers": 1, "experts": 32, "top_k": 4, "vocab": 4096, "chat_template": true}},
	} {
		o := mustRun(t, "inspect", c.model, "--json").object(t)
		for key, want := range c.want {
			if got := at(t, o, key); fmt.Sprint(got) != fmt.Sprint(want) {
				t.Errorf("%s: %s is %v, want %v", c.model, key, got, want)
			}
		}
		for _, key := range []string{"model", "name", "files", "file_bytes", "hidden", "heads", "kv_heads", "head_dim", "expert_ff", "ctx", "dense_bytes", "expert_bytes", "bytes_per_expert", "bytes_per_token", "types"} {
			at(t, o, key)
		}
		fi, err := os.Stat(c.model)
		if err != nil {
			t.Fatal(err)
		}
		types, _ := at(t, o, "types").(map[string]any)
		sum, tensors := int64(0), int64(0)
		for name := range types {
			sum += number(t, types, name, "bytes")
			tensors += number(t, types, name, "tensors")
		}
		size, held := number(t, o, "file_bytes"), number(t, o, "dense_bytes")+number(t, o, "expert_bytes")
		if size != fi.Size() || sum >= size || held > sum || tensors == 0 {
			t.Errorf("%s: %d bytes of %d are tensors, %d of them in use, in a file of %d", c.model, sum, size, held, fi.Size())
		}

		r := mustRun(t, "inspect", c.model)
		for _, s := range []string{"architecture ", "layers ", "experts ", "resident ", "streamed ", "per token ", "chat template ", fmt.Sprintf("top-%v", o["top_k"])} {
			if !strings.Contains(r.out, s) {
				t.Errorf("%s: the lines lack %q:\n%s", c.model, s, r.out)
			}
		}
		for name := range types {
			if !strings.Contains(r.out, name) {
				t.Errorf("%s: the lines lack the type %s", c.model, name)
			}
		}
	}
}

// TestInspectPlan: what inspect calls resident is what run makes resident, the
// rounding of each direct read to whole sectors aside.
func TestInspectPlan(t *testing.T) {
	d := mustRun(t, "inspect", demo, "--json").object(t)
	want := float64(number(t, d, "dense_bytes"))
	r := mustRun(t, "run", demo, "2", "-p", "a", "-n", "1")
	var got float64
	if i := strings.Index(r.err, "announced: dense "); i < 0 {
		t.Fatalf("run announces no dense bytes:\n%s", r.err)
	} else if _, err := fmt.Sscanf(r.err[i:], "announced: dense %f MB", &got); err != nil {
		t.Fatalf("%v:\n%s", err, r.err)
	}
	if got *= 1e6; got < want-1e3 || got > want+2*4096*200 {
		t.Errorf("run announces %.0f dense bytes, inspect says %.0f", got, want)
	}
}
