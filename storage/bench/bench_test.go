package bench

import (
	"context"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"sluice/storage"
)

// blocks is a file of n blocks of size bytes.
func blocks(t *testing.T, n, size int64) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "blocks")
	if err := os.WriteFile(path, make([]byte, n*size), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// With time enough a cell reads every block of the file once and no more,
// whatever the mode, the order and the depth.
func TestMeasureReadsEachBlockOnce(t *testing.T) {
	const n, size = 37, 8192
	d := NewDrive(blocks(t, n, size), 3)
	for mode := storage.Slab; mode <= storage.MMap; mode++ {
		for _, depth := range []int{1, 4, 64} {
			for _, sequential := range []bool{false, true} {
				s, _, err := d.Measure(context.Background(), Cell{Mode: mode, Size: size, Depth: depth, Sequential: sequential}, time.Hour)
				if err != nil {
					if mode == storage.Slab && strings.Contains(err.Error(), "not to be had") {
						t.Skip(err)
					}
					t.Fatal(err)
				}
				if s.Bytes != n*size || s.Nanos <= 0 || s.Rate <= 0 || s.CPUNanos < 0 {
					t.Errorf("%v depth %d sequential=%v: %+v", mode, depth, sequential, s)
				}
			}
		}
	}
}

func TestMeasureErrors(t *testing.T) {
	d := NewDrive(blocks(t, 3, 4096), 0)
	if _, _, err := d.Measure(context.Background(), Cell{Mode: storage.Pread, Size: 8192, Depth: 1}, time.Second); err == nil || !strings.Contains(err.Error(), "blocks") {
		t.Errorf("too small a file: %v", err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if _, _, err := d.Measure(ctx, Cell{Mode: storage.Pread, Size: 4096, Depth: 2}, time.Second); err != context.Canceled {
		t.Errorf("cancelled: %v", err)
	}
}

func TestParseFio(t *testing.T) {
	s, err := parseFio([]byte("note: something\n" + `{"jobs":[{"error":0,"usr_cpu":1.5,"sys_cpu":2.5,"job_runtime":2000,"read":{"io_bytes":4000000000,"runtime":2000}}]}`))
	if err != nil || s.Rate != 2e9 || s.CPUNanos != 80e6 || math.Abs(s.CPUPerGB-0.02) > 1e-12 {
		t.Errorf("%+v, %v", s, err)
	}
	for _, bad := range []string{"", "{}", "{", `{"jobs":[{"error":5,"read":{"io_bytes":1,"runtime":1}}]}`, `{"jobs":[{"read":{"io_bytes":0,"runtime":1}}]}`} {
		if _, err := parseFio([]byte(bad)); err == nil {
			t.Errorf("%q is no report", bad)
		}
	}
}

// Every cell weighs the same in the geometric mean, and its interval holds it.
func TestRatios(t *testing.T) {
	a, b := Cell{Size: 1, Depth: 4}, Cell{Size: 2, Depth: 4}
	pair := func(c Cell, ratio float64) Pair { return Pair{c, Sample{Rate: ratio}, Sample{Rate: 1}} }
	same := Ratios([]Pair{pair(a, 2), pair(a, 2), pair(b, 0.5)})
	if math.Abs(same.Mean-1) > 1e-12 || math.Abs(same.Low-1) > 1e-12 || math.Abs(same.High-1) > 1e-12 {
		t.Errorf("cells of 2, 2 and of 1/2: %+v", same)
	}
	spread := Ratios([]Pair{pair(a, 0.8), pair(a, 1.25), pair(a, 1), pair(a, 0.9), pair(a, 1.2)})
	if !(spread.Low < spread.Mean && spread.Mean < spread.High) || spread.Low < 0.8 || spread.High > 1.25 {
		t.Errorf("%+v", spread)
	}
	if got := Ratios(nil); got != (Ratio{}) {
		t.Errorf("of nothing: %+v", got)
	}
}

func TestFioArgs(t *testing.T) {
	args := FioArgs("/x", Cell{Size: RoundSize(2.6e6), Depth: 4}, 1500*time.Millisecond, true)
	for _, want := range []string{"--bs=2600960", "--iodepth=4", "--direct=1", "--rw=randread", "--runtime=1500ms", "--iomem=mmaphuge", "--readonly"} {
		if !slices.Contains(args, want) {
			t.Errorf("%q lacks %s", args, want)
		}
	}
}
