package storage

import (
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// An Identity tells a model from every other, without reading its weights.
type Identity struct{ Files []FileIdentity }

// A FileIdentity is that of one file.
type FileIdentity struct {
	Size   int64
	Time   int64             // of its last change, nanoseconds since 1970
	Header [sha256.Size]byte // SHA-256 of its header: metadata, names and places of tensors
}

// IsFile says whether it is of a file of weights. The others are of texts beside
// them, and of what a slab was requantized to.
func (f FileIdentity) IsFile() bool { return f.Time != 0 && f.Time != requantizedTime }

// Stamp is Time for people.
func (f FileIdentity) Stamp() string {
	return time.Unix(0, f.Time).UTC().Format("2006-01-02 15:04:05.999999999Z")
}

// Identity reads the headers again and looks at sizes and times. Of a slab, it is
// the identity of the model that was packed.
func (m *Model) Identity() (Identity, error) {
	if m.slab != nil {
		return m.slab.source, nil
	}
	var id Identity
	for _, f := range m.Files {
		fi, err := f.f.Stat()
		if err != nil {
			return id, fmt.Errorf("storage: %w", err)
		}
		h := sha256.New()
		if _, err := io.Copy(h, io.NewSectionReader(f.f, 0, f.head)); err != nil {
			return id, fmt.Errorf("storage: read the header of %s: %w", f.Path, err)
		}
		x := FileIdentity{Size: fi.Size(), Time: fi.ModTime().UnixNano()}
		h.Sum(x.Header[:0])
		id.Files = append(id.Files, x)
	}
	for _, name := range hfTexts { // what is read whole needs no time
		if text, ok := m.Meta.Value("hf." + name).(string); ok {
			id.Files = append(id.Files, FileIdentity{Size: int64(len(text)), Header: sha256.Sum256([]byte(name + "\n" + text))})
		}
	}
	return id, nil
}

// Hash is one number for the whole: SHA-256 over the files' records.
func (id Identity) Hash() [sha256.Size]byte { return sha256.Sum256(id.append(nil)) }

// append appends a record for each file: size u64, time i64, hash.
func (id Identity) append(b []byte) []byte {
	for _, f := range id.Files {
		b = binary.LittleEndian.AppendUint64(b, uint64(f.Size))
		b = binary.LittleEndian.AppendUint64(b, uint64(f.Time))
		b = append(b, f.Header[:]...)
	}
	return b
}

// decodeIdentity reads what append wrote.
func decodeIdentity(b []byte) (id Identity) {
	for ; len(b) >= sourceSize; b = b[sourceSize:] {
		f := FileIdentity{Size: int64(binary.LittleEndian.Uint64(b)), Time: int64(binary.LittleEndian.Uint64(b[8:]))}
		copy(f.Header[:], b[16:])
		id.Files = append(id.Files, f)
	}
	return id
}

// Differs says in words how a model that was packed as id is another one now;
// "" if it is not. timeOnly: no more than a copied or touched file would differ.
func (id Identity) Differs(now Identity) (words string, timeOnly bool) {
	switch was, is := id.requantized(), now.requantized(); {
	case was && !is:
		return "its weights were requantized", false
	case is && !was:
		return "its weights were not requantized", false
	}
	if len(id.Files) != len(now.Files) {
		return fmt.Sprintf("it was made of %d files, not %d", len(id.Files), len(now.Files)), false
	}
	for i, was := range id.Files {
		is, which := now.Files[i], "the model"
		if len(id.Files) > 1 {
			which = fmt.Sprintf("the model's file %d", i+1)
		}
		switch {
		case was.Time == requantizedTime && is != was:
			return "its weights were requantized to other types", false
		case was.Size != is.Size:
			return fmt.Sprintf("%s had another size, %d bytes and not %d", which, was.Size, is.Size), false
		case was.Header != is.Header:
			return which + " had another header", false
		case was.Time != is.Time && words == "":
			words = fmt.Sprintf("%s had another time, %s and not %s", which, was.Stamp(), is.Stamp())
		}
	}
	return words, words != ""
}

// SlabPath is where a model's slab belongs: beside it, under the same name with
// .slab in place of .gguf, without the number of a shard; in the directory of a
// Hugging Face model as model.slab.
func (m *Model) SlabPath() string { return m.stem() + ".slab" }

func (m *Model) stem() string {
	if m.directory() {
		return filepath.Join(filepath.Dir(m.Files[0].Path), "model")
	}
	return stem(m.Files[0].Path)
}

// stem is a model's path without what tells the format and the shard.
func stem(path string) string {
	dir, base := filepath.Split(path)
	if parts := shardName.FindStringSubmatch(base); parts != nil {
		return dir + parts[1]
	}
	return strings.TrimSuffix(path, ".gguf")
}

// Sidecar opens the slab beside a model, MODEL.slab or MODEL.gguf.slab, if there
// is one of the very same model; else it is nil. words say why one that is there
// is not used.
func (m *Model) Sidecar() (side *Model, words string) {
	if m.Format == "slab" {
		return nil, ""
	}
	base := m.stem()
	for _, path := range []string{base + ".slab", base + ".gguf.slab"} {
		fi, err := os.Stat(path)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err == nil && !fi.Mode().IsRegular() { // to open a pipe would wait for its other end
			words = fmt.Sprintf("slab %s is not used: it is no regular file", path)
			continue
		}
		side, why := m.sidecar(path)
		if why == "" {
			return side, ""
		}
		words = fmt.Sprintf("slab %s is not used: %s", path, why)
	}
	return nil, words
}

func (m *Model) sidecar(path string) (side *Model, why string) {
	side, err := openSlab(path)
	if err != nil {
		return nil, err.Error()
	}
	now, err := m.Identity()
	if other := side.Requantized(); other != "" {
		why = "its weights were requantized (" + other + "), so it gives other logits: name it as MODEL to use it"
	} else if err != nil {
		why = err.Error()
	} else if words, timeOnly := side.slab.source.Differs(now); timeOnly {
		why = words + ": pack the model again; if it was only copied or touched, sluice verify " + path + " compares the bytes, and naming the slab as MODEL uses it"
	} else if words != "" {
		why = words + ": pack the model again"
	} else if !sameTensors(m, side) {
		why = "its tensors are not those of the model: pack the model again"
	}
	if why != "" {
		side.Close()
		return nil, why
	}
	return side, ""
}

// sameTensors says whether a slab has the tensors of a model, which must be of the
// same names, types and shapes. In place of those that an expert's parts are made
// of it has the parts.
func sameTensors(m, slab *Model) bool {
	if !m.directory() && len(m.Tensors) != len(slab.Tensors) {
		return false
	}
	for _, x := range slab.Tensors {
		y, ok := m.Tensor(x.Name)
		if !ok || x.Type != y.Type || !slices.Equal(x.Dims, y.Dims) {
			return false
		}
	}
	return true
}

// Unpacked opens the model that lies beside a slab under its name; it may be
// another than the one that was packed. Nil: there is none.
func (m *Model) Unpacked() (*Model, error) {
	if m.Format != "slab" {
		return nil, nil
	}
	base := strings.TrimSuffix(strings.TrimSuffix(m.Files[0].Path, ".slab"), ".gguf")
	dir, name := filepath.Split(base)
	if m.Meta.Has("hf." + hfConfig) {
		if dir = filepath.Clean(dir + "."); !hfModel(dir, true) {
			return nil, nil
		}
		return openHF(dir, true)
	}
	first := base + ".gguf"
	if _, err := os.Stat(first); errors.Is(err, fs.ErrNotExist) {
		entries, err := os.ReadDir(filepath.Clean(dir + "."))
		if err != nil {
			return nil, fmt.Errorf("storage: %w", err)
		}
		first = ""
		for _, e := range entries {
			if parts := shardName.FindStringSubmatch(e.Name()); parts != nil && parts[1] == name && parts[2] == "00001" {
				first = filepath.Join(dir, e.Name())
			}
		}
		if first == "" {
			return nil, nil
		}
	}
	return openGGUF(first)
}
