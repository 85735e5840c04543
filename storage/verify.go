package storage

import (
	"context"
	"errors"
	"fmt"
	"hash/crc32"

	"sluice/internal/quant"
)

// A Finding is one thing that Verify found wrong.
type Finding struct {
	File   string
	Tensor string // "": the bytes belong to no tensor, or the expert as a whole is meant
	Key    Key    // the expert; -1, -1: none. Of a GGUF file, whose tensors know no layer, Layer is -1
	Off    int64
	Err    error // what, in words, with file and place where they help
}

// A Verification is the result of Verify.
type Verification struct {
	Bytes    int64 // read of the model, and as many of the other if it was compared
	Tensors  int   // that lie together
	Experts  int   // of a slab: with a checksum each
	Compared bool  // every byte was compared with the model that was packed
	Bad      []Finding
}

// verifyChunk bounds what is read at once of a tensor; a multiple of no block in
// particular, so it is rounded down to whole blocks.
const verifyChunk = 4 << 20

// Verify reads every byte of a model's weights. Of a GGUF file or a directory of
// safetensors it finds what
// cannot be read, and numbers that the arithmetic does not take. Of a slab also
// each checksum that does not fit, and, if packed is not nil, each byte that is
// not the model's that it was made of. It goes on after a finding; the error is
// that ctx ended, or that the two models cannot be compared.
func Verify(ctx context.Context, m, packed *Model, progress func(done, total int64)) (Verification, error) {
	v := &verifier{ctx: ctx, m: m, packed: packed, progress: progress}
	for _, f := range m.Files {
		v.total += f.Size
	}
	if packed != nil {
		if m.slab == nil || !sameTensors(packed, m) {
			return v.Verification, fmt.Errorf("storage: %s cannot be compared with %s: their tensors are not the same", m.Files[0].Path, packed.Files[0].Path)
		}
		v.Compared = true
	}
	err := v.all()
	return v.Verification, err
}

func (v *verifier) all() error {
	if v.m.slab != nil {
		return v.slab()
	}
	for k := range v.m.Tensors {
		v.Tensors++
		if err := v.tensor(k, nil); err != nil {
			return err
		}
	}
	return nil
}

type verifier struct {
	Verification
	ctx       context.Context
	m, packed *Model
	progress  func(done, total int64)
	total     int64
	buf, same []byte

	// The last share of packed that was made, of which tensor and expert.
	shareOf  []byte
	sharesOf string
	shareNo  int64
}

// room makes b n bytes long.
func room(b *[]byte, n int64) []byte {
	if int64(cap(*b)) < n {
		*b = make([]byte, n)
	}
	return (*b)[:n]
}

func (v *verifier) note(n int64) {
	v.Bytes += n
	if v.progress != nil {
		v.progress(v.Bytes, v.total)
	}
}

// tensor verifies a tensor that lies together, its checksum if it has one.
func (v *verifier) tensor(k int, sum *uint32) error {
	t := v.m.Tensors[k]
	if t.form != nil {
		return v.woven(t)
	}
	find := func(off int64, err error) {
		key := Key{-1, -1}
		if n := t.Dims[len(t.Dims)-1]; v.m.slab == nil && len(t.Dims) > 2 && n > 1 {
			key.Expert = int32((off - t.Off) / (t.Bytes / n)) // a stack, most likely of experts
		}
		v.Bad = append(v.Bad, Finding{v.m.Files[t.File].Path, t.Name, key, off, err})
	}
	_, block := t.Type.Block()
	chunk := int64(verifyChunk) / int64(block) * int64(block)
	got, ranged := uint32(0), false
	var differs error // from the model that was packed
	var differsAt int64
	for done := int64(0); done < t.Bytes; done += chunk {
		if err := v.ctx.Err(); err != nil {
			return err
		}
		b := room(&v.buf, min(chunk, t.Bytes-done))
		if err := v.m.read(b, t, t.Off+done); err != nil {
			find(t.Off+done, err)
			return nil
		}
		v.note(int64(len(b)))
		got = crc32.Update(got, castagnoli, b)
		if at, err := checkRange(t, b, done); err != nil && !ranged {
			ranged = true
			find(t.Off+at, err)
		}
		if v.packed != nil && differs == nil {
			differsAt, differs = v.compare(b, k, done)
		}
	}
	switch {
	case sum != nil && got != *sum:
		find(t.Off, &ChecksumError{File: v.m.Files[t.File].Path, Tensor: t.Name, Off: t.Off, Want: *sum, Got: got})
	case differs != nil:
		find(t.Off+differsAt, changed(differs))
	}
	return nil
}

// woven verifies a tensor that is made of others.
func (v *verifier) woven(t Tensor) error {
	n := t.Bytes / t.shares()
	ranged := false
	for e := range t.shares() {
		if err := v.ctx.Err(); err != nil {
			return err
		}
		key, at := Key{-1, -1}, t.form.from[0].of(e)
		if t.shares() > 1 {
			key.Expert = int32(e)
		}
		b := room(&v.buf, n)
		err := v.m.readShare(b, t, e)
		if err == nil {
			for _, src := range t.form.from {
				v.note(src.n)
			}
			if _, err = checkRange(t, b, e*n); ranged {
				err = nil
			}
			ranged = ranged || err != nil
		}
		if err != nil { // the bytes that it is of may be any of those that it is made of
			v.Bad = append(v.Bad, Finding{v.m.Files[at.file].Path, t.Name, key, at.off, err})
		}
	}
	return nil
}

