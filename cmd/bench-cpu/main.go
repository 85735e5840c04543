// Command bench-cpu measures how fast the CPU backend multiplies rows of each
// format, beside the rate at which this machine reads memory at the same moment
// with the same threads.
//
//	go run ./cmd/bench-cpu [-rows 7168] [-cols 2048] [-types Q4_K,Q8_0] [-samples 5]
//
// Weights lie in a pool that no cache holds, and are streamed through. Reading
// and multiplying take turns; the numbers are medians, and with -v every sample
// is printed, since other users of the machine move them.
package main

import (
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"runtime"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"sluice/backends"
	"sluice/backends/backendtest"
	"sluice/backends/cpu"
	"sluice/internal/offheap"
	"sluice/internal/quant"
)

func main() {
	if err := run(os.Args[1:], os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "bench-cpu:", err)
		os.Exit(1)
	}
}

// options are what is measured.
type options struct {
	rows, cols int
	samples    int
	pool       []byte
	out        io.Writer
	verbose    bool
}

const positions = 64

func run(args []string, out io.Writer) error {
	f := flag.NewFlagSet("bench-cpu", flag.ContinueOnError)
	o := options{out: out}
	f.IntVar(&o.rows, "rows", 7168, "rows of a matrix")
	f.IntVar(&o.cols, "cols", 2048, "columns of a matrix, a multiple of 256")
	f.IntVar(&o.samples, "samples", 5, "samples of each measurement")
	f.BoolVar(&o.verbose, "v", false, "print every sample")
	types := f.String("types", "Q4_K,Q8_0,Q6_K,Q4_0,Q5_K,MXFP4,BF16,F32,F16,Q5_0,Q5_1,Q4_1,IQ4_XS,IQ4_NL,Q3_K,Q2_K,F8_128,INT4_32,INT4_128,INT4F_32,INT4F_64,INT4F_128,INT8F_32,INT8F_128", "formats, or all")
	pool := f.Int("pool", 768, "MiB of weights, more than the caches hold")
	kernels := f.String("kernels", os.Getenv("SLUICE_CPU"), "go, avx2 or avx512 (default: the best)")
	if err := f.Parse(args); err != nil {
		return err
	}
	if o.rows < 1 || o.cols < 256 || o.cols%256 != 0 || o.samples < 1 || *pool < 64 {
		return fmt.Errorf("rows, samples at least 1, cols a multiple of 256, pool at least 64")
	}
	level, err := cpu.ParseLevel(*kernels)
	if err != nil {
		return err
	}
	if level, err = cpu.Choose(level); err != nil {
		return err
	}
	if o.pool, err = offheap.Alloc(int64(*pool) << 20); err != nil {
		return err
	}
	defer offheap.Free(o.pool)
	all := runtime.GOMAXPROCS(0)
	fmt.Fprintf(out, "kernels %v, %d x %d, %d threads at most, medians of %d; GB/s of weights, read = what the same threads read\n", level, o.rows, o.cols, all, o.samples)
	t := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintf(t, "\t1 core\tread\tof it\t%d cores\tread\tof it\tcached\tbound\t%d positions\tof 1\t\n", all, positions)
	fmt.Fprintf(t, "\tGB/s\tGB/s\t%%\tGB/s\tGB/s\t%%\tGB/s\t\tGMAC/s\tx\t\n")
	for _, typ := range backendtest.Types {
		if *types != "all" && !slices.Contains(strings.Split(*types, ","), typ.String()) {
			continue
		}
		one, err := o.measure(typ, level, 1)
		if err != nil {
			return err
		}
		many := one
		if all > 1 {
			if many, err = o.measure(typ, level, all); err != nil {
				return err
			}
		}
		bound := "memory"
		if many.cached < many.read {
			bound = "kernel"
		}
		fmt.Fprintf(t, "%v\t%.1f\t%.1f\t%.0f\t%.1f\t%.1f\t%.0f\t%.1f\t%s\t%.0f\t%.1f\t\n", typ, one.rate, one.read, 100*one.ratio,
			many.rate, many.read, 100*many.ratio, many.cached, bound, many.batch/1e9, many.gain)
	}
	return t.Flush()
}

