#!/usr/bin/env bash
# Collect mlp-offload and all that it needs as wheels, for nodes without a network.
#
#   bash scripts/build_wheels.sh [--dry-run] [--python PYTHON] [--extra EXTRA] [--torch VERSION] [--megatron VERSION] DIR
#
# Run it where there is a network, a C++ compiler and, for the CUDA kernels, nvcc, on the kind of machine that will
# train: wheels are of one Python version and platform. Then, on any node that sees DIR:
#
#   python3 -m venv VENV && VENV/bin/pip install --no-index --find-links DIR -r DIR/requirements.txt
#
# --python    interpreter whose version the nodes have        (.venv/bin/python where it is there, else python3)
# --extra     optional dependencies of setup.cfg, with commas between them   (examples)
# --torch     version                                         (the newest that is tested)
# --megatron  version of megatron-core                        (0.19.2; 0.16.1 below Python 3.12)
#
# A torch that the site provides is kept: make the environment with `python3 -m venv --system-site-packages`.
set -euo pipefail

dry_run=0 python='' extra=examples torch='torch>=2.6,<=2.13.0' megatron='' directory=''
while [ $# -gt 0 ]; do
    case $1 in
        --dry-run) dry_run=1; shift ;;
        --python) python=$2; shift 2 ;;
        --extra) extra=$2; shift 2 ;;
        --torch) torch="torch==$2"; shift 2 ;;
        --megatron) megatron=$2; shift 2 ;;
        -h|--help) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"; exit 0 ;;
        -*) echo "build_wheels.sh: unknown option $1 (see --help)" >&2; exit 2 ;;
        *) [ -z "$directory" ] || { echo "build_wheels.sh: one DIR only (see --help)" >&2; exit 2; }
           directory=$1; shift ;;
    esac
done
[ -n "$directory" ] || { echo "build_wheels.sh: no DIR (see --help)" >&2; exit 2; }
directory=$(realpath -m "$directory")
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [ -z "$python" ]; then python=$PWD/.venv/bin/python; [ -x "$python" ] || python=python3; fi
modern=$("$python" -c 'import sys; print(int(sys.version_info >= (3, 12)))') ||
    { echo "build_wheels.sh: --python $python cannot be run" >&2; exit 2; }
if [ -z "$megatron" ]; then if [ "$modern" = 1 ]; then megatron=0.19.2; else megatron=0.16.1; fi; fi
wanted=("$torch" "megatron-core==$megatron")
# megatron-core >= 0.19 imports triton; CUDA builds of torch bring it, CPU builds do not.
if [ "$modern" = 1 ]; then wanted+=(triton); fi
wheel=("$python" -m pip wheel --disable-pip-version-check --quiet --wheel-dir "$directory" ".[$extra]" "${wanted[@]}")

echo "wheels for $("$python" -V) in $directory:"
printf ' %q' "${wheel[@]}"
echo
if [ $dry_run = 1 ]; then exit 0; fi

mkdir -p "$directory"
rm -f "$directory"/mlp_offload-*.whl # of an earlier version, which pip could take
"${wheel[@]}"
ours=$(basename "$directory"/mlp_offload-*.whl)
version=$(cut -d- -f2 <<<"$ours")
printf '%s\n' "mlp-offload[$extra]==$version" "${wanted[@]}" >"$directory/requirements.txt"
echo "$(find "$directory" -name '*.whl' | wc -l) wheels, $(du -sh "$directory" | cut -f1). On each node, or once on a shared file system:"
echo "  python3 -m venv VENV && VENV/bin/pip install --no-index --find-links $directory -r $directory/requirements.txt"
