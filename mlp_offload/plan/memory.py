"""What a training needs of each GPU, of a node's memory and of its paths, and whether a machine has it.

Weights, gradients and state are counted; activations and what software takes for itself are estimated, and say so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..config import AUTO, OffloadConfig, PathConfig
from ..errors import CapacityError, ConfigError
from ..units import format_bytes
from .activations import activation_bytes, stages_to_look_at
from .devices import choose_device_residents, updates_on_gpu
from .megatron_flags import Job, Training
from .model import Stage, stage_of
from .placement import (
    MINIMUM_STAGING,
    RECORD_ALIGNMENT,
    Residency,
    choose_residents,
    place,
    snapshot_slots,
    weights_a_slot,
)
from .subgroups import Subgroup, cut

GRADIENT_STAGINGS, STAGED_BYTES = 2, 4
"""Gradients and weights of this many subgroups are on their way between GPU and host; a gradient may be fp32."""


@dataclass(frozen=True)
class Machine:
    """What there is, in bytes and parameters a second.

    Attributes:
        gpu_memory, host_memory: of a GPU; of a node.
        gpu_reserve: of a GPU, for what no formula counts: CUDA, NCCL, cuBLAS, what the allocator cannot use.
        host_reserve: of a node's memory, for each rank: Python, torch, NCCL, data loading.
        paths: of every node; rates are those of the whole node.
    """

    nodes: int
    gpus_per_node: int = 4
    gpu_memory: int = 80 * 2**30
    host_memory: int = 512 * 2**30
    gpu_reserve: int = 4 * 2**30
    host_reserve: int = 6 * 2**30
    paths: "tuple[PathConfig, ...]" = ()

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node


@dataclass(frozen=True)
class Shortage:
    """What is too small: ``needed`` and ``available`` bytes of "GPU", "GPU at start-up", "host memory" or a path."""

    what: str
    needed: int
    available: int

    def __str__(self) -> str:
        short = format_bytes(self.needed - self.available)
        return f"{self.what}: {format_bytes(self.needed)} needed, {format_bytes(self.available)} there, {short} short"


@dataclass(frozen=True)
class GpuNeed:
    """Bytes on one GPU of one pipeline stage; ``state`` is with offload what ``gpu_memory`` and ``update_device`` take.

    Attributes:
        update: what stock's step takes on top: gradients widened to fp32.
        startup: before the first iteration, when weights exist twice (Megatron copies them into its own buffer).
    """

    stage: int
    weights: int
    gradients: int
    state: int
    update: int
    activations: int
    startup: int

    @property
    def total(self) -> int:
        """While training. Activations are gone when the optimizer steps."""
        return self.weights + self.gradients + self.state + max(self.activations, self.update)


@dataclass(frozen=True)
class HostNeed:
    """Bytes of one node's memory.

    Attributes:
        buffers: for state, of all ranks; gradients and weights on their way are part of them.
        processes: what the ranks themselves are reckoned to take.
        save, startup: for a while, on top.
    """

    buffers: int
    processes: int
    save: int
    startup: int

    @property
    def total(self) -> int:
        return self.processes + max(self.buffers + self.save, self.startup)


@dataclass(frozen=True)
class PathNeed:
    """Bytes of one node on one path, spare slots included; ``capacity`` is None where it is not known."""

    path: PathConfig
    needed: int
    subgroups: int


@dataclass(frozen=True)
class Need:
    """The whole answer of this module.

    Attributes:
        dp: data-parallel ranks.
        shard_numels: parameters whose state the busiest rank owns, dense and expert ones.
        state_bytes: of one parameter, in a record.
        residency: of the busiest rank; None without offload.
        rank_budget: bytes of host memory that a rank's state buffers may take.
    """

    job: Job
    machine: Machine
    dp: int
    micro_batches: int
    gpu: GpuNeed
    stages: "tuple[GpuNeed, ...]"
    shard_numels: "tuple[int, ...]"
    state_bytes: int
    subgroups: "tuple[Subgroup, ...]" = ()
    residency: "Residency | None" = None
    host: "HostNeed | None" = None
    paths: "tuple[PathNeed, ...]" = ()
    rank_budget: int = 0
    shortages: "tuple[Shortage, ...]" = field(default=())

    @property
    def fits(self) -> bool:
        return not self.shortages

    @property
    def all_resident(self) -> bool:
        """Whether nothing goes to a path."""
        return self.residency is not None and not any(map(self.residency.streams, range(len(self.subgroups))))


def data_parallel(job: Job, gpus: int) -> int:
    """Data-parallel size on so many GPUs.

    Raises:
        ConfigError: the sizes do not divide; says which.
    """
    layout, training = job.layout, job.training
    if gpus % layout.model_parallel or gpus < layout.model_parallel:
        raise ConfigError(
            f"{gpus} GPUs are not a multiple of TP {layout.tp} x PP {layout.pp} x CP {layout.cp} = {layout.model_parallel}"
        )
    dp = gpus // layout.model_parallel
    if gpus % (layout.etp * layout.ep * layout.pp):
        raise ConfigError(f"{gpus} GPUs are not a multiple of expert TP {layout.etp} x EP {layout.ep} x PP {layout.pp}")
    if training.global_batch_size and training.global_batch_size % (training.micro_batch_size * dp):
        raise ConfigError(
            f"--global-batch-size {training.global_batch_size} is not a multiple of --micro-batch-size "
            f"{training.micro_batch_size} x DP {dp}"
        )
    return dp


def gpu_needs(job: Job, gpus: int, offload: bool) -> "list[GpuNeed]":
    """What the GPUs of the stages that matter need (see ``activations.stages_to_look_at``)."""
    training, layout = job.training, job.layout
    dp = data_parallel(job, gpus)
    micro_batches = max(1, training.global_batch_size // (training.micro_batch_size * dp))
    needs = []
    for index in stages_to_look_at(job.model, layout):
        stage = stage_of(job.model, layout, index)
        weights, gradients = training.weight_bytes * stage.numel, training.gradient_bytes * stage.numel
        shards = shard_numels(job, stage, gpus)
        shard = sum(shards)
        # fp32 weights are their own masters; gradients in 16 bits are widened before stock steps with them.
        state = _state_on_gpu(job, shards) if offload else shard * (8 if training.dtype == "fp32" else 12)
        update = 0 if offload or training.gradient_bytes == 4 else 4 * shard
        activations = activation_bytes(job.model, layout, training, stage, micro_batches)
        startup = _startup_bytes(stage, training, layout.ep > 1)
        needs.append(GpuNeed(index, weights, gradients, state, update, activations, startup))
    return needs


def _state_on_gpu(job: Job, shards: Sequence[int]) -> int:
    """Bytes of the buffers that offload takes on a GPU."""
    config = job.offload or OffloadConfig()
    if not updates_on_gpu(config):
        return 0
    subgroups = _subgroups(job, config, shards)
    slot_bytes = _slot_bytes(subgroups)
    residents, passing = choose_device_residents(
        len(subgroups), slot_bytes, config.gpu_memory, config.update_device == "cuda"
    )
    return (len(residents) + passing) * slot_bytes


def _subgroups(job: Job, config: OffloadConfig, shards: Sequence[int]) -> "list[Subgroup]":
    main_itemsize = 2 if job.training.dtype == "bf16" and config.master_weights == "remainder" else 4
    return [s for numel in shards for s in cut([numel], config.subgroup_size, main_itemsize)]


def _slot_bytes(subgroups: Sequence[Subgroup]) -> int:
    return _round_up(max(s.record_bytes for s in subgroups))


def _startup_bytes(stage: Stage, training: Training, experts_apart: bool) -> int:
    """The most that lives while Megatron moves one virtual stage after another, dense parameters before experts, into buffers.

    Each buffer of weights and gradients is there before the weights move into it, one parameter at a time.
    """
    buffers = [numel for chunk in stage.chunks for numel in (chunk if experts_apart else (sum(chunk),))]
    moved, most = 0, 0
    for numel in buffers:
        moved += numel
        waiting = stage.numel - moved + numel
        most = max(most, (training.weight_bytes + training.gradient_bytes) * moved + training.weight_bytes * waiting)
    return most


def shard_numels(job: Job, stage: Stage, gpus: int) -> "tuple[int, ...]":
    """Parameters of a stage whose state one rank owns: dense ones, then experts where they are sharded otherwise."""
    layout = job.layout
    dense_ranks = gpus // (layout.tp * layout.pp)  # DP x CP
    expert_ranks = gpus // (layout.etp * layout.ep * layout.pp)
    shards = [-(-stage.dense_numel // dense_ranks)]
    if stage.expert_numel:
        shards.append(-(-stage.expert_numel // max(1, expert_ranks)))
    return tuple(shards)


def gpu_shortages(needs: Sequence[GpuNeed], machine: Machine) -> "list[Shortage]":
    """What a GPU lacks, while training and at start-up."""
    room = machine.gpu_memory - machine.gpu_reserve
    shortages = []
    for what, needed in (
        ("GPU memory", max(n.total for n in needs)),
        ("GPU memory at start-up", max(n.startup for n in needs)),
    ):
        if needed > room:
            shortages.append(Shortage(what, needed, room))
    return shortages


def needs_of(job: Job, machine: Machine, offload: bool = True) -> Need:
    """Everything that ``job`` needs on ``machine``.

    Args:
        offload: with the options of ``job.offload`` (defaults where it has none); else as stock Megatron.

    Raises:
        ConfigError: sizes do not divide, or the host-memory budget is too small to work with.
    """
    stages = gpu_needs(job, machine.gpus, offload)
    worst = max(stages, key=lambda need: need.total)
    dp = data_parallel(job, machine.gpus)
    micro_batches = max(1, job.training.global_batch_size // (job.training.micro_batch_size * dp))
    shortages = gpu_shortages(stages, machine)
    shards = max((shard_numels(job, stage_of(job.model, job.layout, n.stage), machine.gpus) for n in stages), key=sum)
    if not offload:
        return Need(job, machine, dp, micro_batches, worst, tuple(stages), shards, 12, shortages=tuple(shortages))
    config = job.offload or OffloadConfig()
    subgroups = _subgroups(job, config, shards)
    slot_bytes = _slot_bytes(subgroups)
    there: "tuple[frozenset[int], int]" = (frozenset(), 0)
    if updates_on_gpu(config):
        there = choose_device_residents(len(subgroups), slot_bytes, config.gpu_memory, config.update_device == "cuda")
    reserved = GRADIENT_STAGINGS * max(s.numel for s in subgroups) * (STAGED_BYTES + job.training.weight_bytes)
    budget, ranks = rank_budget(config, machine), machine.gpus_per_node
    in_host = len(subgroups) - len(there[0])
    least = min(MINIMUM_STAGING, in_host + bool(there[0])) * slot_bytes + reserved
    too_small = config.host_memory == AUTO and budget < least
    budget = max(budget, least) if too_small else budget
    paths = machine.paths or config.paths
    staging = config.staging_count or 2 + 2 * max(1, len(paths))
    residency = choose_residents(len(subgroups), slot_bytes, budget, staging, reserved, *there)
    streamed = in_host - len(residency.residents)
    path_needs, short = _paths(job, machine, paths, subgroups, residency, streamed, slot_bytes)
    host = _host(job, machine, stages, residency.buffer_count * slot_bytes + reserved, dp)
    shortages += short
    if host.total > machine.host_memory or too_small:
        needed = host.total
        if config.host_memory == AUTO:
            needed = _enough_host_memory(config, host, least * ranks, in_host * slot_bytes * ranks)
        shortages.append(Shortage("host memory of a node", needed, machine.host_memory))
    return Need(
        *(
            job,
            machine,
            dp,
            micro_batches,
            worst,
            tuple(stages),
            shards,
            8 + subgroups[0].main_itemsize,
            tuple(subgroups),
        ),
        *(residency, host, path_needs, budget, tuple(shortages)),
    )


def rank_budget(config: OffloadConfig, machine: Machine) -> int:
    """Bytes that a rank's state buffers may take, as ``opening`` will reckon them."""
    if config.host_memory != AUTO:
        return int(config.host_memory)
    free = machine.host_memory - machine.host_reserve * machine.gpus_per_node
    return max(0, int(free * config.host_memory_fraction)) // machine.gpus_per_node