// A result is one format with some threads: GB/s, but for batch, in
// multiply-adds a second.
type result struct {
	rate, read, ratio float64 // one position, from memory; reading; the median of their ratios
	cached            float64 // one position, weights in the caches
	batch             float64 // 64 positions
	gain              float64 // its rate of positions by that of one
}

func (o *options) measure(typ quant.Type, level cpu.Level, threads int) (r result, err error) {
	b, err := cpu.New(cpu.Options{Threads: threads, Level: level})
	if err != nil {
		return r, err
	}
	defer b.Close()
	size := o.rows * typ.RowBytes(o.cols)
	count := len(o.pool) / size
	if count == 0 {
		return r, fmt.Errorf("a matrix of %d x %d %v takes %d bytes, more than the pool", o.rows, o.cols, typ, size)
	}
	rng := rand.New(rand.NewPCG(1, 2))
	seed := backendtest.Weights(rng, typ, min(o.rows, 64)*o.cols)
	var weights [][]backends.Linear
	for i := range count {
		data := o.pool[i*size : (i+1)*size]
		for at := 0; at < size; {
			at += copy(data[at:], seed)
		}
		weights = append(weights, []backends.Linear{{Matrix: backends.Matrix{Type: typ, Rows: o.rows, Cols: o.cols, Data: data}}})
	}
	small := weights[0][0]
	small.Rows = min(o.rows, 512)
	small.Data = small.Data[:small.Rows*typ.RowBytes(o.cols)]

	x, err := b.NewVec(positions, o.cols)
	if err != nil {
		return r, err
	}
	y, err := b.NewVec(positions, o.rows)
	if err != nil {
		return r, err
	}
	ySmall, err := b.NewVec(positions, small.Rows)
	if err != nil {
		return r, err
	}
	table := backendtest.Weights(rng, quant.F32, positions*o.cols)
	ids := make([]int32, positions)
	for i := range ids {
		ids[i] = int32(i)
	}
	fill := func(n int) {
		b.Embed(x, backends.Matrix{Type: quant.F32, Rows: positions, Cols: o.cols, Data: table}, ids[:n])
	}
	seconds := func(do func()) float64 {
		start := time.Now()
		do()
		return time.Since(start).Seconds()
	}
	out, outSmall := []backends.Vec{y}, []backends.Vec{ySmall}
	used := float64(count * size)
	var rate, read, ratio, cached, batch []float64
	for range o.samples {
		const reads = 1 << 18
		scanned := o.pool[:len(o.pool)&^(reads-1)]
		s := seconds(func() { b.Scan(scanned) })
		read = append(read, float64(len(scanned))/s/1e9)
		fill(1)
		s = seconds(func() {
			for _, w := range weights {
				b.MatMul(out, w, x)
			}
		})
		rate = append(rate, used/s/1e9)
		ratio = append(ratio, rate[len(rate)-1]/read[len(read)-1])
		w := []backends.Linear{small}
		const rounds = 50
		s = seconds(func() {
			for range rounds {
				b.MatMul(outSmall, w, x)
			}
		})
		cached = append(cached, rounds*float64(len(small.Data))/s/1e9)
		fill(positions)
		n := min(count, 4)
		s = seconds(func() {
			for _, w := range weights[:n] {
				b.MatMul(out, w, x)
			}
		})
		batch = append(batch, float64(n*positions)*float64(o.rows)*float64(o.cols)/s)
	}
	if o.verbose {
		fmt.Fprintf(o.out, "%v, %d threads: rows %.1f, read %.1f, cached %.1f, %d positions %.3g\n", typ, threads, rate, read, cached, positions, batch)
	}
	r = result{median(rate), median(read), median(ratio), median(cached), median(batch), 0}
	r.gain = r.batch / (r.rate * 1e9 / float64(size) * float64(o.rows) * float64(o.cols))
	return r, b.Read(make([]float32, positions*o.rows), y)
}

func median(x []float64) float64 {
	s := slices.Sorted(slices.Values(x))
	return s[len(s)/2]
}
