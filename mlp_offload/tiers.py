"""The two tiers of one rank: a pool of host buffers, and the paths together as one virtual storage tier.

Knows where each subgroup's only authoritative copy is and moves single subgroups; it decides nothing about order.
Only the trainer's thread calls it.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from .config import AUTO, OffloadConfig
from .errors import ChecksumError, OffloadError, PathIOError, PathTimeoutError
from .plan.placement import RECORD_ALIGNMENT, Residency, choose_residents, place
from .plan.subgroups import ARRAYS, Subgroup
from .storage.buffers import BufferPool, Lease
from .storage.engine import IoFuture
from .storage.jobdir import ScratchFile, check_directories, job_name
from .storage.memory import available_memory_bytes
from .storage.statefile import StateFile, free_bytes
from .telemetry import StepRecord

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RankContext:
    """Who this process is: global rank, and its place among the processes of its node."""

    rank: int = 0
    local_rank: int = 0
    local_rank_count: int = 1


class Where(enum.Enum):
    """Where a subgroup's authoritative copy is, and what that costs."""

    HOST = "in a leased host buffer; its slot, if it has one, holds an older step"
    FLUSHING = "in a leased host buffer, being written; the buffer is released and the old slot freed when that is done"
    STORED = "in a slot on its path; no host memory"


@dataclass
class Entry:
    """One row of the table: where the subgroup is, and what its stored bytes must add up to."""

    where: Where = Where.HOST
    lease: "Lease | None" = None
    path: int = -1
    slot: int = -1
    checksum: "int | None" = None
    step: int = 0


@dataclass
class Flight:
    """Bytes of one subgroup on their way; they belong to ``lease`` until the flight has landed."""

    phase: str  # "fetch" or "flush"
    index: int
    path: int
    slot: int
    lease: Lease
    future: IoFuture
    step: int
    record: "StepRecord | None" = None


@dataclass(frozen=True)
class StateView:
    """The record of one subgroup in host memory: three fp32 arrays of ``numel`` elements.

    ``address`` is that of ``main_param``; ``exp_avg`` and ``exp_avg_sq`` follow ``stride_numel`` elements apart.
    """

    address: int
    stride_numel: int
    numel: int
    main_param: np.ndarray
    exp_avg: np.ndarray
    exp_avg_sq: np.ndarray

    @classmethod
    def of(cls, subgroup: Subgroup, lease: Lease) -> "StateView":
        stride = subgroup.stride_numel
        arrays = [lease.array(4 * stride * k, subgroup.numel) for k in range(len(ARRAYS))]
        return cls(lease.address, stride, subgroup.numel, *arrays)


