#!/usr/bin/env bash
# Pre-train a small GPT with its optimizer state on two directories, and compare with the stock optimizer.
#
#   bash scripts/quickstart.sh [--iterations N] [--paths DIR...]     (--help says more)
#
# Needs Python 3.12 or 3.13 and a C++ compiler; uses up to two GPUs, or the CPU. Under ten minutes on two cores.
set -euo pipefail
scripts=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

# Help and wrong options before minutes of setting up; any Python 3 can read them.
if command -v python3 >/dev/null; then
    python3 "$scripts/quickstart.py" --check-options "$@"
    for argument in "$@"; do
        case $argument in
            -h|--help) exit 0 ;;
        esac
    done
fi
bash "$scripts/setup_env.sh" --extra examples
exec "$scripts/../.venv/bin/python" "$scripts/quickstart.py" "$@"
