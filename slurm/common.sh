# What the batch scripts here have in common; sourced by them. slurm/README.md explains the settings.
#
# The batch script calls, in this order: read_settings "$@"; add flags to `training`; launch SCRIPT FLAGS...

say() { printf 'mlp-offload job: %s\n' "$*"; }
fail() { say "$*" >&2; exit 1; }

# The last value of flag $1 among the words that follow; nothing where it is not given.
last_value() {
    local flag=$1 found='' word next=0
    shift
    for word in "$@"; do
        if [ $next = 1 ]; then found=$word; fi
        next=0
        case $word in "$flag") next=1 ;; "$flag="*) found=${word#*=} ;; esac
    done
    printf '%s' "$found"
}

# What stands at the head of the batch script.
usage() { sed -n '/^#$/,/^set /{/^set /d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[-1]}" | sed 1d; }

read_settings() {
    case ${1:-} in -h|--help) usage; exit 0 ;; esac
    dry_run=0
    if [ "${1:-}" = --dry-run ]; then dry_run=1; shift; fi
    flags=("$@")
    if [ -n "${SITE:-}" ]; then
        [ -r "$SITE" ] || fail "SITE=$SITE: no such file"
        SITE=$(realpath "$SITE")
        # shellcheck disable=SC1090
        . "$SITE"
    fi
    PYTHON=${PYTHON:-$PWD/.venv/bin/python}
    LAUNCH=${LAUNCH:-srun}
    HOST_MEMORY=${HOST_MEMORY:-auto}
    OFFLOAD_PATHS=${OFFLOAD_PATHS:-'$NODE_SCRATCH'}
    CPU_BIND=${CPU_BIND:-cores}
    NUMA_BIND=${NUMA_BIND:-auto}
    EXIT_SIGNAL=${EXIT_SIGNAL:-USR1}
    IDLE_LIMIT=${IDLE_LIMIT:-3}
    case $LAUNCH in srun|torchrun) ;; *) say "LAUNCH=$LAUNCH: must be srun or torchrun" >&2; exit 2 ;; esac
    # TERM is none: srun and torchrun kill the ranks by it.
    case $EXIT_SIGNAL in USR1|USR2) ;; *) say "EXIT_SIGNAL=$EXIT_SIGNAL: must be USR1 or USR2" >&2; exit 2 ;; esac
    case $IDLE_LIMIT in ''|*[!0-9]*|0) say "IDLE_LIMIT=$IDLE_LIMIT: must be a count of 1 or more" >&2; exit 2 ;; esac
    # A link of a chain or an element of an array makes room for the next one; a job of its own goes back to the queue.
    if [ -n "${SLURM_ARRAY_JOB_ID:-}" ]; then ON_SIGNAL=${ON_SIGNAL:-exit}; else ON_SIGNAL=${ON_SIGNAL:-requeue}; fi
    case $ON_SIGNAL in requeue|exit) ;; *) say "ON_SIGNAL=$ON_SIGNAL: must be requeue or exit" >&2; exit 2 ;; esac
    nodes=${SLURM_JOB_NUM_NODES:-1}
    ranks_per_node=${SLURM_NTASKS_PER_NODE:-2}
    job=${SLURM_JOB_ID:-0}
    RUN_DIR=${RUN_DIR:-$PWD/runs/slurm-${SLURM_ARRAY_JOB_ID:-$job}}
    saved=$(last_value --save "${flags[@]}")
    saved=${saved:-$RUN_DIR/checkpoints}
    export PYTHON OFFLOAD_PATHS NUMA_BIND EXIT_SIGNAL SITE
    export MLP_OFFLOAD_FINISHED=$RUN_DIR/finished   # made by rank 0 when the script has come to its end
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}
    export CUDA_DEVICE_MAX_CONNECTIONS=1
}

