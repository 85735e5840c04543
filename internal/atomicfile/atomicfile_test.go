package atomicfile

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// names lists a folder, so that a test sees whatever was left behind.
func names(t *testing.T, dir string) string {
	t.Helper()
	es, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	var s []string
	for _, e := range es {
		s = append(s, e.Name())
	}
	return strings.Join(s, " ")
}

func TestWholeOrNotThere(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "f")
	if err := os.WriteFile(path, []byte("old"), 0o666); err != nil {
		t.Fatal(err)
	}
	f, err := Create(path)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Create(path); err == nil || !strings.Contains(err.Error(), "another program is writing") {
		t.Errorf("a second writer got %v", err)
	}
	if _, err := f.Write([]byte("new")); err != nil {
		t.Fatal(err)
	}
	if b, _ := os.ReadFile(path); string(b) != "old" {
		t.Errorf("before Commit the file holds %q", b)
	}
	if err := f.Commit(); err != nil {
		t.Fatal(err)
	}
	f.Abort() // must not take it back
	if b, _ := os.ReadFile(path); string(b) != "new" {
		t.Errorf("after Commit the file holds %q", b)
	}
	if _, err := f.Write(nil); err == nil {
		t.Error("a write after Commit succeeded")
	}

	g, err := Create(path)
	if err != nil {
		t.Fatal(err)
	}
	g.Write([]byte("never"))
	g.Abort()
	g.Abort()
	if err := g.Commit(); err == nil {
		t.Error("Commit after Abort succeeded")
	}
	if b, _ := os.ReadFile(path); string(b) != "new" {
		t.Errorf("after Abort the file holds %q", b)
	}
	if got := names(t, dir); got != "f" {
		t.Errorf("left behind: %s", got)
	}
}

// What a killed program left is no hindrance.
func TestStalePart(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "f")
	if err := os.WriteFile(path+tempEnd, []byte("half of something longer"), 0o666); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path+".part", []byte("a download of somebody's"), 0o666); err != nil {
		t.Fatal(err)
	}
	f, err := Create(path)
	if err != nil {
		t.Fatal(err)
	}
	f.Write([]byte("whole"))
	if err := f.Commit(); err != nil {
		t.Fatal(err)
	}
	if b, _ := os.ReadFile(path); string(b) != "whole" {
		t.Errorf("the file holds %q", b)
	}
	if b, _ := os.ReadFile(path + ".part"); string(b) != "a download of somebody's" {
		t.Errorf("f.part holds %q", b)
	}
	if got := names(t, dir); got != "f f.part" {
		t.Errorf("left behind: %s", got)
	}
}

// A device is written to, not replaced.
func TestDevice(t *testing.T) {
	f, err := Create("/dev/full")
	if err != nil {
		t.Skipf("needs /dev/full: %v", err)
	}
	f.Write([]byte("x"))
	if err := f.Commit(); !errors.Is(err, syscall.ENOSPC) {
		t.Errorf("got %v", err)
	}
	if fi, err := os.Stat("/dev/full"); err != nil || fi.Mode()&os.ModeDevice == 0 {
		t.Errorf("/dev/full is %v, %v", fi, err)
	}
}

// full is a drive with no space left.
type full struct{}

func (full) Write([]byte) (int, error) {
	return 0, &os.PathError{Op: "write", Path: "x", Err: syscall.ENOSPC}
}

func TestDriveFull(t *testing.T) {
	dir := t.TempDir()
	f, err := Create(filepath.Join(dir, "f"))
	if err != nil {
		t.Fatal(err)
	}
	f.w.Reset(full{})
	checkFull(t, dir, f)
}

func TestDriveFullTmpfs(t *testing.T) {
	dir := t.TempDir()
	if err := mountTmpfs(dir, 1<<20); err != nil {
		t.Skipf("needs the right to mount a small tmpfs: %v", err)
	}
	defer unmount(dir)
	f, err := Create(filepath.Join(dir, "f"))
	if err != nil {
		t.Fatal(err)
	}
	checkFull(t, dir, f)
}

// checkFull writes until there is no space.
func checkFull(t *testing.T, dir string, f *File) {
	t.Helper()
	var err error
	for i := 0; i < 64 && err == nil; i++ {
		_, err = f.Write(make([]byte, 64<<10))
	}
	if err == nil {
		err = f.Commit()
	}
	if !errors.Is(err, syscall.ENOSPC) || !strings.Contains(err.Error(), "free some space") {
		t.Errorf("got %v", err)
	}
	if again := f.Commit(); again != err {
		t.Errorf("Commit after it says %v", again)
	}
	if got := names(t, dir); got != "" {
		t.Errorf("left behind: %s", got)
	}
}

// The unfinished file is never followed to another file, and a PATH that is a link stays one.
func TestLinks(t *testing.T) {
	dir := t.TempDir()
	precious, path := filepath.Join(dir, "precious"), filepath.Join(dir, "f")
	if err := os.WriteFile(precious, []byte("precious"), 0o666); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(precious, path+tempEnd); err != nil {
		t.Fatal(err)
	}
	if _, err := Create(path); err == nil || !strings.Contains(err.Error(), "symbolic link") {
		t.Errorf("got %v", err)
	}
	if b, _ := os.ReadFile(precious); string(b) != "precious" {
		t.Errorf("the other file holds %q", b)
	}

	link := filepath.Join(dir, "link")
	if err := os.Symlink(precious, link); err != nil {
		t.Fatal(err)
	}
	f, err := Create(link)
	if err != nil {
		t.Fatal(err)
	}
	f.Write([]byte("new"))
	if err := f.Commit(); err != nil {
		t.Fatal(err)
	}
	if b, _ := os.ReadFile(precious); string(b) != "new" {
		t.Errorf("what the link names holds %q", b)
	}
	if fi, err := os.Lstat(link); err != nil || fi.Mode()&os.ModeSymlink == 0 {
		t.Errorf("the link is %v, %v", fi, err)
	}
}
