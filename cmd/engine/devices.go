package engine

import (
	"errors"
	"fmt"
	"io"

	"sluice/backends"
	"sluice/backends/dense"
	"sluice/backends/held"
	"sluice/internal/offheap"
	"sluice/internal/pci"
	"sluice/internal/quant"
	"sluice/tiers"
)

// devices are the GPUs that hold experts: the tiers' VRAM, and what computes
// there. Each expert lies on one of them, and a group is computed by all that
// hold a part of it at once.
type devices struct {
	all   []*gpu
	close func() // lets the driver go
	owner map[tiers.Key]int8

	// Of the group under way.
	jobs    [][]backends.HeldJob // of each device
	who     []int8               // the device of each job
	floats  []int                // of each job's outputs
	input   []float32            // the devices' own may not be read back
	out     []float32            // gathered in the order of the jobs, outside the Go heap
	n, dim  int
	layers  map[int]backends.HeldLayer
	arena   []byte
	outs    [][]float32
	running bool
	taken   bool // the devices have the input
}

// A gpu is a device with its share.
type gpu struct {
	name    string // vulkan:0
	index   int
	link    *pci.Link // nil: not told
	refused string    // why it copies nothing from where experts are read to
	dev     driven
	experts *held.Experts
	// Of what is no expert.
	software bool
	knows    func(quant.Type) bool // whether its kernels multiply by matrices of a type
	room     int64                 // bytes for experts
	taken    int64
}

// A driven is an open device, which may compute what is no expert, too.
type driven interface {
	io.Closer
	NewDense(name string, host backends.Backend, o dense.Options) (*dense.Backend, error)
}

// dense makes the first device's backend beside one of the host, which it closes.
func (d *devices) dense(host backends.Backend, o dense.Options) (*dense.Backend, error) {
	g := d.all[0]
	return g.dev.NewDense(g.name, host, o)
}

// room is what experts may take in all.
func (d *devices) room() (n int64) {
	for _, g := range d.all {
		n += g.room
	}
	return n
}

// give assigns the first of keys for which there is room to devices, each to the
// one with the most left, and returns how many that were and their bytes.
func (d *devices) give(keys []tiers.Key) (n int, bytes int64) {
	for _, g := range d.all {
		g.taken = 0
	}
	d.owner = make(map[tiers.Key]int8, len(keys))
	for _, k := range keys {
		size := d.ExpertBytes(int(k.Layer), 0)
		best := 0
		for i, g := range d.all {
			if g.room-g.taken > d.all[best].room-d.all[best].taken {
				best = i
			}
		}
		if g := d.all[best]; g.taken+size > g.room {
			break
		}
		d.all[best].taken += size
		d.owner[k] = int8(best)
		n, bytes = n+1, bytes+size
	}
	return n, bytes
}

// ExpertBytes is tiers.Device's.
func (d *devices) ExpertBytes(layer int, _ int64) int64 { return d.all[0].experts.ExpertBytes(layer) }

// Upload is tiers.Device's.
func (d *devices) Upload(k tiers.Key, parts *tiers.Parts) error {
	return d.all[d.owner[k]].experts.Upload(int(k.Layer), int(k.Expert), [3][]byte{parts[0], parts[1], parts[2]})
}

// Lend is tiers.Device's. Where it fails uploads go through staging.
func (d *devices) Lend(mem [][]byte) {
	for _, g := range d.all {
		if err := g.experts.Lend(mem); err != nil && g.refused == "" && !errors.Is(err, errors.ErrUnsupported) {
			g.refused = err.Error()
		}
	}
}

// Replace is tiers.Device's: k takes the place of old, which has its size.
func (d *devices) Replace(old, k tiers.Key, parts *tiers.Parts) error {
	at := d.owner[old]
	if err := d.all[at].experts.Replace(int(old.Layer), int(old.Expert), int(k.Layer), int(k.Expert), [3][]byte{parts[0], parts[1], parts[2]}); err != nil {
		return err
	}
	delete(d.owner, old)
	d.owner[k] = at
	return nil
}

// settle waits until all that was uploaded is there, and gives what there is to
// say of it.
func (d *devices) settle() (notices []string, err error) {
	for _, g := range d.all {
		if err := g.experts.Settle(); err != nil {
			return notices, err
		}
		u := g.experts.Usage()
		if u.Experts == 0 {
			continue
		}
		driver := "does not tell what is in use"
		if u.Driver >= 0 {
			driver = fmt.Sprintf("reports %s in use", tiers.GB(u.Driver))
		}
		notices = append(notices, fmt.Sprintf("vram of %s: %d experts of %s, %s allocated; the driver %s; uploaded in %.3g s, %.3g GB/s%s",
			g.name, u.Experts, tiers.GB(u.Payload), tiers.GB(u.Allocated), driver, float64(u.UploadNanos)/1e9, float64(u.UploadBytes)/float64(max(u.UploadNanos, 1)), g.way(&u)))
		for _, words := range []string{u.Doubt(g.index), slowUpload(g.name, g.link, &u)} {
			if words != "" {
				notices = append(notices, words)
			}
		}
	}
	return notices, nil
}

// way says how experts came to a device.
func (g *gpu) way(u *backends.HeldUsage) string {
	switch {
	case u.DirectBytes > 0 && u.DirectBytes >= u.UploadBytes:
		return ", straight from where they were read"
	case u.DirectBytes > 0:
		return fmt.Sprintf(", %s of them straight from where they were read", tiers.GB(u.DirectBytes))
	case g.refused != "":
		return ", through staging (" + g.refused + ")"
	}
	return ""
}