@dataclass
class Tiers:
    """Host buffers, state files and the table. Made by ``open_tiers``.

    Attributes:
        subgroups: all of the rank's subgroups, of all spaces; their position here is their index in the table.
        homes: path on which a subgroup that is not resident lives; it may be flushed elsewhere when that path fails.
    """

    config: OffloadConfig
    subgroups: "tuple[Subgroup, ...]"
    residency: Residency
    homes: "dict[int, int]"
    pool: BufferPool
    directories: "list[str]"
    files: "list[StateFile]"
    table: "list[Entry]" = field(default_factory=list)
    fetches: "list[Flight]" = field(default_factory=list)
    flushes: "list[Flight]" = field(default_factory=list)
    hung: bool = False

    def homes_on(self, path: int) -> int:
        """How many subgroups live on a path."""
        return sum(home == path for home in self.homes.values())

    # ------------------------------------------------------------------------------- one subgroup

    def view(self, index: int, lease: Lease) -> StateView:
        return StateView.of(self.subgroups[index], lease)

    def start_fetch(self, index: int, lease: Lease, record: "StepRecord | None" = None) -> Flight:
        """Begin to read a stored subgroup into ``lease``."""
        entry, file = self.table[index], self.files[self.table[index].path]
        future = file.read(entry.slot, lease, self._transfer_bytes(index), checksum=self.config.checksums)
        flight = Flight("fetch", index, entry.path, entry.slot, lease, future, entry.step, record)
        self.fetches.append(flight)
        return flight

    def land_fetch(self, flight: Flight) -> None:
        """Wait for a fetch and check what came.

        Raises:
            PathIOError, PathTimeoutError, ChecksumError: names the subgroup; nothing has been updated with it.
        """
        entry, file = self.table[flight.index], self.files[flight.path]
        try:
            checksum = self._result(flight)
        except PathIOError as error:
            detail = f"It held the only copy of subgroup {flight.index} (step {entry.step}). Restart from the last checkpoint, without this path."
            raise PathIOError(error.path, error.operation, error.offset, error.nbytes, error.errno, detail) from error
        if entry.checksum is not None and checksum is not None and checksum != entry.checksum:
            raise ChecksumError(
                f"subgroup {flight.index} (step {entry.step}) on {file.path}, slot {flight.slot}, offset={file.offset(flight.slot)} "
                f"bytes={self._transfer_bytes(flight.index)}: crc32c of the bytes read is {checksum:#010x}, of those written {entry.checksum:#010x}. "
                "The path returned other bytes than it was given: stop using it and restart from the last checkpoint."
            )
        self._account(flight)
        self.fetches.remove(flight)
        entry.where, entry.lease = Where.HOST, flight.lease

    def start_flush(self, index: int, lease: Lease, path: int, step: int, record: "StepRecord | None" = None) -> Flight:
        """Begin to write a subgroup from ``lease`` to a free slot of ``path``, or of another path when it has none."""
        if not self.files[path].free_count:
            path = max(range(len(self.files)), key=lambda i: self.files[i].free_count)
        file = self.files[path]
        slot = file.allocate()
        future = file.write(slot, lease, self._transfer_bytes(index), checksum=self.config.checksums)
        flight = Flight("flush", index, path, slot, lease, future, step, record)
        self.table[index].where, self.table[index].lease = Where.FLUSHING, lease
        self.flushes.append(flight)
        return flight

    def keep(self, index: int, lease: Lease, step: int) -> None:
        """The subgroup stays in ``lease``; its slot, if any, held an older step and is free now."""
        self._free_slot(self.table[index])
        self.table[index] = Entry(Where.HOST, lease, step=step)

    def reap(self) -> int:
        """Land the flushes that are done, without waiting; returns how many buffers came free."""
        done = [f for f in self.flushes if f.future.done()]
        return sum(self._land_flush(flight) for flight in done)

    def settle(self) -> None:
        """Wait until no flush is in flight."""
        while self.flushes:
            self._land_flush(self.flushes[0])

    def wait_any(self, flights: Sequence[Flight]) -> None:
        """Sleep until one of ``flights`` is done; warns of, and gives up on, a storage call that hangs."""
        oldest, begin, warned = flights[0].future, time.monotonic(), False
        # The oldest is most likely to be next; 2 ms is how late another one may be noticed.
        while not oldest.wait(0.002):
            if any(f.future.done() for f in flights):
                return
            waited = time.monotonic() - begin
            if waited > self.config.warn_seconds and not warned:
                warned = True
                log.warning("%s", oldest.describe(begin))
            if waited > self.config.timeout_seconds:
                self.hung = True
                raise oldest.given_up(begin, self.config.timeout_seconds)

    @contextlib.contextmanager
    def borrow(self, index: int, write_back: bool) -> "Iterator[StateView]":
        """The record of one subgroup, between steps; with ``write_back`` what the caller changed is kept."""
        self.settle()
        entry = self.table[index]
        if entry.where is Where.HOST:
            yield self.view(index, entry.lease)
            return
        lease = self.pool.lease()
        if lease is None:
            raise OffloadError(f"no free buffer to read subgroup {index}: another one is still borrowed")
        self.land_fetch(self.start_fetch(index, lease))
        yield self.view(index, lease)
        if write_back:
            self.start_flush(index, lease, entry.path, entry.step)
            self.settle()
        else:
            entry.where, entry.lease = Where.STORED, None
            lease.release()

    def close(self) -> None:
        """Remove the state files and give the memory back. Safe to call twice and after errors."""
        stuck = False
        # Whoever gave up on a call that hangs must not wait for it here again.
        patience_seconds = 1.0 if self.hung else 30.0
        for file in self.files:
            stuck |= not file.close(patience_seconds)
        self.files = []
        if stuck:  # memory that the kernel may still write to is never given back
            return
        leases = [flight.lease for flight in self.fetches]
        leases += [entry.lease for entry in self.table if entry.lease is not None]
        for lease in leases:
            lease.release()
        self.fetches, self.flushes, self.table = [], [], []
        self.pool.close()

    # ------------------------------------------------------------------------------------ helpers

    def _land_flush(self, flight: Flight) -> int:
        """Wait for a flush; on failure send the subgroup, which is still in memory, to another path."""
        entry = self.table[flight.index]
        try:
            checksum = self._result(flight)
        except PathIOError as error:
            self.flushes.remove(flight)
            # The slot that failed stays allocated, so that nothing else is written there.
            others = [i for i in range(len(self.files)) if i != flight.path and self.files[i].free_count]
            if not others:
                detail = f"Subgroup {flight.index} is safe in memory; no other path has a free slot. Free space or add a path, and restart from the last checkpoint."
                raise PathIOError(
                    error.path, error.operation, error.offset, error.nbytes, error.errno, detail
                ) from error
            other = max(others, key=lambda i: self.files[i].free_count)
            log.warning("%s Subgroup %d is safe in memory and goes to %s.", error, flight.index, self.files[other].path)
            self.homes[flight.index] = other
            self.start_flush(flight.index, flight.lease, other, flight.step, flight.record)
            return 0
        self._account(flight)
        self.flushes.remove(flight)
        self._free_slot(entry)
        self.table[flight.index] = Entry(Where.STORED, None, flight.path, flight.slot, checksum, flight.step)
        flight.lease.release()
        return 1

    def _result(self, flight: Flight) -> "int | None":
        try:
            return flight.future.result(self.config.warn_seconds, self.config.timeout_seconds)
        except PathTimeoutError:
            self.hung = True
            raise

    def _free_slot(self, entry: Entry) -> None:
        if entry.slot >= 0:
            self.files[entry.path].free(entry.slot)

    def _transfer_bytes(self, index: int) -> int:
        alignment = max(file.alignment for file in self.files)
        return _round_up(self.subgroups[index].record_bytes, max(alignment, RECORD_ALIGNMENT))

    def _account(self, flight: Flight) -> None:
        if flight.record is None:
            return
        directory = self.directories[flight.path]
        moved = flight.record.bytes_read if flight.phase == "fetch" else flight.record.bytes_written
        moved[directory] = moved.get(directory, 0) + self._transfer_bytes(flight.index)
        future = flight.future
        flight.record.add(flight.phase, flight.index, future.started_seconds, future.finished_seconds, directory)


