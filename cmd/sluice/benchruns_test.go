package main

import "testing"

// What the benches of fresh processes have in common they refuse alike.
func TestBenchesRefuseAlike(t *testing.T) {
	for _, bench := range [][]string{{"cap", "--caps", "4"}, {"draft", "--caps", "4"}, {"limit"}} {
		for want, args := range map[string][]string{
			"unexpected argument \"8\"":                            {"8", "9"},
			"--print-config and --explain-counters are for run":    {"--explain-counters"},
			"--usage learns while it is measured":                  {"--usage", "u.txt"},
			"--runs is at least 1":                                 {"--runs", "0"},
			"-n at least 2":                                        {"-n", "1"},
			"unknown storage mode":                                 {"--storage", "tape"},
			"to compare are given by":                              {map[string]string{"cap": "--cap", "draft": "--cap", "limit": "--storage"}[bench[0]], "4"},
			"there is no policy":                                   {"--policy", "best"},
			"neither a number of experts, such as 64, nor of byte": {"--pin", "much"},
		} {
			if bench[0] == "limit" && want == "unknown storage mode" {
				args = []string{"--modes", "tape"}
			}
			r := sluice("", append(append([]string{"bench", bench[0], demo}, bench[1:]...), args...)...)
			r.wants(t, exitUsage, want)
		}
	}
	for _, bench := range []string{"cap", "draft"} {
		sluice("", "bench", bench, demo).wants(t, exitUsage, "name the caps to compare: --caps 4,8,16")
		sluice("", "bench", bench, demo, "--caps", "4,0").wants(t, exitUsage, "cap 0: ")
	}
}
