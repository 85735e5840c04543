package tiers

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"

	"sluice/internal/atomicfile"
)

// A ModelID says of which model a usage history is.
type ModelID struct {
	Name string // as people call it: architecture and name
	Hash string // SHA-256 of what decides which expert is which, in hex
}

// Identify makes the identity of a model: a hash over its architecture, the
// tables of its experts, and every tensor's name, type and dims. Where the
// tensors lie and what their bytes are does not enter: a copy, a split and a
// file of other weights of the same shape have one identity.
func Identify(arch, name string, m *Model, layers []ExpertLayer) ModelID {
	h := sha256.New()
	fmt.Fprintf(h, "%q\n", arch)
	for _, l := range layers {
		fmt.Fprintf(h, "%d %d %q\n", l.Layer, l.Experts, l.Parts)
	}
	order := make([]int, len(m.Tensors))
	for i := range order {
		order[i] = i
	}
	slices.SortFunc(order, func(a, b int) int { return cmp.Compare(m.Tensors[a].Name, m.Tensors[b].Name) })
	for _, i := range order {
		t := &m.Tensors[i]
		fmt.Fprintf(h, "%q %v %d\n", t.Name, t.Type, t.Dims)
	}
	if name == "" {
		name = "unnamed"
	}
	return ModelID{Name: arch + " " + strings.Join(strings.Fields(name), " "), Hash: hex.EncodeToString(h.Sum(nil))}
}

// A History is a history of which experts a model's router chose: a count for
// each expert of each layer. It chooses the sets of VRAM and of the pinned tier.
type History struct {
	model  ModelID
	layers []ExpertLayer
	counts [][]int64 // of layers, by expert
}

// NewHistory is an empty history.
func NewHistory(model ModelID, layers []ExpertLayer) *History {
	u := &History{model: model, layers: layers}
	for _, l := range layers {
		u.counts = append(u.counts, make([]int64, l.Experts))
	}
	return u
}

// Total is the sum of all counts.
func (u *History) Total() (n int64) {
	for _, layer := range u.counts {
		for _, c := range layer {
			n += c
		}
	}
	return n
}

// Count is how often an expert was chosen.
func (u *History) Count(k Key) int64 {
	for i, l := range u.layers {
		if l.Layer == int(k.Layer) {
			return u.counts[i][k.Expert]
		}
	}
	return 0
}

// Frequency gives the share of a layer's positions that chose an expert, 0 to 1,
// for a model of this top-k.
func (u *History) Frequency(topK int) func(Key) float64 {
	positions := make(map[int32]float64)
	for i, l := range u.layers {
		for _, n := range u.counts[i] {
			positions[int32(l.Layer)] += float64(n) / float64(topK)
		}
	}
	return func(k Key) float64 {
		n := u.Count(k)
		if n == 0 {
			return 0
		}
		return min(1, float64(n)/positions[k.Layer])
	}
}

// Ranked lists all experts, the most used first. Among equals the lower expert
// comes first, then the lower layer, so that what was never used is spread over
// the layers.
func (u *History) Ranked() []Key {
	type ranked struct {
		Key
		n int64
	}
	var all []ranked
	for i, l := range u.layers {
		for e, n := range u.counts[i] {
			all = append(all, ranked{Key{Layer: int32(l.Layer), Expert: int32(e)}, n})
		}
	}
	slices.SortFunc(all, func(a, b ranked) int {
		return cmp.Or(cmp.Compare(b.n, a.n), cmp.Compare(a.Expert, b.Expert), cmp.Compare(a.Layer, b.Layer))
	})
	keys := make([]Key, len(all))
	for i, r := range all {
		keys[i] = r.Key
	}
	return keys
}

// TakeUses adds what the router has chosen since it was last asked, or since
// New, to a history of the same layers. The cache's user calls it.
func (c *Cache) TakeUses(u *History) {
	for i, l := range u.layers {
		uses := c.layers[l.Layer].uses
		for e, n := range uses {
			u.counts[i][e] += n
		}
		clear(uses)
	}
}

// Counts are plain sums, so that a history can be checked by hand and does not
// depend on how many runs it came from. They are halved as soon as they reach
// usageMost: then what is older weighs less and less, and a change of habits
// shows after as much again. 2^32 choices are some ten million tokens of a
// model of 48 layers and top-8.
const usageMost = 1 << 32

func (u *History) age() {
	for u.Total() >= usageMost {
		for _, layer := range u.counts {
			for e := range layer {
				layer[e] /= 2
			}
		}
	}
}

// The file is text:
//
//	sluice usage 1
//	model ARCH NAME
//	identity HASH
//	layer NUMBER COUNT COUNT ...
//	sha256 HASH
//
// with a line for each MoE layer and a count for each of its experts. The last
// line is the SHA-256 of all bytes before it.
const (
	usageMagic = "sluice usage "
	usageFirst = usageMagic + "1\n"
	usageBytes = 64 << 20 // more than any model's; what is longer is no usage file
)

