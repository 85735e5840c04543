package storage

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"os"

	"golang.org/x/sys/unix"

	"sluice/internal/atomicfile"
	"sluice/internal/quant"
)

// PackOptions choose how Pack works. The zero value resumes and verifies.
type PackOptions struct {
	Restart  bool // throw away what an interrupted Pack left
	NoVerify bool // do not read the written bytes back
	// Progress, if not nil, hears now and then how far Pack is: of total bytes,
	// done are written, or read back.
	Progress func(what string, done, total int64)
	// Requantize gives tensors of F32, F16, BF16 or F8_128 another type, one that
	// quant.Encode has, by their names or, of experts, those of their parts. Such a
	// slab is none of the model: Sidecar does not take it.
	Requantize map[string]quant.Type

	// In tests: other sizes than packChunk and journal, and what stands before
	// every write to the file and says how much of it happens before it fails.
	chunk, journal int64
	fault          func(off int64, b []byte) (n int, err error)
}

// A PackReport is what Pack did.
type PackReport struct {
	Bytes    int64 // of the file
	Tensors  int   // that lie together
	Experts  int
	Resumed  int64 // bytes of them that an interrupted Pack had written
	Verified bool
}

const (
	packChunk = 1 << 20  // bytes copied at once
	journal   = 64 << 20 // bytes after which the checksums so far are written: what a kill costs
)

// A packer writes OUT.slab.part: header and front at once, then the items in
// their order. The checksums in the front are the journal: they are zero until
// their items are written, and say then whether those are right.
type packer struct {
	*slab
	m     *Model
	f     *os.File
	w     *bufio.Writer // at byte at
	at    int64
	opt   PackOptions
	done  int // items written
	noted int // of them, those whose checksums are in the file
	buf   []byte
	made  []byte // a share that is made of others
	enc   encoder
}

// Pack writes the model as a slab to out: the same tensors and metadata, but
// the matrices of each expert of layers together, so that one read brings it.
// No weight is changed, but those of opt.Requantize. Memory is constant.
//
// The file appears when it is whole. Until then it is out.part, which stays
// after an error or when ctx ends: the next Pack of the same model goes on
// from there, after it has verified what is there. A .part of another model is
// an error, unless opt.Restart.
func Pack(ctx context.Context, m *Model, layers []ExpertLayer, out string, opt PackOptions) (PackReport, error) {
	if m.Format == "slab" {
		return PackReport{}, fmt.Errorf("storage: pack %s: it is a slab already: name the model that it was made of", m.Files[0].Path)
	}
	if fi, err := os.Stat(out); err == nil {
		if !fi.Mode().IsRegular() {
			return PackReport{}, fmt.Errorf("storage: pack: %s is no regular file: name another output", out)
		}
		for _, f := range m.Files {
			if mine, err := f.f.Stat(); err == nil && os.SameFile(fi, mine) {
				return PackReport{}, fmt.Errorf("storage: pack: %s is the model itself: name another output", out)
			}
		}
	}
	s, err := layOut(m, layers, opt.Requantize, out)
	if err != nil {
		return PackReport{}, err
	}
	opt.chunk, opt.journal = cmp.Or(opt.chunk, packChunk), cmp.Or(opt.journal, journal)
	p := &packer{slab: s, m: m, opt: opt, buf: make([]byte, opt.chunk)}
	if p.f, err = atomicfile.OpenPart(out); err != nil {
		return PackReport{}, fmt.Errorf("storage: %w", err)
	}
	defer func() {
		if p.f != nil {
			p.f.Close()
		}
	}()
	r := PackReport{Bytes: s.size, Verified: !opt.NoVerify}
	for _, it := range s.items() {
		if it.stack == nil {
			r.Tensors++
		} else {
			r.Experts++
		}
	}
	if r.Resumed, err = p.begin(ctx, out); err != nil {
		return r, err
	}
	err = p.copyAll(ctx)
	if err == nil && !opt.NoVerify {
		err = p.readBack(ctx)
	}
	if err == nil {
		err = p.finish(out)
	}
	if err == nil {
		p.f = nil
		return r, nil
	}
	p.note() // if it fails, what was noted before stays true
	hint := ""
	if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
		hint = "free some space; "
	}
	return r, fmt.Errorf("storage: pack: stopped at item %d of %d: %w; %s.part stays: %sthe same command goes on with it", p.noted, len(s.sums), err, out, hint)
}

