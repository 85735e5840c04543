//go:build race

package npmtest

const raceEnabled = true
