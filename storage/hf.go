package storage

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"

	"sluice/internal/safetensors"
)

// A Hugging Face model is a directory: config.json, one safetensors file or
// several shards, with an index of which tensor is in which or without, and the
// files of the tokenizer.
const (
	hfConfig = "config.json"
	hfIndex  = "model.safetensors.index.json"
	hfWhole  = "model.safetensors"
)

// hfTexts are the files beside the weights that are carried in the metadata, as
// "hf." and their name, so that a slab has them too.
var hfTexts = [...]string{
	hfConfig, "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
	"chat_template.jinja", "chat_template.json", "tokenizer.model", "tiktoken.model", "vocab.json", "merges.txt", "added_tokens.json",
}

const (
	maxText  = 64 << 20  // bytes of one of them; the largest tokenizers have 35 MB
	maxIndex = 256 << 20 // bytes of an index
)

// hfShard is how shards are named: a stem, the number from 1, the count.
var hfShard = regexp.MustCompile(`^(.*)-(\d{5})-of-(\d{5})\.safetensors$`)

// hfModel says whether path, a file or a directory, is of a Hugging Face model.
func hfModel(path string, isDir bool) bool {
	if isDir {
		_, err := os.Stat(filepath.Join(path, hfConfig))
		return err == nil
	}
	base := filepath.Base(path)
	return base == hfConfig || strings.HasSuffix(base, ".safetensors") || strings.HasSuffix(base, ".safetensors.index.json")
}

// openHF opens the model in a directory, or that a file in it is of.
func openHF(path string, isDir bool) (_ *Model, err error) {
	dir, named := path, ""
	if !isDir {
		dir, named = filepath.Split(path)
		dir = filepath.Clean(dir + ".")
	}
	m := &Model{Format: "safetensors", byName: map[string]int{}}
	defer func() {
		if err != nil {
			m.Close()
		}
	}()
	if m.Meta, err = hfMeta(dir); err != nil {
		return nil, err
	}
	names, index, err := hfFiles(dir, named)
	if err != nil {
		return nil, err
	}
	shards, err := m.openShards(dir, names)
	if err != nil {
		return nil, err
	}
	if index != nil {
		if err := index.fits(dir, names, shards); err != nil {
			return nil, err
		}
	}
	ts, err := m.compose(shards)
	if err != nil {
		return nil, err
	}
	return m, m.addTensors(ts)
}

// hfFiles lists the weight files of the model in dir, in order, and gives its
// index, nil if it has none. named is the file that was asked for, or "".
func hfFiles(dir, named string) ([]string, *hfWeights, error) {
	name := hfIndex
	if strings.HasSuffix(named, ".index.json") {
		name = named
	}
	path := filepath.Join(dir, name)
	b, err := readBounded(path, maxIndex)
	switch {
	case err == nil:
		index, err := parseIndex(path, b)
		if err != nil {
			return nil, nil, err
		}
		names := index.files()
		if strings.HasSuffix(named, ".safetensors") && !slices.Contains(names, named) {
			if named == hfWhole || hfShard.MatchString(named) {
				return nil, nil, &FormatError{File: path, Off: -1, Msg: fmt.Sprintf("the index does not know the file %q: it is of another model, or the index is; download the model again", named)}
			}
			break // a file beside the model
		}
		return names, index, nil
	case !errors.Is(err, fs.ErrNotExist) || name == named:
		return nil, nil, err
	}
	if names, err := coliFiles(dir, named); err != nil || names != nil {
		return names, nil, err
	}
	if !strings.HasSuffix(named, ".safetensors") {
		if named, err = soleWeights(dir); err != nil {
			return nil, nil, err
		}
	}
	parts := hfShard.FindStringSubmatch(named)
	if parts == nil {
		return []string{named}, nil, nil
	}
	n, _ := strconv.Atoi(parts[3])
	if no, _ := strconv.Atoi(parts[2]); no < 1 || no > n {
		return nil, nil, &FormatError{File: filepath.Join(dir, named), Off: -1, Msg: fmt.Sprintf("its name says that it is shard %d of %d: rename it back, or download it again", no, n)}
	}
	names := make([]string, n)
	for i := range names {
		names[i] = fmt.Sprintf("%s-%05d-of-%05d.safetensors", parts[1], i+1, n)
	}
	return names, nil, nil
}

