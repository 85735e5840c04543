// Package invariants says whether this build checks its own bookkeeping and
// overwrites memory that is let go. Slow, for tests: go test -tags invariants.
package invariants
