"""The tiers of one rank: a pool of host buffers, the paths together as one virtual storage tier, and maybe GPU memory.

Knows where each subgroup's only authoritative copy is and moves single subgroups; it decides nothing about order.
Only the trainer's thread calls it.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from .config import OffloadConfig
from .errors import ChecksumError, OffloadError, PathIOError, PathTimeoutError
from .plan.placement import RECORD_ALIGNMENT, Residency
from .plan.subgroups import Subgroup
from .rates import PathRates
from .records import DeviceRecord, DeviceTier, StateView
from .storage.buffers import BufferPool, Lease
from .storage.engine import IoFuture
from .storage.statefile import StateFile
from .telemetry import StepRecord

log = logging.getLogger(__name__)

CLOSE_SECONDS = 30.0
"""How long ``close`` waits for storage calls that are under way."""


class Where(enum.Enum):
    """Where a subgroup's authoritative copy is, and what that costs."""

    HOST = "in a leased host buffer; its slot, if it has one, holds an older step"
    FLUSHING = "in a leased host buffer, being written; the buffer is released and the old slot freed when that is done"
    STORED = "in a slot on its path; no host memory"
    DEVICE = "in GPU memory for good; no host memory, no slot"


@dataclass
class Entry:
    """One row of the table: where the subgroup is, and what its stored bytes must add up to."""

    where: Where = Where.HOST
    lease: "Lease | None" = None
    path: int = -1
    slot: int = -1
    checksum: "int | None" = None
    step: int = 0


@dataclass(eq=False)
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


