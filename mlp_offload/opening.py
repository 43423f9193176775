"""Open the tiers of a rank: check, plan, make state files and host buffers, write every slot once."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Protocol

from .config import AUTO, OffloadConfig
from .errors import OffloadError, PathTimeoutError
from .plan.devices import choose_device_residents
from .plan.placement import RECORD_ALIGNMENT, Residency, choose_residents, place, snapshot_slots, weights_a_slot
from .plan.subgroups import Subgroup
from .ranks import RankContext
from .rates import PathRates, first_rates
from .records import DeviceTier
from .storage.buffers import BufferPool
from .storage.jobdir import ScratchFile, check_directories, job_name
from .storage.memory import available_memory_bytes
from .storage.statefile import StateFile, free_bytes
from .tiers import Entry, Tiers, round_up


class Gpu(Protocol):
    """A GPU that may update subgroups; see ``device_updates.Gpu``."""

    def reserve(self, residents: Collection[int], passing_count: int, buffer_bytes: int) -> DeviceTier:
        """Take memory for the records of ``residents``, and for those that pass through."""


def open_tiers(
    config: OffloadConfig,
    subgroups: "tuple[Subgroup, ...]",
    rank: RankContext,
    name: str,
    reserved_bytes: int = 0,
    gpu: "Gpu | None" = None,
) -> Tiers:
    """Check everything, then make pool and state files. Nothing is left behind after an error.

    Args:
        subgroups: of all spaces.
        reserved_bytes: part of the host-memory budget that the caller spends itself.
        gpu: updates some subgroups, and has memory for some.

    Raises:
        ConfigError, CapacityError, PathInUseError: each names the subject, the numbers and the next step.
    """
    directories = [str(d) for d in check_directories([p.resolved_directory() for p in config.paths])]
    slot_bytes, residency, streamed = spend_memory(
        config, subgroups, _host_memory(config, rank), reserved_bytes, gpu is not None
    )
    with contextlib.ExitStack() as undo:
        device = None
        if gpu is not None:
            device = gpu.reserve(sorted(residency.device_residents), residency.passing_count, slot_bytes)
            undo.callback(device.close)
        copies = len(subgroups) - len(streamed) + residency.staging_count  # for a snapshot, and then bf16 weights
        copies += -(-len(subgroups) // weights_a_slot(slot_bytes, max((s.numel for s in subgroups), default=1)))
        homes, files, rates = _make_files(
            undo, config, directories, streamed, residency.staging_count, slot_bytes, rank, name, copies
        )
        alignment = max([RECORD_ALIGNMENT, *(file.alignment for file in files)])
        pool = BufferPool(max(1, residency.buffer_count), round_up(slot_bytes, alignment))
        for file in files:
            file.engine.register_buffers(*pool.region, keepalive=pool)
        undo.pop_all()  # closed by the tiers from now on
    table = [Entry() for _ in subgroups]
    return Tiers(config, subgroups, residency, homes, pool, directories, files, rates, table, device=device)


def spend_memory(
    config: OffloadConfig,
    subgroups: "tuple[Subgroup, ...]",
    host_memory: int,
    reserved_bytes: int,
    with_gpu: bool = False,
) -> "tuple[int, Residency, list[int]]":
    """(bytes of a slot, what is done with ``host_memory`` bytes and ``gpu_memory``, the subgroups that are not resident)."""
    slot_bytes = round_up(max((s.record_bytes for s in subgroups), default=1), RECORD_ALIGNMENT)
    staging_count = config.staging_count or 2 + 2 * len(config.paths)
    there: "tuple[frozenset[int], int]" = (frozenset(), 0)
    if with_gpu:
        there = choose_device_residents(len(subgroups), slot_bytes, config.gpu_memory, config.update_device == "cuda")
    residency = choose_residents(len(subgroups), slot_bytes, host_memory, staging_count, reserved_bytes, *there)
    return slot_bytes, residency, [i for i in range(len(subgroups)) if residency.streams(i)]


def _make_files(
    undo: contextlib.ExitStack,
    config: OffloadConfig,
    directories: "list[str]",
    streamed: "list[int]",
    spare_count: int,
    slot_bytes: int,
    rank: RankContext,
    name: str,
    copy_count: int,
) -> "tuple[dict[int, int], list[StateFile], list[PathRates]]":
    """(homes, state files, paths' rates); none where everything is resident. ``undo`` removes what was made."""
    if not streamed:
        return {}, [], []
    job, ranks = job_name(config.job), rank.local_rank_count
    scratches = [
        undo.enter_context(ScratchFile.create(directory, job=job, rank=rank.rank, name=name))
        for directory in directories
    ]
    rates = first_rates(config, [scratch.path.parent for scratch in scratches], rank.local_rank)
    room = []
    for path, directory, scratch in zip(config.paths, directories, scratches):
        free = free_bytes(directory) + scratch.neighbour_bytes()
        room.append((free if path.capacity is None else min(free, path.capacity)) // ranks)
    homes = place(len(streamed), [r.path for r in rates], slot_bytes, room, spare_count, ranks)
    files = []
    counts = [homes.count(i) for i in range(len(scratches))]
    more = snapshot_slots(counts, copy_count) if config.snapshots else [0] * len(scratches)
    for i, (path, scratch) in enumerate(zip(config.paths, scratches)):
        file = StateFile.create(
            scratch,
            slot_count=counts[i] + spare_count + more[i],
            slot_bytes=slot_bytes,
            kind=config.engine if path.engine == AUTO else path.engine,
            direct=config.direct,
            capacity_bytes=path.capacity,
            local_rank_count=ranks,
            threads=config.threads,
            iodepth=config.iodepth,
            block_size=config.block_size,
            warn_seconds=config.warn_seconds,
            timeout_seconds=config.timeout_seconds,
        )
        files.append(undo.enter_context(file))
    return dict(zip(streamed, homes)), files, rates


def fill_slots(tiers: Tiers, progress: "Callable[[int], None]") -> None:
    """Write every slot of every path once, all paths at the same time; ``progress`` gets bytes written since its last call.

    Raises:
        CapacityError, PathIOError: a path is full, or fails.
    """
    ended = threading.Event()

    def go_on(nbytes: int) -> None:
        if ended.is_set():
            raise OffloadError("another path failed while this one was filled")
        progress(nbytes)

    with ThreadPoolExecutor(max(1, len(tiers.files)), "mlp-offload-fill") as threads:
        try:
            for done in as_completed([threads.submit(file.write_all_slots, go_on) for file in tiers.files]):
                done.result()
        except BaseException as error:  # nobody waits for the other paths, which may have minutes to go
            ended.set()
            tiers.hung |= isinstance(error, PathTimeoutError)
            raise


def _host_memory(config: OffloadConfig, rank: RankContext) -> int:
    """The budget of this rank, bytes."""
    if config.host_memory == AUTO:
        return int(available_memory_bytes() * config.host_memory_fraction) // rank.local_rank_count
    return int(config.host_memory)
