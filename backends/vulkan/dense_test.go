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
		on, err := d.NewDense("device", onHost(t), dense.Options{Room: 1 << 30})
		if err != nil {
			t.Fatal(err)
		}
		const n, heads, dim, before, most = 30, 2, 64, 300, 100
		rng := rand.New(rand.NewPCG(4, 1))
		x, k, v := backendtest.Vectors(rng, n, heads*dim, 0), backendtest.Vectors(rng, before, dim, 0), backendtest.Vectors(rng, before, dim, 0)
		norm, rows := backendtest.Vectors(rng, 1, dim, 0), make([]int32, before)
		for i := range rows {
			rows[i] = int32(i)
		}
		rope := &backends.Rope{Half: dim / 2, Cos: backendtest.Vectors(rng, 1000, dim/2, 0), Sin: backendtest.Vectors(rng, 1000, dim/2, 0)}
		var out [2][5][n * heads * dim]float32
		for i, b := range []backends.Backend{onHost(t), on} {
			vec := func(capacity, dim int, data []float32) backends.Vec {
				v, err := b.NewVec(capacity, dim)
				if err != nil {
					t.Fatal(err)
				}
				v.SetLen(capacity)
				if data != nil {
					b.Put(v, rows[:capacity], data)
				}
				return v
			}
			read := func(j int, v backends.Vec) {
				t.Helper()
				if err := b.Read(out[i][j][:v.Len()*v.Dim()], v); err != nil {
					t.Fatal(err)
				}
			}
			q, y, kx, vx, w := vec(n, heads*dim, x), vec(n, heads*dim, nil), vec(before, dim, k), vec(before, dim, v), vec(n, heads, x[:n*heads])
			kv, err := b.NewKV(backends.KVShape{Layers: 2, Positions: 400, Heads: 1, KeyDim: dim, ValueDim: dim})
			if err != nil {
				t.Fatal(err)
			}
			chosen, err := b.NewKeys(n, most)
			if err != nil {
				t.Fatal(err)
			}
			b.RMSNorm(y, q, norm, 1e-6)
			read(0, y)
			b.RoPE(q, dim, rope, before)
			read(1, q)
			b.Store(kv, 1, 0, kx, vx)
			kx.SetLen(n)
			vx.SetLen(n)
			b.Store(kv, 1, before, kx, vx)
			b.Attend(y, q, kv, 1, before, &backends.Attention{Scale: 0.125})
			read(2, y)
			b.ChooseKeys(chosen, q, w, kv, 1, before)
			b.Attend(y, q, kv, 1, before, &backends.Attention{Scale: 0.125, Keys: chosen})
			read(3, y)
			b.Combine(y, q, 1, x[:n], q)
			b.Add(y, q)
			read(4, y)
			if err := b.Close(); err != nil {
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
	})
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
		for _, f := range []*fn{&d.f.submit, &d.f.wait} {
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
