package main

import (
	"encoding/json"
	"fmt"
	"path/filepath"
	"strings"
	"testing"
)

// TestPlan: what would lie where sums to the total, and reading follows from
// the rate of the drive.
func TestPlan(t *testing.T) {
	for _, args := range [][]string{
		{demo}, {demo, "8"}, {demo, "--cap", "4", "--pin", "20"}, {demo, "--ram", "4GiB", "--vram", "1MB"}, {demo, "--storage", "mmap"},
		{tinyGLM4, "--vram", "1000", "--ctx", "64", "--prefetch", "off"},
	} {
		r := mustRun(t, append([]string{"plan", "--json", "--drive-rate", "2"}, args...)...)
		var got struct {
			RAM   map[string]int64 `json:"ram_bytes"`
			VRAM  map[string]int64 `json:"vram_bytes"`
			Cap   int
			Cold  int64   `json:"bytes_per_token"`
			Rate  float64 `json:"drive_bytes_per_s"`
			Slots int
			Rows  []struct {
				Hit   float64 `json:"hit_pct"`
				Bytes int64   `json:"bytes_per_token"`
				Rate  float64 `json:"tok_per_s_ceiling"`
			}
		}
		if err := json.Unmarshal([]byte(r.out), &got); err != nil {
			t.Fatal(err)
		}
		sum := int64(0)
		for name, n := range got.RAM {
			if n < 0 {
				t.Errorf("%q: %d bytes of %s", args, n, name)
			}
			if name != "total" {
				sum += n
			}
		}
		if sum != got.RAM["total"] || len(got.RAM) != 8 || got.Cap < 1 || got.Slots < 1 || got.Rate != 2e9 {
			t.Errorf("%q: %+v", args, got)
		}
		if len(got.Rows) != 7 || got.Rows[0].Bytes != got.Cold || got.Rows[0].Rate != 2e9/float64(got.Cold) || got.Rows[6].Bytes != got.Cold/100 {
			t.Errorf("%q: %+v", args, got.Rows)
		}
		mustRun(t, append([]string{"plan"}, args...)...) // measured, as text
	}
	// The drafting layer, with which run begins too, has slots like the six that decode.
	r := mustRun(t, "plan", demo, "8", "--drive-rate", "1.5")
	for _, s := range []string{"dense ", "staging ", "pinned ", "lru ", "base ", "total ", "cap        8 of 32 experts per layer, 72 slots, top-4", "1.5 GB/s, as given", "99% "} {
		if !strings.Contains(r.out, s) {
			t.Errorf("lacks %q:\n%s", s, r.out)
		}
	}
}

// TestMemoryFlags: what cannot be had is refused or told, in words.
func TestMemoryFlags(t *testing.T) {
	usage := filepath.Join(t.TempDir(), "usage")
	text := []string{"-p", verse, "-n", "3", "--temp", "0"}
	for _, c := range []struct {
		args []string
		code int
		want string
	}{
		{[]string{"run", demo, "--ram", "100TiB"}, exitRefused, "--ram 109951.2 GB is more than the "},
		{[]string{"run", demo, "--ram", "1MB"}, exitRefused, "not enough memory for one expert per layer (cap 1)"},
		{[]string{"plan", demo, "--ram", "1MB"}, exitRefused, "not enough memory for one expert per layer (cap 1)"},
		{[]string{"plan", demo, "--ram", "100TiB"}, exitDone, "--ram 109951.2 GB is more than the "},
		{[]string{"run", demo, "--ram", "much"}, exitUsage, `--ram: "much" is no size`},
		{[]string{"run", demo, "--vram", "16GiB"}, exitRefused, "--vram 17.2 GB: "},
		{[]string{"run", demo, "--vram", "3", "--release-host=false"}, exitRefused, "--vram 3: "},
		{[]string{"run", demo, "--vram", "0"}, exitDone, ""},
		{[]string{"run", demo, "--backend", "opencl"}, exitUsage, `--backend "opencl": use one of auto, cpu, vulkan, cuda, hip`},
		{[]string{"run", demo, "--backend", "cpu", "--gpu-dense"}, exitRefused, "--backend cpu uses no device: leave out --vram, --devices and --gpu-dense"},
		{[]string{"run", demo, "--backend", "vulkan", "--devices", "99", "--gpu-dense"}, exitRefused, "ulkan"}, // no device, or no driver
		{[]string{"plan", demo, "--devices", "vulkan:99", "--drive-rate", "2"}, exitDone, "ulkan"},
		{[]string{"plan", demo, "--devices", "vulkan:99", "--gpu-dense", "--drive-rate", "2"}, exitDone, "planned for a GPU with room for all dense weights"},
		{[]string{"run", demo, "--pin", "few"}, exitUsage, `--pin: "few" is neither a number of experts, such as 64, nor of bytes`},
		{[]string{"run", demo, "--pin", "-3"}, exitUsage, "--pin:"},
		{[]string{"run", demo, "--pin", "1.5"}, exitUsage, "--pin:"},
		{[]string{"run", demo, "--pin", "1MB"}, exitDone, "no usage history (--usage FILE) says which experts are used most"},
		{[]string{"run", demo, "--pin", "1000"}, exitDone, "pin lowered 1000 -> 192 (that is all 192 experts"},
		{[]string{"run", demo, "--prefetch", "maybe"}, exitUsage, `--prefetch: unknown prefetch mode "maybe": use off, auto or on`},
		{[]string{"run", demo, "--usage", "a", "--usage-freeze", "b"}, exitUsage, "either live or frozen"},
		{[]string{"run", demo, "--usage-freeze", usage}, exitError, "no such file"},
		{[]string{"run", demo, "--usage", usage}, exitDone, "begins with this run"},
		{[]string{"run", demo, "--usage", usage, "--pin", "8", "8"}, exitDone, "pin: 8 experts"},
		{[]string{"run", demo, "--usage-freeze", usage}, exitDone, ", frozen, "},
		{[]string{"run", tinyGLM4, "--usage", usage}, exitError, "it is of the model \""},
		{[]string{"plan", demo, "--drive-rate", "0"}, exitUsage, "--drive-rate 0: it must be above 0"},
	} {
		args := c.args
		if args[0] == "run" {
			args = append(args[:len(args):len(args)], text...)
		}
		var out, errw strings.Builder
		if code := run(args, strings.NewReader(""), &out, &errw); code != c.code || !strings.Contains(errw.String(), c.want) {
			t.Errorf("%q: exit %d, want %d with %q:\n%s", c.args, code, c.code, c.want, errw.String())
		}
	}
	// The pinned set serves, and is counted apart.
	o := mustRun(t, append([]string{"run", demo, "4", "--usage-freeze", usage, "--pin", "30", "--json"}, text...)...).object(t)
	if number(t, o, "counters", "preload_loads") != 30 || number(t, o, "counters", "tier_hits", "pinned") == 0 || number(t, o, "settings", "pin", "value") != 30 {
		t.Error(fmt.Sprint(o["counters"]))
	}
	if hash, _ := at(t, o, "settings", "usage-hash", "value").(string); len(hash) != 64 {
		t.Errorf("usage-hash %q", hash)
	}
}