# The flags that every script adds before the user's, which win.
common_flags() {
    local path
    common=(--optimizer-offload mlp --mlp-offload-host-memory "$HOST_MEMORY")
    for path in $OFFLOAD_PATHS; do common+=(--mlp-offload-path "$path"); done
    common+=(--save "$saved" --load "$saved" --exit-signal-handler --exit-signal "SIG$EXIT_SIGNAL")
}

# Sets `flags` to what they are for a run that has a checkpoint of its own: what it began from must not win over that.
for_a_later_start() {
    local base word kept=()
    base=$(last_value --load "$@")
    flags=("$@")
    if [ -z "$base" ] || [ "$base" = "$saved" ] || [ "$(saved_iteration)" = 0 ]; then return 0; fi
    for word in "$@"; do
        case $word in --finetune|--no-load-optim|--no-load-rng) ;; *) kept+=("$word") ;; esac
    done
    say "goes on from $saved; --load $base, --finetune and --no-load-... were for the first start"
    flags=("${kept[@]}" --load "$saved")
}

# --overlap: the next step need not wait until this one's cores are given back.
one_a_node() { srun --overlap --ntasks="$nodes" --ntasks-per-node=1 "$@"; }

# launch SCRIPT FLAGS...: everything that the batch script does after its flags are known; does not return.
launch() {
    local head run step=(srun --kill-on-bad-exit=1)
    for_a_later_start "$@"
    run=(-m mlp_offload run "${flags[@]}")
    head=${MASTER_ADDR:-$(scontrol show hostnames "${SLURM_JOB_NODELIST:-}" 2>/dev/null | head -n 1 || true)}
    head=${head:-$(hostname)}
    # Since SLURM 22.05 a step does not inherit --cpus-per-task from the job.
    if [ "$LAUNCH" = torchrun ]; then
        step+=("--cpus-per-task=$((ranks_per_node * ${SLURM_CPUS_PER_TASK:-1}))")
    elif [ -n "${SLURM_CPUS_PER_TASK:-}" ]; then
        step+=("--cpus-per-task=$SLURM_CPUS_PER_TASK")
    fi
    # Each rank takes the GPU of its local rank, so it must see them all.
    if [ -n "${SLURM_GPUS_ON_NODE:-}${SLURM_JOB_GPUS:-}" ]; then step+=(--gpu-bind=none); fi
    # --kill-on-bad-exit: when one rank fails, the others must not wait for it in a collective.
    if [ "$LAUNCH" = srun ]; then
        if [ "$CPU_BIND" != none ]; then step+=("--cpu-bind=$CPU_BIND"); fi
        command=("${step[@]}" "--ntasks-per-node=$ranks_per_node" bash slurm/node.sh rank "$PYTHON" "${run[@]}")
    else
        command=(
            "${step[@]}" "--ntasks=$nodes" --ntasks-per-node=1 --cpu-bind=none bash slurm/node.sh agent
            "$PYTHON" -m torch.distributed.run "--nnodes=$nodes" "--nproc-per-node=$ranks_per_node"
            --rdzv-backend=c10d "--rdzv-endpoint=$head:${MASTER_PORT:-$((20000 + job % 20000))}" "--rdzv-id=$job"
            --no-python bash slurm/node.sh rank "$PYTHON" "${run[@]}"
        )
    fi
    printf '%-16s %s\n' nodes "$nodes" ranks "$((nodes * ranks_per_node))" "first node" "$head" launch "$LAUNCH" \
        python "$PYTHON" site "${SITE:-none}" paths "$OFFLOAD_PATHS" "host memory" "$HOST_MEMORY a rank" \
        "run directory" "$RUN_DIR" checkpoints "$saved" "on signal" "save, then $ON_SIGNAL"
    printf 'command         '
    printf ' %q' "${command[@]}"
    printf '\n'
    if [ $dry_run = 1 ]; then
        bash slurm/node.sh scratch || true
        exit 0
    fi
    [ -n "${SLURM_JOB_ID:-}" ] || fail "not a SLURM job; submit with sbatch, or look with --dry-run"
    # A job may be preempted before it trains: then it goes back to the queue at once.
    signalled=''
    trap 'signalled=${signalled:-USR1}' USR1
    one_a_node bash slurm/node.sh check || fail "not started: the nodes above cannot use their paths"
    begin
    if declare -F prepare >/dev/null; then prepare; fi
    status=0
    if [ -z "$signalled" ]; then train; fi
    one_a_node bash slurm/node.sh clean || say "some scratch files may be left; see mlp-offload clean --help"
    finish
}

