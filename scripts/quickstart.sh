#!/usr/bin/env bash
# Pre-train a small GPT with its optimizer state on two directories, and compare with the stock optimizer.
#
#   bash scripts/quickstart.sh [--iterations N] [--paths DIR...]     (--help says more)
#
# Needs Python 3.12 or 3.13 and a C++ compiler; uses up to two GPUs, or the CPU. Under ten minutes on two cores.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

for argument in "$@"; do
    case $argument in
        -h|--help) exec python3 scripts/quickstart.py --help ;;
    esac
done
bash scripts/setup_env.sh --extra examples
exec .venv/bin/python scripts/quickstart.py "$@"
