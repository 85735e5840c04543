package vulkan

import (
	"fmt"
	"unsafe"

	"sluice/internal/offheap"
)

// An arena is memory outside the Go heap for what is handed to Vulkan: structs,
// arrays, strings. Nothing in it is moved or collected, so an address is good
// until the arena is reset, whatever the garbage collector does meanwhile.
type arena struct {
	mem  []byte
	used int
}

func newArena(bytes int) (*arena, error) {
	mem, err := offheap.Alloc(int64(bytes))
	if err != nil {
		return nil, fmt.Errorf("vulkan: no memory for calls: %w", err)
	}
	return &arena{mem: mem}, nil
}

func (a *arena) free() {
	offheap.Free(a.mem)
	a.mem = nil
}

// mark and release bracket the calls that need what is put between them.
func (a *arena) mark() int      { return a.used }
func (a *arena) release(at int) { a.used = at }

func (a *arena) take(bytes int) unsafe.Pointer {
	at := (a.used + 15) &^ 15
	if at+bytes > len(a.mem) {
		panic(fmt.Sprintf("vulkan: arena of %d bytes is full: %d asked for at %d", len(a.mem), bytes, at))
	}
	a.used = at + bytes
	p := unsafe.Pointer(&a.mem[at])
	clear(a.mem[at : at+bytes])
	return p
}

// put copies v into the arena and gives it there.
func put[T any](a *arena, v T) *T {
	p := (*T)(a.take(int(unsafe.Sizeof(v))))
	*p = v
	return p
}

// list copies v into the arena and gives its address, 0 if it is empty.
func list[T any](a *arena, v []T) uintptr {
	if len(v) == 0 {
		return 0
	}
	p := a.take(len(v) * int(unsafe.Sizeof(v[0])))
	copy(unsafe.Slice((*T)(p), len(v)), v)
	return uintptr(p)
}

// text is s as C takes it.
func text(a *arena, s string) uintptr {
	p := a.take(len(s) + 1)
	copy(unsafe.Slice((*byte)(p), len(s)), s)
	return uintptr(p)
}

// texts is an array of strings as C takes it.
func texts(a *arena, all []string) uintptr {
	at := make([]uintptr, len(all))
	for i, s := range all {
		at[i] = text(a, s)
	}
	return list(a, at)
}

// addr is the address of something in an arena.
func addr[T any](p *T) uintptr { return uintptr(unsafe.Pointer(p)) }

// cString is the text of a fixed field.
func cString(b []byte) string {
	for i, c := range b {
		if c == 0 {
			return string(b[:i])
		}
	}
	return string(b)
}