// begin makes the .part ready for the next item, and says how many bytes of
// items are there already.
func (p *packer) begin(ctx context.Context, out string) (resumed int64, err error) {
	name := out + ".part"
	fi, err := p.f.Stat()
	if err != nil {
		return 0, fmt.Errorf("storage: pack: %w", err)
	}
	old := make([]byte, slabBlock)
	if n := min(fi.Size(), slabBlock); !p.opt.Restart && n > 0 {
		if _, err := readFull(p.f, old[:n], 0); err != nil {
			return 0, fmt.Errorf("storage: pack: read %s: %w", name, err)
		}
	}
	first := p.header(partMagic, 0)
	i := 0
	for i < len(first) && old[i] == first[i] {
		i++
	}
	mine := p.opt.Restart || int64(i) >= min(fi.Size(), int64(len(partMagic))) // whatever else is there is somebody's
	if mine && i < len(first) && allZero(old[i:]) {                            // it was killed before the header was there
		return 0, p.fresh(name)
	}
	if err := p.sameModel(name, old, fi.Size()); err != nil {
		return 0, err
	}
	if err := p.f.Truncate(p.size); err != nil {
		return 0, fmt.Errorf("storage: pack: write %s: %w", name, err)
	}
	// The checksums may be of bytes that never reached the drive, or of a file
	// that was cut: the first item that is not right ends what is there.
	for _, it := range p.items() {
		sum, err := p.sumOf(ctx, it)
		if err != nil {
			return 0, fmt.Errorf("storage: pack: read %s: %w", name, err)
		}
		if sum != *it.sum {
			break
		}
		p.done++
		resumed += it.n
		p.progress("checking what is there", it)
	}
	if err := p.writeAt(first, 0); err != nil {
		return resumed, fmt.Errorf("storage: pack: write %s: %w", name, err)
	}
	p.noted = p.done
	p.seek()
	return resumed, nil
}

// fresh begins the file: its full size, front and header.
func (p *packer) fresh(name string) error {
	err := p.f.Truncate(0)
	if err == nil {
		err = p.writeAt([]byte(partMagic), 0) // whose it is
	}
	if err == nil {
		// Better to know now than after an hour that the space is not there. Where
		// it cannot be asked for beforehand, writing will tell.
		if e := unix.Fallocate(int(p.f.Fd()), 0, 0, p.size); e == unix.ENOSPC || e == unix.EDQUOT || e == unix.EFBIG {
			p.f.Truncate(0)
			os.Remove(name)
			return fmt.Errorf("storage: pack: %s needs %d bytes, which are not to be had there: free some space or write elsewhere: %w", name, p.size, e)
		}
		err = p.f.Truncate(p.size)
	}
	if err == nil {
		err = p.writeAt(p.frontData(), slabBlock)
	}
	if err == nil {
		err = p.writeAt(p.header(partMagic, 0), 0)
	}
	if err != nil {
		return fmt.Errorf("storage: pack: write %s: %w", name, err)
	}
	p.seek()
	return nil
}

// sameModel checks that the .part of size bytes, whose header is old, is one
// that this packing would have begun, and takes its checksums. It may be a
// whole slab already, or nearly one, that was not renamed.
func (p *packer) sameModel(name string, old []byte, size int64) error {
	const restart = "throw it away with --restart"
	le := binary.LittleEndian
	if magic := string(old[:atVersion]); magic[:6] != partMagic[:6] || size < slabBlock {
		return fmt.Errorf("storage: pack: %s is not what an interrupted packing leaves: name another output, or %s", name, restart)
	}
	files := le.Uint32(old[atSources:])
	records := make([]byte, min(size-slabBlock, int64(min(files, maxSources))*sourceSize))
	if _, err := readFull(p.f, records, slabBlock); err != nil {
		return fmt.Errorf("storage: pack: read %s: %w", name, err)
	}
	if id := p.source.Hash(); !bytes.Equal(id[:], old[atIdentity:atEnd]) {
		why, _ := decodeIdentity(records).Differs(p.source)
		return fmt.Errorf("storage: pack: %s is of another model: %s: go on as it was begun, or %s", name, why, restart)
	}
	// What finish changes in the header may have been written in part.
	now := p.header(partMagic, 0)
	copy(old[:atVersion], now)
	copy(old[atFrontSum:atIdentity], now[atFrontSum:])
	copy(old[atHeadSum:], now[atHeadSum:])
	front := make([]byte, p.front())
	if !bytes.Equal(old, now) || size < slabBlock+int64(len(front)) {
		return fmt.Errorf("storage: pack: %s was laid out by another version, or is damaged: %s", name, restart)
	}
	if _, err := readFull(p.f, front, slabBlock); err != nil {
		return fmt.Errorf("storage: pack: read %s: %w", name, err)
	}
	want := p.frontData()
	sums := front[p.sumsAt()-slabBlock:][:len(p.sums)*sumSize]
	for i := range p.sums {
		p.sums[i] = le.Uint32(sums[i*sumSize:])
	}
	clear(sums) // as they are in want
	if !bytes.Equal(front, want) {
		return fmt.Errorf("storage: pack: the index of %s is damaged: %s", name, restart)
	}
	return nil
}

