#!/usr/bin/env bash
# Submit a chain of jobs that continue one run, one after the other: for sites where a job may not requeue itself.
#
#   bash slurm/chain.sh [--dry-run] COUNT [SBATCH OPTIONS...] SCRIPT.sbatch [FLAGS...]
#   bash slurm/chain.sh 5 --nodes 4 --time 12:00:00 slurm/pretrain_gpt.sbatch --train-iters 100000
#
# Each link saves and ends before its time is over, and the next goes on from there; links that come after the end of the
# run end at once. The links share a name, of which SLURM runs one job at a time (--dependency=singleton), and RUN_DIR.
# An array does the same: RUN_DIR=... sbatch --array=1-5%1 ...
set -euo pipefail

dry_run=0
if [ "${1:-}" = --dry-run ]; then dry_run=1; shift; fi
count=${1:-}
case $count in
    -h|--help) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"; exit 0 ;;
    ''|*[!0-9]*|0) echo "chain.sh: COUNT must be 1 or more (see --help)" >&2; exit 2 ;;
esac
shift
[ $# -gt 0 ] || { echo "chain.sh: no SCRIPT.sbatch (see --help)" >&2; exit 2; }
name=mlp-offload-chain-$(date +%Y%m%d-%H%M%S)-$$
export RUN_DIR=${RUN_DIR:-$PWD/runs/$name} ON_SIGNAL=exit
echo "run directory $RUN_DIR"
for _ in $(seq "$count"); do
    command=(sbatch "--job-name=$name" --dependency=singleton --no-requeue "$@")
    if [ $dry_run = 1 ]; then printf '%q ' "${command[@]}"; echo; else "${command[@]}"; fi
done
