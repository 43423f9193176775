"""The step: fetch k+1.., update k and flush ..k-1 at the same time. The only scheduler.

    plan (rows) -> start fetches -> update the first row that is ready -> keep it, or start its flush

Updates on a GPU are begun as soon as they can be, and go on while the next rows are updated here.

The trainer's thread runs all of it; the paths' engines only complete futures. Flushes may go on after ``step``
returns, during the next forward and backward pass; their buffers are taken back when the next step needs them.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

from .balance import Balance
from .config import OffloadConfig
from .device_share import DeviceShare
from .errors import OffloadError
from .opening import Gpu, fill_slots, open_tiers
from .plan.schedule import Row, StepPlan, Waiting, plan_step
from .plan.subgroups import Subgroup, cut
from .ranks import RankContext
from .records import DeviceFuture, DeviceRecord, StateView
from .storage.buffers import Lease
from .telemetry import GPU, StepLog, StepRecord
from .tiers import Flight, Tiers, Where


class SubgroupWork(Protocol):
    """What the pipeline calls to update one subgroup; see ``updates.AdamWork``."""

    def prepare(self, subgroup: Subgroup) -> None:
        """Begin to bring the subgroup's gradients to the host; must not wait."""

    def update(self, subgroup: Subgroup, state: StateView) -> None:
        """Apply Adam to ``state`` in place and send the weights to the model."""

    def start_on_device(self, subgroups: Sequence[Subgroup]) -> None:
        """Called first in a step with those that the GPU will update, if there are some; must not wait."""

    def update_on_device(self, subgroup: Subgroup, record: "StateView | DeviceRecord") -> "DeviceFuture | None":
        """Begin to apply Adam on the GPU; must not wait. Nobody touches a view until it is done."""


@dataclass(frozen=True)
class _Passing:
    """A record that passes through GPU memory; the buffer is in use until the future is done."""

    row: Row
    lease: Lease
    future: DeviceFuture
    begin: float


