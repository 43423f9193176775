"""What a step did, as data: one JSON line a step and rank. Nobody parses prose."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .errors import ConfigError
from .units import format_bytes

PHASES = ("fetch", "update", "flush", "stall")
"""storage to host; the Adam kernel and its copies; host to storage; the trainer's thread waiting for storage or a GPU."""

DEVICE = "cuda"
"""In place of a path: an update on the GPU, from the moment at which it is asked for. Where the record passes through, until
it is seen to be back; where it stays in GPU memory, until it has been asked for: nobody waits for it."""


@dataclass
class Event:
    """One subgroup in one phase; seconds since the start of the step."""

    phase: str  # one of PHASES
    subgroup: int
    begin: float
    end: float
    path: str = ""


@dataclass(eq=False)
class StepRecord:
    """One optimizer step of one rank.

    Attributes:
        step: executed steps of this optimizer, 1 for the first.
        step_seconds: from the call to the return; flushes may go on after it.
        bytes_read, bytes_written: by path directory.
        hit_count, fetch_count: subgroups found in host or GPU memory, and fetched.
        host_memory_bytes: of the state buffers.
        events: the profile of the step.
        loss, grad_norm: None where not known.
        started: monotonic clock at the start of the step; all event times count from it.
    """

    step: int = 0
    iteration: "int | None" = None
    loss: "float | None" = None
    grad_norm: "float | None" = None
    step_seconds: float = 0.0
    bytes_read: "dict[str, int]" = field(default_factory=dict)
    bytes_written: "dict[str, int]" = field(default_factory=dict)
    hit_count: int = 0
    fetch_count: int = 0
    host_memory_bytes: int = 0
    events: "list[Event]" = field(default_factory=list)
    started: float = 0.0

    def add(self, phase: str, subgroup: int, begin: float, end: float, path: str = "") -> None:
        """Note one event; ``begin`` and ``end`` in seconds of the monotonic clock."""
        self.events.append(Event(phase, subgroup, begin - self.started, end - self.started, path))

    def seconds(self, phase: str) -> float:
        """Time in which at least one event of ``phase`` was under way."""
        return union_seconds((e.begin, e.end) for e in self.events if e.phase == phase)

    @property
    def hit_rate(self) -> float:
        """Share of subgroups that needed no fetch, 0 to 1."""
        touched = self.hit_count + self.fetch_count
        return self.hit_count / touched if touched else 0.0

    def merge(self, other: "StepRecord") -> "StepRecord":
        """This record and that of another space stepped right after it (dense, then experts)."""
        shift = other.started - self.started
        moved = [Event(e.phase, e.subgroup, e.begin + shift, e.end + shift, e.path) for e in other.events]
        total = StepRecord(
            step=self.step, iteration=self.iteration, loss=self.loss, grad_norm=self.grad_norm, started=self.started
        )
        total.host_memory_bytes = max(self.host_memory_bytes, other.host_memory_bytes)
        total.events = self.events + moved
        for name in ("step_seconds", "hit_count", "fetch_count"):
            setattr(total, name, getattr(self, name) + getattr(other, name))
        for name in ("bytes_read", "bytes_written"):
            mine, theirs = getattr(self, name), getattr(other, name)
            setattr(total, name, {p: mine.get(p, 0) + theirs.get(p, 0) for p in {**mine, **theirs}})
        return total

    def summary(self) -> str:
        """One line for a training log."""
        phases = " | ".join(f"{phase} {self.seconds(phase) * 1e3:.0f}" for phase in PHASES)
        return (
            f"offload: step {self.step_seconds * 1e3:.0f} ms | {phases} ms | read {format_bytes(sum(self.bytes_read.values()))} | "
            f"written {format_bytes(sum(self.bytes_written.values()))} | hits {self.hit_count}/{self.hit_count + self.fetch_count}"
        )


def union_seconds(intervals: "Iterable[tuple[float, float]]") -> float:
    """Total length of the union of ``(begin, end)`` intervals."""
    total, covered_to = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, covered_to))
        covered_to = max(covered_to, end)
    return total


class StepLog:
    """Appends records to ``<directory>/rank0003.jsonl``, a whole line at a time.

    Raises:
        ConfigError: the directory cannot be made or written.
    """

    def __init__(self, directory: "str | os.PathLike[str]", rank: int):
        self.file = Path(directory) / f"rank{rank:04d}.jsonl"
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self._stream = open(self.file, "a", buffering=1, encoding="utf-8")  # noqa: SIM115 - open until close()
        except OSError as error:
            raise ConfigError(f"telemetry directory {str(directory)!r}: {error.strerror}") from error

    def write(self, record: StepRecord) -> None:
        """Append one record. A full disk costs the line, not the run."""
        items: "dict[str, Any]" = asdict(record)
        del items["started"]
        items |= {f"{phase}_seconds": round(record.seconds(phase), 6) for phase in PHASES}
        items["events"] = [[e.phase, e.subgroup, round(e.begin, 6), round(e.end, 6), e.path] for e in record.events]
        try:
            self._stream.write(json.dumps(items) + "\n")
        except OSError:
            return

    def close(self) -> None:
        self._stream.close()
