package doctor

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// A tree is the folder under which the files lie that Linux describes itself in.
type tree string

func (t tree) path(name string) string { return filepath.Join(string(t), name) }

// text is a file without the white space around it; "" if it cannot be read.
func (t tree) text(name string) string {
	b, err := os.ReadFile(t.path(name))
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
}

// number is a file of one number, decimal or with 0x.
func (t tree) number(name string) (int64, bool) {
	n, err := strconv.ParseInt(t.text(name), 0, 64)
	return n, err == nil
}

// field is what follows KEY and a colon in a file of such lines.
func (t tree) field(name, key string) string {
	for line := range strings.Lines(t.text(name)) {
		if k, v, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(k) == key {
			return strings.TrimSpace(v)
		}
	}
	return ""
}

// list is the names in a folder, sorted.
func (t tree) list(dir string) (names []string) {
	entries, err := os.ReadDir(t.path(dir))
	if err != nil {
		return nil
	}
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

func (t tree) has(name string) bool {
	_, err := os.Stat(t.path(name))
	return err == nil
}

// real is the name without symbolic links; "" if there is no such file.
func (t tree) real(name string) string {
	root := "/"
	if t != "" {
		var err error
		if root, err = filepath.EvalSymlinks(string(t)); err != nil {
			return ""
		}
	}
	full, err := filepath.EvalSymlinks(t.path(name))
	if err != nil {
		return ""
	}
	rel, err := filepath.Rel(root, full)
	if err != nil || strings.HasPrefix(rel, "..") {
		return ""
	}
	return "/" + rel
}