class StepPipeline:
    """The optimizer state of one rank on its tiers.

    Args:
        config: the options.
        spaces: for each space (a set of shards that is stepped at once, such as "dense" or "expert") the
            elements of its shards, in order.
        rank: who we are on this node; names the state files and divides shared room.
        name: tells two optimizers of one process apart.
        reserved_bytes: host memory that the caller spends from the same budget (gradient staging).
        pin: called with (address, nbytes) of the buffer pool, to pin it for a device; gives what undoes it, or None.
        on_progress: called with (bytes written so far, bytes in all) while the state is written at start-up.
        main_itemsize: bytes a parameter of what a record holds of main_param; see ``updates.main_itemsize``.
        gpu: updates some subgroups, and has memory for some; see ``device_updates.gpu_for_updates``.
        open, clock: what makes the tiers, and gives the time in seconds; ``simulator`` has others.

    Attributes:
        on_record: called with each step's record (of all spaces) when it is complete: all its flushes have landed.

    Raises:
        ConfigError, CapacityError, PathInUseError: before anything is written.
    """

    def __init__(
        self,
        config: OffloadConfig,
        spaces: "Mapping[str, Sequence[int]]",
        rank: "RankContext | None" = None,
        *,
        name: str = "optimizer",
        reserved_bytes: int = 0,
        pin: "Callable[[int, int], Callable[[], object] | None] | None" = None,
        on_progress: "Callable[[int, int], None] | None" = None,
        main_itemsize: int = 4,
        gpu: "Gpu | None" = None,
        open: "Callable[..., Tiers]" = open_tiers,
        clock: "Callable[[], float]" = time.monotonic,
    ):
        rank = rank or RankContext()
        self.config = config
        self._clock = clock
        self.subgroups = {space: cut(numels, config.subgroup_size, main_itemsize) for space, numels in spaces.items()}
        self._first: "dict[str, int]" = {}
        every: "list[Subgroup]" = []
        for space, subgroups in self.subgroups.items():
            self._first[space] = len(every)
            every += subgroups
        self._log = StepLog(config.telemetry, rank.rank) if config.telemetry else None
        self._steps = dict.fromkeys(self.subgroups, 0)
        self._records: "list[StepRecord]" = []
        self._broken: "str | None" = None
        self._on_progress = on_progress
        self.on_record: "Callable[[StepRecord], None] | None" = None
        self._pid = os.getpid()
        with contextlib.ExitStack() as undo:
            if self._log is not None:
                undo.callback(self._log.close)
            self.tiers: Tiers = open(config, tuple(every), rank, name, reserved_bytes, gpu)
            undo.callback(self.tiers.close)
            self.balance = Balance(self.tiers)
            self._unpin = pin(*self.tiers.pool.region) if pin is not None else None
            self._share = DeviceShare(self.tiers)
            undo.pop_all()

    # ---------------------------------------------------------------------------------- start-up

    def initialize(self, fill: "Callable[[str, Subgroup, StateView], None]") -> None:
        """Make the state: ``fill`` writes the masters of each subgroup; all else is zero.

        First every slot is written once, so that a full disk or quota is an error here and not at step 1000. Then
        one subgroup at a time passes through the staging buffers on its way to its path.

        Raises:
            CapacityError, PathIOError: the state files are removed by ``close``.
        """
        tiers = self.tiers
        homes = list(tiers.homes.values())
        total = sum(file.nbytes + homes.count(i) * file.slot_bytes for i, file in enumerate(tiers.files))
        done_bytes, lock = 0, threading.Lock()

        def advance(nbytes: int) -> None:
            nonlocal done_bytes
            with lock:
                done_bytes += nbytes
                if self._on_progress is not None:
                    self._on_progress(done_bytes, total)

        with self._stop_on_error("initialisation"):
            fill_slots(tiers, advance)
            for space, subgroups in self.subgroups.items():
                for subgroup in subgroups:
                    index = self._first[space] + subgroup.index
                    lease = self._take_buffer()
                    tiers.keep(index, lease, 0)
                    lease.array(0, lease.nbytes // 4).fill(0)
                    fill(space, subgroup, tiers.view(index, lease))
                    if index in tiers.residency.device_residents:
                        tiers.move_to_device(index, lease, 0)
                    elif tiers.residency.streams(index):
                        home = tiers.homes[index]
                        tiers.start_flush(index, lease, home, 0)
                        advance(tiers.files[home].slot_bytes)
            tiers.settle()

    def log_start(self, header: "Mapping[str, Any]") -> None:
        """Put what is known of this start before the steps of the telemetry; see ``startup.header``."""
        if self._log is not None:
            self._log.start({**header, "planned_hit_count": sum(map(self._planned_hit_count, self.subgroups))})

    def indices(self, space: str) -> range:
        """Positions of the space's subgroups in the table of the tiers."""
        return range(self._first[space], self._first[space] + len(self.subgroups[space]))

    # -------------------------------------------------------------------------------------- step

    def step(self, space: str, work: SubgroupWork) -> StepRecord:
        """Fetch, update and flush every subgroup of ``space``.

        Returns:
            What was done. Flushes that are still under way add themselves to it later.

        Raises:
            PathIOError, PathTimeoutError, ChecksumError: some subgroups are updated and others are not; the
                pipeline refuses to go on.
        """
        self._check_usable()
        self._publish(everything=False)
        self._steps[space] += 1
        indices = self.indices(space)
        residency = self.tiers.residency
        self.balance.rehome([i for i in indices if residency.streams(i)])
        cached = [i for i in indices if self.tiers.table[i].where is Where.HOST]
        plan = plan_step(
            self._steps[space],
            indices,
            residency.residents,
            cached,
            self.tiers.homes,
            self._keep_count(space),
            residency.device_residents,
            self.passing(space),
        )
        record = StepRecord(step=self._steps[space], host_memory_bytes=self.tiers.pool.region[1], started=self._clock())
        record.hit_count = plan.hit_count
        record.fetch_count = len(indices) - plan.hit_count
        self._records.append(record)
        with self._stop_on_error(f"step {plan.step}"):
            self._run(space, plan, work, record)
        record.step_seconds = self._clock() - record.started
        self.balance.observe(record)
        return record

    def _run(self, space: str, plan: StepPlan, work: SubgroupWork, record: StepRecord) -> None:
        tiers, first = self.tiers, self._first[space]
        subgroup_of = self.subgroups[space]
        here = Waiting(row for row in plan.rows if not row.device)
        there = Waiting(row for row in plan.rows if row.device)
        to_fetch = OrderedDict.fromkeys(row.subgroup for row in plan.rows if not row.hit)
        fetches: "dict[int, Flight]" = {}
        passing: "list[_Passing]" = []
        if here:  # the first gradients travel while the first state is fetched
            work.prepare(subgroup_of[here.first.subgroup - first])
        if there:
            work.start_on_device([subgroup_of[row.subgroup - first] for row in there])
        while True:
            tiers.reap()
            for update in [update for update in passing if update.future.done()]:
                passing.remove(update)
                record.add("update", update.row.subgroup, update.begin, self._clock(), GPU)
                self._keep_or_flush(update.row, update.lease, plan, record)
            if not (here or there or passing):
                break
            # A subgroup whose flush of the step before is still under way has no good copy on its path yet.
            stored = (i for i in to_fetch if tiers.table[i].where is Where.STORED)
            for index in list(islice(stored, tiers.pool.free_count)):
                del to_fetch[index]
                fetches[index] = tiers.start_fetch(index, tiers.pool.lease(), record)
            # What the GPU can begin goes first: it takes no time here.
            arrived = [index for index, fetch in fetches.items() if fetch.future.done()]
            row = there.take(arrived) or here.take(arrived)
            if row is None:
                begin = self._clock()
                tiers.wait_any([*fetches.values(), *passing, *tiers.flushes])
                stalled = here.first or there.first or passing[0].row
                record.add("stall", stalled.subgroup, begin, self._clock())
                continue
            if not row.hit:
                tiers.land_fetch(fetches.pop(row.subgroup))
            lease, subgroup = tiers.table[row.subgroup].lease, subgroup_of[row.subgroup - first]
            begin = self._clock()
            if row.device:
                if lease is not None:
                    future = work.update_on_device(subgroup, tiers.view(row.subgroup, lease))
                    passing.append(_Passing(row, lease, future, begin))
                else:
                    work.update_on_device(subgroup, tiers.on_device(row.subgroup))
                    record.add("update", row.subgroup, begin, self._clock(), GPU)
                    tiers.table[row.subgroup].step = plan.step
                continue
            if here:  # its gradients travel while this one is updated
                work.prepare(subgroup_of[here.first.subgroup - first])
            work.update(subgroup, tiers.view(row.subgroup, lease))
            record.add("update", row.subgroup, begin, self._clock())
            self._keep_or_flush(row, lease, plan, record)

    def _keep_or_flush(self, row: Row, lease: Lease, plan: StepPlan, record: StepRecord) -> None:
        if row.keep:
            self.tiers.keep(row.subgroup, lease, plan.step)
        else:
            self.tiers.start_flush(row.subgroup, lease, row.path, plan.step, record)

    def passing_count(self) -> int:
        """How many subgroups of all spaces will pass through GPU memory in the next step."""
        return sum(len(self.passing(space)) for space in self.subgroups)

    def passing(self, space: str) -> "frozenset[int]":
        """Positions in the table of the subgroups that will pass through GPU memory in the next step of ``space``."""
        return self._share.choose(self.indices(space), self.balance.rates)

    def _keep_count(self, space: str) -> int:
        """Streamed subgroups that stay in staging buffers between steps.

        Two buffers stay free, so that the next step's first fetches start at once. With several spaces the next
        one to step needs the buffers, so nothing stays.
        """
        return max(0, self.tiers.residency.staging_count - 2) if len(self.subgroups) == 1 else 0

    def _planned_hit_count(self, space: str) -> int:
        """Subgroups that a step finds in host memory, from the second step on."""
        indices = self.indices(space)
        resident_count = sum(not self.tiers.residency.streams(index) for index in indices)
        return resident_count + min(self._keep_count(space), len(indices) - resident_count)

    def annotate(self, iteration: "int | None", loss: "float | None", grad_norm: "float | None") -> "StepRecord | None":
        """Add to the newest step's record what only the trainer knows, before it is written.

        Returns:
            The record of all spaces together, or None when no step was made since the last call.
        """
        group = self._records[-len(self.subgroups) :]
        if not group or group[0].iteration is not None:
            return None
        for record in group:
            record.iteration, record.loss, record.grad_norm = iteration, loss, grad_norm
        merged, *others = group
        for other in others:
            merged = merged.merge(other)
        return merged

    # --------------------------------------------------------------------------- between the steps

    def settle(self) -> None:
        """Wait until no flush is under way; the table then says where each subgroup's newest copy is.

        Raises:
            PathIOError, PathTimeoutError: a flush failed, and no other path takes the subgroup.
        """
        self._check_usable()
        with self._stop_on_error("the last flushes of a step"):
            self.tiers.settle()

    @contextlib.contextmanager
    def read(self, space: str, subgroup: Subgroup) -> "Iterator[StateView]":
        """The state of one subgroup, to read; valid inside the ``with`` block."""
        self._check_usable()
        with contextlib.ExitStack() as borrowed:
            with self._stop_on_error(f"reading subgroup {subgroup.index} of {space}"):
                view = borrowed.enter_context(self.tiers.borrow(self._first[space] + subgroup.index, write_back=False))
            yield view

    @contextlib.contextmanager
    def modify(self, space: str, subgroup: Subgroup) -> "Iterator[StateView]":
        """The state of one subgroup, to change in place; written back when the ``with`` block ends."""
        self._check_usable()
        with (
            self._stop_on_error(f"writing subgroup {subgroup.index} of {space}"),
            self.tiers.borrow(self._first[space] + subgroup.index, write_back=True) as view,
        ):
            yield view

    def close(self) -> None:
        """Land what is in flight, remove the state files, give the memory back. Safe to call twice."""
        if self._pid != os.getpid():  # a forked child owns none of this
            return
        if self._broken is None:
            with contextlib.suppress(OffloadError):
                self.tiers.settle_before_close()
        self._publish(everything=True)
        self._broken = self._broken or "it was closed"
        if self.tiers.device is not None:  # nothing moves between it and the host any more
            self.tiers.device.close()
        if self._unpin is not None:  # before the memory goes: its address may be given out again
            self._unpin()
            self._unpin = None
        self.tiers.close()
        if self._log is not None:
            self._log.close()
            self._log = None

    # ------------------------------------------------------------------------------------ helpers

    def _take_buffer(self) -> Lease:
        while (lease := self.tiers.pool.lease()) is None:
            if not self.tiers.reap():
                self.tiers.wait_any(self.tiers.flushes)
        return lease

    def _check_usable(self) -> None:
        if self._broken is not None:
            raise OffloadError(
                f"this optimizer state can no longer be used: {self._broken}. Restart from the last checkpoint."
            )

    @contextlib.contextmanager
    def _stop_on_error(self, what: str) -> "Iterator[None]":
        """After an error in the middle of a write nothing may go on as if it had not happened."""
        try:
            yield
        except BaseException as error:
            self._broken = f"{what} ended with {type(error).__name__}: {error}"
            raise

    def _publish(self, everything: bool) -> None:
        """Write the records whose flushes have all landed, oldest first, one line for all spaces of a step."""
        per_step = len(self.subgroups)
        while len(self._records) >= per_step:
            group = self._records[:per_step]
            if not everything and any(f.record in group for f in self.tiers.flushes):
                return
            del self._records[:per_step]
            if self._log is not None or self.on_record is not None:
                merged = group[0]
                for other in group[1:]:
                    merged = merged.merge(other)
                if self._log is not None:
                    self._log.write(merged)
                if self.on_record is not None:
                    self.on_record(merged)
