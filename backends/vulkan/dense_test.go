package vulkan

import (
	"math"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/ebitengine/purego"

	"sluice/backends"
	"sluice/backends/backendtest"
	"sluice/backends/cpu"
	"sluice/backends/dense"
	"sluice/internal/quant"
)

// The backend of dense steps passes the suite: with all matrices on the device, with
// those for which there is room, and with none.
func TestDense(t *testing.T) {
	devices(t, func(t *testing.T, d *Device) {
		rooms := map[string]int64{"all": 1 << 40, "some": 64 << 10, "none": 0}
		if d.Software() { // which is slow
			if raceEnabled && d.opt.Staging {
				return
			}
			name := "all"
			if d.opt.Staging {
				name = "some"
			}
			rooms = map[string]int64{name: rooms[name]}
		}
		for name, room := range rooms {
			t.Run(name, func(t *testing.T) { denseOn(t, d).Run(t, room) })
		}
	})
}

// denseOn is what the tests of a backend of dense steps want of a device, whose memory
// has poison where nothing was written.
func denseOn(t *testing.T, d *Device) *backendtest.Dense {
	return &backendtest.Dense{
		Host: func() backends.Backend { return onHost(t) },
		Open: func(host backends.Backend, room int64) (backends.Backend, error) {
			s, err := d.newDense("device")
			if err != nil {
				return nil, err
			}
			return dense.New(poisoned{s}, host, dense.Options{Room: room, Resident: func(*backends.Matrix) bool { return true }})
		},
		Hold: func(layers map[int]backends.HeldLayer, k, most int) (backendtest.Taker, error) {
			return d.newExperts(layers, k, most)
		},
		Types: types,
	}
}

func onHost(t *testing.T) backends.Backend {
	t.Helper()
	host, err := cpu.New(cpu.Options{Threads: 1})
	if err != nil {
		t.Fatal(err)
	}
	return host
}

// A poisoned driver gives memory that is full of NaNs.
type poisoned struct{ *denseDriver }

func (p poisoned) Alloc(size int64) (uint64, error) {
	at, err := p.denseDriver.Alloc(size)
	if err != nil {
		return 0, err
	}
	poison := make([]byte, min(size, 1<<20))
	for i := range poison {
		poison[i] = 0xfb
	}
	for done := int64(0); done < size; done += int64(len(poison)) {
		if err := p.Upload(at+uint64(done), quant.F32, poison[:min(size-done, int64(len(poison)))]); err != nil {
			return 0, err
		}
	}
	return at, nil
}

// An expert that stays where it is is computed on the device.
func TestDenseExpert(t *testing.T) {
	devices(t, func(t *testing.T, d *Device) { denseOn(t, d).Experts(t) })
}

// Groups whose input and outputs stay on the device have the bits of the CPU.
func TestGive(t *testing.T) {
	devices(t, func(t *testing.T, d *Device) {
		on := denseOn(t, d)
		on.Open = func(host backends.Backend, room int64) (backends.Backend, error) {
			return d.NewDense("device", host, dense.Options{Room: room})
		}
		on.Give(t)
	})
}

// Steps allocate nothing on the Go heap once each kind has run.
func TestDenseAllocates(t *testing.T) {
	devices(t, func(t *testing.T, d *Device) {
		if n := denseOn(t, d).Allocates(t); n > 0 && !raceEnabled { // whose pools forget
			t.Errorf("a round of steps allocates %v times", n)
		}
	})
}

// Where a device starts few groups in a row, steps of many have the same bits: long
// vectors, caches and batches.
func TestDenseManyGroups(t *testing.T) {
	devices(t, func(t *testing.T, d *Device) {
		defer func(n uint32) { d.groupCount = n }(d.groupCount)
		d.groupCount = 3
		alike(t, d, func(b *steps) {
			const n, heads, dim, before = 30, 2, 64, 300
			q, y, k, v := b.vec(n, heads*dim), b.vec(n, heads*dim), b.vec(before, dim), b.vec(before, dim)
			kv := b.cache(backends.KVShape{Layers: 2, Positions: 400, Heads: 1, KeyDim: dim, ValueDim: dim})
			b.RMSNorm(y, q, b.floats(dim), 1e-6)
			b.read(y)
			b.RoPE(q, dim, &backends.Rope{Half: dim / 2, Cos: b.floats(400 * dim / 2), Sin: b.floats(400 * dim / 2)}, before)
			b.read(q)
			b.Store(kv, 1, 0, k, v)
			k.SetLen(n)
			v.SetLen(n)
			b.Store(kv, 1, before, k, v)
			b.Attend(y, q, kv, 1, before, &backends.Attention{Scale: 0.125})
			b.read(y)
			chosen := b.keys(n, 100)
			b.ChooseKeys(chosen, q, b.vec(n, heads), kv, 1, before)
			b.Attend(y, q, kv, 1, before, &backends.Attention{Scale: 0.125, Keys: chosen})
			b.read(y)
			b.Combine(y, q, 1, b.floats(n), q)
			b.Add(y, q)
			b.read(y)
		})
	})
}

