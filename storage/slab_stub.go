//go:build !giouring || !linux

package storage

import "errors"

// newRing has no io_uring to offer in this build.
func newRing(*Reader) (transport, error) {
	return nil, errors.New("not in this build, which lacks -tags giouring -ldflags=-checklinkname=0")
}
