"""One step without its events: small enough to keep those of a whole run."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..telemetry import PHASES, StepRecord, union, union_seconds

GPU = "cuda"
"""Path of update events on the GPU."""

GPU_UPDATE = "update on the GPU"
"""The part of the phase ``update`` that ran there; a phase of its own in reports, where there is any."""

DIRECTIONS = {"read": "fetch", "write": "flush"}
"""Direction on a path -> the phase that moves bytes in it."""

Spans = tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Traffic:
    """What one step moved on one path in one direction.

    Attributes:
        nbytes: bytes.
        spans: when something was under way; disjoint and ascending, seconds since the start of the step.
    """

    nbytes: int
    spans: Spans


@dataclass(frozen=True)
class StepNumbers:
    """One step of one rank.

    Attributes:
        window_seconds: from the start of the step until it returned and all its transfers had landed.
        phases: phase -> seconds in which it was under way; those of ``PHASES``, and ``GPU_UPDATE`` where there is any.
        cpu_update_seconds: the part of ``update`` in which the trainer's thread was busy; an update on the GPU goes on beside it.
        traffic: (path, direction) -> what moved.
        offset: of its line in its file, bytes; -1 where it was not read from one.
        The others are those of ``StepRecord``.
    """

    step: int
    iteration: "int | None"
    loss: "float | None"
    grad_norm: "float | None"
    started: float
    step_seconds: float
    window_seconds: float
    phases: "dict[str, float]"
    cpu_update_seconds: float
    traffic: "dict[tuple[str, str], Traffic]"
    hit_count: int
    fetch_count: int
    host_memory_bytes: int
    offset: int = field(default=-1, compare=False)

    @classmethod
    def of(cls, record: StepRecord, offset: int = -1) -> "StepNumbers":
        """The numbers of a record, whether of a run or simulated."""
        phases = {phase: record.seconds(phase) for phase in PHASES}
        on_gpu = [(e.begin, e.end) for e in record.events if e.phase == "update" and e.path == GPU]
        if on_gpu:
            phases[GPU_UPDATE] = union_seconds(on_gpu)
        traffic = {}
        for direction, moved in (("read", record.bytes_read), ("write", record.bytes_written)):
            for path, nbytes in moved.items():
                spans = ((e.begin, e.end) for e in record.events if (e.phase, e.path) == (DIRECTIONS[direction], path))
                traffic[path, direction] = Traffic(nbytes, tuple(union(spans)))
        return cls(
            step=record.step,
            iteration=record.iteration,
            loss=record.loss,
            grad_norm=record.grad_norm,
            started=record.started,
            step_seconds=record.step_seconds,
            window_seconds=max([record.step_seconds, *(e.end for e in record.events)]),
            phases=phases,
            cpu_update_seconds=union_seconds(
                (e.begin, e.end) for e in record.events if e.phase == "update" and e.path != GPU
            ),
            traffic=traffic,
            hit_count=record.hit_count,
            fetch_count=record.fetch_count,
            host_memory_bytes=record.host_memory_bytes,
            offset=offset,
        )
