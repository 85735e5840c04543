package offheap

import (
	"math"
	"os"
	"strings"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
)

func address(b []byte) uintptr { return uintptr(unsafe.Pointer(unsafe.SliceData(b))) }

// mapped counts the pages in [from, from+pages) that belong to a mapping.
func mapped(from uintptr, pages int) (n int) {
	page := unix.Getpagesize()
	for i := range pages {
		var vec byte
		_, _, no := unix.Syscall(unix.SYS_MINCORE, from+uintptr(i*page), uintptr(page), uintptr(unsafe.Pointer(&vec)))
		if no == 0 {
			n++
		}
	}
	return n
}

// Memory of every size is aligned, zero, wholly ours, and gone after Free.
func TestAlloc(t *testing.T) {
	page := int64(unix.Getpagesize())
	for _, n := range []int64{1, 7, page - 1, page, page + 1, 10*page + 3, HugePage - 1, HugePage, HugePage + 1,
		HugePage + page, 2*HugePage - 1, 2 * HugePage, 5*HugePage + 12345} {
		b, err := Alloc(n)
		if err != nil {
			t.Fatalf("%d bytes: %v", n, err)
		}
		align := uintptr(page)
		if n >= HugePage {
			align = HugePage
		}
		if int64(len(b)) != n || int64(cap(b)) != n || address(b)%align != 0 {
			t.Fatalf("%d bytes: length %d, capacity %d, address %#x", n, len(b), cap(b), address(b))
		}
		for i, v := range b {
			if v != 0 {
				t.Fatalf("%d bytes: byte %d is %d", n, i, v)
			}
			b[i] = 0xff
		}
		at, pages := address(b), int((n+page-1)/page)
		if got := mapped(at, pages); got != pages {
			t.Fatalf("%d bytes: %d of %d pages are mapped", n, got, pages)
		}
		if err := Free(b); err != nil {
			t.Fatalf("%d bytes: %v", n, err)
		}
	}
}

// What Alloc maps to find an aligned start it gives back, and Free the rest:
// the address space stays as large as it was.
func TestNoLeak(t *testing.T) {
	vmBytes := func() int {
		b, err := os.ReadFile("/proc/self/statm")
		if err != nil {
			t.Skip("needs /proc/self/statm: ", err)
		}
		pages := 0
		for _, c := range b {
			if c == ' ' {
				break
			}
			pages = pages*10 + int(c-'0')
		}
		return pages * unix.Getpagesize()
	}
	const rounds = 64
	before := vmBytes()
	for i := range int64(rounds) {
		b, err := Alloc(HugePage + i*513)
		if err != nil {
			t.Fatal(err)
		}
		if err := Free(b); err != nil {
			t.Fatal(err)
		}
	}
	// The Go runtime may map something of its own meanwhile, but rarely so much.
	if grown := vmBytes() - before; grown >= rounds*unix.Getpagesize() && grown < rounds*HugePage/2 {
		t.Errorf("the address space grew by %d bytes in %d rounds", grown, rounds)
	}
}

// Populate makes every page that the slice lies on resident and changes no byte,
// and so does its stand-in on old kernels.
func TestPopulate(t *testing.T) {
	page := unix.Getpagesize()
	for name, populate := range map[string]func([]byte){"populate": Populate, "touch": touch} {
		b, err := Alloc(int64(20 * page))
		if err != nil {
			t.Fatal(err)
		}
		defer Free(b)
		sub := b[2*page : 9*page+1] // 8 pages
		if name == "populate" {
			sub = b[2*page+1000 : 9*page+1]
		}
		sub[0], sub[len(sub)-1] = 17, 18
		populate(sub)
		if sub[0] != 17 || sub[len(sub)-1] != 18 {
			t.Errorf("%s changed bytes", name)
		}
		vec := make([]byte, 20)
		if _, _, no := unix.Syscall(unix.SYS_MINCORE, address(b), uintptr(len(b)), uintptr(unsafe.Pointer(&vec[0]))); no != 0 {
			t.Fatal(no)
		}
		for i := 2; i < 10; i++ {
			if vec[i]&1 == 0 {
				t.Errorf("%s: page %d is not resident", name, i)
			}
		}
	}
	Populate(nil)
}