// seek makes w write behind the items that are done.
func (p *packer) seek() {
	p.at = slabBlock + p.front()
	for i, it := range p.items() {
		if i == p.done {
			break
		}
		p.at = it.off + it.n
	}
	p.w = bufio.NewWriterSize(&writer{p, p.at}, int(p.opt.chunk))
}

// writer writes to the file from a position on.
type writer struct {
	p   *packer
	off int64
}

func (w *writer) Write(b []byte) (int, error) {
	if err := w.p.writeAt(b, w.off); err != nil {
		return 0, err
	}
	w.off += int64(len(b))
	return len(b), nil
}

func (p *packer) writeAt(b []byte, off int64) error {
	if p.opt.fault != nil {
		if n, err := p.opt.fault(off, b); err != nil {
			p.f.WriteAt(b[:n], off)
			return err
		}
	}
	_, err := p.f.WriteAt(b, off)
	return err
}

// zeros writes zeros up to byte end.
func (p *packer) zeros(end int64) error {
	clear(p.buf)
	for p.at < end {
		n, err := p.w.Write(p.buf[:min(end-p.at, p.opt.chunk)])
		p.at += int64(n)
		if err != nil {
			return err
		}
	}
	return nil
}

// copyAll writes the items that are not done.
func (p *packer) copyAll(ctx context.Context) error {
	last := p.at
	for i, it := range p.items() {
		if i < p.done {
			continue
		}
		if err := p.zeros(it.off); err != nil {
			return err
		}
		if err := p.copyItem(ctx, it); err != nil {
			return err
		}
		p.done = i + 1
		p.progress("packing", it)
		if p.at-last >= p.opt.journal {
			if err := p.note(); err != nil {
				return err
			}
			last = p.at
		}
	}
	if err := p.zeros(p.size); err != nil {
		return err
	}
	return p.note()
}

// copyItem writes one item and notes its checksum.
func (p *packer) copyItem(ctx context.Context, it item) error {
	sum := uint32(0)
	write := func(b []byte) error {
		if err := ctx.Err(); err != nil {
			return err
		}
		sum = crc32.Update(sum, castagnoli, b)
		k, err := p.w.Write(b)
		p.at += int64(k)
		return err
	}
	piece := func(t Tensor, off, n int64) error {
		for done := int64(0); done < n; {
			b := p.buf[:min(n-done, p.opt.chunk)]
			if err := p.m.read(b, t, off+done); err != nil {
				return err
			}
			if err := write(b); err != nil {
				return err
			}
			done += int64(len(b))
		}
		return nil
	}
	share := func(k int, e, n int64) error {
		t := p.from[k]
		if to := p.tensors[k].Type; to != t.Type {
			return p.requantize(ctx, t, to, e, n, write)
		}
		if t.form == nil {
			off, bytes := t.at(e, n)
			return piece(t, off, bytes)
		}
		if t.form.weave == unwoven {
			at := t.form.from[0].of(e)
			return piece(Tensor{Name: t.Name, File: at.file}, at.off, t.form.from[0].n)
		}
		made := room(&p.made, t.Bytes/n)
		if err := p.m.readShare(made, t, e); err != nil {
			return err
		}
		for ; len(made) > 0; made = made[min(p.opt.chunk, int64(len(made))):] {
			if err := write(made[:min(p.opt.chunk, int64(len(made)))]); err != nil {
				return err
			}
		}
		return nil
	}
	if it.stack == nil {
		t := p.from[it.tensor]
		n := int64(1)
		if t.form != nil {
			n = t.shares()
		}
		for e := range n {
			if err := share(it.tensor, e, n); err != nil {
				return err
			}
		}
		*it.sum = sum
		return nil
	}
	n := int64(it.stack.experts)
	for _, k := range it.stack.parts {
		off, _ := p.tensors[k].at(it.expert, n)
		pad := p.buf[:off-p.at]
		clear(pad)
		sum = crc32.Update(sum, castagnoli, pad)
		if err := p.zeros(off); err != nil {
			return err
		}
		t := p.from[k]
		if it.expert+1 < n { // while this is written
			for _, src := range t.sources(n) {
				if src.n == 0 {
					continue
				}
				next := src.of(it.expert + 1)
				unix.Fadvise(int(p.m.Files[next.file].f.Fd()), next.off, src.n, unix.FADV_WILLNEED)
			}
		}
		if err := share(k, it.expert, n); err != nil {
			return err
		}
	}
	*it.sum = sum
	return nil
}