// Steps over tens of thousands of keys, thousands of positions and long vectors have the
// same bits: kernels go through their outer loops often, and end them before a software
// device does, which runs 65535 rounds of an invocation and then falls silent.
func TestDenseLong(t *testing.T) {
	devices(t, func(t *testing.T, d *Device) {
		if d.opt.Staging {
			return
		}
		alike(t, d, func(b *steps) {
			const n, heads, dim, ctx = 2, 6, 64, 66000
			q, y, k, v := b.vec(n, heads*dim), b.vec(n, heads*dim/2), b.vec(ctx, dim), b.vec(ctx, dim/2)
			chosen := b.keys(n, 2048)
			for _, typ := range []backends.KVType{backends.KVF16, backends.KVQ8} {
				kv := b.cache(backends.KVShape{Layers: 1, Positions: ctx, Heads: 1, KeyDim: dim, ValueDim: dim / 2, Type: typ})
				b.Store(kv, 0, 0, k, v)
				for _, window := range []int{0, 777} {
					b.Attend(y, q, kv, 0, ctx-n, &backends.Attention{Scale: 0.1, Window: window})
					b.read(y)
				}
				b.ChooseKeys(chosen, q, b.vec(n, heads), kv, 0, ctx-n)
				b.Attend(y, q, kv, 0, ctx-n, &backends.Attention{Scale: 0.1, Keys: chosen})
				b.read(y)
			}
			s := backends.DeltaShape{Layers: 1, KeyHeads: 1, ValueHeads: 2, KeyDim: 128, ValueDim: 32, Taps: 4}
			net, err := b.NewDelta(s)
			if err != nil {
				t.Fatal(err)
			}
			const positions = 4000
			y = b.vec(positions, 64)
			b.DeltaNet(y, b.vec(positions, s.Channels()), b.vec(positions, 64), b.vec(positions, 2), b.vec(positions, 2), net, 0, 0,
				&backends.DeltaNet{Conv: b.floats(4 * s.Channels()), A: []float32{-1, -2}, Bias: []float32{0.1, 0.2}, Norm: b.floats(32), Eps: 1e-6})
			b.read(y)
			x := b.vec(1, 200000)
			b.RMSNorm(x, x, b.floats(200000), 1e-6)
			b.read(x)
		})
	})
}

// Steps are of a backend, on random vectors, and keep what is read.
type steps struct {
	backends.Backend
	t   *testing.T
	rng *rand.Rand
	out [][]float32
}

// alike does steps on the host and on a device, and wants the same bits of both.
func alike(t *testing.T, d *Device, do func(b *steps)) {
	t.Helper()
	on, err := d.NewDense("device", onHost(t), dense.Options{Room: 1 << 30})
	if err != nil {
		t.Fatal(err)
	}
	var out [2][][]float32
	for i, be := range []backends.Backend{onHost(t), on} {
		b := &steps{Backend: be, t: t, rng: rand.New(rand.NewPCG(4, 1))}
		do(b)
		out[i] = b.out
		if err := be.Close(); err != nil {
			t.Error(err)
		}
	}
	for j, want := range out[0] {
		for i := range want {
			if got := out[1][j][i]; math.Float32bits(got) != math.Float32bits(want[i]) {
				t.Fatalf("result %d: float %d is %x, want %x", j, i, got, want[i])
			}
		}
	}
}

func (b *steps) floats(n int) []float32 { return backendtest.Vectors(b.rng, 1, n, 0) }

func (b *steps) vec(n, dim int) backends.Vec {
	v, err := b.NewVec(n, dim)
	if err != nil {
		b.t.Fatal(err)
	}
	v.SetLen(n)
	rows := make([]int32, n)
	for i := range rows {
		rows[i] = int32(i)
	}
	b.Put(v, rows, backendtest.Vectors(b.rng, n, dim, 0))
	return v
}

func (b *steps) cache(s backends.KVShape) backends.KV {
	kv, err := b.NewKV(s)
	if err != nil {
		b.t.Fatal(err)
	}
	return kv
}

