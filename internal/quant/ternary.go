package quant

// The ternary formats: 256 elements of -1, 0 and 1 under one scale.

// TQ1_0: 48 bytes of five base-3 digits, 4 bytes of four, d f16. A byte is its
// number times 256/243, rounded up, so that each multiplication by 3 moves the
// next digit above the byte. Value (q-1)*d.
func unpackTQ1_0(b *Block, row []byte, i int) {
	p := (*[54]byte)(row[54*i:])
	b.W = f16At(p[52:])
	for g := range b.Scale {
		b.Scale[g] = 1
	}
	trits(b.Code[:160], p[:32])
	trits(b.Code[160:240], p[32:48])
	trits(b.Code[240:], p[48:52])
}

// trits spreads the leading base-3 digits of q: digit n of byte j is code[n*len(q)+j].
func trits(code []int8, q []byte) {
	var rest [32]byte
	copy(rest[:], q)
	for ; len(code) > 0; code = code[len(q):] {
		for j := range q {
			x := uint16(rest[j&31]) * 3
			code[j], rest[j&31] = int8(x>>8)-1, byte(x)
		}
	}
}

// TQ2_0: 64 bytes of 2-bit codes, d f16; byte l of a half's 32 holds elements l,
// l+32, l+64, l+96 from its low bits up. Value (q-1)*d.
func unpackTQ2_0(b *Block, row []byte, i int) {
	p := (*[66]byte)(row[66*i:])
	b.W = f16At(p[64:])
	for g := range b.Scale {
		b.Scale[g] = 1
	}
	c := b.codes()
	for l := 0; l < 32; l += 8 {
		for half := 0; half < 2; half++ {
			x := load8(p[32*half+l:])
			for k := 0; k < 4; k++ {
				store8(c[128*half+32*k+l:], minus(x>>(2*k)&(3*ones), 1))
			}
		}
	}
}
