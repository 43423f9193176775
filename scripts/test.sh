#!/usr/bin/env bash
# Set up as quickstart.sh does, with the test tools, and run the tests.
#
#   bash scripts/test.sh [--full] [PYTEST ARGUMENTS...]
#
# --full also runs the long tests, and the Megatron tests on Python 3.11 or 3.10 with megatron-core 0.16.1.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

full=0
case ${1:-} in
    --full) full=1; shift ;;
    -h|--help) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"; exit 0 ;;
esac
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

bash scripts/setup_env.sh --extra dev
if [ $full = 0 ]; then
    exec .venv/bin/python -m pytest -m "not full" "$@"
fi
# Both parts run; the first that fails gives the exit status.
status=0
.venv/bin/python -m pytest "$@" || status=$?
bash scripts/setup_env.sh --extra dev --venv .venv-old --python 3.11 --python 3.10
.venv-old/bin/python -m pytest tests/multi_rank "$@" || status=$((status ? status : $?))
exit $status
