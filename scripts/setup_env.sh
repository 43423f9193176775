#!/usr/bin/env bash
# Make a virtual environment with everything and the native module built; quick when it is there already.
#
#   bash scripts/setup_env.sh [--extra examples|dev] [--venv DIR] [--python VERSION]...
#
# --extra    which optional dependencies of setup.cfg (default: examples)
# --venv     where (default: .venv)
# --python   wanted version, best first, may be repeated (default: 3.12, 3.13)
#
# Python 3.12 or later gets megatron-core 0.19.2; 3.10 and 3.11 get 0.16.1, which has no megatron.training.
# MLP_OFFLOAD_WERROR=1 turns compiler warnings into errors.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

extra=examples venv=.venv versions=()
while [ $# -gt 0 ]; do
    case $1 in
        --extra) extra=$2; shift 2 ;;
        --venv) venv=$2; shift 2 ;;
        --python) versions+=("$2"); shift 2 ;;
        -h|--help) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"; exit 0 ;;
        *) echo "setup_env.sh: unknown option $1 (see --help)" >&2; exit 2 ;;
    esac
done
[ ${#versions[@]} -gt 0 ] || versions=(3.12 3.13)
mkdir -p .work
log=.work/setup.log

say() { printf 'setup: %s\n' "$*"; }

find_python() {
    local version candidate
    for version in "${versions[@]}"; do
        for candidate in "python$version" "${PYENV_ROOT:-$HOME/.pyenv}/versions/$version"*/bin/python \
            "/opt/python/$version/bin/python" python3 python; do
            if "$candidate" -c "import sys, ensurepip, venv; sys.exit('%d.%d' % sys.version_info[:2] != '$version')" \
                2>/dev/null; then
                echo "$candidate"
                return
            fi
        done
    done
    echo "setup: no Python ${versions[*]} with venv and ensurepip found; install one (Debian: python3-venv), or put" \
        "it on PATH" >&2
    return 1
}

# Run a step with its output in the log; on failure show the end of it.
quietly() {
    if ! "$@" >>"$log" 2>&1; then
        tail -n 30 "$log" >&2
        echo "setup: failed: $* (all output: $log)" >&2
        exit 1
    fi
}

# liburing gives the io_uring engine, strace the fault tests; both are optional.
system_packages() {
    local missing=()
    [ -e /usr/include/liburing.h ] || missing+=(liburing-dev)
    command -v strace >/dev/null || missing+=(strace)
    if [ ${#missing[@]} -eq 0 ] || [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
        return 0
    fi
    say "apt-get install ${missing[*]} (optional)"
    export DEBIAN_FRONTEND=noninteractive
    timeout 90 apt-get install -y -q "${missing[@]}" >>"$log" 2>&1 ||
        { timeout 60 apt-get update -q && timeout 90 apt-get install -y -q "${missing[@]}"; } >>"$log" 2>&1 ||
        say "not available; going on without"
}

# nvcc builds the CUDA kernels, with a GPU or without one; without nvcc their tests are skipped.
cuda_compiler() {
    if [ "$extra" != dev ] || [ -n "${NVCC:-}" ] || command -v nvcc >/dev/null || [ -x /usr/local/cuda/bin/nvcc ]; then
        return 0
    fi
    say "installing nvcc 13.0 for the CUDA kernels (270 MB, optional)"
    "${pip[@]}" 'nvidia-cuda-nvcc==13.0.*' 'nvidia-cuda-crt==13.0.*' 'nvidia-nvvm==13.0.*' \
        'nvidia-cuda-runtime==13.0.*' >>"$log" 2>&1 || say "not available; going on without"
}

find_or_make_venv() {
    if ! "$venv/bin/python" -c '' 2>/dev/null; then
        local python
        python=$(find_python)
        say "new environment $venv with $("$python" -V) ($python)"
        rm -rf "$venv"
        quietly "$python" -m venv "$venv"
    fi
}

stamp() {
    { cat setup.cfg setup.py pyproject.toml scripts/setup_env.sh
      find mlp_offload/csrc -type f | LC_ALL=C sort | xargs cat
      echo "${MLP_OFFLOAD_WERROR:-} $(ls /usr/include/liburing.h 2>/dev/null) $(command -v "${NVCC:-nvcc}")"
    } | sha256sum | cut -d' ' -f1
}

: >"$log"
system_packages
find_or_make_venv
wanted=$(stamp)
stamp_file=$venv/.mlp-offload-$extra
if [ "$(cat "$stamp_file" 2>/dev/null)" = "$wanted" ]; then
    say "reusing $venv"
    exit 0
fi

pip=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check)
modern=$("$venv/bin/python" -c 'import sys; print(int(sys.version_info >= (3, 12)))')
if [ "$modern" = 1 ]; then megatron='megatron-core==0.19.2'; else megatron='megatron-core==0.16.1'; fi
say "installing torch and $megatron (the first time about two minutes)"
quietly "${pip[@]}" 'setuptools>=68' wheel 'pybind11>=2.12' 'torch>=2.6,<=2.13.0' "$megatron"
# megatron-core >= 0.19 imports triton; CUDA builds of torch bring it, CPU builds do not.
if [ "$modern" = 1 ] && ! "$venv/bin/python" -c 'import triton' 2>/dev/null; then
    quietly "${pip[@]}" triton
fi
cuda_compiler
say "building and installing mlp-offload with [$extra]"
quietly "${pip[@]}" --no-build-isolation --editable ".[$extra]"
echo "$wanted" >"$stamp_file"
say "ready: $venv ($("$venv/bin/python" -V))"
