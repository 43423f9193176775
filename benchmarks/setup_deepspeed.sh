#!/usr/bin/env bash
# Make a virtual environment of its own for DeepSpeed, and build the native operations that its NVMe offload needs.
#
#   bash benchmarks/setup_deepspeed.sh [--venv DIR] [--python VERSION]...
#
# --venv     where (default: .work/deepspeed)
# --python   wanted version, best first, may be repeated (default: 3.11, 3.12, 3.10)
#
# Quick when everything is there already. Needs a C++ compiler and libaio's header (installed with apt-get when root).
# The compiled operations lie inside the environment (torch_extensions), so that nothing else can remove or lock them.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=.work/deepspeed versions=()
while [ $# -gt 0 ]; do
    case $1 in
        --venv) venv=$2; shift 2 ;;
        --python) versions+=("$2"); shift 2 ;;
        -h|--help) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"; exit 0 ;;
        *) echo "setup_deepspeed.sh: unknown option $1 (see --help)" >&2; exit 2 ;;
    esac
done
[ ${#versions[@]} -gt 0 ] || versions=(3.11 3.12 3.10)
deepspeed='deepspeed==0.19.*'
mkdir -p "$(dirname "$venv")"
log=$venv.log

say() { printf 'setup: %s\n' "$*"; }

fail() { echo "setup: $*" >&2; exit 1; }

# Run a step with its output in the log; on failure show the end of it.
quietly() {
    if ! "$@" >>"$log" 2>&1; then
        tail -n 30 "$log" >&2
        fail "failed: $* (all output: $log)"
    fi
}

find_python() {
    local version candidate
    for version in "${versions[@]}"; do
        for candidate in "python$version" "${PYENV_ROOT:-$HOME/.pyenv}/versions/$version"*/bin/python \
            "/opt/python/$version/bin/python" python3 python; do
            if "$candidate" -c "import sys, ensurepip, venv; sys.exit('%d.%d' % sys.version_info[:2] != '$version')" \
                2>/dev/null && has_headers "$candidate"; then
                echo "$candidate"
                return
            fi
        done
    done
    fail "no Python ${versions[*]} with venv, ensurepip and headers found"
}

has_headers() {
    "$1" -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))'
}

find_libaio() {
    if ! echo '#include <libaio.h>' | "${CXX:-c++}" -x c++ -fsyntax-only - 2>/dev/null; then
        if [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; then
            say "apt-get install libaio-dev"
            export DEBIAN_FRONTEND=noninteractive
            timeout 120 apt-get install -y -q libaio-dev >>"$log" 2>&1 ||
                { timeout 120 apt-get update -q && timeout 120 apt-get install -y -q libaio-dev; } >>"$log" 2>&1 || true
        fi
        echo '#include <libaio.h>' | "${CXX:-c++}" -x c++ -fsyntax-only - 2>/dev/null ||
            fail "libaio.h not found; install libaio-dev (Debian) or libaio-devel (Fedora)"
    fi
}

# One setup at a time; a lock file of torch's builder that is left now belongs to a build that was killed, and
# would let the next one wait for ever.
exec 9>"$venv.lock"
flock -w 1800 9 || fail "another setup of $venv is still running"
stamp="$deepspeed $(sha256sum "${BASH_SOURCE[0]}" | cut -d' ' -f1)"
if [ "$(cat "$venv/ready" 2>/dev/null)" = "$stamp" ]; then
    find "$venv/torch_extensions" -name lock -delete
    say "reusing $venv"
    exit 0
fi
: >"$log"
find_libaio
if ! "$venv/bin/python" -c '' 2>/dev/null; then
    python=$(find_python)
    say "new environment $venv with $("$python" -V) ($python)"
    rm -rf "$venv"
    quietly "$python" -m venv "$venv"
fi
say "installing torch and $deepspeed (a minute or two)"
quietly "$venv/bin/python" -m pip install --quiet 'setuptools>=68' wheel ninja 'torch>=2.6,<=2.13.0'
quietly env DS_ACCELERATOR=cpu "$venv/bin/python" -m pip install --quiet --no-build-isolation "$deepspeed"
mkdir -p "$venv/torch_extensions"
find "$venv/torch_extensions" -name lock -delete
say "building DeepSpeed's cpu_adam, async_io and shared-memory operations (several minutes on two cores)"
export PATH="$PWD/$venv/bin:$PATH"
case $venv in /*) export PATH="$venv/bin:$PATH" TORCH_EXTENSIONS_DIR="$venv/torch_extensions" ;;
    *) export TORCH_EXTENSIONS_DIR="$PWD/$venv/torch_extensions" ;;
esac
export DS_ACCELERATOR=cpu MAX_JOBS=${MAX_JOBS:-2}
for builder in CPUAdamBuilder AsyncIOBuilder ShareMemCommBuilder; do
    quietly timeout 900 python -c "
from deepspeed.accelerator import get_accelerator
get_accelerator().create_op_builder('$builder').load(verbose=True)"
done
echo "$stamp" >"$venv/ready"
say "ready: $venv ($(python -c 'import deepspeed, torch; print("deepspeed", deepspeed.__version__, "torch", torch.__version__)' 2>/dev/null | tail -1))"
