#!/usr/bin/env bash
# Run Megatron's own tests of the distributed optimizer and its checkpoints with stock's and with the offloaded one.
#
#   bash scripts/megatron_unit_tests.sh [--source DIR] [--tag TAG] [-k TESTS]     (--help says more)
#
# Fails when a test passes with stock and not with the offloaded optimizer. Fetches the tests of the installed
# Megatron-Core's release from GitHub, or from DIR. Eight processes, on GPUs or on the CPU: takes an hour on two cores.
set -euo pipefail
scripts=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

bash "$scripts/setup_env.sh" --extra dev
exec env PYTHONPATH="$scripts/.." "$scripts/../.venv/bin/python" "$scripts/megatron_unit_tests.py" "$@"
