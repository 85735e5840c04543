package vulkan

import (
	"fmt"
	"math/rand/v2"
	"runtime"
	"sync"
	"testing"
	"unsafe"

	"sluice/backends"
	"sluice/backends/backendtest"
	"sluice/backends/cpu"
	"sluice/backends/dense"
	"sluice/internal/quant"
)

// While a garbage collection follows the other and memory is taken and given
// back, groups are computed as ever: nothing that Vulkan reads is the collector's.
func TestGarbageStorm(t *testing.T) {
	devices(t, func(t *testing.T, d *Device) {
		stop := make(chan struct{})
		var storm sync.WaitGroup
		storm.Go(func() {
			var keep [64][]byte
			for i := 0; ; i++ {
				select {
				case <-stop:
					return
				default:
					keep[i%len(keep)] = make([]byte, 1<<(i%16))
					runtime.GC()
				}
			}
		})
		defer storm.Wait()
		defer close(stop)
		rng := rand.New(rand.NewPCG(3, 4))
		for range 3 {
			again(t, d, rng, quant.Q4_K, 2)
		}
	})
}

// again makes experts, computes groups with them and closes them.
func again(t *testing.T, d *Device, rng *rand.Rand, typ quant.Type, rounds int) {
	t.Helper()
	ref, err := cpu.New(cpu.Options{Threads: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer ref.Close()
	l := backends.HeldLayer{Types: [3]quant.Type{typ, typ, quant.Q8_0}, Dim: 256, FF: 256}
	e, err := d.newExperts(map[int]backends.HeldLayer{5: l}, 4, 3)
	if err != nil {
		t.Fatal(err)
	}
	g := backendtest.NewHeldGroup(rng, l, 1, 4, 4)
	for round := range rounds {
		for i := range e.out.host { // poison: what is not written shows
			e.out.host[i] = 0xfb
		}
		g.N = 1 + 2*(round%2)
		change(t, g, rng, e)
		g.Run(t, ref, e, fmt.Sprintf("round %d", round))
	}
	if err := e.Close(); err != nil {
		t.Fatal(err)
	}
}

// change makes other weights and inputs, in the places of those before.
func change(t *testing.T, g *backendtest.HeldGroup, rng *rand.Rand, e *experts) {
	t.Helper()
	g.Reweigh(rng)
	g.Refill(rng)
	g.Upload(t, e)
}

// Groups of several kinds in turn on one queue, as layers follow each other, each
// with other weights and inputs in the same places and poison where outputs go:
// no step reads what an earlier group left.
func TestProductionOrder(t *testing.T) {
	devices(t, func(t *testing.T, d *Device) {
		ref, err := cpu.New(cpu.Options{Threads: 1})
		if err != nil {
			t.Fatal(err)
		}
		defer ref.Close()
		rng := rand.New(rand.NewPCG(5, 6))
		kinds := []backends.HeldLayer{
			{Types: [3]quant.Type{quant.Q4_K, quant.Q4_K, quant.Q6_K}, Dim: 512, FF: 256},
			{Types: [3]quant.Type{quant.Q4_K, quant.Q8_0, quant.BF16}, Dim: 512, FF: 256},
			{Types: [3]quant.Type{quant.MXFP4, quant.MXFP4, quant.MXFP4}, Dim: 512, FF: 256},
		}
		var all []*experts
		var groups []*backendtest.HeldGroup
		for _, l := range kinds {
			e, err := d.newExperts(map[int]backends.HeldLayer{5: l}, 4, 3)
			if err != nil {
				t.Fatal(err)
			}
			all, groups = append(all, e), append(groups, backendtest.NewHeldGroup(rng, l, 1, 4, 4))
		}
		for round := range 12 {
			i := round % len(kinds)
			e := all[i]
			for _, b := range []*buffer{e.out, e.onDevice} {
				for j := range b.host {
					b.host[j] = 0xfb
				}
			}
			g := groups[i]
			g.N = []int{1, 3, 1, 2}[round%4]
			change(t, g, rng, e)
			g.Run(t, ref, e, fmt.Sprintf("round %d, %v", round, kinds[i]))
		}
		recorded := d.recorded
		for i, e := range all {
			groups[i].N = 3
			groups[i].Refill(rng)
			groups[i].Run(t, ref, e, "again")
			if err := e.Close(); err != nil {
				t.Fatal(err)
			}
		}
		if d.recorded != recorded {
			t.Errorf("%d command buffers recorded again", d.recorded-recorded)
		}
	})
}

// Each word of a result has one writer: variants of the kernels that count.
func TestOneWriter(t *testing.T) {
	devices(t, func(t *testing.T, d *Device) {
		if d.dot {
			t.Skip("the counting variants are of the emulated dot product")
		}
		const size = 1 << 20
		b, err := d.buffer(up, size)
		if err != nil {
			t.Fatal(err)
		}
		defer d.drop(b)
		count := func(k kernel, at int) {
			t.Helper()
			c, err := d.kernels.commands()
			if err != nil {
				t.Fatal(err)
			}
			defer c.free()
			c.begin()
			c.run(k, b, uint64(at))
			if err := c.end(); err != nil {
				t.Fatal(err)
			}
			p, err := c.submit()
			if err != nil {
				t.Fatal(err)
			}
			if err := d.waitFor(p); err != nil {
				t.Fatal(err)
			}
		}
		wants := func(what string, from uint64, words, guard int) {
			t.Helper()
			for i, n := range slice[uint32](b, from, words+guard) {
				want := uint32(1)
				if i >= words {
					want = 0
				}
				if n != want {
					t.Fatalf("%s: word %d of %d has %d writers", what, i, words, n)
				}
			}
		}
		// once: words are written, each by one, somewhere in so much room.
		once := func(what string, from uint64, words, room int) {
			t.Helper()
			got := 0
			for i, n := range slice[uint32](b, from, room) {
				if n > 1 {
					t.Fatalf("%s: word %d has %d writers", what, i, n)
				}
				got += int(n)
			}
			if got != words {
				t.Fatalf("%s: %d words are written, want %d", what, got, words)
			}
		}
		for _, c := range []struct{ block, n int }{{0, 1000}, {32, 256 * 3}, {32, 32 * 5}, {256, 256 * 5}} {
			clear(b.host)
			f := formAt(b.at+1<<17, 4096)
			*at[quantizeParams](b, 128) = f.quantize(b.at+1<<16, 0, dense.Failure{At: b.at, Step: 1}, c.n)
			count(kernel{shader: "quantize_count", c0: uint32(c.block)}, 128)
			what := fmt.Sprintf("quantize %+v", c)
			if c.block == 0 {
				wants(what, f.Code-b.at, c.n, 64)
				continue
			}
			once(what+" codes", f.Code-b.at, c.n/4, 2048/4) // vectors lie in eights of blocks
			wants(what+" scales", f.Scale-b.at, c.n/c.block, 8)
			once(what+" sums", f.Sum-b.at, c.n/16, 2048/16)
		}
		for _, typ := range []quant.Type{quant.Q4_K, quant.Q8_0, quant.MXFP4, quant.F32} {
			for _, c := range []struct{ rows, cols, n int }{{1, 256, 1}, {13, 2304, 1}, {21, 512, 5}, {8, 4096, 20}} {
				clear(b.host)
				k := d.rows(typ, c.n)
				k.shader += "_count"
				const y, jobs, index = 1 << 19, 4096, 8192
				for i, list := 0, slice[uint32](b, index, 2*c.n); i < c.n; i++ {
					list[2*i], list[2*i+1] = 0, uint32(i)
				}
				*at[rowsJob](b, jobs) = rowsJob{W: b.at + 1<<18, Y: b.at + y, N: uint32(c.n), Stride: uint32(c.rows)}
				*at[rowsParams](b, 128) = formAt(b.at+1<<17, 8192).rows(k, b.at+jobs, b.at+index, 1, c.n, c.rows, c.cols, typ)
				count(k.kernel, 128)
				wants(fmt.Sprintf("%v %+v", typ, c), y, c.rows*c.n, 64)
			}
		}
		for _, typ := range []quant.Type{quant.Q4_K, quant.Q6_K, quant.Q5_0, quant.MXFP4, quant.INT4_128} {
			_, block := typ.Block()
			l := layoutOf(typ)
			for _, blocks := range []int{1, planesBlocks, 2*planesBlocks + 13} {
				clear(b.host)
				for at := 0; at < blocks; at += planesBlocks { // runs of a matrix
					k, p := planes(typ, b.at+1<<18, b.at+1<<19, at*block, min(planesBlocks, blocks-at)*block, blocks*block)
					k.shader += "_count"
					*(*planesParams)(unsafe.Pointer(&b.host[128])) = p
					count(k, 128)
				}
				units := blocks * max(1, l.units)
				words := 4 * units * l.quads
				if l.fifths {
					words += (units + 3) / 4 * 4
				}
				words += (blocks*l.scale + 15) / 16 * 4
				once(fmt.Sprintf("planes of %v, %d blocks", typ, blocks), 1<<19, words, int(matrixBytes(typ, 1, units*l.unit)/4))
			}
		}
	})
}

// heldJobs are jobs of experts 0, 1, ..., each with a row.
func heldJobs(n int) (jobs []backends.HeldJob) {
	for i := range n {
		jobs = append(jobs, backends.HeldJob{Expert: int32(i), Rows: []int32{int32(i)}})
	}
	return jobs
}
