// Package npmtest fetches packages from the npm registry for tests that compare
// with another implementation. Nothing that it fetches is kept.
package npmtest

import (
	"archive/tar"
	"compress/gzip"
	"context"
	"errors"
	"io"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// Bounds of one fetch: the largest package has 60 MB, half of it one file.
const (
	maxFile   = 64 << 20
	fetchTime = 2 * time.Minute
)

// Fetch gives the folder of a package at one version, such as a@1.2.3, with its
// files whose names begin with one of keep. Where there is no npm or no network
// the test is skipped, and says so.
func Fetch(t testing.TB, spec string, keep ...string) string {
	t.Helper()
	if raceEnabled {
		t.Skip("SKIPPED: comparing with another implementation shows no race: run without -race")
	}
	npm, err := exec.LookPath("npm")
	if err != nil {
		t.Skip("SKIPPED: needs npm, to compare with another implementation: install Node.js and npm (apt-get install nodejs npm)")
	}
	dir := t.TempDir()
	ctx, cancel := context.WithTimeout(context.Background(), fetchTime)
	defer cancel()
	var stderr strings.Builder
	cmd := exec.CommandContext(ctx, npm, "pack", "--silent", "--ignore-scripts", "--pack-destination", dir, spec)
	cmd.Dir, cmd.Stderr = dir, &stderr
	if err := cmd.Run(); err != nil {
		t.Skipf("SKIPPED: needs the npm registry, to compare with another implementation: npm pack %s: %v %s", spec, err, strings.TrimSpace(stderr.String()))
	}
	archives, err := filepath.Glob(filepath.Join(dir, "*.tgz"))
	if err != nil || len(archives) != 1 {
		t.Fatalf("npm pack %s made the files %q", spec, archives)
	}
	if err := unpack(archives[0], dir, keep); err != nil {
		t.Fatalf("unpacking %s: %v", spec, err)
	}
	return dir
}

// unpack writes the files that are wanted below dir, and removes the archive.
func unpack(archive, dir string, keep []string) error {
	f, err := os.Open(archive)
	if err != nil {
		return err
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		return err
	}
	for r := tar.NewReader(z); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return os.Remove(archive)
		}
		if err != nil {
			return err
		}
		_, name, _ := strings.Cut(path.Clean(h.Name), "/") // after package/
		if h.Typeflag != tar.TypeReg || h.Size > maxFile || !filepath.IsLocal(name) || !wanted(name, keep) {
			continue
		}
		to := filepath.Join(dir, filepath.FromSlash(name))
		if err := os.MkdirAll(filepath.Dir(to), 0o777); err != nil {
			return err
		}
		b, err := io.ReadAll(r)
		if err != nil {
			return err
		}
		if err := os.WriteFile(to, b, 0o666); err != nil {
			return err
		}
	}
}

func wanted(name string, keep []string) bool {
	for _, prefix := range keep {
		if strings.HasPrefix(name, prefix) {
			return true
		}
	}
	return false
}

// Node runs a script of ours with arguments and gives what it prints.
func Node(t testing.TB, script string, args ...string) []byte {
	t.Helper()
	node, err := exec.LookPath("node")
	if err != nil {
		t.Skip("SKIPPED: needs node, to compare with another implementation: install Node.js (apt-get install nodejs)")
	}
	ctx, cancel := context.WithTimeout(context.Background(), fetchTime)
	defer cancel()
	var stderr strings.Builder
	cmd := exec.CommandContext(ctx, node, append([]string{script}, args...)...)
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("node %s: %v\n%s", script, err, stderr.String())
	}
	return out
}
