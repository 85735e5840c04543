package bench

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// Evict drops files from the page cache and says which share of them is still
// there, 0 to 1; known is false where the kernel (below Linux 6.5) cannot tell.
func Evict(paths []string) (left float64, known bool, err error) {
	for _, path := range paths {
		if err := withFile(path, func(fd int, _ int64) error {
			// What is not yet on the drive would stay. A file system may refuse.
			if err := unix.Fsync(fd); err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.EROFS) {
				return err
			}
			return unix.Fadvise(fd, 0, 0, unix.FADV_DONTNEED)
		}); err != nil {
			return 0, false, fmt.Errorf("bench: drop %s from the page cache: %w", path, err)
		}
	}
	bytes, size, known, err := Cached(paths)
	if size > 0 {
		left = float64(bytes) / float64(size)
	}
	return left, known, err
}

// Cached counts the bytes of files that are in the page cache, and all their bytes.
func Cached(paths []string) (bytes, size int64, known bool, err error) {
	known = true
	for _, path := range paths {
		if err := withFile(path, func(fd int, n int64) error {
			var stat unix.Cachestat_t
			err := unix.Cachestat(uint(fd), &unix.CachestatRange{Len: uint64(n)}, &stat, 0)
			if errors.Is(err, unix.ENOSYS) || errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.EPERM) {
				known = false
				return nil
			}
			bytes += int64(stat.Cache) * int64(os.Getpagesize())
			size += n
			return err
		}); err != nil {
			return 0, 0, false, fmt.Errorf("bench: what of %s is in the page cache: %w", path, err)
		}
	}
	return bytes, size, known, nil
}

// withFile opens a file of some size for f.
func withFile(path string, f func(fd int, size int64) error) error {
	file, err := os.Open(path)
	if err != nil {
		return err
	}
	defer file.Close()
	fi, err := file.Stat()
	if err != nil || fi.Size() == 0 {
		return err
	}
	return f(int(file.Fd()), fi.Size())
}
