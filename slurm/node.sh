#!/usr/bin/env bash
# What runs on each node; the batch scripts start it.
#
#   scratch       say which node-local scratch directory would be used
#   check         say so, and check all paths; status 1 with the reason where one cannot be used
#   rank CMD...   bind this rank to the NUMA node of its GPU, and become CMD
#   agent CMD...  run CMD (torchrun), and pass the exit signal on to its ranks
#   clean         remove what a killed rank of this job left on this node
#
# $NODE_SCRATCH is set for all of them: the first of the places below that is a directory on a local disk.
set -euo pipefail

# Nothing here may end by the signal to save and end before training can take it; the batch script sends it again.
case ${1:-} in rank|agent) trap '' "${EXIT_SIGNAL:-USR1}" ;; esac

# Of the job, as sites name them; then directories that exist on nodes with a local drive.
VARIABLES="SLURM_TMPDIR LOCAL_SCRATCH LOCALSCRATCH PBS_JOBFS TMPDIR"
PLACES="/local/scratch /scratch/local /localscratch /local_scratch /mnt/nvme /raid/scratch /tmp"

node=${SLURMD_NODENAME:-$(hostname)}
say() { printf 'node %s: %s\n' "$node" "$*"; }

if [ -n "${SITE:-}" ]; then
    # shellcheck disable=SC1090
    . "$SITE"
fi

# Why directory $1 is no node-local storage; nothing where it is.
unfit() {
    [ -d "$1" ] || { echo "no directory"; return; }
    [ -w "$1" ] && [ -x "$1" ] || { echo "not writable"; return; }
    local kind
    kind=$(stat --file-system --format=%T "$1" 2>/dev/null || echo unknown)
    case $kind in
        tmpfs|ramfs) echo "$kind, which is memory" ;;
        nfs*|lustre|gpfs|ceph*|fuse*|smb*|cifs|beegfs|panfs|afs) echo "$kind, which is not local" ;;
    esac
}

# Sets NODE_SCRATCH, unless the site or the user has, and where_from; status 1 where there is none.
find_scratch() {
    local name place problem
    skipped=''
    if [ -n "${NODE_SCRATCH:-}" ]; then where_from='set'; return 0; fi
    for name in $VARIABLES; do
        place=${!name:-}
        [ -n "$place" ] || continue
        problem=$(unfit "$place")
        if [ -z "$problem" ]; then NODE_SCRATCH=$place where_from="\$$name"; return 0; fi
        skipped+="; not \$$name=$place ($problem)"
    done
    for place in $PLACES; do
        [ -d "$place" ] || continue
        problem=$(unfit "$place")
        if [ -z "$problem" ]; then NODE_SCRATCH=$place where_from=found; return 0; fi
        skipped+="; not $place ($problem)"
    done
    return 1
}

tell_scratch() {
    local free
    free=$(df --output=avail -h "$NODE_SCRATCH" 2>/dev/null | tail -n 1 | tr -d ' ')
    say "scratch $NODE_SCRATCH ($where_from), ${free:-?} free${skipped}"
}

check() {
    [ -x "$PYTHON" ] || { say "PYTHON=$PYTHON cannot be run here" >&2; return 1; }
    # shellcheck disable=SC2086
    "$PYTHON" - "$node" $OFFLOAD_PATHS <<'PYTHON_END'
import os, sys, tempfile
from mlp_offload.config import PathConfig
from mlp_offload.errors import OffloadError
from mlp_offload.storage.jobdir import check_directories

node, *specs = sys.argv[1:]
try:
    for directory in check_directories([PathConfig.parse(spec).resolved_directory() for spec in specs]):
        with tempfile.TemporaryFile(dir=directory) as file:  # a full disk or quota shows here
            file.write(bytes(1 << 16))
            file.flush()
            os.fsync(file.fileno())
        space = os.statvfs(directory)
        print(f"node {node}: path {directory}, {space.f_bavail * space.f_frsize / 2**30:.1f} GiB free")
except (OffloadError, OSError) as error:
    sys.exit(f"node {node}: {error}")
PYTHON_END
}

