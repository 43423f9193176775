#!/usr/bin/env bash
# Pre-train a GPT by one of the recipes in mlp_offload/recipes, with its optimizer state on storage.
#
#   scripts/recipes/pretrain.sh NAME [--dry-run] [--small] [MEGATRON OR OFFLOAD FLAGS...]
#   scripts/recipes/pretrain.sh gpt-70b --dry-run              prints settings and command; runs nothing
#   scripts/recipes/pretrain.sh gpt-70b --small                three iterations of two layers, here, on two processes
#
# Flags that are given here come last and win. Run it once on each node (LAUNCH=torchrun), or once in a SLURM allocation
# (LAUNCH=srun). Settings, as environment variables:
#
#   PYTHON         interpreter with mlp-offload installed              (python)
#   GPU_MEMORY     of a GPU; decides layout and number of nodes        (80GB)
#   GPUS_PER_NODE  ranks a node                                        (4)
#   LAUNCH         torchrun: starts this node's ranks; srun: a task a rank in a SLURM allocation; exec: this process is one rank
#                  whose RANK, WORLD_SIZE .. or SLURM_* are set already          (torchrun)
#   NODES, NODE_RANK, MASTER_ADDR, MASTER_PORT   for torchrun on several nodes   (as many as hold the recipe's GPUs, 0, localhost, 29500)
#   DATA           prefix of an indexed dataset on a shared file system; without it, made-up data
#   TOKENIZER      directory of a Hugging Face tokenizer; without it, the data's token ids are taken as they are
#   CHECKPOINTS    directory to save to and to go on from; without it, nothing is saved
#   OFFLOAD_PATHS  directories for the state, separated by blanks, each as DIR[,read=..][,write=..][,capacity=..]; variables in
#                  them are expanded on each node                      ($SLURM_TMPDIR where it is set, else $TMPDIR, else /tmp)
#   HOST_MEMORY    host memory for state, a rank                       (auto)
set -euo pipefail

usage() { sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"; }
case ${1:-} in
    -h|--help) usage; exit 0 ;;
    ''|-*) usage >&2; exit 2 ;;
esac
name=$1; shift
dry_run=0; small=(); more=()
for word in "$@"; do
    case $word in
        --dry-run) dry_run=1 ;;
        --small) small=(--small) ;;
        *) more+=("$word") ;;
    esac
done

PYTHON=${PYTHON:-python}
GPU_MEMORY=${GPU_MEMORY:-80GB}
LAUNCH=${LAUNCH:-torchrun}
if [ -z "${OFFLOAD_PATHS:-}" ]; then
    if [ -n "${SLURM_TMPDIR:-}" ]; then OFFLOAD_PATHS='$SLURM_TMPDIR'; else OFFLOAD_PATHS=${TMPDIR:-/tmp}; fi
fi
recipe=("$PYTHON" -m mlp_offload.recipes "$name" --gpu-memory "$GPU_MEMORY" ${small[@]+"${small[@]}"})
flags=$("${recipe[@]}")   # an error ends this script here, which in <(...) it would not
needed=$("${recipe[@]}" --nodes)
read -ra flags <<< "${flags//$'\n'/ }"
made_for=$([ ${#small[@]} = 1 ] && echo 2 || echo 4)   # GPUs of a node
GPUS_PER_NODE=${GPUS_PER_NODE:-$made_for}
for count in "GPUS_PER_NODE=$GPUS_PER_NODE" "NODES=${NODES:-1}"; do
    case ${count#*=} in ''|*[!0-9]*|0*) echo "$count: must be a count of 1 or more" >&2; exit 2 ;; esac
done
NODES=${NODES:-${SLURM_JOB_NUM_NODES:-$(( (needed * made_for + GPUS_PER_NODE - 1) / GPUS_PER_NODE ))}}

if [ -n "${DATA:-}" ]; then
    flags+=(--data-path "$DATA" --data-cache-path "${DATA}_cache")
else
    flags+=(--mock-data)
fi
if [ -n "${TOKENIZER:-}" ]; then
    flags+=(--tokenizer-type HuggingFaceTokenizer --tokenizer-model "$TOKENIZER")
else
    flags+=(--tokenizer-type NullTokenizer)
fi
if [ -n "${CHECKPOINTS:-}" ]; then flags+=(--save "$CHECKPOINTS" --load "$CHECKPOINTS"); fi
if [ -n "${HOST_MEMORY:-}" ]; then flags+=(--mlp-offload-host-memory "$HOST_MEMORY"); fi
for path in $OFFLOAD_PATHS; do flags+=(--mlp-offload-path "$path"); done
run=(-m mlp_offload run pretrain_gpt "${flags[@]}" ${more[@]+"${more[@]}"})

export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
case $LAUNCH in
    torchrun)
        command=("$PYTHON" -m torch.distributed.run "--nproc-per-node=$GPUS_PER_NODE")
        if [ "$NODES" = 1 ]; then command+=(--standalone); else
            command+=("--nnodes=$NODES" "--node-rank=${NODE_RANK:-0}" "--master-addr=${MASTER_ADDR:-localhost}"
                "--master-port=${MASTER_PORT:-29500}")
        fi
        command+=("${run[@]}") ;;
    srun)  # when one rank fails, the others must not wait for it in a collective
        command=(srun --kill-on-bad-exit=1 "--nodes=$NODES" "--ntasks-per-node=$GPUS_PER_NODE" "$PYTHON" "${run[@]}") ;;
    exec)
        command=("$PYTHON" "${run[@]}") ;;
    *)
        echo "LAUNCH=$LAUNCH: must be torchrun, srun or exec" >&2
        exit 2 ;;
esac

printf '%-15s %s\n' recipe "$name${small[*]+, small}" "made for" "$needed nodes of $made_for GPUs of $GPU_MEMORY" \
    "started for" "$NODES nodes of $GPUS_PER_NODE ranks" paths "$OFFLOAD_PATHS" data "${DATA:-made up}" checkpoints "${CHECKPOINTS:-none}"
if [ $((NODES * GPUS_PER_NODE)) -lt $((needed * made_for)) ]; then
    echo "warning: the recipe needs $((needed * made_for)) GPUs, not $((NODES * GPUS_PER_NODE)); mlp-offload plan $name" \
        "--gpu-memory $GPU_MEMORY --nodes $NODES --gpus-per-node $GPUS_PER_NODE tells why" >&2
fi
printf 'command        '
printf ' %q' "${command[@]}"
printf '\n'
if [ $dry_run = 1 ]; then exit 0; fi
exec "${command[@]}"
