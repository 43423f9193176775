#!/usr/bin/env bash
# Check on this machine's GPU what cannot be checked without one: build the CUDA kernels and run tests/gpu.
#
#   bash scripts/gpu_check.sh [PYTEST ARGUMENTS...]
#
# Fails where there is no GPU, or no nvcc.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

case ${1:-} in
    -h|--help) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"; exit 0 ;;
esac
bash scripts/setup_env.sh --extra dev
.venv/bin/python setup.py -q build_cuda
.venv/bin/python - <<'PYTHON'
import sys

import torch

from mlp_offload.cuda import available

usable, reason = available()
if not usable or not torch.cuda.is_available():
    sys.exit(f"gpu_check: {reason or 'torch sees no GPU'}")
properties = torch.cuda.get_device_properties(0)
print(f"gpu_check: {properties.name}, compute capability {properties.major}.{properties.minor}, torch {torch.__version__}")
PYTHON
exec .venv/bin/python -m pytest -rs tests/gpu "$@"
