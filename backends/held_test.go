package backends

import "testing"

// The driver's count is held against what was allocated.
func TestDoubt(t *testing.T) {
	for _, c := range []struct {
		u    HeldUsage
		want string
	}{
		{HeldUsage{Experts: 320, Allocated: 6_040_000_000, Driver: 82_000_000}, "warning: VRAM tier claims 6.04 GB but the driver reports 82 MB in use on device 0: experts are not in VRAM."},
		{HeldUsage{Experts: 320, Allocated: 6_040_000_000, Driver: 5_500_000_000}, ""},
		{HeldUsage{Experts: 320, Allocated: 6_040_000_000, Driver: 5_400_000_000}, "warning: VRAM tier claims 6.04 GB but the driver reports 5.40 GB in use on device 0: experts are not in VRAM."},
		{HeldUsage{Experts: 320, Allocated: 6_040_000_000, Driver: -1}, ""},
		{HeldUsage{Experts: 320, Allocated: 1_000_000_000, Driver: 2_000_000_000}, "warning: VRAM tier claims 1.00 GB but the driver reports 2.00 GB in use on device 0: something else of this process takes the rest; lower --vram if the device runs out of memory."},
		{HeldUsage{Allocated: 1_000_000, Driver: 0}, ""},
	} {
		if got := c.u.Doubt(0); got != c.want {
			t.Errorf("%+v:\n got %q\nwant %q", c.u, got, c.want)
		}
	}
}
