// Package bench is what measurements of groups of experts on a GPU have in common,
// whoever's driver runs them.
package bench

import (
	"fmt"
	"slices"

	"sluice/backends"
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

// Parts are the matrices of an expert, some encoded rows again and again.
func Parts(l backends.HeldLayer) (parts [3][]byte, err error) {
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
