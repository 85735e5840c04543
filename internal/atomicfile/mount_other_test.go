//go:build !linux

package atomicfile

import "errors"

func mountTmpfs(string, int) error { return errors.New("no tmpfs here") }

func unmount(string) {}
