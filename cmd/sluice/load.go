package main

import (
	"context"
	"errors"
	"os"

	"sluice/cmd/engine"
	"sluice/tiers"
)

// load prints what the plan has to say and loads the model.
func (m *modelFlags) load(ctx context.Context, s streams, p *engine.Plan) (*engine.Engine, error) {
	for _, n := range p.Notices {
		s.notice("%s", n)
	}
	progress(s, "loading %s of resident weights", size(p.Ledger.Of(tiers.Dense)))
	e, err := p.Load(ctx)
	if err != nil {
		return nil, err
	}
	for _, n := range e.Said() {
		s.notice("%s", n)
	}
	drives(s, e)
	return e, nil
}

// drives prints what the drives gave occasion to say since it was last called.
func drives(s streams, e *engine.Engine) {
	for _, n := range e.Reader.Notices() {
		s.notice("%s", n)
	}
}

// finish tells what happened while the model ran, and saves what is to last.
//
// failed is why the run ended, if it failed: what was routed until then was
// routed, and is kept all the same.
func finish(s streams, e *engine.Engine, failed error) error {
	notices, err := e.Finish()
	for _, n := range notices {
		s.notice("%s", n)
	}
	switch {
	case failed == nil:
		return err
	case err != nil:
		return errors.Join(failed, err)
	}
	return failed
}

// progress tells a person at a terminal what is under way; logs stay clean.
func progress(s streams, format string, args ...any) {
	if f, ok := s.err.(*os.File); ok {
		if fi, err := f.Stat(); err == nil && fi.Mode()&os.ModeCharDevice != 0 {
			s.notice(format, args...)
		}
	}
}
