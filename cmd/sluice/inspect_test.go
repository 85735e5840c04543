package main

import (
	"fmt"
	"os"
	"path/filepath"
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

// TestInspectRoles: what each weight is for, what a token reads, and what comes with
// the weights.
func TestInspectRoles(t *testing.T) {
	o := mustRun(t, "inspect", demo, "--json").object(t)
	if at(t, o, "tokenizer") != "gpt2, glm4" || at(t, o, "chat_template_from") != "tokenizer.chat_template" || at(t, o, "mtp_usable") != true ||
		number(t, o, "roles", "MTP", "bytes") != number(t, o, "nextn_bytes") || at(t, o, "roles", "head", "types", "Q6_K") == nil {
		t.Errorf("%v", o)
	}
	models := []string{demo, tinyGLM4, tinyQwen3}
	for _, name := range []string{"glm4_moe_mtp", "gpt_oss", "deepseek_v32", "qwen3_next"} {
		models = append(models, filepath.Join("oracles/hf", name))
	}
	for i, model := range models {
		if i > 2 {
			model = shared(t, model)
		}
		o = mustRun(t, "inspect", model, "--json").object(t)
		types, sum := at(t, o, "types").(map[string]any), int64(0)
		for name := range types {
			sum += number(t, types, name, "bytes")
		}
		roles := at(t, o, "roles").(map[string]any)
		for name := range roles {
			of := at(t, roles, name, "types").(map[string]any)
			n := int64(0)
			for typ := range of {
				n += number(t, of, typ, "bytes")
			}
			if n != number(t, roles, name, "bytes") || n == 0 {
				t.Errorf("%s: %s has %v", model, name, roles[name])
			}
			sum -= n
		}
		if sum != number(t, o, "unused_bytes") || sum < 0 {
			t.Errorf("%s: the roles lack %d bytes, not %d", model, sum, number(t, o, "unused_bytes"))
		}
		if number(t, roles, "routed experts", "bytes") != number(t, o, "expert_bytes") {
			t.Errorf("%s: experts of %v and of %v bytes", model, at(t, roles, "routed experts"), at(t, o, "expert_bytes"))
		}
		for _, role := range []string{"embedding", "attention", "router", "norms", "head"} {
			at(t, roles, role)
		}
		cold := number(t, o, "bytes_per_token")
		rates := at(t, o, "bytes_per_token_at_hit_percent").(map[string]any)
		if number(t, rates, "0") != cold || number(t, rates, "50") != cold/2 || number(t, rates, "99") != cold/100 {
			t.Errorf("%s: of %d bytes a token: %v", model, cold, rates)
		}
	}
}

// Which file the template is of, and that none of several can be taken.
func TestInspectTemplate(t *testing.T) {
	dir := shared(t, "oracles/hf/glm4_moe")
	to := t.TempDir()
	if err := os.CopyFS(to, os.DirFS(dir)); err != nil {
		t.Fatal(err)
	}
	for _, x := range []struct{ file, text, from, fault string }{
		{"tokenizer_config.json", `{"chat_template":"{{ messages }}"}`, "tokenizer_config.json", ""},
		{"tokenizer_config.json", `{"chat_template":[{"name":"a","template":"x"}]}`, "tokenizer_config.json", "default"},
		{"chat_template.json", `{"chat_template":7}`, "chat_template.json", "neither a text nor a list"},
	} {
		os.Remove(filepath.Join(to, x.file))
		if err := os.WriteFile(filepath.Join(to, x.file), []byte(x.text), 0o666); err != nil {
			t.Fatal(err)
		}
		r := mustRun(t, "inspect", to, "--json").object(t)
		if at(t, r, "chat_template_from") != x.from || at(t, r, "tokenizer") != "tokenizer.json, BPE" {
			t.Errorf("%v of %v, want %s", at(t, r, "chat_template_from"), at(t, r, "tokenizer"), x.from)
		}
		if text, _ := r["chat_template_error"].(string); (text != "") != (x.fault != "") || !strings.Contains(text, x.fault) {
			t.Errorf("%s: %q", x.file, text)
		}
	}
	if out := mustRun(t, "inspect", to).out; !strings.Contains(out, "chat_template.json, which cannot be used") {
		t.Error(out)
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