saved_iteration() { cat "$saved/latest_checkpointed_iteration.txt" 2>/dev/null || echo 0; }

# Refuse to start a run that is complete, and one that has started IDLE_LIMIT times without getting on.
begin() {
    local now starts=$RUN_DIR/starts
    if [ -e "$RUN_DIR/finished" ]; then
        say "$RUN_DIR is complete; nothing to do"
        exit 0
    fi
    mkdir -p "$RUN_DIR"
    now=$(saved_iteration)
    if [ "$(tail -n "$IDLE_LIMIT" "$starts" 2>/dev/null | grep -c "^$now ")" -ge "$IDLE_LIMIT" ]; then
        fail "no progress: the last $IDLE_LIMIT starts all began at iteration $now and saved nothing later. Find out why," \
            "then remove $starts and submit again"
    fi
    echo "$now job ${SLURM_JOB_ID} restart ${SLURM_RESTART_COUNT:-0} $(date +%FT%T)" >>"$starts"
    say "starts from iteration $now (restart ${SLURM_RESTART_COUNT:-0})"
}

# Run the step in the background, so that signals are handled at once. Sets `status` and `signalled`.
train() {
    local step again resend=''
    trap 'signalled=TERM' TERM INT
    "${command[@]}" &
    step=$!
    # However this script ends, the step ends first.
    trap 'kill "$step" 2>/dev/null && wait "$step"' EXIT
    while :; do
        status=0
        wait "$step" || status=$?
        kill -0 "$step" 2>/dev/null || break
        if [ "$signalled" = TERM ]; then
            kill -TERM "$step" 2>/dev/null || true # SLURM has told the ranks, too
        elif [ -z "$resend" ]; then
            say "signal USR1 at $(date +%T): training is asked to save and end"
            # Again and again: a rank that still imports its modules ignores it.
            (trap - EXIT; while kill "-$EXIT_SIGNAL" "$step" 2>/dev/null; do sleep 5; done) &
            resend=$!
        fi
    done
    # A wait that a signal interrupted just as the step ended tells of the signal; a later one tells of the step.
    for _ in 1 2 3 4 5; do
        if [ "$status" -ge 0 ] && [ "$status" -le 128 ]; then break; fi
        again=0
        wait "$step" 2>/dev/null || again=$?
        if [ $again != 127 ]; then status=$again; fi
    done
    trap - EXIT
    if [ -n "$resend" ]; then kill "$resend" 2>/dev/null || true; fi
}

finish() {
    say "training ended with status $status; checkpoint of iteration $(saved_iteration)"
    if [ "$signalled" = TERM ]; then exit 143; fi
    if [ "$status" != 0 ]; then exit "$status"; fi
    if [ -e "$RUN_DIR/finished" ]; then exit 0; fi
    if [ -z "$signalled" ]; then
        say "the script ended before the end of its training (--exit-interval, --exit-duration-in-mins, a signal that only the" \
            "ranks got?); to go on: RUN_DIR=$RUN_DIR sbatch ..."
        exit 0
    fi
    if [ "$ON_SIGNAL" = exit ]; then exit 0; fi
    scontrol requeue "$SLURM_JOB_ID" ||
        fail "this job may not be requeued (sbatch --requeue?); continue with RUN_DIR=$RUN_DIR sbatch ..."
    exit 0
}
