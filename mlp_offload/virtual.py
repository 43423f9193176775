"""A clock that jumps, and what stands on it in place of devices: paths that are only bandwidths, buffers, an update.

Each class has the methods of what it stands for that ``Tiers``, ``StateFile`` and ``StepPipeline`` call.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .config import PathConfig
from .errors import ConfigError
from .plan.placement import RECORD_ALIGNMENT
from .plan.subgroups import Subgroup
from .tiers import StateView
from .units import parse_bytes

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

    @classmethod
    def parse(cls, spec: str) -> "SimulatedPath":
        """From ``"/nvme,read=6GB/s,write=5GB/s[,both=7GB/s][,latency=0.001]"``; keys of ``PathConfig`` are left out.

        Raises:
            ConfigError: a key is unknown or missing, or a value cannot be read; names the spec.
        """
        name, *pairs = spec.split(",")
        own = {
            key: value
            for key, found, value in (p.partition("=") for p in pairs)
            if found and key in ("both", "latency")
        }
        rest = [p for p in pairs if p.partition("=")[0] not in own]
        path = PathConfig.parse(",".join([name, *rest]))
        if path.read is None or path.write is None:
            raise ConfigError(f"path {spec!r}: give both rates, as in {path.directory},read=6GB/s,write=5GB/s")
        try:
            latency = float(own.get("latency", 0))
        except ValueError:
            raise ConfigError(f"path {spec!r}: latency {own['latency']!r} is not a number of seconds") from None
        both = parse_bytes(own["both"], f"path {name!r}: both") if "both" in own else None
        return cls(path.directory, path.read, path.write, both, latency)


@dataclass(eq=False)
class Transfer:
    """One request: what ``IoFuture`` is for a real one."""

    clock: "Clock"
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


class Clock:
    """Virtual seconds; what is under way on the devices moves with them."""

    def __init__(self, devices: "list[Device]"):
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


class Device:
    """One rank's share of a path: the requests of each direction one after the other, both directions at once.

    Attributes:
        change: when the next request begins to move or is done; until then all goes on as it does.
    """

    def __init__(self, path: SimulatedPath, rank_count: int):
        self._rates = (path.read_bytes_per_second / rank_count, path.write_bytes_per_second / rank_count)
        self._both = (path.both_bytes_per_second or _NEVER) / rank_count
        self._latency = path.latency_seconds
        self._queues: "tuple[deque[Transfer], deque[Transfer]]" = (deque(), deque())
        self._moving: "list[tuple[float, float, deque[Transfer]]]" = []  # (end, bytes/s, queue), its first request
        self._now = 0.0  # when ``left`` of the moving requests was so
        self.change = _NEVER

    def submit(self, clock: Clock, direction: int, nbytes: int) -> Transfer:
        """Queue a request now; ``direction`` is 0 to read and 1 to write."""
        transfer = Transfer(clock, float(nbytes), clock.now + self._latency)
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
class Engine:
    """What ``storage.engine.Engine`` is for a real file."""

    device: Device
    clock: Clock
    direct: bool = False
    alignment: int = RECORD_ALIGNMENT

    def read(self, offset: int, address: int, nbytes: int, **_: Any) -> Transfer:
        return self.device.submit(self.clock, 0, nbytes)

    def write(self, offset: int, address: int, nbytes: int, **_: Any) -> Transfer:
        return self.device.submit(self.clock, 1, nbytes)

    def close(self, timeout_seconds: float) -> bool:
        return True


@dataclass(eq=False)
class Scratch:
    path: Path

    def close(self) -> None:
        pass


class Pool:
    """Buffers that are only counted."""

    def __init__(self, buffer_count: int, buffer_bytes: int):
        self.region = (0, buffer_count * buffer_bytes)
        self.buffer_bytes = buffer_bytes
        self.free_count = buffer_count

    def lease(self) -> "Lease | None":
        if not self.free_count:
            return None
        self.free_count -= 1
        return Lease(self, self.buffer_bytes)

    def close(self) -> bool:
        return True


@dataclass(eq=False)
class Lease:
    pool: Pool
    nbytes: int
    address: int = 0

    def array(self, *_: Any) -> None:
        return None

    def release(self) -> None:
        self.pool.free_count += 1


class Work:
    """Durations of an update, and of the copies that ``transfers.CudaTransfers`` makes beside it.

    Weights leave faster than the next gradients come, so nobody waits for a staging buffer that they still fill.
    """

    def __init__(self, clock: Clock, parameters_per_second: float, copy_bytes_per_second: float, reads_weights: bool):
        self._clock = clock
        self._rate = parameters_per_second
        self._copy_rate = copy_bytes_per_second
        self._to_host_bytes = GRADIENT_BYTES + (WEIGHT_BYTES if reads_weights else 0)
        self.sent = 0.0  # when the last weights have left
        self.begin()

    def begin(self) -> None:
        """A step begins."""
        self._staged: "dict[int, float]" = {}  # subgroup -> when its gradients (and old weights) are on the host
        self._to_host = self._clock.now

    def prepare(self, subgroup: Subgroup) -> None:
        if self._copy_rate and subgroup.index not in self._staged and len(self._staged) < STAGING_COUNT:
            self._bring(subgroup)

    def update(self, subgroup: Subgroup, state: StateView) -> None:
        clock = self._clock
        begin = clock.now
        if self._copy_rate:
            if subgroup.index not in self._staged:  # it comes before its turn
                if len(self._staged) == STAGING_COUNT:  # another one gives way, and is brought again
                    del self._staged[next(iter(self._staged))]
                self._bring(subgroup)
            begin = max(begin, self._staged.pop(subgroup.index))
        clock.advance(begin + subgroup.numel / self._rate)
        if self._copy_rate:
            self.sent = max(self.sent, clock.now) + subgroup.numel * WEIGHT_BYTES / self._copy_rate

    def _bring(self, subgroup: Subgroup) -> None:
        seconds = subgroup.numel * self._to_host_bytes / self._copy_rate
        self._to_host = self._staged[subgroup.index] = max(self._to_host, self._clock.now) + seconds