// soleWeights finds the weights in a directory without an index: model.safetensors,
// or shards of one set, or the only file there is. Of shards it gives one.
func soleWeights(dir string) (string, error) {
	if _, err := os.Stat(filepath.Join(dir, hfWhole)); err == nil {
		return hfWhole, nil
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return "", fmt.Errorf("storage: %w", err)
	}
	sets := map[string]string{} // a file of each
	for _, e := range entries {
		if name := e.Name(); strings.HasSuffix(name, ".safetensors") {
			key := name
			if parts := hfShard.FindStringSubmatch(name); parts != nil {
				key = parts[1] + "/" + parts[3]
			}
			sets[key] = name
		}
	}
	switch len(sets) {
	case 0:
		return "", &FormatError{File: dir, Off: -1, Msg: "there is no .safetensors file in it: download the weights, or name a model file"}
	case 1:
		for _, name := range sets {
			return name, nil
		}
	}
	return "", &FormatError{File: dir, Off: -1, Msg: fmt.Sprintf("there are %d models in it (%s) and no %s: name one of the files", len(sets), short([]byte(strings.Join(slices.Sorted(maps.Values(sets)), ", "))), hfIndex)}
}

// hfWeights is an index: which file has which tensor.
type hfWeights struct {
	path string
	file map[string]string
}

// parseIndex reads an index. The files that it names are in the directory.
func parseIndex(path string, b []byte) (*hfWeights, error) {
	bad := func(format string, args ...any) (*hfWeights, error) {
		return nil, &FormatError{File: path, Off: -1, Msg: fmt.Sprintf(format, args...) + ": download the index again"}
	}
	files, err := safetensors.ParseIndex(b)
	if err != nil {
		return bad("it is no index of a model: %v", err)
	}
	if len(files) == 0 {
		return bad("it has no weight_map, or an empty one")
	}
	for _, f := range files {
		if f != filepath.Base(f) || !strings.HasSuffix(f, ".safetensors") {
			return bad("it names the file %.60q, which is no .safetensors file beside it", f)
		}
	}
	return &hfWeights{path, files}, nil
}

// files lists the files of an index in order.
func (x *hfWeights) files() []string {
	set := map[string]bool{}
	for _, f := range x.file {
		set[f] = true
	}
	return slices.Sorted(maps.Keys(set))
}

// fits checks that the shards have the tensors that the index says, and no others.
func (x *hfWeights) fits(dir string, names []string, shards [][]safetensors.Tensor) error {
	n := 0
	for i, ts := range shards {
		for _, t := range ts {
			f, known := x.file[t.Name]
			if f == names[i] {
				n++
				continue
			}
			words := fmt.Sprintf("the index puts it into %s", f)
			if !known {
				words = "the index does not have it"
			}
			return &FormatError{File: filepath.Join(dir, names[i]), Off: t.Off, Msg: fmt.Sprintf("tensor %.60q is in this shard, but %s: the shard is of another model; download it again", t.Name, words)}
		}
	}
	if n == len(x.file) { // then each name is there once
		return nil
	}
	have := map[string]bool{}
	for i, ts := range shards {
		for _, t := range ts {
			have[names[i]+"/"+t.Name] = true
		}
	}
	for _, name := range slices.Sorted(maps.Keys(x.file)) {
		if f := x.file[name]; !have[f+"/"+name] {
			return &FormatError{File: filepath.Join(dir, f), Off: -1, Msg: fmt.Sprintf("the index puts tensor %.60q into this shard, which does not have it: the shard is of another model; download it again", name)}
		}
	}
	return nil
}

// openShards opens the files and reads their headers, several at once.
func (m *Model) openShards(dir string, names []string) ([][]safetensors.Tensor, error) {
	shards, failed := make([][]safetensors.Tensor, len(names)), make([]error, len(names))
	m.Files = make([]File, len(names))
	var all sync.WaitGroup
	turn := make(chan struct{}, runtime.GOMAXPROCS(0))
	for i, name := range names {
		all.Go(func() {
			turn <- struct{}{}
			defer func() { <-turn }()
			path := filepath.Join(dir, name)
			m.Files[i].Path = path
			shards[i], failed[i] = m.Files[i].openSafetensors()
			if errors.Is(failed[i], fs.ErrNotExist) && len(names) > 1 {
				failed[i] = &FormatError{File: path, Off: -1, Msg: fmt.Sprintf("it is one of %d shards, and it is missing: put it beside the others", len(names))}
			}
		})
	}
	all.Wait()
	for _, err := range failed {
		if err != nil {
			return nil, err
		}
	}
	return shards, nil
}

