package tiers

import (
	"context"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"sluice/storage"
)

// resident counts the pages of b that are in memory.
func resident(t *testing.T, b []byte) (n int) {
	t.Helper()
	page := unix.Getpagesize()
	vec := make([]byte, (len(b)+page-1)/page)
	if _, _, no := unix.Syscall(unix.SYS_MINCORE, uintptr(unsafe.Pointer(unsafe.SliceData(b))), uintptr(len(b)), uintptr(unsafe.Pointer(&vec[0]))); no != 0 {
		t.Fatal(no)
	}
	for _, v := range vec {
		n += int(v & 1)
	}
	return n
}

// fill uses every expert of every layer once.
func fill(t *testing.T, c *Cache) {
	t.Helper()
	for l, layer := range c.layers {
		var keys, uses []int32
		for e := range layer.experts {
			keys, uses = append(keys, int32(e)), append(uses, 1)
		}
		s, err := c.Begin(context.Background(), l, keys, uses)
		if err != nil {
			t.Fatal(err)
		}
		compute(t, s)
	}
}

// A smaller cap gives the memory back at once, keeps the bytes of who stays,
// and the ledger follows.
func TestShrinkGivesMemoryBack(t *testing.T) {
	el, fl := small(4, 64)
	for l := range fl {
		fl[l] = fakeLayer{3 * 8192, 8000} // a slot is 24 KiB, the arena 5 MiB: more than a huge page
	}
	f := newFake(t, storage.Slab, fl)
	f.pick = func(int) int { return 0 }
	led := NewLedger(0)
	c := open(t, f, Options{Cap: 60, TopK: 2, Layers: el, Ledger: led})
	cl := c.classes[0]
	fill(t, c)
	page := unix.Getpagesize()
	for _, limit := range []int{40, 7, 1} {
		c.Shrink(limit)
		n := limit*4 + 2
		bytes := int64(n) * cl.size.Bytes
		if got := led.Of(LRU) + led.Of(Staging); got != bytes || led.Total() != bytes {
			t.Errorf("cap %d: %d bytes granted, want %d", limit, got, bytes)
		}
		if got, want := resident(t, cl.arena)*page, int(bytes); got < want || got > want+page {
			t.Errorf("cap %d: %d bytes are resident, want %d", limit, got, want)
		}
		if st := c.Stats(); cl.kept.n != limit*4 || st.Cap != limit || len(cl.slots) != n {
			t.Errorf("cap %d: %d experts, %d slots, %+v", limit, cl.kept.n, len(cl.slots), st)
		}
		for k, s := range cl.kept.all() {
			if err := f.verify(k, &s.fetch.Parts); err != nil {
				t.Fatal(err)
			}
		}
		c.check()
	}
	fill(t, c) // in waves, through what is left
	if st := c.Stats(); st.CapChanges != 3 {
		t.Errorf("%+v", st)
	}
}

// strained are the files of a machine with a cgroup of version 2.
func strained(t *testing.T) (m Memory, write func(name, text string)) {
	m = tree(t, map[string]string{
		"/proc/meminfo":                   "MemTotal: 65000000 kB\nMemAvailable:   48000000 kB\nCommitLimit: 5 kB\n",
		"/proc/pressure/memory":           "some avg10=0.00 avg60=0.00 avg300=0.00 total=0\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=0\n",
		"/proc/self/cgroup":               "0::/a\n",
		"/proc/self/mountinfo":            mountsV2,
		"/sys/fs/cgroup/a/memory.max":     "max\n",
		"/sys/fs/cgroup/a/memory.high":    "max\n",
		"/sys/fs/cgroup/a/memory.stat":    "anon 7\nfile 9\ninactive_file 50\nactive_file 3\n",
		"/sys/fs/cgroup/a/memory.current": "2900\n",
		"/sys/fs/cgroup/a/memory.pressure": "some avg10=0.00 avg60=0.00 avg300=0.00 total=0\n" +
			"full avg10=0.00 avg60=0.00 avg300=0.00 total=0\n",
	})
	return m, func(name, text string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(m.Root, name), []byte(text), 0o666); err != nil {
			t.Fatal(err)
		}
	}
}

