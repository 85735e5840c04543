// Package bench is what measurements of groups of experts on a GPU have in common,
// whoever's driver runs them.
package bench

import (
	"fmt"
	"slices"
	"time"

	"sluice/backends"
	"sluice/backends/held"
	"sluice/internal/quant"
)

// A Shape is a group of K experts of a type, gate and up [FF, Dim], down
// [Dim, FF], for one position; Sets of them lie in memory and take turns, so that
// no cache serves the next. CopyBytes are what a copy moves.
type Shape struct {
	Type             quant.Type
	Dim, FF, K, Sets int
	Samples          int
	CopyBytes        int64
}

// A Measurement is what was found of one type. Times are nanoseconds, one for
// each sample; samples of the group and of the copy took turns.
type Measurement struct {
	Type       string             `json:"type"`
	GroupBytes int64              `json:"group_bytes"` // weights that a group reads
	Group      []float64          `json:"group_device_ns"`
	Wall       []float64          `json:"group_wall_ns"` // from Start to the end of Finish
	Steps      map[string]float64 `json:"steps_ns"`      // medians, by the device's clock, where it stamps between them, which takes time of its own
	CopyBytes  int64              `json:"copy_bytes"`
	Copy       []float64          `json:"copy_device_ns"`
	Upload     float64            `json:"upload_ns"` // of UploadBytes from the host, alone
	UploadSize int64              `json:"upload_bytes"`
	Groups     int                `json:"overlap_groups"`
	Alone      float64            `json:"overlap_groups_ns"` // those groups alone
	Both       float64            `json:"overlap_both_ns"`   // groups and upload at once
}

// Rate is the group's weights in GB/s by the device's clock, Wall by the host's,
// Copied the bytes that the copy read and wrote. Medians.
func (m *Measurement) Rate() float64     { return float64(m.GroupBytes) / Median(m.Group) }
func (m *Measurement) WallRate() float64 { return float64(m.GroupBytes) / Median(m.Wall) }
func (m *Measurement) Copied() float64   { return 2 * float64(m.CopyBytes) / Median(m.Copy) }

// Overlap is the share of the shorter of upload and groups that passed while the
// other ran: 1 is all of it, 0 none.
func (m *Measurement) Overlap() float64 {
	return (m.Alone + m.Upload - m.Both) / min(m.Alone, m.Upload)
}

// Median is the middle of x, which is not empty.
func Median(x []float64) float64 {
	s := slices.Clone(x)
	slices.Sort(s)
	return (s[len(s)/2] + s[(len(s)-1)/2]) / 2
}

// A Driver runs what is measured, on the queue of kernels and on that of copies.
type Driver interface {
	// Sample gives nanoseconds of a group and of a copy of CopyBytes within the device's
	// memory, by the device's clock, and of the group from Start to the end of Finish.
	Sample(start, finish func() error) (group, wall, copied float64, err error)
	// Upload begins to copy UploadBytes from the host, Groups readies n groups like the
	// last, one after the other, for begin. Wait waits for all that was begun.
	Upload() error
	Groups(n int) (begin func() error, err error)
	Wait() error
}

// warmUp is how long samples are thrown away: an idle device takes some tens of
// milliseconds to come to its clock.
const warmUp = 200 * time.Millisecond

// UploadBytes are what an upload moves.
const UploadBytes = 8 * UploadRun

// UploadRun are what it moves at once.
const UploadRun = 16 << 20

// Layer is the layer of a shape's experts.
func (s Shape) Layer() backends.HeldLayer {
	return backends.HeldLayer{Types: [3]quant.Type{s.Type, s.Type, s.Type}, Dim: s.Dim, FF: s.FF}
}