// openSafetensors opens the file of f's path and reads its header. Offsets are
// absolute.
func (f *File) openSafetensors() ([]safetensors.Tensor, error) {
	var err error
	if f.f, err = openUnwaiting(f.Path); err != nil {
		return nil, fmt.Errorf("storage: open model: %w", err)
	}
	fi, err := f.f.Stat()
	if err != nil {
		return nil, fmt.Errorf("storage: open model: %w", err)
	}
	if !fi.Mode().IsRegular() {
		return nil, fmt.Errorf("storage: %s is not a regular file: a model is read at many positions, so it must lie on a drive", f.Path)
	}
	f.Size = fi.Size()
	bad := func(off int64, format string, args ...any) ([]safetensors.Tensor, error) {
		return nil, &FormatError{File: f.Path, Off: off, Msg: fmt.Sprintf(format, args...)}
	}
	var length [8]byte
	if f.Size < 8 {
		return bad(0, "a safetensors file begins with 8 bytes of length, and this one has %d: download it again", f.Size)
	}
	if _, err := readFull(f.f, length[:], 0); err != nil {
		return nil, fmt.Errorf("storage: read %s: %w", f.Path, err)
	}
	n := binary.LittleEndian.Uint64(length[:])
	if n > safetensors.MaxHeader || n > uint64(f.Size-8) {
		return bad(0, "its header says that it has %d bytes, but the file has %d, and %d is the limit: it is cut short or no safetensors file; download it again", n, f.Size, safetensors.MaxHeader)
	}
	b := make([]byte, n)
	if _, err := readFull(f.f, b, 8); err != nil {
		return nil, fmt.Errorf("storage: read %s: %w", f.Path, err)
	}
	f.head = 8 + int64(n)
	ts, err := safetensors.ParseHeader(b, f.Size-f.head)
	if err != nil {
		return bad(-1, "%v; download it again", err)
	}
	for i := range ts {
		ts[i].Off += f.head
	}
	if f.stamps, err = coliStamps(b); err != nil {
		return bad(-1, "%v", err)
	}
	return ts, nil
}

// hfMeta reads the files beside the weights.
func hfMeta(dir string) (Meta, error) {
	path := filepath.Join(dir, hfConfig)
	meta := newMeta(path)
	if abs, err := filepath.Abs(dir); err == nil {
		meta.add(KV{"general.name", filepath.Base(abs)}, -1)
	}
	for _, name := range hfTexts {
		b, err := readBounded(filepath.Join(dir, name), maxText)
		if errors.Is(err, fs.ErrNotExist) && name == hfConfig {
			return meta, &FormatError{File: path, Off: -1, Msg: "it is missing: a Hugging Face model has one beside its weights; download it too"}
		}
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return meta, err
		}
		if name == hfConfig {
			kvs, err := flattenConfig(path, b)
			if err != nil {
				return meta, err
			}
			for _, kv := range kvs {
				meta.add(kv, -1) // of a key given twice, the first counts
			}
		}
		meta.add(KV{"hf." + name, string(b)}, -1)
	}
	return meta, nil
}

// readBounded reads a file of at most so many bytes.
func readBounded(path string, most int64) ([]byte, error) {
	f, err := openUnwaiting(path)
	if err != nil {
		return nil, fmt.Errorf("storage: %w", err)
	}
	defer f.Close()
	fi, err := f.Stat()
	if err != nil {
		return nil, fmt.Errorf("storage: %w", err)
	}
	if !fi.Mode().IsRegular() || fi.Size() > most {
		return nil, &FormatError{File: path, Off: -1, Msg: fmt.Sprintf("it is no regular file of at most %d bytes", most)}
	}
	b, err := io.ReadAll(io.LimitReader(f, most+1))
	if err == nil && int64(len(b)) > most {
		err = &FormatError{File: path, Off: -1, Msg: fmt.Sprintf("it has more than %d bytes", most)}
	}
	if err != nil {
		return nil, fmt.Errorf("storage: read %s: %w", path, err)
	}
	return b, nil
}
