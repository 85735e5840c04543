// Package pci tells how fast the link of a device is, as Linux describes it in /sys.
package pci

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// A Link is a connection by PCI Express, as it is now and as the device could.
// Speeds are in GT/s; devices that idle lower theirs.
type Link struct {
	Width, MaxWidth int
	Speed, MaxSpeed float64
}

// Narrow says that lanes are missing, which no idling explains.
func (l Link) Narrow() bool { return l.Width > 0 && l.Width < l.MaxWidth }

func (l Link) String() string {
	return fmt.Sprintf("%d of %d lanes at %g of %g GT/s", l.Width, l.MaxWidth, l.Speed, l.MaxSpeed)
}

// Rate is what the lanes that it has carry in one direction at their full speed,
// bytes a second: what coding takes is off, what packets' headers take is not.
func (l Link) Rate() float64 {
	coded := 128.0 / 130
	switch {
	case l.MaxSpeed <= 5:
		coded = 8.0 / 10
	case l.MaxSpeed > 32:
		coded = 242.0 / 256
	}
	return float64(l.Width) * l.MaxSpeed * coded * 1e9 / 8
}

// Slowest is the slowest of the links from a device to the processor; nil: none is
// told. dir is the device's folder in /sys/devices, or that of something on it,
// without symbolic links.
func Slowest(dir string) (slowest *Link) {
	text := func(name string) string {
		b, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			return ""
		}
		return strings.TrimSpace(string(b))
	}
	for ; filepath.Base(dir) != "devices" && filepath.Dir(dir) != dir; dir = filepath.Dir(dir) {
		l := Link{Speed: speed(text("current_link_speed")), MaxSpeed: speed(text("max_link_speed"))}
		l.Width, _ = strconv.Atoi(text("current_link_width"))
		l.MaxWidth, _ = strconv.Atoi(text("max_link_width"))
		if l.Width <= 0 || l.Speed <= 0 {
			continue
		}
		if slowest == nil || float64(l.Width)*l.Speed < float64(slowest.Width)*slowest.Speed {
			slowest = &l
		} else if l.MaxSpeed > 0 && l.MaxSpeed < slowest.MaxSpeed {
			slowest.MaxSpeed = max(l.MaxSpeed, slowest.Speed) // a card that could more than its slot
		}
	}
	return slowest
}

// Of is the slowest link of the device at a PCI address, such as 0000:3d:00.0;
// nil: none is told. root is the folder under which /sys lies.
func Of(root, address string) *Link {
	if address == "" || address != filepath.Base(address) {
		return nil
	}
	dir, err := filepath.EvalSymlinks(filepath.Join(root, "/sys/bus/pci/devices", strings.ToLower(address)))
	if err != nil {
		return nil
	}
	return Slowest(dir)
}

// speed reads "16.0 GT/s PCIe": 0 if it is none.
func speed(text string) float64 {
	number, _, _ := strings.Cut(text, " ")
	v, err := strconv.ParseFloat(number, 64)
	if err != nil || !(v > 0 && v < 1e3) {
		return 0
	}
	return v
}
