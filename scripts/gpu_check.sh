#!/usr/bin/env bash
# Check on this machine's GPU what cannot be checked without one, in under six minutes and without network.
#
#   bash scripts/gpu_check.sh [--parts PART,...] [--commit NAME]     on the machine with the GPU
#   bash scripts/gpu_check.sh --fetch-wheels                         beforehand, where there is a network
#
# Uses the Python that has torch ($PYTHON, default: python3). --help says more.
set -euo pipefail
exec "${PYTHON:-python3}" "$(dirname "${BASH_SOURCE[0]}")/gpu_check.py" "$@"