// packedBytes gives n bytes of a tensor of the model that was packed, from its byte
// from on.
func (v *verifier) packedBytes(t Tensor, from, n int64) ([]byte, error) {
	if t.form == nil {
		other := room(&v.same, n)
		return other, v.packed.read(other, t, t.Off+from)
	}
	other, done := room(&v.same, n), int64(0)
	for share := t.Bytes / t.shares(); done < n; {
		e := (from + done) / share
		if v.sharesOf != t.Name || v.shareNo != e {
			v.sharesOf = ""
			v.shareOf = room(&v.shareOf, share)
			if err := v.packed.readShare(v.shareOf, t, e); err != nil {
				return nil, err
			}
			v.sharesOf, v.shareNo = t.Name, e
		}
		done += int64(copy(other[done:], v.shareOf[:share][from+done-e*share:]))
	}
	return other, nil
}

// changed says what a difference means where the slab's own checksum fits.
func changed(differs error) error {
	if differs == nil {
		return nil
	}
	return fmt.Errorf("%w, and the checksum made at packing fits: that model has changed since or is damaged; look at it before you pack it again", differs)
}

// compare compares b, which is tensor k from its byte from on, with the model
// that was packed, and says at which of its bytes they differ.
func (v *verifier) compare(b []byte, k int, from int64) (at int64, err error) {
	t, _ := v.packed.Tensor(v.m.Tensors[k].Name) // see sameTensors
	other, err := v.packedBytes(t, from, int64(len(b)))
	if err != nil {
		return from, err
	}
	i := differAt(b, other)
	if i < 0 {
		return 0, nil
	}
	at = from + int64(i)
	return at, fmt.Errorf("byte %d of the tensor is not that of %s", at, v.packed.Files[t.File].Path)
}

// checkRange finds the first number of b that the arithmetic does not take, and
// at which byte of tensor t its block begins, if b is t from its byte from on.
func checkRange(t Tensor, b []byte, from int64) (at int64, err error) {
	err = quant.Check(t.Type, b)
	if e, ok := err.(*quant.RangeError); ok {
		per, size := t.Type.Block()
		if t.Type.Kind() == quant.Float { // it counts elements
			at = from + int64(e.Index/per*size)
			e.Index += int(from) / size * per
		} else {
			at = from + int64(e.Index*size)
			e.Index += int(from) / size
		}
	}
	return at, err
}

// slab verifies every byte of a slab behind its header and index, which Open has
// verified.
func (v *verifier) slab() error {
	s := v.m.slab
	at := slabBlock + s.front()
	v.note(at)
	for _, it := range s.items() {
		if err := v.gap(at, it.off); err != nil {
			return err
		}
		at = it.off + it.n
		var err error
		if it.stack == nil {
			v.Tensors++
			err = v.tensor(it.tensor, it.sum)
		} else {
			v.Experts++
			err = v.expert(it)
		}
		if err != nil {
			return err
		}
	}
	return v.gap(at, s.size)
}

// gap verifies that there are zeros from byte at to end.
func (v *verifier) gap(at, end int64) error {
	file := v.m.Files[0]
	for ; at < end; at += verifyChunk {
		if err := v.ctx.Err(); err != nil {
			return err
		}
		b := room(&v.buf, min(verifyChunk, end-at))
		_, err := readFull(file.f, b, at)
		if err == nil && !allZero(b) {
			err = errors.New("bytes between the tensors are not zero: the file is damaged; pack the model again")
		}
		if err != nil {
			v.Bad = append(v.Bad, Finding{file.Path, "", Key{-1, -1}, at, err})
			return nil
		}
		v.note(int64(len(b)))
	}
	return nil
}

// expert verifies an expert of a slab.
func (v *verifier) expert(it item) error {
	if err := v.ctx.Err(); err != nil {
		return err
	}
	st := it.stack
	find := func(tensor string, off int64, err error) {
		v.Bad = append(v.Bad, Finding{v.m.Files[0].Path, tensor, Key{int32(st.layer), int32(it.expert)}, off, err})
	}
	b := room(&v.buf, it.n)
	err := v.m.readExpert(b, st, it.expert)
	if sum := (*ChecksumError)(nil); err == nil || errors.As(err, &sum) {
		v.note(it.n)
	}
	if err != nil {
		find("", it.off, err)
		return nil
	}
	for _, k := range st.parts {
		t := v.m.Tensors[k]
		off, share := t.at(it.expert, int64(st.experts))
		part := b[off-it.off:][:share]
		at, err := checkRange(t, part, 0)
		if err == nil && v.packed != nil {
			at, err = v.compare(part, k, it.expert*share)
			at -= it.expert * share
			err = changed(err)
		}
		if err != nil {
			find(t.Name, off+at, err)
		}
	}
	return nil
}
