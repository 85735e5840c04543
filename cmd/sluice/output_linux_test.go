package main

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// writers are the commands that write a file, ready but for the path.
func writers(t *testing.T) map[string][]string {
	return map[string][]string{
		"logits": {"logits", tinyGLM4, "--ids", file(t, "ids", "[1,2,3]"), "-o"},
		"synth":  {"synth", "--layers", "3", "--hidden", "64", "--experts", "4", "--ff", "32", "--vocab", tinyGLM4, "-o"},
	}
}

// TestFullDisk: where the room ends nothing is left behind, and what had the
// name stays as it was.
func TestFullDisk(t *testing.T) {
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=1m"); err != nil {
		t.Skipf("cannot mount a file system of 1 MB (needs root): %v", err)
	}
	defer unix.Unmount(dir, unix.MNT_DETACH)
	out := filepath.Join(dir, "out")
	for name, args := range map[string][]string{ // more than 1 MB each
		"logits": {"logits", demo, "--ids", file(t, "ids", "[1"+strings.Repeat(",7", 79)+"]"), "-o"},
		"synth":  {"synth", "--layers", "4", "--hidden", "256", "--experts", "8", "--ff", "128", "--vocab", demo, "-o"},
	} {
		r := sluice("", append(args, out)...)
		r.wants(t, exitError, "sluice "+name+": ", "write "+out+": no space for more than about ", "removed what was written: free some space or write elsewhere", "no space left on device")
		none(t, dir)
		if err := os.WriteFile(out, []byte("before"), 0o666); err != nil {
			t.Fatal(err)
		}
		sluice("", append(args, out, "--force")...).wants(t, exitError, "removed what was written")
		untouched(t, out)
		os.Remove(out)
	}
}

// TestOutputPath: where no file can be written.
func TestOutputPath(t *testing.T) {
	dir := t.TempDir()
	sub := filepath.Join(dir, "folder")
	if err := os.Mkdir(sub, 0o777); err != nil {
		t.Fatal(err)
	}
	for name, args := range writers(t) {
		for _, c := range []struct{ path, want string }{
			{filepath.Join(dir, "absent", "out"), "no such file or directory"},
			{sub, "is a directory"},
		} {
			sluice("", append(args, c.path)...).wants(t, exitError, "sluice "+name+": ", "create "+c.path+": ", c.want)
		}
		none(t, sub)
		if list, err := os.ReadDir(dir); err != nil || len(list) != 1 {
			t.Errorf("%v was left behind, %v", list, err)
		}
	}
}

// TestOutputDevice: a device is written to and not replaced.
func TestOutputDevice(t *testing.T) {
	before, err := os.Stat("/dev/full")
	if errors.Is(err, os.ErrNotExist) {
		t.Skip("this system has no /dev/full")
	}
	if err != nil {
		t.Fatal(err)
	}
	for name, args := range writers(t) {
		sluice("", append(args, "/dev/full")...).wants(t, exitError, "sluice "+name+": ", "/dev/full", "no space left on device")
		after, err := os.Stat("/dev/full")
		if err != nil || !os.SameFile(before, after) {
			t.Fatalf("%s replaced /dev/full: %v", name, err)
		}
		if _, err := os.Stat("/dev/full.part"); err == nil {
			t.Errorf("%s left /dev/full.part", name)
		}
		mustRun(t, append(args, "/dev/null")...)
	}
}

// TestOverwrite: an output takes the place of an older one.
func TestOverwrite(t *testing.T) {
	for name, args := range writers(t) {
		dir := t.TempDir()
		fresh, old := filepath.Join(dir, "fresh"), filepath.Join(dir, "old")
		if err := os.WriteFile(old, bytes.Repeat([]byte("before"), 1<<20), 0o666); err != nil {
			t.Fatal(err)
		}
		mustRun(t, append(args, fresh)...)
		mustRun(t, append(args, old, "--force")...)
		a, err := os.ReadFile(fresh)
		if err != nil {
			t.Fatal(err)
		}
		b, err := os.ReadFile(old)
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(a, b) {
			t.Errorf("%s: the old file was not replaced whole", name)
		}
		if list, err := os.ReadDir(dir); err != nil || len(list) != 2 {
			t.Errorf("%s left %v, %v", name, list, err)
		}
	}
}