// Discard gives back whole pages and leaves the bytes around them.
func TestDiscard(t *testing.T) {
	page := unix.Getpagesize()
	resident := func(b []byte, pages int) (n int) {
		vec := make([]byte, pages)
		if _, _, no := unix.Syscall(unix.SYS_MINCORE, address(b), uintptr(pages*page), uintptr(unsafe.Pointer(&vec[0]))); no != 0 {
			t.Fatal(no)
		}
		for _, v := range vec {
			n += int(v & 1)
		}
		return n
	}
	b, err := Alloc(int64(10*page - 7))
	if err != nil {
		t.Fatal(err)
	}
	defer Free(b)
	fill := func() {
		for i := range b {
			b[i] = 1
		}
	}
	for _, tt := range []struct{ from, to, left int }{
		{0, len(b), 0}, {page, len(b), 1}, {page + 1, len(b), 2}, {page, 3*page + 5, 8}, {page + 1, 3 * page, 9}, {1, page, 10}, {5, 5, 10},
	} {
		fill()
		Discard(b[tt.from:tt.to:min(len(b), tt.to+page)])
		if tt.to == len(b) {
			Discard(b[tt.from:])
		}
		if n := resident(b, 10); n != tt.left {
			t.Errorf("[%d:%d]: %d pages are resident, want %d", tt.from, tt.to, n, tt.left)
		}
		for i := range b {
			if inside := i >= tt.from && i < tt.to; !inside && b[i] != 1 {
				t.Fatalf("[%d:%d]: byte %d is %d", tt.from, tt.to, i, b[i])
			}
		}
	}
	Discard(nil)
}

func TestOf(t *testing.T) {
	v, b, err := Of[float64](1000)
	if err != nil {
		t.Fatal(err)
	}
	if len(v) != 1000 || len(b) != 8000 {
		t.Fatalf("%d values in %d bytes", len(v), len(b))
	}
	v[999] = 1
	if b[7999] != 0x3f {
		t.Error("values and bytes are not the same memory")
	}
	if err := Free(b); err != nil {
		t.Fatal(err)
	}
}

// Sizes that make no sense are errors, never panics.
func TestErrors(t *testing.T) {
	for _, n := range []int64{0, -1, math.MinInt64, maxBytes + 1, math.MaxInt64} {
		if _, err := Alloc(n); err == nil || !strings.HasPrefix(err.Error(), "offheap: ") {
			t.Errorf("%d bytes: error %v", n, err)
		}
	}
	for _, n := range []int{0, -1, math.MaxInt, math.MaxInt/8 + 2} {
		if _, _, err := Of[float64](n); err == nil {
			t.Errorf("%d values: no error", n)
		}
	}
	if _, _, err := Of[struct{}](5); err == nil {
		t.Error("values of no size: no error")
	}
	if err := Free(nil); err != nil {
		t.Error(err)
	}
}

// Huge counts the huge pages of the mappings that memory lies on, and no others.
func TestHuge(t *testing.T) {
	const smaps = `1000000-3000000 rw-p 00000000 00:00 0
AnonHugePages:      8192 kB
THPeligible:           1
5000000-5400000 rw-p 00000000 00:00 0 [anon: x]
Size:               4096 kB
AnonHugePages:      4096 kB
`
	for _, c := range []struct {
		start, end uint64
		want       int64
	}{
		{0x1000000, 0x3000000, 8 << 20},
		{0x1000000, 0x1200000, 2 << 20}, // no more than asked about
		{0x3000000, 0x5000000, 0},
		{0x2000000, 0x6000000, 12 << 20},
	} {
		if got, err := huge(strings.NewReader(smaps), c.start, c.end); err != nil || got != c.want {
			t.Errorf("%x-%x: %d, %v, want %d", c.start, c.end, got, err, c.want)
		}
	}
	for _, bad := range []string{"xyz-1 rw-p\n", "1000-2000 rw-p\nAnonHugePages: -1 kB\n"} {
		if _, err := huge(strings.NewReader(bad), 0, 1<<40); err == nil {
			t.Errorf("%q gives no error", bad)
		}
	}
	b, err := Alloc(8 * HugePage)
	if err != nil {
		t.Fatal(err)
	}
	defer Free(b)
	if n, err := Huge(b); err != nil || n != 0 {
		t.Errorf("untouched memory: %d, %v", n, err)
	}
	Populate(b)
	n, err := Huge(b)
	if err != nil || n < 0 || n > int64(len(b)) {
		t.Errorf("%d, %v", n, err)
	}
	if HugePagesOff() && n > 0 {
		t.Errorf("%d bytes on huge pages, which are off", n)
	}
}

func TestHolds(t *testing.T) {
	all := make([]byte, 100)
	mem := all[20:60]
	for _, c := range []struct {
		b    []byte
		want bool
	}{{mem, true}, {all[20:21], true}, {all[59:60], true}, {all[60:60], true}, {all[19:21], false}, {all[59:61], false}, {all[60:61], false}, {all, false}} {
		if got := Holds(mem, c.b); got != c.want {
			t.Errorf("%d bytes of %d: %v", len(c.b), cap(all)-cap(c.b), got)
		}
	}
}