// slowUpload says in words that experts went to a device at less than half of what
// its link carries, as they do where they land elsewhere than in its memory or where
// the host is in the way; "" if they did not, or if it was too few to tell.
func slowUpload(name string, link *pci.Link, u *backends.HeldUsage) string {
	const enough = 256 << 20
	if link == nil || u.UploadBytes < enough || u.UploadNanos == 0 {
		return ""
	}
	rate := float64(u.UploadBytes) / float64(u.UploadNanos)
	if can := link.Rate() / 1e9; rate < can/2 {
		return fmt.Sprintf("warning: experts went to %s at %.3g GB/s, and its link (%v) carries %.3g GB/s: see that Resizable BAR is on, that memory can be pinned (ulimit -l), and that nothing else uses the link or the memory", name, rate, *link, can)
	}
	return ""
}

// usage sums over the devices. Driver is -1 if one of them does not tell.
func (d *devices) usage() (sum backends.HeldUsage) {
	if d == nil {
		return sum
	}
	for _, g := range d.all {
		u := g.experts.Usage()
		sum.Experts += u.Experts
		sum.Payload += u.Payload
		sum.Allocated += u.Allocated
		sum.UploadBytes += u.UploadBytes
		sum.UploadNanos += u.UploadNanos
		sum.DirectBytes += u.DirectBytes
		sum.Pinned += u.Pinned
		sum.PinAsked += u.PinAsked
		sum.Unpinned += u.Unpinned
		sum.Unequal += u.Unequal
		sum.Recorded += u.Recorded
		sum.Launches += u.Launches
		if sum.Driver >= 0 && u.Driver >= 0 {
			sum.Driver += u.Driver
		} else {
			sum.Driver = -1
		}
	}
	return sum
}

// holder is what computes the experts: the device itself where there is one.
func (d *devices) holder(k, chunk int) (backends.Holder, error) {
	if len(d.all) == 1 {
		return d.all[0].experts, nil
	}
	widest := 0
	for _, l := range d.layers {
		widest = max(widest, l.Dim)
	}
	floats := (k + 1) * chunk * widest
	var err error
	var all []float32
	if all, d.arena, err = offheap.Of[float32](floats); err != nil {
		return nil, err
	}
	d.input, d.out = all[:chunk*widest], all[chunk*widest:]
	d.jobs, d.outs = make([][]backends.HeldJob, len(d.all)), make([][]float32, len(d.all))
	return d, nil
}

// Input is backends.Holder's.
func (d *devices) Input(n, dim int) []float32 {
	d.n, d.dim, d.taken = n, dim, false
	return d.input[:n*dim]
}

// Take is backends.Taker's: each device takes x, or none.
func (d *devices) Take(x backends.Vec) (bool, error) {
	d.taken = false
	for _, g := range d.all {
		if ok, err := g.experts.Take(x); !ok || err != nil {
			return false, err
		}
	}
	d.taken = true
	return true, nil
}

// Give is backends.Taker's: outputs of several devices are put in order by the host.
func (d *devices) Give(backends.Vec, []int32) (bool, error) { return false, nil }

// Start is backends.Holder's: each device gets the jobs of its experts.
func (d *devices) Start(layer int, jobs []backends.HeldJob, k, n int, act backends.Activation, bias *[3][]float32) error {
	for i := range d.jobs {
		d.jobs[i] = d.jobs[i][:0]
	}
	d.who, d.floats = d.who[:0], d.floats[:0]
	for _, j := range jobs {
		at := d.owner[tiers.Key{Layer: int32(layer), Expert: j.Expert}]
		d.jobs[at] = append(d.jobs[at], j)
		d.who, d.floats = append(d.who, at), append(d.floats, len(j.Rows)*d.layers[layer].Dim)
	}
	for i, g := range d.all {
		if len(d.jobs[i]) == 0 {
			continue
		}
		if !d.taken {
			copy(g.experts.Input(n, d.dim), d.input[:n*d.dim])
		}
		if err := g.experts.Start(layer, d.jobs[i], k, n, act, bias); err != nil {
			d.Finish() // what others have begun
			return err
		}
	}
	d.running = true
	return nil
}

// Finish is backends.Holder's: outputs come back in the order of the jobs.
func (d *devices) Finish() ([]float32, error) {
	var failed error
	outs := d.outs
	for i, g := range d.all {
		var err error
		if outs[i], err = g.experts.Finish(); err != nil && failed == nil {
			failed = err
		}
	}
	running := d.running
	d.running = false
	if failed != nil || !running {
		return nil, failed
	}
	at := 0
	for i, who := range d.who {
		n := d.floats[i]
		copy(d.out[at:], outs[who][:n])
		outs[who] = outs[who][n:]
		at += n
	}
	return d.out[:at], nil
}

func (d *devices) Close() error {
	if d == nil {
		return nil
	}
	var errs []error
	for _, g := range d.all { // experts may be linked to another device
		if g.experts != nil {
			errs = append(errs, g.experts.Close())
		}
	}
	for _, g := range d.all {
		if g.dev != nil {
			errs = append(errs, g.dev.Close())
		}
	}
	if d.close != nil {
		d.close()
	}
	errs = append(errs, offheap.Free(d.arena))
	d.arena = nil
	return errors.Join(errs...)
}