func (b *steps) keys(n, most int) backends.Keys {
	k, err := b.NewKeys(n, most)
	if err != nil {
		b.t.Fatal(err)
	}
	return k
}

func (b *steps) read(v backends.Vec) {
	b.t.Helper()
	x := make([]float32, v.Len()*v.Dim())
	if err := b.Read(x, v); err != nil {
		b.t.Fatal(err)
	}
	b.out = append(b.out, x)
}

// What a driver may answer to the steps comes back from the next Read, and what is
// lost stays lost.
func TestDenseFaults(t *testing.T) {
	devices(t, func(t *testing.T, d *Device) {
		real := d.f
		defer func() { d.f, d.lost = real, nil }()

		// No memory: at the start, for vectors and caches, and for weights.
		d.f.allocate = fails(errOutOfDevice)
		_, err := d.NewDense("device", onHost(t), dense.Options{})
		wants(t, err, "found no device memory", "bytes of")
		d.f.allocate = real.allocate
		b, err := d.NewDense("device", onHost(t), dense.Options{Room: 1 << 30})
		if err != nil {
			t.Fatal(err)
		}
		d.f.allocate = fails(errOutOfDevice)
		_, err = b.NewVec(1, 256)
		wants(t, err, "device: ", "found no device memory")
		_, err = b.NewKV(backends.KVShape{Layers: 1, Positions: 1 << 16, Heads: 8, KeyDim: 128, ValueDim: 128})
		wants(t, err, "a key-value cache of", "a smaller --ctx", "found no device memory")
		d.f.allocate = real.allocate
		const rows = regionBytes/256/4 + 1 // of a matrix with an allocation of its own
		x, err := b.NewVec(1, 256)
		if err != nil {
			t.Fatal(err)
		}
		y, err := b.NewVec(1, rows)
		if err != nil {
			t.Fatal(err)
		}
		x.SetLen(1)
		w := backends.Matrix{Type: quant.F32, Rows: rows, Cols: 256, Data: make([]byte, rows*256*4)}
		out := make([]float32, rows)
		multiply := func() error {
			b.MatMul([]backends.Vec{y}, []backends.Linear{{Matrix: w}}, x)
			return b.Read(out, y)
		}
		d.f.allocate = fails(errOutOfDevice)
		wants(t, multiply(), "found no device memory", "bytes of device memory")
		d.f.allocate = real.allocate
		if err := multiply(); err != nil {
			t.Fatal(err)
		}

		// A kernel that the driver refuses, a step too large for it, a batch that it
		// cannot record.
		d.f.createPipelines = fails(errInitFailed)
		b.Add(x, x)
		b.RMSNorm(x, x, make([]float32, 256), 1)
		wants(t, b.Read(out[:256], x), "could not start the driver", "kernel dense_normalize")
		d.f.createPipelines = real.createPipelines
		groups := d.groupCount
		d.groupCount = 1
		if err := multiply(); err == nil || !strings.Contains(err.Error(), "lower --chunk or --ctx") {
			t.Errorf("a step of too many groups: %v", err)
		}
		d.groupCount = groups
		d.f.begin = fails(errOutOfHost)
		wants(t, multiply(), "vkBeginCommandBuffer found no host memory")
		d.f.begin = real.begin
		failure := errOutOfDevice
		d.f.end = fn(purego.NewCallback(func(c uintptr) uintptr { real.end.call(c); return uintptr(uint32(failure)) }))
		wants(t, multiply(), "vkEndCommandBuffer found no device memory")
		d.f.end = real.end
		if err := multiply(); err != nil {
			t.Fatal(err)
		}

		// The device is lost, at the submission and while it is waited for.
		calls := []*fn{&d.f.submit, &d.f.wait}
		if d.patience > 0 {
			calls = append(calls, &d.f.reached)
		}
		for _, f := range calls {
			was := *f
			*f = fails(errDeviceLost)
			wants(t, multiply(), "lost the device", "--backend cpu")
			*f = was
			wants(t, multiply(), "lost the device") // it stays lost
			_, err = b.NewVec(1, 256)
			wants(t, err, "lost the device")
			d.lost = nil
			if err := check("vkDeviceWaitIdle", d.f.waitIdle.call(d.handle)); err != nil { // the steps were real
				t.Fatal(err)
			}
			if err := multiply(); err != nil {
				t.Fatal(err)
			}
		}
		if err := b.Close(); err != nil {
			t.Error(err)
		}
	})
}
