"""What a step did, as data: one JSON line a step and rank. Nobody parses prose.

[Note: telemetry lines] A rank's file has one JSON object a line: ``{"header": {...}}`` at each start of the rank (see
``startup.header``), one line a step, and ``{"end": seconds since 1970}`` where the rank closed its state in order. A job
that is resumed with the same directory goes on in the same file. A line that a killed rank left unfinished is one
that no reader can use: the next start begins a new line, and ``read_line`` passes over the torn one.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from .errors import ConfigError
from .units import format_bytes

PHASES = ("fetch", "update", "flush", "stall")
"""storage to host; the Adam kernel and its copies; host to storage; the trainer's thread waiting for storage or a GPU."""

GPU = "cuda"
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
        started: monotonic clock at the start of the step; all event times count from it. Of a record that was read
            from a file: seconds since 1970.
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
    return sum(end - begin for begin, end in union(intervals))


def union(intervals: "Iterable[tuple[float, float]]") -> "list[tuple[float, float]]":
    """The union of ``(begin, end)`` intervals as disjoint ones, ascending."""
    result: "list[tuple[float, float]]" = []
    for begin, end in sorted(intervals):
        if result and begin <= result[-1][1]:
            result[-1] = (result[-1][0], max(result[-1][1], end))
        else:
            result.append((begin, end))
    return result


class StepLog:
    """Appends to ``<directory>/rank0003.jsonl``, a whole line at a time; see [Note: telemetry lines].

    Raises:
        ConfigError: the directory cannot be made or written.
    """

    def __init__(self, directory: "str | os.PathLike[str]", rank: int):
        self.file = Path(directory) / f"rank{rank:04d}.jsonl"
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            torn = _ends_in_a_torn_line(self.file)
            self._stream = open(self.file, "a", buffering=1, encoding="utf-8")  # noqa: SIM115 - open until close()
        except OSError as error:
            raise ConfigError(f"telemetry directory {str(directory)!r}: {error.strerror}") from error
        if torn:
            self._append("")

    def start(self, header: "Mapping[str, Any]") -> None:
        """Append what is known of this start of the rank."""
        self._append(json.dumps({"header": {"rank": int(self.file.stem[4:])} | dict(header)}))

    def write(self, record: StepRecord) -> None:
        """Append one record."""
        items: "dict[str, Any]" = asdict(record)
        # The monotonic clocks of two nodes, or of two starts, have nothing to do with each other.
        items["started_at"] = round(time.time() - (time.monotonic() - items.pop("started")), 6)
        items |= {f"{phase}_seconds": round(record.seconds(phase), 6) for phase in PHASES}
        items["events"] = [[e.phase, e.subgroup, round(e.begin, 6), round(e.end, 6), e.path] for e in record.events]
        self._append(json.dumps(items))

    def close(self) -> None:
        self._append(json.dumps({"end": round(time.time(), 3)}))
        with contextlib.suppress(OSError):
            self._stream.close()

    def _append(self, line: str) -> None:
        """A full disk costs the line, not the run."""
        with contextlib.suppress(OSError, ValueError):  # ValueError: closed twice
            self._stream.write(line + "\n")


def read_line(line: "str | bytes") -> "StepRecord | dict[str, Any] | None":
    """A step, or the object of a header or end line; None for a torn line, and for one with values of a wrong type."""
    try:
        items = json.loads(line)
        if not isinstance(items, dict) or ("header" in items and not _is_header(items["header"])):
            return None
        if "header" in items or "end" in items:
            return items
        known = {f.name: items[f.name] for f in fields(StepRecord) if f.name in items}
        known["events"] = [Event(*event) for event in items["events"]]
        known["started"] = items.get("started_at", 0.0)
        record = StepRecord(**known)
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return record if _is_step(record) else None


def read_steps(file: "str | os.PathLike[str]") -> "list[StepRecord]":
    """All steps in a rank's file, of all its starts. For long runs see ``report.read``, which keeps less of each."""
    with open(file, encoding="utf-8") as stream:
        return [found for line in stream if isinstance(found := read_line(line), StepRecord)]


_NUMBER = (int, float)
_HEADER = {"time": _NUMBER, "host": str, "pid_namespace": str, "pid": int, "paths": list}
_HEADER |= dict.fromkeys(("state_bytes", "buffer_bytes", "subgroup_count", "planned_hit_count", "staging_count"), int)
_HEADER |= dict.fromkeys(("update_threads", "cores", "local_rank_count"), int)
"""What a report looks at in a header, where it is there."""
_STEP = {"step": int, "step_seconds": _NUMBER, "started": _NUMBER, "bytes_read": dict, "bytes_written": dict}
_STEP |= dict.fromkeys(("hit_count", "fetch_count", "host_memory_bytes"), int)


def _is_header(header: Any) -> bool:
    if not isinstance(header, dict) or not all(isinstance(header[k], t) for k, t in _HEADER.items() if k in header):
        return False
    if header.get("subgroup_count") and "planned_hit_count" not in header:
        return False
    rates = (*_NUMBER, type(None))
    return all(
        isinstance(path, dict)
        and isinstance(path.get("directory"), str)
        and all(k in path and isinstance(path[k], t) for k, t in (("read", rates), ("write", rates), ("origin", str)))
        for path in header.get("paths", ())
    )


def _is_step(record: StepRecord) -> bool:
    return (
        all(isinstance(getattr(record, name), kind) for name, kind in _STEP.items())
        and all(isinstance(v, (*_NUMBER, type(None))) for v in (record.iteration, record.loss, record.grad_norm))
        and all(isinstance(n, int) for moved in (record.bytes_read, record.bytes_written) for n in moved.values())
        and all(
            isinstance(e.begin, _NUMBER)
            and isinstance(e.end, _NUMBER)
            and isinstance(e.phase, str)
            and isinstance(e.path, str)
            for e in record.events
        )
    )


def _ends_in_a_torn_line(file: Path) -> bool:
    if not file.exists() or not file.stat().st_size:
        return False
    with open(file, "rb") as stream:
        stream.seek(-1, os.SEEK_END)
        return stream.read(1) != b"\n"
