# make          builds bin/sluice
# make demo     builds it and runs the demo model on a prompt
# make test     runs every test
# make check    format, vet, staticcheck, race, fuzz smoke, builds for other platforms

GO        ?= go
# giouring reaches into the runtime by linkname, which Go refuses since 1.23
# unless the linker is told otherwise. Without the tag, preads do the reading.
TAGS      := giouring
LDFLAGS   := -checklinkname=0
BUILD     := -tags $(TAGS) -ldflags=$(LDFLAGS)
FUZZTIME  ?= 60s
STATICCHECK := honnef.co/go/tools/cmd/staticcheck@2026.1

export CGO_ENABLED = 0

.PHONY: all demo test check race fuzz clean
all: bin/sluice

bin/sluice: FORCE
	@mkdir -p bin
	$(GO) build $(BUILD) -o $@ ./cmd/sluice

.PHONY: FORCE
FORCE:

DEMO_PROMPT ?= And it came to pass in those days, that

demo: bin/sluice
	@echo '$$ sluice run --cap 8 --temp 0 -n 120 -p "$(DEMO_PROMPT)"'
	@bin/sluice run --cap 8 --temp 0 -n 120 -p "$(DEMO_PROMPT)"

test:
	$(GO) test $(BUILD) ./...

# The race detector needs cgo and a C compiler.
race:
	CGO_ENABLED=1 $(GO) test -race $(BUILD) ./...

clean:
	rm -rf bin
