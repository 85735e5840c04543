//go:build !race

package npmtest

const raceEnabled = false
