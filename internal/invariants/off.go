//go:build !invariants

package invariants

// Enabled is true in builds with -tags invariants.
const Enabled = false
