#!/usr/bin/env bash
# Stands for the Python interpreter of the batch scripts (PYTHON=slurm/in_container.sh) and runs the image's.
#
#   IMAGE  the image made from slurm/mlp-offload.def
#   BINDS  directories that the container sees, with commas between them; home, /tmp and the working directory it sees
#          anyway, and $NODE_SCRATCH is added
set -euo pipefail
[ -r "${IMAGE:-}" ] || { echo "in_container.sh: IMAGE=${IMAGE:-}: no such image" >&2; exit 2; }
binds=$PWD${BINDS:+,$BINDS}${NODE_SCRATCH:+,$NODE_SCRATCH}
gpus=()
if [ -e /dev/nvidiactl ]; then gpus=(--nv); fi
exec "$(command -v apptainer || command -v singularity || echo apptainer)" exec "${gpus[@]}" --bind "$binds" \
    --pwd "$PWD" "$IMAGE" python "$@"