func TestGauge(t *testing.T) {
	m, write := strained(t)
	g, err := m.Gauge()
	if err != nil {
		t.Fatal(err)
	}
	defer g.Close()
	look := func(want Strain) {
		t.Helper()
		got, err := g.Read()
		if err != nil || got != want {
			t.Errorf("%+v, %v; want %+v", got, err, want)
		}
	}
	const mem = 48000000 << 10
	look(Strain{Known: true, Available: mem})
	write("/proc/pressure/memory", "some avg10=14.23 avg60=0.00 avg300=0.00 total=0\n")
	look(Strain{Known: true, Machine: 14.23, Available: mem})
	write("/sys/fs/cgroup/a/memory.pressure", "some avg10=99.00 avg60=0.00 avg300=0.00 total=0\n")
	look(Strain{Known: true, Machine: 14.23, Group: 99, Available: mem})
	write("/sys/fs/cgroup/a/memory.high", "4000\n")
	look(Strain{Known: true, Machine: 14.23, Group: 99, Available: 1150})
	write("/sys/fs/cgroup/a/memory.max", "3000\n")
	look(Strain{Known: true, Machine: 14.23, Group: 99, Available: 150})
	if n := testing.AllocsPerRun(20, func() { g.Read() }); n != 0 {
		t.Errorf("a look allocates %v times", n)
	}
	// The same as is said at the start.
	if room, err := m.Available(); err != nil || room.Bytes != 150 {
		t.Errorf("%+v, %v", room, err)
	}

	for name, text := range map[string]string{
		"/proc/pressure/memory":           "some avg60=0.00\n",
		"/proc/meminfo":                   "MemTotal: 5 kB\n",
		"/sys/fs/cgroup/a/memory.max":     "much\n",
		"/sys/fs/cgroup/a/memory.current": "-3\n",
		"/sys/fs/cgroup/a/memory.stat":    "",
	} {
		before, err := os.ReadFile(filepath.Join(m.Root, name))
		if err != nil {
			t.Fatal(err)
		}
		write(name, text)
		if s, err := g.Read(); err == nil || !strings.Contains(err.Error(), filepath.Base(name)) {
			t.Errorf("%s says %q: %+v, %v", name, text, s, err)
		}
		write(name, string(before))
	}
	if _, err := g.Read(); err != nil {
		t.Error(err)
	}

	// A kernel that tells nothing of pressure and has no cgroups.
	plain := tree(t, map[string]string{"/proc/meminfo": meminfo})
	h, err := plain.Gauge()
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	if s, err := h.Read(); err != nil || s != (Strain{Available: mem}) {
		t.Errorf("%+v, %v", s, err)
	}
	if _, err := tree(t, nil).Gauge(); err == nil {
		t.Error("a machine without /proc/meminfo is watched")
	}
	// This one.
	own, err := Memory{}.Gauge()
	if err != nil {
		t.Fatal(err)
	}
	defer own.Close()
	if s, err := own.Read(); err != nil || s.Available <= 0 {
		t.Errorf("%+v, %v", s, err)
	}
}

