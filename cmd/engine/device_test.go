package engine

import (
	"errors"
	"fmt"
	"slices"
	"testing"

	"sluice/backends/vulkan"
)

// Where an expert lives never changes a token: with none, some and all experts
// in a device's memory the text and every bit of the logits are those of the CPU.
func TestSameBitsOnDevice(t *testing.T) {
	in, err := vulkan.Open(false)
	if errors.Is(err, vulkan.ErrNoDriver) {
		t.Skipf("needs a Vulkan driver: %v", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	in.Close()
	for _, path := range []string{light(demo), qwen} {
		e := open(t, Options{Path: path, Cap: 1})
		prompt := heldout(t, e, 20)
		plain := Options{Path: path, Cap: 4, Threads: 1, Ctx: 64, Chunk: 16, Backend: "cpu"}
		want := ask(t, plain, prompt, 6)
		for _, o := range []Options{
			{NoVRAM: true}, {VRAM: Budget{Experts: 8}}, {VRAM: Budget{Experts: 8}, KeepHost: true}, {VRAM: Budget{Experts: 64}, Staging: true}, {},
		} {
			o.Path, o.Cap, o.Threads, o.Ctx, o.Chunk, o.Devices = plain.Path, plain.Cap, plain.Threads, plain.Ctx, plain.Chunk, "vulkan:0"
			got := ask(t, o, prompt, 6)
			same(t, fmt.Sprintf("%s with %v in VRAM", path, o.VRAM), got.logits, want.logits)
			if got.witness != want.witness || !slices.Equal(got.text, want.text) {
				t.Errorf("%s with %v in VRAM: %v, want %v", path, o.VRAM, got.text, want.text)
			}
		}
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
	var last, routed int64
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
		last, routed = loads, st.RoutedExperts
	}
	if last != 0 {
		t.Errorf("%d loads with every expert in VRAM", last)
	}
}
