# make          builds bin/sluice
# make demo     builds it and runs the demo model on a prompt
# make test     runs every test
# make generate writes the assembly of backends/cpu from its generator
# make ptx      writes the PTX of shaders/gpu.cu and dense.cu, with clang
# make bench-cpu how fast rows of each format are multiplied, beside the rate of reading
# make check    format, vet, staticcheck, race, fuzz smoke, builds for other platforms

GO        ?= go
# giouring reaches into the runtime by linkname, which Go refuses since 1.23
# unless the linker is told otherwise. Without the tag, preads do the reading.
TAGS      := giouring
LDFLAGS   := -checklinkname=0
BUILD     := -tags $(TAGS) -ldflags=$(LDFLAGS)
FUZZTIME  ?= 20s
STATICCHECK := honnef.co/go/tools/cmd/staticcheck@v0.8.2

export CGO_ENABLED = 0

.PHONY: all demo test abi shaders generate bench-cpu check race fuzz clean
all: bin/sluice

bin/sluice: FORCE
	@mkdir -p bin
	$(GO) build $(BUILD) -o $@ ./cmd/sluice

.PHONY: FORCE
FORCE:

DEMO_PROMPT ?= And it came to pass in those days, that

demo: bin/sluice
	@echo '$$ sluice run --cap 8 -n 100 -p "$(DEMO_PROMPT)"'
	@bin/sluice run --cap 8 -n 100 -p "$(DEMO_PROMPT)"

test:
	$(GO) test $(BUILD) $(TESTFLAGS) ./...

# What backends/vulkan says of Vulkan's structs against the C header and a binding:
# needs cgo, gcc and libvulkan-dev.
abi:
	cd backends/vulkan/abitest && CGO_ENABLED=1 $(GO) vet ./... && CGO_ENABLED=1 $(GO) test -count=1 ./...

# The race detector needs cgo and a C compiler.
race:
	CGO_ENABLED=1 $(GO) test -race $(BUILD) ./...

bench-cpu:
	$(GO) run $(BUILD) ./cmd/bench-cpu $(BENCHFLAGS)

# The groups of kernels, each a .s file and its stubs. ASM is where they go.
KERNELS := floats rows256 rows512 tiles256 tiles512 vectors attention
ASM     ?= backends/cpu

generate:
	@for group in $(KERNELS); do \
		(cd backends/cpu/asm && $(GO) run . -out $(abspath $(ASM))/$${group}_amd64.s -stubs $(abspath $(ASM))/$${group}_amd64.go -pkg cpu $$group) || exit 1; \
	done

check:
	@test -z "$$(gofmt -l .)" || { gofmt -l .; echo "gofmt would change these files"; exit 1; }
	$(GO) vet -tags $(TAGS) ./...
	$(GO) run $(STATICCHECK) -tags $(TAGS) ./...
	$(GO) mod tidy -diff
	$(GO) build ./...
	@dir=$$(mktemp -d) && trap "rm -rf $$dir" EXIT && $(MAKE) -s generate ASM=$$dir && for f in $$dir/*; do \
		cmp $$f backends/cpu/$${f##*/} || { echo "backends/cpu differs from its generator: make generate"; exit 1; }; \
	done
	cd backends/cpu/asm && $(GO) vet ./...
	@if command -v glslc >/dev/null; then \
		dir=$$(mktemp -d) && trap "rm -rf $$dir" EXIT && $(MAKE) -s shaders SPIRV=$$dir && for f in $$dir/*; do \
			cmp $$f shaders/$${f##*/} || { echo "shaders differs from its sources: make shaders"; exit 1; }; \
		done; \
	else echo "no glslc (package glslc): the shaders are not held against their sources"; fi
	@if command -v $(CLANG) >/dev/null; then \
		dir=$$(mktemp -d) && trap "rm -rf $$dir" EXIT && $(MAKE) -s ptx PTX=$$dir && for f in $$dir/*; do \
			cmp $$f shaders/ptx/$${f##*/} || { echo "shaders/ptx differs from its source: make ptx (with clang-19, as Debian has it)"; exit 1; }; \
		done; \
	else echo "no $(CLANG) (package clang-19): the PTX is not held against its source"; fi
	GOARCH=arm64 $(GO) vet $(BUILD) ./...
	GOAMD64=v3 $(GO) test $(BUILD) ./internal/... ./backends/...
	$(GO) test -tags $(TAGS),invariants -ldflags=$(LDFLAGS) ./tiers/... ./cmd/engine

# Every parser of foreign bytes, for FUZZTIME each.
fuzz:
	@$(GO) list -f '{{$$d := .ImportPath}}{{range .TestGoFiles}}{{$$d}} {{$$.Dir}}/{{.}}{{"\n"}}{{end}}' ./... | while read -r pkg file; do \
		for target in $$(sed -n 's/^func \(Fuzz[A-Za-z0-9_]*\)(.*/\1/p' "$$file"); do \
			echo "fuzz $$pkg $$target"; \
			$(GO) test $(BUILD) -run '^$$' -fuzz "^$$target\$$" -fuzztime $(FUZZTIME) "$$pkg" || exit 1; \
		done; \
	done

clean:
	rm -rf bin

# The kernels of package shaders: text to SPIR-V. Not optimized: the optimizer
# drops NoContraction from what it copies, and the driver has its own.
SHADERS := $(patsubst shaders/%.comp,%,$(wildcard shaders/*.comp))
SPIRV   ?= shaders
GLSLC   := glslc --target-env=vulkan1.2

shaders:
	@for s in $(SHADERS); do $(GLSLC) shaders/$$s.comp -o $(SPIRV)/$$s.spv || exit 1; done
	@for s in quantize rows floats planes; do $(GLSLC) -DCOUNT shaders/$$s.comp -o $(SPIRV)/$${s}_count.spv || exit 1; done
	@$(GLSLC) -DDOT shaders/rows.comp -o $(SPIRV)/rows_dot.spv
	@gzip -nf9 $(SPIRV)/*.spv

# The kernels of CUDA and HIP: PTX of each type of weights, for drivers without a
# compiler beside them. Clang needs no CUDA for it.
CLANG    ?= clang-19
GPUTYPES := 0 1 2 3 6 7 8 12 13 14 20 30 39 1000 1001 1002 1003 1004 1005 1006 1007
PTX      ?= shaders/ptx
CUDA     := -x cuda --cuda-gpu-arch=sm_61 --cuda-device-only -nocudainc -nocudalib -Xclang -target-feature -Xclang +ptx63

.PHONY: ptx
ptx:
	@mkdir -p $(PTX)
	@for t in all dense $(GPUTYPES); do \
		case $$t in all) def=;; dense) def=-DDENSE;; *) def=-DTYPE=$$t;; esac; \
		cat shaders/gpu.cu shaders/dense.cu | $(CLANG) $(CUDA) -O3 -ffp-contract=off -DCUDA $$def -S -o - - | grep -v '^//' | gzip -n9 > $(PTX)/$$t.ptx.gz || exit 1; \
	done
