"""Traces keep to the format: nothing overlaps on a track, times are microseconds, every event is there."""

import json
from collections import defaultdict

import pytest

from mlp_offload.errors import OffloadError
from mlp_offload.simulator import SimulatedPath, simulate
from mlp_offload.telemetry import StepRecord
from mlp_offload.trace import chrome_trace, write_trace


def tracks(trace):
    """Name of the track -> its events in order of time; process names on the side."""
    names, found, processes = {}, defaultdict(list), []
    for event in trace["traceEvents"]:
        key = event["pid"], event.get("tid")
        if event["ph"] == "M" and event["name"] == "thread_name":
            names[key] = event["args"]["name"]
        elif event["ph"] == "M" and event["name"] == "process_name":
            processes.append((event["pid"], event["args"]["name"]))
        elif event["ph"] == "X":
            found[names[key]].append(event)
    return {name: sorted(events, key=lambda e: e["ts"]) for name, events in found.items()}, processes


def no_overlap(events):
    return all(a["ts"] + a["dur"] <= b["ts"] + 1e-3 for a, b in zip(events, events[1:]))


def record(started=0.0, step=1, **numbers):
    made = StepRecord(step=step, step_seconds=2.0, started=0.0, bytes_read={"/a": 7}, **numbers)
    made.add("fetch", 0, 0.0, 1.0, "/a")
    made.add("fetch", 1, 0.5, 1.5, "/a")  # its first block goes while the last of the one before is under way
    made.add("flush", 0, 1.25, 3.0, "/a")
    made.add("update", 0, 1.0, 1.25)
    made.add("update", 1, 1.0, 1.5, "cuda")
    made.started = started
    return made


def test_a_track_a_path_and_direction_and_what_each_event_says():
    found, processes = tracks(chrome_trace([record(started=100.0)], "run a", rank=3))
    assert processes == [(3, "run a")]
    assert set(found) == {"step", "update", "update on the GPU", "/a read", "/a read (2)", "/a write"}
    (step,) = found["step"]
    assert (step["ts"], step["dur"], step["name"]) == (0, 2e6, "step 1")
    assert step["args"] == {"read": {"/a": 7}, "written": {}, "hits": 0}
    (second,) = found["/a read (2)"]
    assert (second["ts"], second["dur"], second["name"]) == (5e5, 1e6, "fetch 1")
    assert second["args"] == {"subgroup": 1, "step": 1}


def test_steps_lie_where_they_began_or_one_after_the_other():
    def begins(*started):
        records = [record(start, step) for step, start in enumerate(started, 1)]
        return [event["ts"] / 1e6 for event in tracks(chrome_trace(records, ""))[0]["step"]]

    assert begins(50.0, 54.0, 59.0) == [0, 4, 9]
    assert begins(0.0, 0.0, 0.0) == [0, 3, 6], "written without times: after the last flush of the step before"


def test_all_of_a_simulated_run_is_there_and_nothing_overlaps(tmp_path):
    records = simulate(
        [10**6],
        paths=[SimulatedPath("/a", 3e6, 1e6), SimulatedPath("/b", 1e6, 1e6, 1.5e6)],
        host_memory_bytes=2 * 10**6,
        subgroup_size=10**4,
        adam_parameters_per_second=1e6,
        compute_seconds=0.5,
        steps=3,
    )
    write_trace(tmp_path / "trace.json", chrome_trace(records, "simulated"))
    trace = json.loads((tmp_path / "trace.json").read_text())
    found, _ = tracks(trace)
    assert {"/a read", "/a write", "/b read", "/b write", "update", "stall", "step"} <= set(found)
    assert sum(map(len, found.values())) == sum(len(r.events) for r in records) + len(records)
    assert all(no_overlap(events) for events in found.values())
    assert all(event["dur"] >= 0 for events in found.values() for event in events)


def test_a_trace_that_cannot_be_written_is_told(tmp_path):
    with pytest.raises(OffloadError, match=r"trace .*trace.json': No such file"):
        write_trace(tmp_path / "no" / "trace.json", chrome_trace([record()], ""))