func (u *History) text() (text []byte, hash string) {
	var b bytes.Buffer
	fmt.Fprintf(&b, "%smodel %s\nidentity %s\n", usageFirst, u.model.Name, u.model.Hash)
	for i, l := range u.layers {
		fmt.Fprintf(&b, "layer %d", l.Layer)
		for _, n := range u.counts[i] {
			b.WriteByte(' ')
			b.WriteString(strconv.FormatInt(n, 10))
		}
		b.WriteByte('\n')
	}
	sum := sha256.Sum256(b.Bytes())
	hash = hex.EncodeToString(sum[:])
	fmt.Fprintf(&b, "sha256 %s\n", hash)
	return b.Bytes(), hash
}

// Write puts the history into a file, whole or not at all, and returns the hash
// in its last line.
func (u *History) Write(path string) (hash string, err error) {
	u.age()
	text, hash := u.text()
	f, err := atomicfile.Create(path)
	if err != nil {
		return "", fmt.Errorf("tiers: usage history: %w", err)
	}
	if _, err = f.Write(text); err == nil {
		err = f.Commit()
	}
	if err != nil {
		return "", fmt.Errorf("tiers: usage history: %w", err)
	}
	return hash, nil
}

// A HistoryError says what is wrong with a usage file.
type HistoryError struct {
	Path string
	Line int // 0: the whole file
	Msg  string
}

func (e *HistoryError) Error() string {
	if e.Line == 0 {
		return fmt.Sprintf("tiers: usage file %s: %s", e.Path, e.Msg)
	}
	return fmt.Sprintf("tiers: usage file %s: line %d: %s", e.Path, e.Line, e.Msg)
}

// ReadHistory reads a history of the model from a file, and the hash in its last
// line. A file that is damaged, of another version or of another model is a
// *HistoryError; one that is not there fs.ErrNotExist.
func ReadHistory(path string, model ModelID, layers []ExpertLayer) (u *History, hash string, err error) {
	fi, err := os.Stat(path)
	if err != nil {
		return nil, "", fmt.Errorf("tiers: usage history: %w", err)
	}
	if !fi.Mode().IsRegular() || fi.Size() > usageBytes {
		return nil, "", &HistoryError{path, 0, "it is no file that sluice has written: name another"}
	}
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, "", fmt.Errorf("tiers: usage history: %w", err)
	}
	return parseHistory(path, string(text), model, layers)
}

func parseHistory(path, text string, model ModelID, layers []ExpertLayer) (*History, string, error) {
	bad := func(line int, format string, args ...any) (*History, string, error) {
		return nil, "", &HistoryError{path, line, fmt.Sprintf(format, args...)}
	}
	first, rest, _ := strings.Cut(text, "\n")
	if first+"\n" != usageFirst {
		if version, ok := strings.CutPrefix(first, usageMagic); ok {
			return bad(1, "it is of version %.20q, this program knows version 1: use the program that wrote it, or another file", version)
		}
		return bad(1, "it is no usage history: name another file, or one that does not exist yet")
	}
	// The hash comes first: what follows need not ask whether a cut made it so.
	const sumLine = len("sha256 ") + 2*sha256.Size + 1
	if len(text) < sumLine || !strings.HasPrefix(text[len(text)-sumLine:], "sha256 ") || text[len(text)-1] != '\n' {
		return bad(0, "its end is missing: it was cut short; remove it to begin a new history")
	}
	body := text[:len(text)-sumLine]
	sum := sha256.Sum256([]byte(body))
	hash := hex.EncodeToString(sum[:])
	if text[len(body)+len("sha256 "):len(text)-1] != hash {
		return bad(0, "its bytes are not those that were written (SHA-256 %s): remove it to begin a new history", hash)
	}
	lines := strings.Split(strings.TrimSuffix(rest[:len(body)-len(usageFirst)], "\n"), "\n")
	if len(lines) < 2 || !strings.HasPrefix(lines[0], "model ") || !strings.HasPrefix(lines[1], "identity ") {
		return bad(2, "it names no model")
	}
	if got := lines[1][len("identity "):]; got != model.Hash {
		return bad(2, "it is of the model %.200q (%.16s), this one is %q (%.16s): use a file of its own for each model", lines[0][len("model "):], got, model.Name, model.Hash)
	}
	u := NewHistory(model, layers)
	lines = lines[2:]
	if len(lines) != len(layers) {
		return bad(0, "it has %d layers, the model %d", len(lines), len(layers))
	}
	for i, l := range layers {
		at := i + 4
		f := strings.Fields(lines[i])
		if len(f) != 2+l.Experts || f[0] != "layer" || f[1] != strconv.Itoa(l.Layer) {
			return bad(at, "want the %d counts of layer %d", l.Experts, l.Layer)
		}
		for e := range u.counts[i] {
			n, err := strconv.ParseUint(f[2+e], 10, 64)
			if err != nil || n > usageMost {
				return bad(at, "count %.40q of expert %d: want 0 to %d", f[2+e], e, int64(usageMost))
			}
			u.counts[i][e] = int64(n)
		}
	}
	return u, hash, nil
}
