"""What would make a training fit: changes that are tried one by one, and the smallest number of nodes. Nothing is guessed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ..config import OffloadConfig
from ..errors import ConfigError
from .megatron_flags import Job
from .memory import Machine, Need, gpu_needs, gpu_shortages, needs_of
from .model import check

MOST_NODES = 1024


@dataclass(frozen=True)
class Fit:
    """A change, in words to act on, and what is needed then."""

    change: str
    need: Need


def smallest(job: Job, machine: Machine, offload: bool, most_nodes: int = MOST_NODES) -> "Fit | None":
    """The fewest nodes on which the model fits, and with which TP and PP; all else stays as in ``job``.

    TP stays within a node. Of layouts on equally many nodes the one with the fewest pipeline stages is taken, then that with the
    lowest TP. None: not on ``most_nodes``.
    """
    for nodes in range(1, most_nodes + 1):
        there = replace(machine, nodes=nodes)
        if found := next(_fits(job, there, offload, _layouts(job, there)), None):
            return found
    return None


def on_these_nodes(job: Job, machine: Machine, offload: bool) -> "Fit | None":
    """Another TP and PP with which the model fits on as many nodes."""
    return next(_fits(job, machine, offload, _layouts(job, machine)), None)


def leanest_layout(job: Job, machine: Machine) -> "Job | None":
    """The job in the layout that takes least of a GPU on these nodes, whether that is enough or not."""
    best: "tuple[int, Job] | None" = None
    for candidate in _layouts(job, machine):
        try:
            check(candidate.model, candidate.layout)
            needs = gpu_needs(candidate, machine.gpus, True)
        except ConfigError:
            continue
        most = max(max(n.total, n.startup) for n in needs)
        if best is None or most < best[0]:
            best = (most, candidate)
    return best[1] if best else None


def single_changes(job: Job, machine: Machine) -> "Iterator[tuple[str, Job]]":
    """Changes of the command line that save memory of GPUs, smallest first."""
    training = job.training
    if job.layout.tp > 1 and not job.layout.sequence_parallel:
        yield "--sequence-parallel", job.replace(layout=replace(job.layout, sequence_parallel=True))
    if training.recompute == "none" and not training.flash_attention:
        yield "--recompute-granularity selective", job.replace(training=replace(training, recompute="selective"))
    if training.micro_batch_size > 1:
        yield "--micro-batch-size 1", job.replace(training=replace(training, micro_batch_size=1))
    if training.recompute != "full" or training.recompute_layers > 1:
        full = replace(training, recompute="full", recompute_method="uniform", recompute_layers=1)
        text = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
        yield text, job.replace(training=full)
    if job.offload is not None and job.offload.gpu_memory:
        yield "--mlp-offload-gpu-memory 0", job.replace(offload=replace(job.offload, gpu_memory=0))
    if training.dtype == "bf16" and training.fp32_main_grad:
        yield "--grad-reduce-in-bf16", job.replace(training=replace(training, fp32_main_grad=False))


def changes_that_fit(job: Job, machine: Machine) -> "list[Fit]":
    """Each single change that is enough; where none is, all of them together, if those are."""
    found, together, names = [], job, []
    for change, changed in single_changes(job, machine):
        if need := _fit(changed, machine, True):
            found.append(Fit(change, need))
    if found:
        return found
    for _ in range(8):  # each change may open the next; there are fewer than eight
        step = next(((c, j) for c, j in single_changes(together, machine) if c not in names), None)
        if step is None:
            break
        names.append(step[0])
        together = step[1]
    need = _fit(together, machine, True) if len(names) > 1 else None
    return [Fit(" ".join(names), need)] if need else []


def more_state_in_memory(job: Job, machine: Machine) -> "Fit | None":
    """The job with as much host memory for state as the node has beside everything else."""
    need = needs_of(job, machine)
    if need.host is None:
        return None
    free = machine.host_memory - need.host.processes - max(need.host.save, need.host.startup)
    each = free // machine.gpus_per_node // 2**30
    if each * 2**30 <= need.rank_budget:
        return None
    offload = replace(job.offload or OffloadConfig(), host_memory=each * 2**30)
    changed = job.replace(offload=offload)
    found = _fit(changed, machine, True)
    return Fit(f"--mlp-offload-host-memory {each}GiB", found) if found else None


def more_host_memory(job: Job, machine: Machine) -> "int | None":
    """The least host memory of a node, in GiB, with which all fits; None where it is not for host memory that it does not."""
    low, high = machine.host_memory // 2**30, 2**16
    if _fit(job, replace(machine, host_memory=high * 2**30), True) is None:
        return None
    while low + 1 < high:
        middle = (low + high) // 2
        if _fit(job, replace(machine, host_memory=middle * 2**30), True):
            high = middle
        else:
            low = middle
    return high


# ------------------------------------------------------------------------------------------ helpers


def _fit(job: Job, machine: Machine, offload: bool) -> "Need | None":
    """What is needed, where that is there."""
    try:
        check(job.model, job.layout)
        if gpu_shortages(gpu_needs(job, machine.gpus, offload), machine):  # cheap, and most end here
            return None
        need = needs_of(job, machine, offload)
    except ConfigError:
        return None
    return need if need.fits else None


def _layouts(job: Job, machine: Machine) -> "Iterator[Job]":
    """The job with every TP within a node and every PP that divides, fewest stages first."""
    layout, model = job.layout, job.model
    uneven = layout.first_layers is not None or layout.last_layers is not None
    for pp in range(1, model.num_layers + 3):
        # Embedding and output layer may count as a layer each: 124 layers have few divisors, 126 have many.
        given = (layout.embedding_counts, layout.loss_counts)
        choices = [given] if uneven or pp == 1 else dict.fromkeys([given, (True, True)])
        for counts in choices:
            if (uneven and pp != layout.pp) or (not uneven and (model.num_layers + sum(counts)) % pp):
                continue
            for tp in (2**i for i in range(machine.gpus_per_node.bit_length())):
                if machine.gpus % (tp * pp * layout.cp):
                    continue
                changed = replace(
                    layout,
                    tp=tp,
                    pp=pp,
                    etp=tp if layout.etp == layout.tp else layout.etp,
                    chunks=layout.chunks if pp == layout.pp and counts == given else 1,
                    sequence_parallel=tp > 1 and (layout.sequence_parallel or layout.tp == 1),
                    embedding_counts=counts[0],
                    loss_counts=counts[1],
                )
                yield job.replace(layout=changed)


def _fits(job: Job, machine: Machine, offload: bool, candidates: "Iterator[Job]") -> "Iterator[Fit]":
    for candidate in candidates:
        if need := _fit(candidate, machine, offload):
            nodes = f"{machine.nodes} node{'s' if machine.nodes > 1 else ''}"
            yield Fit(f"{nodes} with {layout_flags(candidate)}", need)


def layout_flags(job: Job) -> str:
    """The flags of a layout as ``_layouts`` makes them."""
    layout = job.layout
    flags = [f"--tensor-model-parallel-size {layout.tp}", f"--pipeline-model-parallel-size {layout.pp}"]
    flags += ["--sequence-parallel"] if layout.sequence_parallel else []
    flags += ["--account-for-embedding-in-pipeline-split"] if layout.embedding_counts else []
    flags += ["--account-for-loss-in-pipeline-split"] if layout.loss_counts else []
    return " ".join(flags)
