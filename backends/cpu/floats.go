package cpu

// A floatKernel multiplies float rows of one type. The zero one stands for the
// plain Go of row.go.
type floatKernel struct {
	tile int // rows, and positions, of the larger kernels
	// run takes one row or tile rows, times one position or tile positions.
	run [2][2]func(*floatArgs)
	// together: for one position too it takes tile rows, not one, which would
	// stream best. The lanes of one wait for each other.
	together bool
}

// floatArgs are the arguments of a float kernel.
//
// Assembly reads the fields: asm/floats.go has their order.
type floatArgs struct {
	w        *byte
	rowBytes int
	x        *float32
	stride   int      // bytes from one position to the next
	runs     int      // of 16 columns
	y        *float32 // [rows, positions] out
}

// A floatScratch is a worker's memory for float kernels.
type floatScratch struct {
	args floatArgs
	y    [16]float32
}

// floatRows computes rows lo..hi for positions t..t+n of the product, whose
// numbers in the inputs are in s.row: consecutive ones, or each by itself.
func (p *product) floatRows(s *scratch, t, n, lo, hi int) {
	a, k := &s.floats.args, &p.floats
	cols := p.m.Cols
	a.rowBytes, a.stride, a.runs, a.y = p.rowLen, 4*cols, cols/16, &s.floats.y[0]
	for r := lo; r < hi; {
		rows, tall := 1, 0
		if (n > 1 || k.together) && hi-r >= k.tile {
			rows, tall = k.tile, 1
		}
		a.w = &p.m.Data[r*p.rowLen]
		for j := 0; j < n; {
			wide, many := 1, 0
			if n-j >= k.tile && consecutive(s.row[j:j+k.tile]) {
				wide, many = k.tile, 1
			}
			a.x = &p.in.f[s.row[j]*cols]
			k.run[tall][many](a)
			for i := range rows {
				for o := range wide {
					p.put(t+j+o, r+i, s.floats.y[i*wide+o])
				}
			}
			j += wide
		}
		r += rows
	}
}

func consecutive(n []int) bool {
	for i, v := range n {
		if v != n[0]+i {
			return false
		}
	}
	return true
}
