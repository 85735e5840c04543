// Package offheap gives memory outside the Go heap: page-aligned, zeroed,
// invisible to the garbage collector, counted by its owners.
package offheap

import (
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"
)

// HugePage is the alignment and the unit of transparent huge pages on x86-64
// and on arm64 with 4 KiB pages.
const HugePage = 2 << 20

// Alloc maps n bytes of zeroed private memory. Mappings of a huge page and
// more start on a 2 MiB boundary and ask for huge pages. Nothing is resident
// until touched (see Populate). The caller frees what it gets with Free.
func Alloc(n int64) ([]byte, error) {
	if n <= 0 || n > 1<<46 {
		return nil, fmt.Errorf("offheap: cannot map %d bytes", n)
	}
	want := n
	if n >= HugePage {
		want = n + HugePage // so that an aligned start lies inside
	}
	p, err := unix.MmapPtr(-1, 0, nil, uintptr(want), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE)
	if err != nil {
		return nil, fmt.Errorf("offheap: map %d bytes: %w", n, err)
	}
	if want == n {
		return unsafe.Slice((*byte)(p), n), nil
	}
	// Give back what lies before the aligned start and after the end.
	page := uintptr(unix.Getpagesize())
	start := (uintptr(p) + HugePage - 1) &^ (HugePage - 1)
	end := (start + uintptr(n) + page - 1) &^ (page - 1)
	head, tail := start-uintptr(p), uintptr(p)+uintptr(want)-end
	if head > 0 {
		unix.MunmapPtr(p, head)
	}
	if tail >= page {
		unix.MunmapPtr(unsafe.Add(p, end-uintptr(p)), tail&^(page-1))
	}
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

// Populate makes b resident now, so that no page fault stands in a hot path.
func Populate(b []byte) {
	if len(b) == 0 {
		return
	}
	const madvPopulateWrite = 23 // Linux 5.14
	if unix.Madvise(b, madvPopulateWrite) == nil {
		return
	}
	for i := 0; i < len(b); i += 4096 {
		b[i] = 0
	}
}

// Of maps room for n values of T, which must hold no pointers.
func Of[T any](n int) ([]T, []byte, error) {
	var t T
	b, err := Alloc(int64(n) * int64(unsafe.Sizeof(t)))
	if err != nil {
		return nil, nil, err
	}
	return unsafe.Slice((*T)(unsafe.Pointer(unsafe.SliceData(b))), n), b, nil
}