// note brings the journal up to what is written.
func (p *packer) note() error {
	if err := p.w.Flush(); err != nil {
		return err
	}
	if p.noted == p.done {
		return nil
	}
	var b []byte
	for _, sum := range p.sums[p.noted:p.done] {
		b = binary.LittleEndian.AppendUint32(b, sum)
	}
	if err := p.writeAt(b, p.sumsAt()+int64(p.noted)*sumSize); err != nil {
		return err
	}
	p.noted = p.done
	return nil
}

// sumOf is the checksum of an item in the .part.
func (p *packer) sumOf(ctx context.Context, it item) (sum uint32, err error) {
	for done := int64(0); done < it.n; {
		if err := ctx.Err(); err != nil {
			return 0, err
		}
		b := p.buf[:min(it.n-done, p.opt.chunk)]
		if _, err := readFull(p.f, b, it.off+done); err != nil {
			return 0, err
		}
		sum = crc32.Update(sum, castagnoli, b)
		done += int64(len(b))
	}
	return sum, nil
}

// readBack reads all items from the drive and compares their checksums with
// those of the bytes that came from the model. What is wrong is written again
// by the next Pack.
func (p *packer) readBack(ctx context.Context) error {
	if err := p.f.Sync(); err != nil {
		return err
	}
	forget(p.f, 0, p.size)
	for _, it := range p.items() {
		sum, err := p.sumOf(ctx, it)
		if err == nil && sum != *it.sum {
			what := fmt.Sprintf("tensor %d", it.tensor)
			if it.stack != nil {
				what = Key{int32(it.stack.layer), int32(it.expert)}.String()
			}
			err = fmt.Errorf("%s, from byte %d on, reads back as other bytes than were written (CRC-32C %08x, not %08x): check the drive", what, it.off, sum, *it.sum)
		}
		if err != nil {
			return err
		}
		p.progress("verifying", it)
	}
	return nil
}

// finish writes the front with its checksum and the header that makes it a
// slab, and puts the file in place.
func (p *packer) finish(out string) error {
	now, err := p.m.identityOf(p.opt.Requantize)
	if err != nil {
		return err
	}
	if why, _ := p.source.Differs(now); why != "" {
		return fmt.Errorf("the model was changed while it was packed: %s", why)
	}
	front := p.frontData()
	if err := p.writeAt(front, slabBlock); err != nil {
		return err
	}
	if err := p.f.Sync(); err != nil { // before the header says that all is there
		return err
	}
	if err := p.writeAt(p.header(slabMagic, crc32.Checksum(front, castagnoli)), 0); err != nil {
		return err
	}
	if _, err = parseSlab(p.f, p.size, out+".part"); err == nil {
		err = atomicfile.Publish(p.f, out)
	}
	if err != nil { // a .part again
		p.noted = 0
	}
	return err
}

func (p *packer) progress(what string, it item) {
	if p.opt.Progress != nil {
		p.opt.Progress(what, it.off+it.n, p.size)
	}
}
