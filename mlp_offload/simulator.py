"""Steps without devices: the pipeline itself, on paths that exist only as bandwidths and on a clock that jumps.

``StepPipeline``, ``Tiers``, ``Balance`` and ``StateFile`` are those of a real run. Only what they stand on is simulated:
the engine (a read queue and a write queue a path), the buffer pool (a counter), updates (durations) and the clock. So
order, hits, bytes and the moving of subgroups between paths cannot differ from what a run does. No torch, no files.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .config import AUTO, OffloadConfig, PathConfig
from .errors import ConfigError
from .opening import spend_memory
from .pipeline import StepPipeline
from .plan.devices import GPU_ADAM_RATE, GRADIENT_BYTES, WEIGHT_BYTES, updates_on_gpu
from .plan.placement import place
from .plan.subgroups import Subgroup
from .ranks import RankContext
from .rates import PathRates
from .storage.statefile import StateFile
from .telemetry import StepRecord
from .tiers import Entry, Tiers, Where
from .virtual import Clock, Device, Engine, Pool, Scratch, SimulatedPath
from .virtual_updates import STAGING_COUNT, Gpu, Link, Work

__all__ = ["SimulatedPath", "simulate"]


def simulate(
    numels: Sequence[int],
    *,
    paths: Sequence[SimulatedPath],
    host_memory_bytes: int,
    subgroup_size: int,
    main_itemsize: int = 2,
    adam_parameters_per_second: float,
    copy_bytes_per_second: float = 0.0,
    compute_seconds: float,
    local_rank_count: int = 1,
    staging_count: int = 0,
    gpu_memory_bytes: int = 0,
    update_device: str = AUTO,
    gpu_adam_parameters_per_second: float = GPU_ADAM_RATE,
    steps: int = 5,
) -> "list[StepRecord]":
    """Steps of one rank, as they would go; the first one starts with all streamed subgroups on their paths.

    All ranks of a node do the same at the same time, so each has ``1 / local_rank_count`` of every path.

    Args:
        numels: elements of the rank's shards.
        paths: of the node; none where everything fits into host memory.
        host_memory_bytes: of this rank.
        main_itemsize: bytes a parameter that a record holds of main_param: 2 for bf16 weights, 4 with full masters.
        adam_parameters_per_second: of this rank's CPU update.
        copy_bytes_per_second: between host and device, in each direction, of this rank; 0 = weights and gradients are in
            host memory and used in place.
        compute_seconds: forward and backward between two steps.
        staging_count: buffers in motion; 0 = the default of ``OffloadConfig``.
        gpu_memory_bytes, update_device: as ``gpu_memory`` and ``update_device`` of ``OffloadConfig``, of this rank.
        gpu_adam_parameters_per_second: that the GPU updates, with the record in its memory.

    Returns:
        A record a step, as telemetry has them; seconds are virtual. ``started`` of two records differ by the iteration.

    Raises:
        ConfigError: a number out of range, or too little host memory; says what would do.
    """
    for name, value, least in (
        ("adam_parameters_per_second", adam_parameters_per_second, 1e-9),
        ("gpu_adam_parameters_per_second", gpu_adam_parameters_per_second, 1e-9),
        ("copy_bytes_per_second", copy_bytes_per_second, 0),
        ("compute_seconds", compute_seconds, 0),
        ("local_rank_count", local_rank_count, 1),
        ("steps", steps, 1),
    ):
        if not least <= value < float("inf"):
            raise ConfigError(f"{name} is {value}; it must be {'above 0' if 0 < least < 1 else f'at least {least}'}")
    names = [path.name for path in paths]
    if len(set(names)) < len(names):
        raise ConfigError(f"paths {names}: each needs a name of its own")
    config = OffloadConfig(
        paths=tuple(
            PathConfig(
                p.name,
                *(max(1, round(r / local_rank_count)) for r in (p.read_bytes_per_second, p.write_bytes_per_second)),
            )
            for p in paths
        ),
        host_memory=host_memory_bytes,
        subgroup_size=subgroup_size,
        staging_count=staging_count,
        gpu_memory=gpu_memory_bytes,
        update_device=update_device,
        checksums=False,
    )
    on_gpu = updates_on_gpu(config)
    if on_gpu and not copy_bytes_per_second:
        raise ConfigError("updates on a GPU need copy_bytes_per_second (--copy-rate), between the GPU and its host")
    storage = [Device(path, local_rank_count) for path in paths]
    clock = Clock(storage)
    link = Link(copy_bytes_per_second) if copy_bytes_per_second else None
    gpu = None
    if on_gpu and link:
        gpu = Gpu(clock, link, adam_parameters_per_second, gpu_adam_parameters_per_second, copy_bytes_per_second)
        clock.devices.append(gpu)
    work = Work(clock, adam_parameters_per_second, link, gpu, main_itemsize == 2)

    def open_tiers(
        config: OffloadConfig,
        subgroups: "tuple[Subgroup, ...]",
        rank: RankContext,
        name: str,
        reserved_bytes: int,
        gpu: "Gpu | None",
    ) -> Tiers:
        return _open(config, subgroups, clock, storage, reserved_bytes, gpu)

    largest = min(subgroup_size, sum(numels))
    reserved_bytes = STAGING_COUNT * largest * (GRADIENT_BYTES + WEIGHT_BYTES) if copy_bytes_per_second else 0
    pipeline = StepPipeline(
        config,
        {"all": numels},
        reserved_bytes=reserved_bytes,
        main_itemsize=main_itemsize,
        gpu=gpu,
        open=open_tiers,
        clock=clock,
    )
    records = []
    for _ in range(steps):
        work.begin()
        records.append(pipeline.step("all", work))
        clock.advance(work.end + compute_seconds)
    pipeline.tiers.settle()  # the last flushes, for their record
    pipeline.close()
    return records


def _open(
    config: OffloadConfig,
    subgroups: "tuple[Subgroup, ...]",
    clock: Clock,
    storage: "list[Device]",
    reserved_bytes: int,
    gpu: "Gpu | None",
) -> Tiers:
    """Tiers as ``opening.open_tiers`` makes them, with all state where it is after start-up."""
    slot_bytes, residency, streamed = spend_memory(
        config, subgroups, int(config.host_memory), reserved_bytes, gpu is not None
    )
    if gpu is not None:
        gpu.reserve(residency.device_residents, residency.passing_count, slot_bytes)
    if streamed and not config.paths:
        raise ConfigError(
            f"{len(streamed)} of {len(subgroups)} subgroups do not fit into host memory, and there is no path: add one, or "
            f"raise host_memory to {len(subgroups) * slot_bytes + reserved_bytes} bytes"
        )
    slot_count = len(streamed) + residency.staging_count  # of each path: all of them could go to one
    room = [slot_count * slot_bytes] * len(config.paths)
    homes = place(len(streamed), config.paths, slot_bytes, room, residency.staging_count) if streamed else ()
    pool = Pool(max(1, residency.buffer_count), slot_bytes)
    files = [
        StateFile(Scratch(Path(path.directory)), Engine(device, clock), slot_count, slot_bytes)
        for path, device in zip(config.paths, storage)
    ]
    table = [
        Entry(Where.HOST, pool.lease())
        if i in residency.residents
        else Entry(Where.DEVICE if i in residency.device_residents else Where.STORED)
        for i in range(len(subgroups))
    ]
    for index, home in zip(streamed, homes):
        table[index].path, table[index].slot = home, files[home].allocate()
    directories = [path.directory for path in config.paths]
    rates = [PathRates(path, "given") for path in config.paths]
    return Tiers(
        config,
        subgroups,
        residency,
        dict(zip(streamed, homes)),
        pool,
        directories,
        files if streamed else [],
        rates,
        table,
        device=gpu,
    )
