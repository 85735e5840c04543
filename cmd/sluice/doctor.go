package main

import (
	"context"
	"fmt"
	"os"

	"sluice/backends/cpu"
	"sluice/cmd/doctor"
)

func doctorCommand(ctx context.Context, s streams, args []string) error {
	f, asJSON := newFlags(s, "doctor", "look at this machine, and at a model on it, for what makes it slow or stops it, with the words that mend it")
	model := modelFlag(f)
	seconds := f.Float64("seconds", 1, "time in which each drive is measured; 0: none is, and no scratch file is written")
	if err := parse(f, args); err != nil {
		return err
	}
	if *model == "" && f.NArg() > 0 {
		*model = f.Arg(0)
	} else if f.NArg() > 0 {
		return usagef("unexpected argument %q", f.Arg(0))
	}
	if f.NArg() > 1 {
		return usagef("unexpected argument %q", f.Arg(1))
	}
	if !(*seconds >= 0 && *seconds <= 600) {
		return usagef("--seconds %v: use 0 to 600", *seconds)
	}
	kernels, err := cpu.ParseLevel(os.Getenv("SLUICE_CPU"))
	if err != nil {
		return usagef("SLUICE_CPU: %v", err)
	}
	progress(s, "measuring drives")
	r, err := doctor.Examine(ctx, doctor.Options{Model: *model, Kernels: kernels, Seconds: *seconds})
	if err != nil {
		return err
	}
	if *asJSON {
		err = printJSON(s.out, r)
	} else {
		err = r.Print(s.out)
	}
	if n := r.Broken(); err == nil && n > 0 {
		return fmt.Errorf("broken: %d", n)
	}
	return err
}