def _enough_host_memory(config: OffloadConfig, host: HostNeed, least: int, whole: int) -> int:
    """A node's memory of which ``host_memory_fraction`` is enough for buffers, and the rest for a save."""
    share = config.host_memory_fraction
    rest = host.save / (1 - share) if share < 1 else float("inf")
    return host.processes + int(min(max(least / share, rest, host.startup), whole + host.save))


def _host(job: Job, machine: Machine, stages: Sequence[GpuNeed], buffers: int, dp: int) -> HostNeed:
    ranks = machine.gpus_per_node
    weights = max(n.weights for n in stages)
    startup = 0
    if job.training.cpu_initialization:  # the rank's weights, and one whole fp32 matrix of which it takes a part
        widest = max(
            job.model.ffn_hidden_size * (2 if job.model.gated else 1), job.model.padded_vocab_size(job.layout.tp)
        )
        startup = (weights + 4 * widest * job.model.hidden_size) * ranks
    # Megatron's writer copies the rank's share of the weights to the host before it writes them.
    return HostNeed(buffers * ranks, machine.host_reserve * ranks, weights // dp * ranks, startup)


def _paths(
    job: Job,
    machine: Machine,
    paths: "tuple[PathConfig, ...]",
    subgroups: "Sequence[Subgroup]",
    residency: Residency,
    streamed: int,
    slot_bytes: int,
) -> "tuple[tuple[PathNeed, ...], list[Shortage]]":
    """What each path of a node holds, placed as the run will place it."""
    if not streamed or not paths:
        needed = streamed * slot_bytes * machine.gpus_per_node
        return (), [Shortage("paths (none is given)", needed, 0)] if streamed else []
    ranks, spare = machine.gpus_per_node, residency.staging_count
    config = job.offload or OffloadConfig()
    more = 0
    if config.snapshots or job.training.async_save:
        more = len(subgroups) - streamed + spare
        more += -(-len(subgroups) // weights_a_slot(slot_bytes, max(s.numel for s in subgroups)))
    # A snapshot keeps all that is streamed a second time, so a path with a capacity can hold half as much.
    unlimited = 2 * (streamed + spare + more) * slot_bytes
    room = [unlimited if path.capacity is None else path.capacity // ranks for path in paths]
    shortages: "list[Shortage]" = []
    try:
        homes = place(streamed, paths, slot_bytes, room, spare, ranks)
    except CapacityError:
        homes = place(streamed, paths, slot_bytes, [unlimited] * len(paths), spare, ranks)
    counts = [homes.count(i) for i in range(len(paths))]
    extra = snapshot_slots(counts, more) if more else [0] * len(paths)
    needs = []
    for path, count, copies in zip(paths, counts, extra):
        needed = (count + spare + copies) * slot_bytes * ranks
        needs.append(PathNeed(path, needed, count))
        if path.capacity is not None and needed > path.capacity:
            shortages.append(Shortage(f"path {path.directory!r}", needed, path.capacity))
    return tuple(needs), shortages


def _round_up(nbytes: int) -> int:
    return -(-nbytes // RECORD_ALIGNMENT) * RECORD_ALIGNMENT
