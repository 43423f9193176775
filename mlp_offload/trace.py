"""Steps as a trace that ui.perfetto.dev and chrome://tracing load: a track a path and direction, the update, the stall.

The format is Chrome's: complete events ("X") with times in microseconds, and names of processes and tracks ("M").
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

from .errors import OffloadError
from .telemetry import GPU, Event, StepRecord

_DIRECTIONS = {"fetch": "read", "flush": "write"}


def chrome_trace(records: Sequence[StepRecord], name: str, rank: int = 0) -> "dict[str, Any]":
    """The object to write as JSON.

    Args:
        records: of one rank, in order. They lie where ``started`` says; where it does not, one after the other.
        name: of the process.
        rank: its number in the trace.
    """
    tracks: "dict[str, list[tuple[float, float, str, dict[str, Any]]]]" = {"step": [], "update": [], "stall": []}
    paths = sorted({e.path for record in records for e in record.events if e.phase in _DIRECTIONS})
    tracks |= {f"{path} {direction}": [] for path in paths for direction in _DIRECTIONS.values()}
    for record, begin in zip(records, _starts(records)):
        moved = {"read": record.bytes_read, "written": record.bytes_written, "hits": record.hit_count}
        tracks["step"].append((begin, begin + record.step_seconds, f"step {record.step}", moved))
        for e in record.events:
            event = (
                begin + e.begin,
                begin + e.end,
                f"{e.phase} {e.subgroup}",
                {"subgroup": e.subgroup, "step": record.step},
            )
            tracks.setdefault(_track(e), []).append(event)
    events: "list[dict[str, Any]]" = [{"ph": "M", "pid": rank, "name": "process_name", "args": {"name": name}}]
    number = 0
    for track, items in tracks.items():
        for k, row in enumerate(_rows(items)):
            number += 1
            shown = track if k == 0 else f"{track} ({k + 1})"
            common = {"pid": rank, "tid": number}
            events.append({"ph": "M", **common, "name": "thread_name", "args": {"name": shown}})
            events.append({"ph": "M", **common, "name": "thread_sort_index", "args": {"sort_index": number}})
            for begin, end, title, arguments in row:
                # Rounded as ends, not as durations: events that touch may not overlap.
                at, until = round(begin * 1e6, 3), round(end * 1e6, 3)
                events.append(
                    {"ph": "X", **common, "name": title, "ts": at, "dur": round(until - at, 3), "args": arguments}
                )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def write_trace(file: "str | os.PathLike[str]", trace: "dict[str, Any]") -> None:
    """Raises OffloadError when the file cannot be written."""
    try:
        with open(file, "w", encoding="utf-8") as stream:
            json.dump(trace, stream)
    except OSError as error:
        raise OffloadError(f"trace {os.fspath(file)!r}: {error.strerror}") from error


def _track(event: Event) -> str:
    if event.phase in _DIRECTIONS:
        return f"{event.path} {_DIRECTIONS[event.phase]}"
    return f"{event.phase} on the GPU" if event.path == GPU else event.phase


def _starts(records: Sequence[StepRecord]) -> "list[float]":
    """When each record began, counted from the first."""
    told = [record.started for record in records]
    if all(a + record.step_seconds <= b for a, b, record in zip(told, told[1:], records)):
        return [start - told[0] for start in told]
    starts = [0.0]
    for record in records[:-1]:
        starts.append(starts[-1] + max([record.step_seconds, *(e.end for e in record.events)]))
    return starts


def _rows(items: "list[tuple[float, float, str, dict[str, Any]]]") -> "list[list[Any]]":
    """The events of a track in rows without overlaps, as the format wants them: transfers that follow each other may overlap."""
    rows: "list[list[Any]]" = [[]]
    for item in sorted(items, key=lambda item: item[:2]):
        row = next((row for row in rows if not row or row[-1][1] <= item[0]), None)
        if row is None:
            rows.append(row := [])
        row.append(item)
    return rows
