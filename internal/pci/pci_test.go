package pci

import (
	"math"
	"os"
	"path/filepath"
	"testing"
)

// tree makes a /sys in which a card hangs on a bridge, each with a link.
func tree(t *testing.T, card, bridge [4]string) string {
	root := t.TempDir()
	dir := filepath.Join(root, "sys/devices/pci0000:00/0000:00:01.0")
	for d, values := range map[string][4]string{dir: bridge, filepath.Join(dir, "0000:3d:00.0"): card} {
		if err := os.MkdirAll(d, 0o755); err != nil {
			t.Fatal(err)
		}
		for i, name := range []string{"current_link_width", "max_link_width", "current_link_speed", "max_link_speed"} {
			if values[i] == "" {
				continue
			}
			if err := os.WriteFile(filepath.Join(d, name), []byte(values[i]+"\n"), 0o644); err != nil {
				t.Fatal(err)
			}
		}
	}
	bus := filepath.Join(root, "sys/bus/pci/devices")
	if err := os.MkdirAll(bus, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("../../../devices/pci0000:00/0000:00:01.0/0000:3d:00.0", filepath.Join(bus, "0000:3d:00.0")); err != nil {
		t.Fatal(err)
	}
	return root
}

// The link is the slowest between a device and the processor, whoever says so.
func TestOf(t *testing.T) {
	fifth := [4]string{"16", "16", "32.0 GT/s PCIe", "32.0 GT/s PCIe"}
	for _, c := range []struct {
		name         string
		card, bridge [4]string
		want         Link
		gbps         float64
	}{
		{"whole", fifth, fifth, Link{16, 16, 32, 32}, 63.0},
		{"idle", [4]string{"16", "16", "2.5 GT/s PCIe", "16.0 GT/s PCIe"}, [4]string{}, Link{16, 16, 2.5, 16}, 31.5},
		{"a slot of the third generation", [4]string{"16", "16", "8.0 GT/s PCIe", "16.0 GT/s PCIe"}, [4]string{"16", "16", "8.0 GT/s PCIe", "8.0 GT/s PCIe"}, Link{16, 16, 8, 8}, 15.8},
		{"four lanes above it", fifth, [4]string{"4", "16", "16.0 GT/s PCIe", "16.0 GT/s PCIe"}, Link{4, 16, 16, 16}, 7.88},
		{"old", [4]string{"1", "1", "2.5 GT/s PCIe", "5.0 GT/s PCIe"}, [4]string{}, Link{1, 1, 2.5, 5}, 0.5},
		{"the sixth generation", [4]string{"16", "16", "64.0 GT/s PCIe", "64.0 GT/s PCIe"}, [4]string{}, Link{16, 16, 64, 64}, 121},
	} {
		l := Of(tree(t, c.card, c.bridge), "0000:3D:00.0")
		if l == nil || *l != c.want {
			t.Errorf("%s: %+v, want %+v", c.name, l, c.want)
		} else if got := l.Rate() / 1e9; math.Abs(got-c.gbps) > 0.01*c.gbps {
			t.Errorf("%s: %.2f GB/s, want %v", c.name, got, c.gbps)
		}
	}
	root := tree(t, [4]string{"0", "x", "Unknown", "1e9 GT/s"}, [4]string{})
	for _, address := range []string{"0000:3d:00.0", "0000:99:00.0", "", "../x"} {
		if l := Of(root, address); l != nil {
			t.Errorf("%q: %+v", address, l)
		}
	}
	if (Link{16, 16, 8, 8}).Narrow() || !(Link{4, 16, 8, 8}).Narrow() {
		t.Error("narrow is wrong")
	}
}
