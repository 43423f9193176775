"""A clock that jumps, and what stands on it in place of storage: paths that are only bandwidths, engines, buffers.

Each class has the methods of what it stands for that ``Tiers``, ``StateFile`` and ``StepPipeline`` call.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from .config import PathConfig
from .errors import ConfigError
from .plan.placement import RECORD_ALIGNMENT
from .units import parse_bytes

NEVER = float("inf")


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


class Moves(Protocol):
    """A device on which something is under way.

    Attributes:
        change: when something next begins to move or is done; until then all goes on as it does.
    """

    change: float

    def advance(self, until: float) -> bool:
        """Go on until a moment; true when something was done by then."""


class Clock:
    """Virtual seconds; what is under way on the devices moves with them."""

    def __init__(self, devices: "Sequence[Moves]"):
        self.now = 0.0
        self.devices = list(devices)

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
            until = min((device.change for device in self.devices), default=NEVER)
            if until == NEVER:
                raise RuntimeError("the simulated step waits, and nothing is under way")
            if self.advance(until):
                return


class Device:
    """One rank's share of a path: the requests of each direction one after the other, both directions at once."""

    def __init__(self, path: SimulatedPath, rank_count: int):
        self._rates = (path.read_bytes_per_second / rank_count, path.write_bytes_per_second / rank_count)
        self._both = (path.both_bytes_per_second or NEVER) / rank_count
        self._latency = path.latency_seconds
        self._queues: "tuple[deque[Transfer], deque[Transfer]]" = (deque(), deque())
        self._moving: "list[tuple[float, float, deque[Transfer]]]" = []  # (end, bytes/s, queue), its first request
        self._now = 0.0  # when ``left`` of the moving requests was so
        self.change = NEVER

    def submit(self, clock: Clock, direction: int, nbytes: int) -> Transfer:
        """Queue a request now; ``direction`` is 0 to read and 1 to write."""
        transfer = Transfer(clock, float(nbytes), clock.now + self._latency)
        self._queues[direction].append(transfer)
        if len(self._queues[direction]) == 1:
            self._move(clock.now)
            self._start()
        return transfer

    def advance(self, until: float) -> bool:
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
        self._moving, self.change = [], NEVER
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

    def __enter__(self) -> "Lease":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def array(self, *_: Any) -> None:
        return None

    def release(self) -> None:
        self.pool.free_count += 1
