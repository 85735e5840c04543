package gpu

import (
	"bufio"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"os"
	"runtime"
	"strconv"
	"strings"

	"github.com/ebitengine/purego"
)

// A Library is one that was loaded, as the process's own map of memory shows it:
// search paths do not prove which file was taken.
type Library struct {
	Name string `json:"name"` // asked for
	File string `json:"file"`
	Size int64  `json:"size"`
	Hash string `json:"sha256"`
}

func (l Library) String() string {
	if l.File == "" {
		return "this binary"
	}
	return fmt.Sprintf("%s is %s, %d bytes, sha256 %.16s", l.Name, l.File, l.Size, l.Hash)
}

// load opens the first library that there is.
func load(names []string) (name string, lib uintptr, err error) {
	runtime.LockOSThread() // Dlopen asks for the reason in a second call, and each thread has its own
	defer runtime.UnlockOSThread()
	for _, name = range names {
		var e error
		if lib, e = purego.Dlopen(name, purego.RTLD_NOW|purego.RTLD_LOCAL); e == nil {
			return name, lib, nil
		}
		if err == nil {
			err = e
		}
	}
	return "", 0, err
}

// prove finds the file that the function at an address came from.
func prove(name string, address uintptr) (Library, error) {
	l := Library{Name: name}
	maps, err := os.Open("/proc/self/maps")
	if err != nil {
		return l, fmt.Errorf("gpu: which file %s is: %w", name, err)
	}
	defer maps.Close()
	for s := bufio.NewScanner(maps); s.Scan(); {
		// from-to, rights, offset, device, inode, and the file behind the first slash.
		path := strings.IndexByte(s.Text(), '/')
		span, _, _ := strings.Cut(s.Text(), " ")
		low, high, _ := strings.Cut(span, "-")
		from, err1 := strconv.ParseUint(low, 16, 64)
		to, err2 := strconv.ParseUint(high, 16, 64)
		if err1 != nil || err2 != nil || path < 0 || uint64(address) < from || uint64(address) >= to {
			continue
		}
		l.File = s.Text()[path:]
		break
	}
	file, err := os.Open(l.File)
	if err != nil {
		return l, fmt.Errorf("gpu: %s is mapped from %q, which cannot be read: %w", name, l.File, err)
	}
	defer file.Close()
	h := sha256.New()
	if l.Size, err = io.Copy(h, file); err != nil {
		return l, fmt.Errorf("gpu: %s: %w", l.File, err)
	}
	l.Hash = hex.EncodeToString(h.Sum(nil))
	return l, nil
}
