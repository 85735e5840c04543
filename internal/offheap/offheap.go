// Package offheap gives memory outside the Go heap: page-aligned, zeroed,
// invisible to the garbage collector, counted by its owners.
package offheap

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// HugePage is the alignment and the unit of transparent huge pages on x86-64
// and on arm64 with 4 KiB pages.
const HugePage = 2 << 20

// maxBytes of one mapping: half of what a process can address.
const maxBytes = 1 << 46

// Alloc maps n bytes of zeroed private memory. Mappings of a huge page and
// more start on a 2 MiB boundary and ask for huge pages. Nothing is resident
// until touched (see Populate). The caller frees what it gets with Free.
func Alloc(n int64) ([]byte, error) {
	if n <= 0 || n > maxBytes {
		return nil, fmt.Errorf("offheap: cannot map %d bytes", n)
	}
	page := int64(unix.Getpagesize())
	size := (n + page - 1) &^ (page - 1)
	want := size
	if n >= HugePage {
		want += HugePage // so that an aligned start lies inside
	}
	p, err := unix.MmapPtr(-1, 0, nil, uintptr(want), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE)
	if err != nil {
		return nil, fmt.Errorf("offheap: map %d bytes: %w", n, err)
	}
	if want == size {
		return unsafe.Slice((*byte)(p), n), nil
	}
	// Give back what lies before the aligned start and after the end.
	head := -uintptr(p) & (HugePage - 1)
	if head > 0 {
		unix.MunmapPtr(p, head)
	}
	unix.MunmapPtr(unsafe.Add(p, head+uintptr(size)), HugePage-head)
	b := unsafe.Slice((*byte)(unsafe.Add(p, head)), n)
	unix.Madvise(b, unix.MADV_HUGEPAGE) // a wish; without it the memory works all the same
	return b, nil
}

// Free unmaps what Alloc gave, whole. A nil slice is left alone.
func Free(b []byte) error {
	if len(b) == 0 {
		return nil
	}
	page := unix.Getpagesize()
	n := (len(b) + page - 1) &^ (page - 1)
	if err := unix.MunmapPtr(unsafe.Pointer(unsafe.SliceData(b)), uintptr(n)); err != nil {
		return fmt.Errorf("offheap: unmap %d bytes: %w", len(b), err)
	}
	return nil
}

// Holds says whether b lies in mem, whatever memory that is.
func Holds(mem, b []byte) bool {
	from, at := uintptr(unsafe.Pointer(unsafe.SliceData(mem))), uintptr(unsafe.Pointer(unsafe.SliceData(b)))
	return at >= from && at+uintptr(len(b)) <= from+uintptr(len(mem))
}

// Populate makes all pages that b lies on resident, so that no page fault stands
// in a hot path. The bytes stay as they are. b is memory that may be written to.
func Populate(b []byte) {
	if len(b) == 0 {
		return
	}
	start := unsafe.Pointer(unsafe.SliceData(b))
	skew := int(uintptr(start) & uintptr(unix.Getpagesize()-1))
	whole := unsafe.Slice((*byte)(unsafe.Add(start, -skew)), skew+len(b))
	if unix.Madvise(whole, unix.MADV_POPULATE_WRITE) == nil { // Linux 5.14
		return
	}
	touch(whole)
}

// Discard gives the whole pages of b back to the system; where b is the end of
// what Alloc gave, its last page too. The mapping stays, what is touched again
// is zero.
func Discard(b []byte) {
	page := unix.Getpagesize()
	start := unsafe.Pointer(unsafe.SliceData(b))
	skip := int(-uintptr(start) & uintptr(page-1))
	if len(b) <= skip {
		return
	}
	n := len(b) - skip
	if cap(b) == len(b) {
		n = (n + page - 1) &^ (page - 1)
	} else {
		n &^= page - 1
	}
	if n > 0 {
		unix.Madvise(unsafe.Slice((*byte)(unsafe.Add(start, skip)), n), unix.MADV_DONTNEED) // of memory that is not locked it does not fail
	}
}

// touch writes to each page of b, which starts on one, without changing it.
func touch(b []byte) {
	for i := 0; i < len(b); i += 4096 {
		// Adding 0 atomically is a write that no compiler leaves out.
		atomic.AddInt32((*int32)(unsafe.Pointer(&b[i])), 0)
	}
}

// HugePagesOff says whether the kernel is set to give no huge pages at all, so
// that asking for them is in vain.
func HugePagesOff() bool {
	b, err := os.ReadFile("/sys/kernel/mm/transparent_hugepage/enabled")
	return err == nil && bytes.Contains(b, []byte("[never]"))
}

// Huge is how many bytes of b lie on huge pages now. The kernel walks all of the
// process's memory for the answer: it is for reports, not for each start.
func Huge(b []byte) (int64, error) {
	f, err := os.Open("/proc/self/smaps")
	if err != nil {
		return 0, fmt.Errorf("offheap: %w", err)
	}
	defer f.Close()
	start := uint64(uintptr(unsafe.Pointer(unsafe.SliceData(b))))
	return huge(f, start, start+uint64(len(b)))
}

// huge sums the huge pages of the mappings that overlap [start, end). A mapping
// that reaches further counts for no more than what it shares.
func huge(smaps io.Reader, start, end uint64) (total int64, err error) {
	shared := uint64(0)
	lines := bufio.NewScanner(smaps)
	for lines.Scan() {
		f := strings.Fields(lines.Text())
		if len(f) == 0 {
			continue
		}
		if from, to, ok := strings.Cut(f[0], "-"); ok && !strings.HasSuffix(f[0], ":") { // 7f3c00000000-7f3c40000000 rw-p ...
			lo, err := strconv.ParseUint(from, 16, 64)
			hi, err2 := strconv.ParseUint(to, 16, 64)
			if err != nil || err2 != nil {
				return 0, fmt.Errorf("offheap: /proc/self/smaps: %q is no range of addresses", f[0])
			}
			shared = 0
			if lo, hi = max(lo, start), min(hi, end); lo < hi {
				shared = hi - lo
			}
			continue
		}
		if len(f) >= 2 && f[0] == "AnonHugePages:" && shared > 0 {
			kib, err := strconv.ParseUint(f[1], 10, 53)
			if err != nil {
				return 0, fmt.Errorf("offheap: /proc/self/smaps: %q is no size", f[1])
			}
			total += int64(min(kib<<10, shared))
		}
	}
	return total, lines.Err()
}

// Of maps room for n values of T, which must hold no pointers: the garbage
// collector does not see them. The bytes are the same memory, to be freed.
func Of[T any](n int) ([]T, []byte, error) {
	var t T
	size := int64(unsafe.Sizeof(t))
	if size == 0 || n < 0 || int64(n) > maxBytes/size {
		return nil, nil, fmt.Errorf("offheap: cannot map %d values of %d bytes", n, size)
	}
	b, err := Alloc(int64(n) * size)
	if err != nil {
		return nil, nil, err
	}
	return unsafe.Slice((*T)(unsafe.Pointer(unsafe.SliceData(b))), n), b, nil
}