// The cap follows the files, in words: by a quarter, by what is missing, never
// below 1, and not again before the figures can show what came of it.
func TestWatch(t *testing.T) {
	const floor = 1 << 20
	m, write := strained(t)
	g, err := m.Gauge()
	if err != nil {
		t.Fatal(err)
	}
	defer g.Close()
	w := &Watch{floor: floor} // whose goroutine is this one
	el, fl := small(4, 40)
	f := newFake(t, storage.Slab, fl)
	f.pick = func(int) int { return 0 }
	c := open(t, f, Options{Cap: 32, TopK: 2, Layers: el, Watch: w})
	tick := func(n int) (words string) {
		for range n {
			w.look(g)
		}
		c.Adapt()
		return strings.Join(c.Notices(), "; ")
	}
	pressed := func(file, avg10 string) { write(file, "some avg10="+avg10+" avg60=0.00 avg300=0.00 total=0\n") }
	want := func(limit int, got, words string) {
		t.Helper()
		if got != words || c.Stats().Cap != limit {
			t.Errorf("cap %d, %q; want cap %d, %q", c.Stats().Cap, got, limit, words)
		}
	}
	want(32, tick(3), "")
	pressed("/proc/pressure/memory", "14.20") // of others, while there is plenty
	pressed("/sys/fs/cgroup/a/memory.pressure", "27.80")
	want(32, tick(3), "")
	pressed("/sys/fs/cgroup/a/memory.pressure", "0.00")
	write("/proc/meminfo", "MemAvailable: 4096 kB\n")
	want(24, tick(1), "cap lowered 32 -> 24 (memory pressure: some avg10 14.2 %, available 0.0 GB)")
	want(24, tick(10), "")
	want(18, tick(1), "cap lowered 24 -> 18 (memory pressure: some avg10 14.2 %, available 0.0 GB)")
	pressed("/proc/pressure/memory", "9.90")
	want(18, tick(12), "")
	pressed("/sys/fs/cgroup/a/memory.pressure", "10.00")
	want(14, tick(1), "cap lowered 18 -> 14 (memory pressure: some avg10 10.0 %, available 0.0 GB)")
	pressed("/sys/fs/cgroup/a/memory.pressure", "0.00")
	want(14, tick(11), "")
	// 2 MiB are wanted back, 1000 KiB there: 1048 KiB are 262 slots of 4 KiB, more
	// than there are.
	write("/proc/meminfo", "MemAvailable: 1000 kB\n")
	want(1, tick(1), "cap lowered 14 -> 1 (memory pressure: some avg10 9.9 %, available 0.0 GB)")
	want(1, tick(20), "")
	fill(t, c)
	write("/proc/meminfo", "MemFree: 5 kB\n")
	if got := tick(1); !strings.HasPrefix(got, "memory is no longer watched, the cap stays: ") {
		t.Errorf("%q", got)
	}
}

// What is missing decides where a quarter is not enough.
func TestAdaptByBytes(t *testing.T) {
	el, fl := small(4, 40)
	c := open(t, newFake(t, storage.Slab, fl), Options{Cap: 32, TopK: 2, Layers: el, Watch: &Watch{floor: 100 << 12}})
	c.opt.Watch.find(Strain{Available: 90 << 12}) // 110 slots are missing: 28 of each of 4 layers
	c.Adapt()
	if got := c.Stats().Cap; got != 4 {
		t.Errorf("cap %d, want 4", got)
	}
	c.opt.Watch.find(Strain{Available: 0})
	c.Adapt()
	c.opt.Watch.find(Strain{Available: 0})
	c.Adapt()
	if got := c.Notices(); c.Stats().Cap != 1 || len(got) != 2 || got[1] != "cap lowered 4 -> 1 (memory pressure: available 0.0 GB)" {
		t.Errorf("cap %d, %q", c.Stats().Cap, got)
	}
}

func TestWatchEnds(t *testing.T) {
	before := runtime.NumGoroutine()
	w, err := NewWatch(Memory{}, Floor(1<<30))
	if err != nil {
		t.Fatal(err)
	}
	w.Close()
	for runtime.NumGoroutine() > before {
		runtime.Gosched()
	}
	if _, err := NewWatch(tree(t, nil), 1); err == nil {
		t.Error("nothing is watched")
	}
	if Floor(48<<30) != 64<<20 || Floor(512<<20) != 32<<20 {
		t.Error(Floor(48<<30), Floor(512<<20))
	}
}
