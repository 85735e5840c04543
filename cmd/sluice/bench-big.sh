#!/bin/sh
# A model of 8 GiB under a limit of 3 GiB, cold: slab mode beside mmap. Needs
# root, cgroups, 9 GB of free space, and a machine that does nothing else.
#
#	cmd/sluice/bench-big.sh [FOLDER] [FLAGS OF bench limit...]
#
# FOLDER, where the model is written unless it is there, lies on the drive that
# is measured; without it that is the folder for temporary files.
set -eu
cd "$(dirname "$0")/../.."
folder=${TMPDIR:-/tmp}
case "${1:-}" in
'' | -*) ;;
*) folder=$1 && shift ;;
esac
make -s bin/sluice
model=$folder/sluice-8gib.gguf
test -e "$model" || bin/sluice synth -o "$model" --size 8GiB --arch qwen3moe
exec bin/sluice bench limit "$model" --memory 3GiB "$@"