# NUMA node of GPU number $1, from nvidia-smi and sysfs; nothing where they do not tell.
numa_node_of_gpu() {
    local bus
    command -v nvidia-smi >/dev/null || return 0
    bus=$(nvidia-smi --query-gpu=pci.bus_id --format=csv,noheader 2>/dev/null | sed -n "$(($1 + 1))p")
    # 00000000:3B:00.0 there is 0000:3b:00.0 in sysfs
    cat "${SYSFS:-/sys}/bus/pci/devices/$(echo "${bus#0000}" | tr 'A-F' 'a-f')/numa_node" 2>/dev/null || true
}

# "numactl ..." for this rank, or nothing: bound already, one NUMA node only, no numactl, or switched off.
numa_command() {
    local allowed online numa ranks local_rank
    [ "${NUMA_BIND:-auto}" = auto ] && command -v numactl >/dev/null || return 0
    online=$(cat "${SYSFS:-/sys}/devices/system/node/online" 2>/dev/null || echo 0)
    case $online in *-*|*,*) ;; *) return 0 ;; esac
    # Cores that belong to one NUMA node: the scheduler has bound this rank.
    read -ra allowed <<< "$(numactl --show | sed -n 's/^cpubind: *//p')"
    [ ${#allowed[@]} -gt 1 ] || return 0
    local_rank=${LOCAL_RANK:-${SLURM_LOCALID:-0}}
    numa=$(numa_node_of_gpu "$local_rank")
    # A part of a node may have GPUs beside cores of other NUMA nodes.
    case " ${allowed[*]} " in
        *" ${numa:-none} "*) ;;
        *) ranks=${LOCAL_WORLD_SIZE:-${SLURM_NTASKS_PER_NODE:-1}}
            numa=${allowed[local_rank * ${#allowed[@]} / ranks]} ;;
    esac
    echo "numactl --cpunodebind=$numa --preferred=$numa"
}

needs_scratch=0
case ${OFFLOAD_PATHS:-} in *NODE_SCRATCH*) needs_scratch=1 ;; esac
where_from='' skipped=''
if [ $needs_scratch = 1 ] && ! find_scratch; then
    say "no node-local scratch directory${skipped}. Set OFFLOAD_PATHS, or NODE_SCRATCH in a site file." >&2
    exit 1
fi
export NODE_SCRATCH=${NODE_SCRATCH:-}

mode=$1
shift
case $mode in
    scratch)
        if [ $needs_scratch = 1 ]; then tell_scratch; fi ;;
    check)
        if [ $needs_scratch = 1 ]; then tell_scratch; fi
        check ;;
    rank)
        bind=$(numa_command)
        if [ -n "$bind" ]; then say "rank ${RANK:-${SLURM_PROCID:-0}}: $bind"; fi
        exec $bind "$@" ;;
    agent)
        # SLURM signals all of the task; torchrun would end by it, and its ranks, in sessions of their own, not see it.
        # Its status comes through a file: a wait that is interrupted just as it ends loses it.
        status_file=$(mktemp)
        trap 'rm -f "$status_file"' EXIT
        (status=0; "$@" || status=$?; echo $status >"$status_file") &
        child=$!
        asked=0
        trap 'asked=1' "${EXIT_SIGNAL:-USR1}"
        while kill -0 "$child" 2>/dev/null; do
            wait "$child" || true
            if [ $asked = 1 ]; then
                asked=0
                # no $(...): bash 5.2 stumbles over a signal there
                pgrep -P "$child" | xargs -r -n 1 pkill "-${EXIT_SIGNAL:-USR1}" -P || true
            fi
        done
        trap '' "${EXIT_SIGNAL:-USR1}"
        read -r status <"$status_file" || status=1
        exit "$status" ;;
    clean)
        # shellcheck disable=SC2086
        answer=$("$PYTHON" -m mlp_offload clean --job auto --yes $OFFLOAD_PATHS) ||
            { say "$answer" >&2; exit 1; }
        case $answer in "nothing of job"*) ;; *) say "$answer" ;; esac ;;
    *)
        echo "node.sh: unknown mode $mode" >&2
        exit 2 ;;
esac