@dataclass
class Tiers:
    """Host buffers, state files and the table. Made by ``opening.open_tiers``.

    Attributes:
        subgroups: all of the rank's subgroups, of all spaces; their position here is their index in the table.
        homes: path on which a subgroup that is not resident lives; it may be flushed elsewhere when that path fails.
        rates: of each file's path, as the first homes were chosen by.
        device: GPU memory, where some is used.
    """

    config: OffloadConfig
    subgroups: "tuple[Subgroup, ...]"
    residency: Residency
    homes: "dict[int, int]"
    pool: BufferPool
    directories: "list[str]"
    files: "list[StateFile]"
    rates: "list[PathRates]"
    table: "list[Entry]" = field(default_factory=list)
    fetches: "list[Flight]" = field(default_factory=list)
    flushes: "list[Flight]" = field(default_factory=list)
    pinned: "dict[tuple[int, int], int]" = field(default_factory=dict)  # (path, slot) -> how many snapshots hold it
    retired: "set[tuple[int, int]]" = field(default_factory=set)  # those of them that hold no newest copy
    hung: bool = False
    device: "DeviceTier | None" = None

    def homes_on(self, path: int) -> int:
        """How many subgroups live on a path."""
        return sum(home == path for home in self.homes.values())

    # ------------------------------------------------------------------------------- one subgroup

    def view(self, index: int, lease: Lease) -> StateView:
        return StateView.of(self.subgroups[index], lease)

    def on_device(self, index: int) -> DeviceRecord:
        """The record of a subgroup that is in GPU memory."""
        return DeviceRecord(self.device.address(index), self.subgroups[index].stride_numel)

    def move_to_device(self, index: int, lease: Lease, step: int) -> None:
        """From now on the subgroup is in GPU memory, and the buffer is free."""
        self.device.write(index, self._bytes(index, lease))
        self.table[index] = Entry(Where.DEVICE, step=step)
        lease.release()

    def read_from_device(self, index: int, lease: Lease) -> None:
        """Copy the record of a subgroup that is in GPU memory into a buffer."""
        self.device.read(index, self._bytes(index, lease))

    def start_fetch(self, index: int, lease: Lease, record: "StepRecord | None" = None) -> Flight:
        """Begin to read a stored subgroup into ``lease``."""
        entry, file = self.table[index], self.files[self.table[index].path]
        future = file.read(entry.slot, lease, self.transfer_bytes(index, entry.path), checksum=self.config.checksums)
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
                f"bytes={self.transfer_bytes(flight.index, flight.path)}: crc32c of the bytes read is {checksum:#010x}, of those written {entry.checksum:#010x}. "
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
        future = file.write(slot, lease, self.transfer_bytes(index, path), checksum=self.config.checksums)
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
        free_before = self.pool.free_count
        for flight in [f for f in self.flushes if f.future.done()]:
            if flight in self.flushes:  # landing one may have landed another
                self._land_flush(flight)
        return self.pool.free_count - free_before

    def settle(self) -> None:
        """Wait until no flush is in flight."""
        while self.flushes:
            self._land_flush(self.flushes[0])

    def settle_before_close(self) -> None:
        """Land what is done within ``CLOSE_SECONDS``: nobody will use the state again, so nothing more is worth a wait."""
        deadline = time.monotonic() + CLOSE_SECONDS
        for flight in self.flushes:
            self.hung |= not flight.future.wait(deadline - time.monotonic())
        self.reap()

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
        if entry.where is Where.DEVICE:
            with lease:
                self.read_from_device(index, lease)
                yield self.view(index, lease)
                if write_back:
                    self.device.write(index, self._bytes(index, lease))
            return
        self.land_fetch(self.start_fetch(index, lease))
        if write_back:
            yield self.view(index, lease)
            self.start_flush(index, lease, entry.path, entry.step)
            self.settle()
            return
        try:
            yield self.view(index, lease)
        finally:  # the slot still holds the same bytes
            entry.where, entry.lease = Where.STORED, None
            lease.release()

    # ------------------------------------------------------------------------------------ snapshots

    def pin(self, path: int, slot: int) -> None:
        """The slot's bytes stay as they are until ``unpin``, also when its subgroup is flushed elsewhere."""
        self.pinned[path, slot] = self.pinned.get((path, slot), 0) + 1

    def unpin(self, path: int, slot: int) -> None:
        """Undo one ``pin``; with the last, the slot is free unless it holds a subgroup's newest copy."""
        self.pinned[path, slot] -= 1
        if not self.pinned[path, slot]:
            del self.pinned[path, slot]
            if (path, slot) in self.retired:
                self.retired.remove((path, slot))
                if self.files:
                    self.files[path].free(slot)

    def write_copy(self, lease: Lease, nbytes: int) -> "tuple[int, int, int, int | None]":
        """Write at least the first ``nbytes`` of a buffer to a slot that is pinned at once.

        Returns:
            (path, slot, bytes, checksum) when it is there; bytes are ``nbytes`` rounded up to what the path can transfer.

        Raises:
            PathIOError, PathTimeoutError
        """
        path = max(range(len(self.files)), key=lambda i: self.files[i].free_count)
        file = self.files[path]
        slot, nbytes = file.allocate(), round_up(nbytes, file.alignment)
        try:
            checksum = file.write(slot, lease, nbytes, checksum=self.config.checksums).result()
        except PathTimeoutError:
            self.hung = True
            raise
        except PathIOError:
            file.free(slot)
            raise
        self.pin(path, slot)
        self.retired.add((path, slot))
        return path, slot, nbytes, checksum

    def close(self) -> None:
        """Remove the state files and give the memory back. Safe to call twice and after errors."""
        if self.device is not None:
            self.device.close()
        # Whoever gave up on a call that hangs must not wait for it here again.
        deadline = time.monotonic() + (0.0 if self.hung else CLOSE_SECONDS)
        self.files = [file for file in self.files if not file.close(max(1.0, deadline - time.monotonic()))]
        if self.files:  # memory that the kernel may still write to is never given back
            return
        for holder in (*self.fetches, *self.table):
            if holder.lease is not None:
                holder.lease.release()
        self.fetches, self.flushes, self.table = [], [], []
        self.pool.close()

    # ------------------------------------------------------------------------------------ helpers

    def _land_flush(self, flight: Flight) -> None:
        """Wait for a flush; on failure send the subgroup, which is still in memory, to another path."""
        entry = self.table[flight.index]
        try:
            checksum = self._result(flight)
        except PathIOError as error:
            self.flushes.remove(flight)
            # The slot that failed stays allocated, so that nothing else is written there.
            others = [i for i in range(len(self.files)) if i != flight.path]
            while not any(self.files[i].free_count for i in others):
                elsewhere = [f for f in self.flushes if f.path != flight.path]
                if not elsewhere:
                    break
                self._land_flush(elsewhere[0])  # frees the slot of an older step
            if not any(self.files[i].free_count for i in others):
                detail = f"Subgroup {flight.index} is safe in memory; no other path has a free slot. Free space or add a path, and restart from the last checkpoint."
                raise PathIOError(
                    error.path, error.operation, error.offset, error.nbytes, error.errno, detail
                ) from error
            other = max(others, key=lambda i: self.files[i].free_count)
            log.warning("%s Subgroup %d is safe in memory and goes to %s.", error, flight.index, self.files[other].path)
            self.homes[flight.index] = other
            self.start_flush(flight.index, flight.lease, other, flight.step, flight.record)
            return
        self._account(flight)
        self.flushes.remove(flight)
        self._free_slot(entry)
        self.table[flight.index] = Entry(Where.STORED, None, flight.path, flight.slot, checksum, flight.step)
        flight.lease.release()

    def _bytes(self, index: int, lease: Lease) -> np.ndarray:
        return lease.array(0, self.subgroups[index].record_bytes, np.uint8)

    def _result(self, flight: Flight) -> "int | None":
        try:
            return flight.future.result()
        except PathTimeoutError:
            self.hung = True
            raise

    def _free_slot(self, entry: Entry) -> None:
        if (entry.path, entry.slot) in self.pinned:
            self.retired.add((entry.path, entry.slot))
        elif entry.slot >= 0:
            self.files[entry.path].free(entry.slot)

    def transfer_bytes(self, index: int, path: int) -> int:
        return round_up(self.subgroups[index].record_bytes, max(self.files[path].alignment, RECORD_ALIGNMENT))

    def _account(self, flight: Flight) -> None:
        if flight.record is None:
            return
        directory = self.directories[flight.path]
        moved = flight.record.bytes_read if flight.phase == "fetch" else flight.record.bytes_written
        moved[directory] = moved.get(directory, 0) + self.transfer_bytes(flight.index, flight.path)
        future = flight.future
        flight.record.add(flight.phase, flight.index, future.started_seconds, future.finished_seconds, directory)


def round_up(nbytes: int, multiple: int) -> int:
    """The least multiple of ``multiple`` that holds ``nbytes``."""
    return -(-nbytes // multiple) * multiple
