"""Steps without devices: the pipeline itself, on paths that exist only as bandwidths and on a clock that jumps.

``StepPipeline``, ``Tiers``, ``Balance`` and ``StateFile`` are those of a real run. Only what they stand on is simulated:
the engine (a read queue and a write queue a path), the buffer pool (a counter), the update (a duration) and the clock. So
order, hits, bytes and the moving of subgroups between paths cannot differ from what a run does. No torch, no files.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .config import OffloadConfig, PathConfig
from .errors import ConfigError
from .opening import spend_memory
from .pipeline import StepPipeline
from .plan.placement import RECORD_ALIGNMENT, place
from .plan.subgroups import Subgroup
from .rates import PathRates
from .storage.statefile import StateFile
from .telemetry import StepRecord
from .tiers import Entry, RankContext, StateView, Tiers, Where

STAGING_COUNT = 2
"""Subgroups whose gradients and weights may be on their way at once; as in ``transfers``, which needs torch."""

GRADIENT_BYTES, WEIGHT_BYTES = 4, 2
"""A parameter: fp32 ``main_grad`` and bf16 weights, Megatron's defaults."""


_NEVER = float("inf")


@dataclass(frozen=True)
class SimulatedPath:
    """One path of a node; its ranks share it equally.

    Attributes:
        name: for records and pictures.
        read_bytes_per_second, write_bytes_per_second: of each direction alone.
        both_bytes_per_second: the most of both directions together; None = each has its own.
        latency_seconds: from the submission of a request to its first byte; hidden behind requests before it.

    Raises:
        ConfigError: a rate that is not above 0, or a negative latency.
    """

    name: str
    read_bytes_per_second: float
    write_bytes_per_second: float
    both_bytes_per_second: "float | None" = None
    latency_seconds: float = 0.0

    def __post_init__(self) -> None:
        for key in ("read", "write", "both"):
            rate = getattr(self, f"{key}_bytes_per_second")
            if rate is not None and not 0 < rate < float("inf"):
                raise ConfigError(f"path {self.name!r}: {key} is {rate} bytes/s; it must be above 0 and finite")
        if not 0 <= self.latency_seconds < float("inf"):
            raise ConfigError(f"path {self.name!r}: latency is {self.latency_seconds} s; it must not be negative")


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

    Returns:
        A record a step, as telemetry has them; seconds are virtual. ``started`` of two records differ by the iteration.

    Raises:
        ConfigError: a number out of range, or too little host memory; says what would do.
    """
    for name, value, least in (
        ("adam_parameters_per_second", adam_parameters_per_second, 1e-9),
        ("copy_bytes_per_second", copy_bytes_per_second, 0),
        ("compute_seconds", compute_seconds, 0),
        ("local_rank_count", local_rank_count, 1),
        ("steps", steps, 1),
    ):
        if not least <= value < float("inf"):
            raise ConfigError(
                f"{name} is {value}; it must be {'above 0' if name.startswith('adam') else f'at least {least}'}"
            )
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
        checksums=False,
    )
    clock = _Clock([_Device(path, local_rank_count) for path in paths])
    work = _Work(clock, adam_parameters_per_second, copy_bytes_per_second, main_itemsize == 2)

    def open_tiers(
        config: OffloadConfig, subgroups: "tuple[Subgroup, ...]", rank: RankContext, name: str, reserved: int
    ) -> Tiers:
        return _open(config, subgroups, clock, reserved)

    largest = min(subgroup_size, sum(numels))
    reserved_bytes = STAGING_COUNT * largest * (GRADIENT_BYTES + WEIGHT_BYTES) if copy_bytes_per_second else 0
    pipeline = StepPipeline(
        config,
        {"all": numels},
        reserved_bytes=reserved_bytes,
        main_itemsize=main_itemsize,
        open=open_tiers,
        clock=clock,
    )
    records = []
    for _ in range(steps):
        work.begin()
        records.append(pipeline.step("all", work))
        clock.advance(max(clock.now, work.sent) + compute_seconds)
    pipeline.tiers.settle()  # the last flushes, for their record
    pipeline.close()
    return records


# --------------------------------------------------------------------------------------------- clock and storage


@dataclass(eq=False)
class _Transfer:
    """One request: what ``IoFuture`` is for a real one."""

    clock: "_Clock"
    left: float  # bytes
    arrives: float  # when its first byte may move
    started_seconds: float = -1.0
    finished_seconds: float = 0.0
    finished: bool = False

    def done(self) -> bool:
        return self.finished

    def wait(self, timeout_seconds: float) -> bool:
        """Sleep until something is done, this or another; true when this is."""
        if not self.finished:
            self.clock.sleep()
        return self.finished

    def result(self) -> None:
        while not self.wait(0.0):
            pass


class _Clock:
    """Virtual seconds; what is under way on the devices moves with them."""

    def __init__(self, devices: "list[_Device]"):
        self.now = 0.0
        self.devices = devices

    def __call__(self) -> float:
        return self.now

    def advance(self, until: float) -> bool:
        """Go to a moment; true when a transfer was done by then."""
        done = [device.advance(until) for device in self.devices]
        self.now = until
        return any(done)

    def sleep(self) -> None:
        """Go to the next moment at which a transfer is done."""
        while True:
            until = min((device.change for device in self.devices), default=_NEVER)
            if until == _NEVER:
                raise RuntimeError("the simulated step waits for storage, and nothing is under way")
            if self.advance(until):
                return


class _Device:
    """One rank's share of a path: the requests of each direction one after the other, both directions at once.

    Attributes:
        change: when the next request begins to move or is done; until then all goes on as it does.
    """

    def __init__(self, path: SimulatedPath, rank_count: int):
        self._rates = (path.read_bytes_per_second / rank_count, path.write_bytes_per_second / rank_count)
        self._both = (path.both_bytes_per_second or _NEVER) / rank_count
        self._latency = path.latency_seconds
        self._queues: "tuple[deque[_Transfer], deque[_Transfer]]" = (deque(), deque())
        self._moving: "list[tuple[float, float, deque[_Transfer]]]" = []  # (end, bytes/s, queue), its first request
        self._now = 0.0  # when ``left`` of the moving requests was so
        self.change = _NEVER

    def submit(self, clock: _Clock, direction: int, nbytes: int) -> _Transfer:
        """Queue a request now; ``direction`` is 0 to read and 1 to write."""
        transfer = _Transfer(clock, float(nbytes), clock.now + self._latency)
        self._queues[direction].append(transfer)
        if len(self._queues[direction]) == 1:
            self._move(clock.now)
            self._start()
        return transfer

    def advance(self, until: float) -> bool:
        """Move bytes until a moment; true when a request was done by then."""
        done = False
        while self.change <= until:
            done |= self._move(self.change)
            self._start()
        return done

    def _move(self, until: float) -> bool:
        done = False
        for end, rate, queue in self._moving:
            head = queue[0]
            head.left -= rate * (until - self._now)
            if end <= until:
                head.finished_seconds, head.finished, done = end, True, True
                queue.popleft()
        self._now = until
        return done

    def _start(self) -> None:
        """Share the bandwidth anew among the first request of each direction."""
        moving = [bool(queue) and queue[0].arrives <= self._now for queue in self._queues]
        total = sum(rate for rate, moves in zip(self._rates, moving) if moves)
        share = min(1.0, self._both / total) if total else 0.0
        self._moving, self.change = [], _NEVER
        for queue, rate, moves in zip(self._queues, self._rates, moving):
            if moves:
                head = queue[0]
                if head.started_seconds < 0:
                    head.started_seconds = self._now
                end = self._now + max(0.0, head.left) / (rate * share)
                self._moving.append((end, rate * share, queue))
                self.change = min(self.change, end)
            elif queue:
                self.change = min(self.change, queue[0].arrives)


@dataclass(eq=False)
class _Engine:
    """What ``storage.engine.Engine`` is for a real file."""

    device: _Device
    clock: _Clock
    direct: bool = False
    alignment: int = RECORD_ALIGNMENT

    def read(self, offset: int, address: int, nbytes: int, **_: Any) -> _Transfer:
        return self.device.submit(self.clock, 0, nbytes)

    def write(self, offset: int, address: int, nbytes: int, **_: Any) -> _Transfer:
        return self.device.submit(self.clock, 1, nbytes)

    def close(self, timeout_seconds: float) -> bool:
        return True


@dataclass(eq=False)
class _Scratch:
    path: Path

    def close(self) -> None:
        pass


class _Pool:
    """Buffers that are only counted."""

    def __init__(self, buffer_count: int, buffer_bytes: int):
        self.region = (0, buffer_count * buffer_bytes)
        self.buffer_bytes = buffer_bytes
        self.free_count = buffer_count

    def lease(self) -> "_Lease | None":
        if not self.free_count:
            return None
        self.free_count -= 1
        return _Lease(self, self.buffer_bytes)

    def close(self) -> bool:
        return True


@dataclass(eq=False)
class _Lease:
    pool: _Pool
    nbytes: int
    address: int = 0

    def array(self, *_: Any) -> None:
        return None

    def release(self) -> None:
        self.pool.free_count += 1


def _open(config: OffloadConfig, subgroups: "tuple[Subgroup, ...]", clock: _Clock, reserved_bytes: int) -> Tiers:
    """Tiers as ``opening.open_tiers`` makes them, with all state where it is after start-up."""
    slot_bytes, residency, streamed = spend_memory(config, subgroups, int(config.host_memory), reserved_bytes)
    if streamed and not config.paths:
        raise ConfigError(
            f"{len(streamed)} of {len(subgroups)} subgroups do not fit into host memory, and there is no path: add one, or "
            f"raise host_memory to {len(subgroups) * slot_bytes + reserved_bytes} bytes"
        )
    slot_count = len(streamed) + residency.staging_count  # of each path: all of them could go to one
    room = [slot_count * slot_bytes] * len(config.paths)
    homes = place(len(streamed), config.paths, slot_bytes, room, residency.staging_count) if streamed else ()
    pool = _Pool(max(1, residency.buffer_count), slot_bytes)
    files = [
        StateFile(_Scratch(Path(path.directory)), _Engine(device, clock), slot_count, slot_bytes)
        for path, device in zip(config.paths, clock.devices)
    ]
    table = [
        Entry(Where.HOST, pool.lease()) if i in residency.residents else Entry(Where.STORED)
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
    )


# ----------------------------------------------------------------------------------------------------- update


class _Work:
    """Durations of an update, and of the copies that ``transfers.CudaTransfers`` makes beside it."""

    def __init__(self, clock: _Clock, parameters_per_second: float, copy_bytes_per_second: float, reads_weights: bool):
        self._clock = clock
        self._rate = parameters_per_second
        self._copy_rate = copy_bytes_per_second
        self._to_host_bytes = GRADIENT_BYTES + (WEIGHT_BYTES if reads_weights else 0)
        self.begin()
        self.sent = 0.0

    def begin(self) -> None:
        """A step begins."""
        self._staged: "dict[int, float]" = {}  # subgroup -> when its gradients are on the host
        self._free = [0.0] * STAGING_COUNT  # when the last weights have left each staging buffer that holds nothing
        self._to_host = self._clock.now

    def prepare(self, subgroup: Subgroup) -> None:
        if self._copy_rate and subgroup.index not in self._staged and self._free:
            self._bring(subgroup)

    def update(self, subgroup: Subgroup, state: StateView) -> None:
        clock = self._clock
        if not self._copy_rate:
            clock.advance(clock.now + subgroup.numel / self._rate)
            return
        if subgroup.index not in self._staged:  # it comes before its turn
            if not self._free:  # another one that was prepared gives way, and is brought again
                del self._staged[next(iter(self._staged))]
                self._free.append(0.0)
            self._bring(subgroup)
        begin = max(clock.now, self._staged.pop(subgroup.index))
        clock.advance(begin + subgroup.numel / self._rate)
        self.sent = max(self.sent, clock.now) + subgroup.numel * WEIGHT_BYTES / self._copy_rate
        self._free.append(self.sent)

    def _bring(self, subgroup: Subgroup) -> None:
        """Gradients at once; the old weights when those before them have left the buffer."""
        gradients = max(self._to_host, self._clock.now) + subgroup.numel * GRADIENT_BYTES / self._copy_rate
        weights = subgroup.numel * (self._to_host_bytes - GRADIENT_BYTES) / self._copy_rate
        self._to_host = max(gradients, self._free.pop(0)) + weights
        self._staged[subgroup.index] = self._to_host
