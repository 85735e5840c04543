package engine

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"sluice/backends"
	"sluice/backends/vulkan"
	"sluice/internal/pci"
)

// needsVulkan skips a test where no Vulkan driver is.
func needsVulkan(t *testing.T) {
	t.Helper()
	in, err := vulkan.Open(false)
	if errors.Is(err, vulkan.ErrNoDriver) {
		t.Skipf("needs a Vulkan driver: %v", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	in.Close()
}

// Where an expert lives never changes a token: with none, some and all experts
// in a device's memory the text and every bit of the logits are those of the CPU, and
// so they are where the device computes all the rest too.
func TestSameBitsOnDevice(t *testing.T) {
	needsVulkan(t)
	for _, path := range []string{light(demo), qwen} {
		e := open(t, Options{Path: path, Cap: 1})
		prompt := heldout(t, e, 20)
		plain := Options{Path: path, Cap: 4, Threads: 1, Ctx: 64, Chunk: 16, Backend: "cpu"}
		want := ask(t, plain, prompt, 6)
		for _, o := range []Options{
			{NoVRAM: true}, {VRAM: Budget{Experts: 8}}, {VRAM: Budget{Experts: 8}, KeepHost: true}, {VRAM: Budget{Experts: 64}, Staging: true}, {},
			{GPUDense: DenseOn, NoVRAM: true}, {GPUDense: DenseOn, VRAM: Budget{Experts: 8}}, {GPUDense: DenseOn, Staging: true},
		} {
			o.Path, o.Cap, o.Threads, o.Ctx, o.Chunk, o.Devices = plain.Path, plain.Cap, plain.Threads, plain.Ctx, plain.Chunk, "vulkan:0"
			got := ask(t, o, prompt, 6)
			if u := got.usage; o.Staging && !o.KeepHost && (u.DirectBytes != u.UploadBytes || u.DirectBytes == 0) || o.KeepHost && u.DirectBytes != 0 || u.Unpinned != 0 {
				t.Errorf("%s with %v in VRAM, dense %v: %+v", path, o.VRAM, o.GPUDense, u)
			}
			same(t, fmt.Sprintf("%s with %v in VRAM, dense %v", path, o.VRAM, o.GPUDense), got.logits, want.logits)
			if got.witness != want.witness || !slices.Equal(got.text, want.text) {
				t.Errorf("%s with %v in VRAM, dense %v: %v, want %v", path, o.VRAM, o.GPUDense, got.text, want.text)
			}
		}
	}
}

// A device whose memory the host sees in part is told of, or refused: exit 3.
func TestRequireReBAR(t *testing.T) {
	const words = "warning: only 256 MiB of 16304 MiB VRAM is host-visible"
	if said, err := reBAR(words, false); said != words || err != nil {
		t.Errorf("%q, %v", said, err)
	}
	var refusal *RefusedError
	if said, err := reBAR(words, true); said != "" || !errors.As(err, &refusal) || err.Error() != words+" (--require-rebar)" {
		t.Errorf("%q, %v", said, err)
	}
	if said, err := reBAR("", true); said != "" || err != nil {
		t.Errorf("%q, %v", said, err)
	}
}

// Devices are named by number, with or without the backend, several with commas.
func TestPick(t *testing.T) {
	all := []candidate{{name: "one"}, {name: "two", discrete: true}, {name: "three", discrete: true}}
	for _, c := range []struct {
		devices string
		wanted  bool
		want    []int
		words   string
	}{
		{"", false, []int{1}, ""}, {"", true, []int{1}, ""}, {"vulkan:2", true, []int{2}, ""}, {"0", true, []int{0}, ""}, {"2,vulkan:0", true, []int{2, 0}, ""},
		{"3", true, nil, `there is no device "3": name some of vulkan:0 one, vulkan:1 two, vulkan:2 three`}, {"cuda:0", true, nil, "there is no device"},
		{"1,1", true, nil, "named twice"},
	} {
		got, words := pick("vulkan", all, Options{Devices: c.devices}, c.wanted)
		if !slices.Equal(got, c.want) || !strings.Contains(words, c.words) || (words == "") != (c.words == "") {
			t.Errorf("%q: %v, %q", c.devices, got, words)
		}
	}
}

// Without a name software is not taken, in words, and a device that lacks something
// or is not discrete only if one was asked for.
func TestPickUnnamed(t *testing.T) {
	soft, lacking := candidate{name: "llvmpipe", software: true}, candidate{name: "old", discrete: true, lacking: true}
	integrated, discrete := candidate{name: "iGPU"}, candidate{name: "card", discrete: true}
	for _, c := range []struct {
		all    []candidate
		wanted bool
		want   []int
		words  string
	}{
		{[]candidate{soft}, true, nil, "no GPU: llvmpipe is software, which runs only when it is named (--devices vulkan:0)"},
		{[]candidate{integrated, soft}, false, nil, "no GPU: llvmpipe is software, which runs only when it is named (--devices vulkan:1)"},
		{[]candidate{soft, integrated}, true, []int{1}, ""},
		{[]candidate{integrated}, false, nil, "no discrete GPU (--vram or --devices take any)"},
		{[]candidate{soft, integrated, discrete}, true, []int{2}, ""},
		{[]candidate{lacking, discrete}, false, []int{1}, ""},
		{[]candidate{lacking}, false, nil, "no discrete GPU (--vram or --devices take any)"},
	} {
		if got, words := pick("vulkan", c.all, Options{}, c.wanted); !slices.Equal(got, c.want) || words != c.words {
			t.Errorf("%+v: %v, %q", c.all, got, words)
		}
	}
	if got, words := pick("vulkan", []candidate{soft}, Options{Devices: "vulkan:0"}, true); !slices.Equal(got, []int{0}) || words != "" {
		t.Errorf("named: %v, %q", got, words)
	}
}

// More in VRAM than the model has, or than the devices have room for, is lowered in
// words.
func TestVRAMLowered(t *testing.T) {
	in, err := vulkan.Open(false)
	if err != nil {
		t.Skipf("needs a Vulkan driver: %v", err)
	}
	in.Close()
	for _, c := range []struct {
		vram Budget
		want string
	}{
		{Budget{Experts: 1e6}, "vram lowered 1000000 -> %d (that is all %d experts"},
		{Budget{Bytes: 1 << 50}, "vram lowered 1125899.9 GB -> %d (that is all %d experts"},
	} {
		e := open(t, Options{Path: demo, Cap: 1, Threads: 1, Ctx: 64, Devices: "0", VRAM: c.vram})
		all := len(e.Spec.Roles) * e.Spec.Experts
		if said, want := strings.Join(e.Notices, "\n"), fmt.Sprintf(c.want, all, all); !strings.Contains(said, want) || len(e.VRAM) != all {
			t.Errorf("%v: %d experts, %q lacks %q", c.vram, len(e.VRAM), said, want)
		}
	}
	p := prepare(t, Options{Path: demo, Cap: 1, Threads: 1, Ctx: 64, Devices: "0", VRAM: Budget{Experts: 40}})
	p.devices.all[0].room = 1
	for _, k := range p.VRAM[:7] {
		p.devices.all[0].room += p.devices.ExpertBytes(int(k.Layer), 0)
	}
	p.Notices = nil
	if err := p.choose(Options{VRAM: Budget{Experts: 40}}); err != nil {
		t.Fatal(err)
	}
	if said := strings.Join(p.Notices, "\n"); !strings.Contains(said, "vram lowered 40 -> 7 experts (") || !strings.Contains(said, "of the devices' memory are free for them)") || len(p.VRAM) != 7 {
		t.Errorf("%d experts, %q", len(p.VRAM), said)
	}
}

// With two devices, here the same one twice, experts are split and the bits stay.
func TestTwoDevices(t *testing.T) {
	in, err := vulkan.Open(false)
	if err != nil {
		t.Skipf("needs a Vulkan driver: %v", err)
	}
	t.Cleanup(in.Close)
	path := light(demo)
	e := open(t, Options{Path: path, Cap: 1})
	prompt := heldout(t, e, 20)
	want := ask(t, Options{Path: path, Cap: 4, Threads: 1, Ctx: 64, Chunk: 16, Backend: "cpu"}, prompt, 6)
	p, err := Prepare(Options{Path: path, Cap: 4, Threads: 1, Ctx: 64, Chunk: 16, Devices: "vulkan:0", VRAM: Budget{Experts: 24}})
	if err != nil {
		t.Fatal(err)
	}
	if err := p.openGPU(Options{}, in, 0); err != nil {
		t.Fatal(err)
	}
	if n, _ := p.devices.give(p.VRAM); n != 24 || p.devices.all[0].taken == 0 || p.devices.all[1].taken == 0 {
		t.Fatalf("%d given, %d and %d bytes", n, p.devices.all[0].taken, p.devices.all[1].taken)
	}
	two, err := p.Load(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer two.Close()
	logits, _ := allLogits(t, two, prompt)
	same(t, "two devices", logits, want.logits)
}

// The experts of a drafting layer go to VRAM too, behind the others: with all of
// them there nothing is read, drafts or not.
func TestDraftingLayerInVRAM(t *testing.T) {
	in, err := vulkan.Open(false)
	if err != nil {
		t.Skipf("needs a Vulkan driver: %v", err)
	}
	in.Close()
	e := open(t, Options{Path: demo, Cap: 1, Threads: 1, Ctx: 128, Devices: "0", Drafts: 1})
	layers := append(e.Spec.Roles, e.Spec.NextnRoles...)
	if len(e.Spec.NextnRoles) == 0 || len(e.VRAM) != len(layers)*e.Spec.Experts {
		t.Fatalf("%d experts in VRAM, of %d layers", len(e.VRAM), len(layers))
	}
	if last := e.VRAM[len(e.VRAM)-1]; int(last.Layer) != e.Spec.NextnRoles[len(e.Spec.NextnRoles)-1].Layer {
		t.Errorf("%v is the last of VRAM", last)
	}
	for _, id := range heldout(t, e, 6) {
		if err := e.Model.Forward(t.Context(), []int32{id}); err != nil {
			t.Fatal(err)
		}
	}
	if st := e.Cache.Stats(); st.Misses != 0 || st.Source.Loads != st.PreloadLoads {
		t.Errorf("%+v", st)
	}
}

// With every expert in VRAM nothing is read while decoding; more of them mean
// fewer loads, and the tiers' hits and misses sum to what was routed.
func TestDeviceTierCounters(t *testing.T) {
	in, err := vulkan.Open(false)
	if err != nil {
		t.Skipf("needs a Vulkan driver: %v", err)
	}
	in.Close()
	var last, routed, bare int64
	for i, n := range []int{0, 24, 48, 96, 192} {
		o := Options{Path: demo, Cap: 1, Threads: 1, Ctx: 64, Devices: "0", VRAM: Budget{Experts: n}, NoVRAM: n == 0}
		e := open(t, o)
		for _, id := range heldout(t, e, 12) {
			if err := e.Model.Forward(t.Context(), []int32{id}); err != nil {
				t.Fatal(err)
			}
		}
		st := e.Cache.Stats()
		loads := st.Source.Loads - st.PreloadLoads
		if st.Hits.VRAM+st.Hits.Pinned+st.Hits.LRU+st.Misses != st.RoutedExperts || st.PreloadLoads != int64(n) {
			t.Errorf("%d in VRAM: %+v", n, st)
		}
		if i > 0 && (loads >= last || st.RoutedExperts != routed) {
			t.Errorf("%d in VRAM: %d loads after %d, %d routed after %d", n, loads, last, st.RoutedExperts, routed)
		}
		// Without VRAM there would be the loads of the first round.
		if i == 0 {
			bare = loads
		}
		if st.Marginal.VRAM != bare-loads || st.Marginal.Pinned != 0 || st.Marginal.LRU != st.Avoided.LRU {
			t.Errorf("%d in VRAM: %d loads, %d without it: marginal hits %+v", n, loads, bare, st.Marginal)
		}
		last, routed = loads, st.RoutedExperts
	}
	if last != 0 {
		t.Errorf("%d loads with every expert in VRAM", last)
	}
}

// Uploads far below what the link carries are told, with its address found in /sys.
func TestSlowUpload(t *testing.T) {
	root := t.TempDir()
	dir := filepath.Join(root, "sys/bus/pci/devices/0000:3d:00.0")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{"current_link_width": "16", "max_link_width": "16", "current_link_speed": "2.5 GT/s PCIe", "max_link_speed": "16.0 GT/s PCIe"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text+"\n"), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	link := pci.Of(root, "0000:3d:00.0")
	if link == nil {
		t.Fatal("no link")
	}
	const want = "warning: experts went to cuda:0 at 2.01 GB/s, and its link (16 of 16 lanes at 2.5 of 16 GT/s) carries 31.5 GB/s: see that Resizable BAR is on, that memory can be pinned (ulimit -l), and that nothing else uses the link or the memory"
	for _, c := range []struct {
		link *pci.Link
		u    backends.HeldUsage
		want string
	}{
		{link, backends.HeldUsage{UploadBytes: 6_040_000_000, UploadNanos: 3_000_000_000}, want},
		{link, backends.HeldUsage{UploadBytes: 6_040_000_000, UploadNanos: 350_000_000}, ""},
		{nil, backends.HeldUsage{UploadBytes: 6_040_000_000, UploadNanos: 3_000_000_000}, ""},
		{link, backends.HeldUsage{UploadBytes: 1_000_000, UploadNanos: 3_000_000_000}, ""},
		{link, backends.HeldUsage{}, ""},
	} {
		if got := slowUpload("cuda:0", c.link, &c.u); got != c.want {
			t.Errorf("%+v: %q, want %q", c.u, got, c.want)
		}
	}
}