// Measure measures groups of experts of the shape's layer, which it uploads to e,
// made for layer 0, against copies in the device's own memory.
func Measure(s Shape, e *held.Experts, d Driver) (*Measurement, error) {
	parts, err := parts(s.Layer())
	if err != nil {
		return nil, err
	}
	for i := range s.Sets * s.K {
		if err := e.Upload(0, i, parts); err != nil {
			return nil, err
		}
	}
	if err := e.Settle(); err != nil {
		return nil, err
	}
	m := &Measurement{Type: s.Type.String(), CopyBytes: s.CopyBytes, UploadSize: UploadBytes, Steps: map[string]float64{}}
	for _, p := range parts {
		m.GroupBytes += int64(s.K) * int64(len(p))
	}
	start, finish := Groups(s, e)
	for begin := time.Now(); len(m.Group) < s.Samples; {
		group, wall, copied, err := d.Sample(start, finish)
		if err != nil {
			return nil, err
		}
		if time.Since(begin) > warmUp {
			m.Group, m.Wall, m.Copy = append(m.Group, group), append(m.Wall, wall), append(m.Copy, copied)
		}
	}
	return m, m.overlap(d)
}

// Groups gives what starts and finishes a group of one position of e, each time of
// the next set.
func Groups(s Shape, e *held.Experts) (start, finish func() error) {
	x := e.Input(1, s.Dim)
	for i := range x {
		x[i] = float32(i%17-8) * 0x1p-6
	}
	jobs, set := make([]backends.HeldJob, s.K), 0
	start = func() error {
		for i := range jobs {
			jobs[i] = backends.HeldJob{Expert: int32(set%s.Sets*s.K + i), Rows: []int32{int32(i)}}
		}
		set++
		return e.Start(0, jobs, s.K, 1, backends.SwiGLU, nil)
	}
	return start, func() error { _, err := e.Finish(); return err }
}

// overlap measures how much of an upload passes while groups are computed, by the
// host's clock: uploads alone, as many groups as take as long alone, both at once.
func (m *Measurement) overlap(d Driver) (err error) {
	run := func(all ...func() error) (float64, error) {
		best := 0.0
		for range 5 {
			start := time.Now()
			for _, begin := range all {
				if err := begin(); err != nil {
					return 0, err
				}
			}
			if err := d.Wait(); err != nil {
				return 0, err
			}
			if ns := float64(time.Since(start).Nanoseconds()); best == 0 || ns < best {
				best = ns
			}
		}
		return best, nil
	}
	if m.Upload, err = run(d.Upload); err != nil {
		return err
	}
	m.Groups = max(1, min(1000, int(m.Upload/Median(m.Group))))
	groups, err := d.Groups(m.Groups)
	if err != nil {
		return err
	}
	if m.Alone, err = run(groups); err != nil {
		return err
	}
	m.Both, err = run(d.Upload, groups)
	return err
}

// parts are the matrices of an expert, some encoded rows again and again.
func parts(l backends.HeldLayer) (parts [3][]byte, err error) {
	for i, n := range l.Parts() {
		cols := [...]int{l.Dim, l.Dim, l.FF}[i]
		t := l.Types[i]
		if !t.Fits(cols) || cols%32 != 0 {
			return parts, fmt.Errorf("bench: rows of %d elements of %v: the shape must be a multiple of a block", cols, t)
		}
		elems, bytes := t.Block()
		if !quant.CanEncode(t) {
			return parts, fmt.Errorf("bench: weights of %v cannot be made up here: measure another type", t)
		}
		row := make([]byte, 3*t.RowBytes(cols))
		src := make([]float32, elems)
		for b := 0; b*bytes < len(row); b++ {
			for j := range src {
				src[j] = float32((b*31+j*17)%255-127) * 0x1p-12
			}
			if err := quant.Encode(t, row[b*bytes:(b+1)*bytes], src); err != nil {
				return parts, err
			}
		}
		parts[i] = make([]byte, n)
		for at := 0; at < len(parts[i]); {
			at += copy(parts[i][at:], row)
		}
	}
	return parts, nil
}
