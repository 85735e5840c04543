// Package foreign calls C functions by their addresses, without cgo.
package foreign

import (
	"sync"

	"github.com/ebitengine/purego"
)

// given are arguments of calls under way: those of purego's own call would be made on
// the Go heap, each time.
var given = sync.Pool{New: func() any { return new([15]uintptr) }}

// Call calls f with at most 15 arguments and gives what it returns. What they are the
// addresses of must stay where it is meanwhile: outside the Go heap, or pinned.
func Call(f uintptr, args ...uintptr) uintptr {
	a := given.Get().(*[15]uintptr)
	n := copy(a[:], args)
	r, _, _ := purego.SyscallN(f, a[:n]...)
	given.Put(a)
	return r
}
