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


@dataclass
class Event:
    """One subgroup in one phase; seconds since the start of the step."""

    phase: str  # "fetch", "update", "flush" or "stall"
    subgroup: int
    begin: float
    end: float
    path: str = ""


@dataclass
class StepRecord:
    """One optimizer step of one rank.

    Attributes:
        step: executed steps of this optimizer, 1 for the first.
        fetch_seconds, flush_seconds: time in which at least one fetch (flush) was under way.
        update_seconds: time in the Adam kernel and its copies.
        stall_seconds: time in which the trainer's thread waited for storage.
        bytes_read, bytes_written: by path directory.
        hit_count, fetch_count: subgroups found in host memory, and fetched.
        host_memory_bytes: of the state buffers.
        events: the profile of the step.
        loss, grad_norm: None where not known.
    """

    step: int = 0
    iteration: "int | None" = None
    loss: "float | None" = None
    grad_norm: "float | None" = None
    step_seconds: float = 0.0
    fetch_seconds: float = 0.0
    update_seconds: float = 0.0
    flush_seconds: float = 0.0
    stall_seconds: float = 0.0
    bytes_read: "dict[str, int]" = field(default_factory=dict)
    bytes_written: "dict[str, int]" = field(default_factory=dict)
    hit_count: int = 0
    fetch_count: int = 0
    host_memory_bytes: int = 0
    events: "list[Event]" = field(default_factory=list)

    @property
    def hit_rate(self) -> float:
        """Share of subgroups that needed no fetch, 0 to 1."""
        touched = self.hit_count + self.fetch_count
        return self.hit_count / touched if touched else 0.0

    def seconds(self, phase: str) -> float:
        """Time in which at least one event of ``phase`` was under way."""
        return union_seconds((e.begin, e.end) for e in self.events if e.phase == phase)

    def merge(self, other: "StepRecord") -> "StepRecord":
        """This record and that of another space stepped right after it (dense, then experts)."""
        shift, count = self.step_seconds, max((e.subgroup + 1 for e in self.events), default=0)
        moved = [Event(e.phase, e.subgroup + count, e.begin + shift, e.end + shift, e.path) for e in other.events]
        total = StepRecord(step=self.step, iteration=self.iteration, loss=self.loss, grad_norm=self.grad_norm)
        total.host_memory_bytes = max(self.host_memory_bytes, other.host_memory_bytes)
        total.events = self.events + moved
        for name in (
            "step_seconds",
            "fetch_seconds",
            "update_seconds",
            "flush_seconds",
            "stall_seconds",
            "hit_count",
            "fetch_count",
        ):
            setattr(total, name, getattr(self, name) + getattr(other, name))
        for name in ("bytes_read", "bytes_written"):
            mine, theirs = getattr(self, name), getattr(other, name)
            setattr(total, name, {p: mine.get(p, 0) + theirs.get(p, 0) for p in {**mine, **theirs}})
        return total

    def summary(self) -> str:
        """One line for a training log."""
        return (
            f"offload: step {self.step_seconds * 1e3:.0f} ms | fetch {self.fetch_seconds * 1e3:.0f} | update {self.update_seconds * 1e3:.0f} | "
            f"flush {self.flush_seconds * 1e3:.0f} | stall {self.stall_seconds * 1e3:.0f} ms | read {format_bytes(sum(self.bytes_read.values()))} | "
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
        items["events"] = [[e.phase, e.subgroup, round(e.begin, 6), round(e.end, 6), e.path] for e in record.events]
        try:
            self._stream.write(json.dumps(items) + "\n")
        except OSError:
            return

    def close(self) -> None:
        self._stream.close()