def open_tiers(
    config: OffloadConfig, subgroups: "tuple[Subgroup, ...]", rank: RankContext, name: str, reserved_bytes: int = 0
) -> Tiers:
    """Check everything, then make pool and state files. Nothing is left behind after an error.

    Args:
        subgroups: of all spaces.
        reserved_bytes: part of the host-memory budget that the caller spends itself.

    Raises:
        ConfigError, CapacityError, PathInUseError: each names the subject, the numbers and the next step.
    """
    directories = [str(d) for d in check_directories([p.resolved_directory() for p in config.paths])]
    slot_bytes = _round_up(max((s.record_bytes for s in subgroups), default=1), RECORD_ALIGNMENT)
    staging_count = config.staging_count or 2 + 2 * len(directories)
    residency = choose_residents(len(subgroups), slot_bytes, _host_memory(config, rank), staging_count, reserved_bytes)
    streamed = [i for i in range(len(subgroups)) if i not in residency.residents]
    pool = BufferPool(max(1, residency.buffer_count), slot_bytes)
    tiers = Tiers(config, subgroups, residency, {}, pool, directories, [], [Entry() for _ in subgroups])
    try:
        if streamed:
            _make_files(tiers, streamed, slot_bytes, rank, name)
    except BaseException:
        tiers.close()
        raise
    return tiers


def _make_files(tiers: Tiers, streamed: "list[int]", slot_bytes: int, rank: RankContext, name: str) -> None:
    config, ranks, spares = tiers.config, rank.local_rank_count, tiers.residency.staging_count
    job = job_name(config.job)
    with contextlib.ExitStack() as undo:
        scratches = []
        for directory in tiers.directories:
            scratches.append(undo.enter_context(ScratchFile.create(directory, job=job, rank=rank.rank, name=name)))
        room = []
        for path, directory, scratch in zip(config.paths, tiers.directories, scratches):
            free = free_bytes(directory) + scratch.neighbour_bytes()
            room.append((free if path.capacity is None else min(free, path.capacity)) // ranks)
        homes = place(len(streamed), config.paths, slot_bytes, room, spares, ranks)
        tiers.homes = dict(zip(streamed, homes))
        for i, (path, scratch) in enumerate(zip(config.paths, scratches)):
            file = StateFile.create(
                scratch,
                slot_count=homes.count(i) + spares,
                slot_bytes=slot_bytes,
                kind=config.engine if path.engine == AUTO else path.engine,
                direct=config.direct,
                capacity_bytes=path.capacity,
                local_rank_count=ranks,
                threads=config.threads,
                iodepth=config.iodepth,
                block_size=config.block_size,
            )
            tiers.files.append(file)
            file.engine.register_buffers(*tiers.pool.region, keepalive=tiers.pool)
        undo.pop_all()  # the state files own their scratch files now


def fill_slots(tiers: Tiers, progress: "Callable[[int], None]") -> None:
    """Write every slot of every path once, all paths at the same time; ``progress`` gets bytes written since its last call.

    Raises:
        CapacityError, PathIOError: a path is full, or fails.
    """
    if not tiers.files:
        return
    with ThreadPoolExecutor(len(tiers.files), "mlp-offload-fill") as threads:
        for done in [threads.submit(file.write_all_slots, progress) for file in tiers.files]:
            done.result()


def _host_memory(config: OffloadConfig, rank: RankContext) -> int:
    """The budget of this rank, bytes."""
    if config.host_memory == AUTO:
        return int(available_memory_bytes() * config.host_memory_fraction) // rank.local_rank_count
    return int(config.host_memory)


def _round_up(nbytes: int, multiple: int) -> int:
    return -(-nbytes // multiple) * multiple
