"""Telemetry as it lies on disk: written meanwhile, torn, restarted, with fewer ranks."""

import json
import os
import socket
import subprocess
import sys
import time

import pytest

from mlp_offload.errors import OffloadError
from mlp_offload.report.analysis import analyze
from mlp_offload.report.read import Run
from mlp_offload.telemetry import StepLog, StepRecord


def write(directory, rank, steps, header=None, end=True, age=0):
    """One start of a rank that makes ``steps`` (``age`` seconds ago); ``header=None`` for one that writes none."""
    log = StepLog(directory, rank)
    if header is not None:
        log.start(header)
    for step in steps:
        log.write(StepRecord(step=step, loss=float(step), started=time.monotonic() - age))
    if end:
        log.close()
    return log


def steps_of(run, rank=0):
    return [s.step for s in run.logs[rank].steps]


def test_lines_are_read_as_they_come_and_only_whole_ones(tmp_path):
    run = Run(tmp_path)
    assert not run.poll() and run.over() is None
    StepLog(tmp_path, 0)  # a rank makes its file first, and its header when its state is laid out
    assert not run.poll() and run.over() is None
    log = write(tmp_path, 0, [1, 2], {"time": 0.0}, end=False)
    assert run.poll() and steps_of(run) == [1, 2] and not run.poll()
    log._stream.write('{"step": 3, "events": []')
    log._stream.flush()
    assert not run.poll() and steps_of(run) == [1, 2]
    log._stream.write("}\n")
    assert run.poll() and steps_of(run) == [1, 2, 3]
    log.close()
    assert run.poll() and run.over() == "the run has ended"


def test_the_newest_start_that_made_a_step_is_the_run(tmp_path):
    write(tmp_path, 0, [1, 2, 3], {"time": 1.0})
    with open(tmp_path / "rank0000.jsonl", "a") as file:
        file.write('{"step": 4, "events": [["fetch", 0, 0.1')
    write(tmp_path, 0, [1, 2], {"time": 2.0})
    run = Run(tmp_path)
    run.poll()
    log = run.logs[0]
    assert (steps_of(run), log.header["time"], log.start_count, log.torn_count) == ([1, 2], 2.0, 2, 1)
    write(tmp_path, 0, [], {"time": 3.0}, end=False)
    run.poll()
    assert (steps_of(run), log.header["time"], log.start_count, log.starting) == ([1, 2], 2.0, 3, True)


def test_steps_that_begin_again_without_a_header_are_a_new_start(tmp_path):
    write(tmp_path, 0, [1, 2, 3])
    write(tmp_path, 0, [1, 2])
    run = Run(tmp_path)
    run.poll()
    assert steps_of(run) == [1, 2] and run.logs[0].start_count == 2


def test_a_rank_that_the_newest_start_does_not_have_is_left_out(tmp_path):
    for rank in range(3):
        write(tmp_path, rank, [1, 2], {"time": time.time() - 100}, age=50)
    for rank in range(2):
        write(tmp_path, rank, [1], {"time": time.time() - 10})
    run = Run(tmp_path)
    run.poll()
    assert list(run.current()) == [0, 1] and list(run.logs) == [0, 1, 2]


def test_only_the_last_steps_are_kept_where_that_is_asked_for(tmp_path):
    write(tmp_path, 0, range(1, 50), {"time": 1.0})
    write(tmp_path, 0, range(1, 11), {"time": 2.0}, end=False)
    run = Run(tmp_path, last=3)
    run.poll()
    assert steps_of(run) == [8, 9, 10] and run.logs[0].header["time"] == 2.0
    write(tmp_path, 0, [11, 12])
    run.poll()
    assert steps_of(run) == [10, 11, 12] and run.logs[0].ended


def test_a_step_can_be_read_again_with_its_events(tmp_path):
    log = StepLog(tmp_path, 0)
    for step in (1, 2):
        record = StepRecord(step=step, started=5.0)
        record.add("update", step, 5.0, 6.0)
        log.write(record)
    log.close()
    run = Run(tmp_path)
    run.poll()
    found = run.logs[0].record(run.logs[0].steps[1])
    assert (found.step, [e.subgroup for e in found.events]) == (2, [2])
    (tmp_path / "rank0000.jsonl").write_text("")
    with pytest.raises(OffloadError, match="step 2 is no longer at byte"):
        run.logs[0].record(run.logs[0].steps[1])


def test_a_file_that_was_replaced_is_read_from_its_beginning(tmp_path):
    write(tmp_path, 0, range(1, 9))
    run = Run(tmp_path)
    run.poll()
    (tmp_path / "rank0000.jsonl").unlink()
    write(tmp_path, 0, [1])
    assert run.poll() and steps_of(run) == [1]


def test_a_killed_process_of_this_machine_is_the_end(tmp_path):
    header = {"time": 1.0, "host": socket.gethostname(), "pid_namespace": os.readlink("/proc/self/ns/pid")}
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        write(tmp_path, 0, [1], header | {"pid": process.pid}, end=False)
        run = Run(tmp_path)
        run.poll()
        assert run.over() is None
        process.kill()
    assert run.over() == f"rank 0 did not end in order: its process {process.pid} is gone"


@pytest.mark.parametrize("elsewhere", [{"host": "another"}, {"pid_namespace": "pid:[1]"}])
def test_a_process_that_cannot_be_seen_from_here_may_still_run(tmp_path, elsewhere):
    header = {
        "time": 1.0,
        "host": socket.gethostname(),
        "pid_namespace": os.readlink("/proc/self/ns/pid"),
        "pid": 2**22 + 1,
    }
    write(tmp_path, 0, [1], header | elsewhere, end=False)
    run = Run(tmp_path)
    run.poll()
    assert run.over() is None


@pytest.mark.parametrize("what", ["missing", "a file", "empty", "no step", "ended"])
def test_nothing_to_report_is_told_with_what_is_there(tmp_path, what):
    directory = tmp_path / "run"
    if what == "a file":
        directory.write_text("")
    elif what != "missing":
        directory.mkdir()
    if what in ("no step", "ended"):
        write(directory, 0, [], {"time": 1.0}, end=what == "ended")
    told = {
        "missing": r"no such directory; .*--mlp-offload-telemetry DIR",
        "a file": r"is not a directory; give the one that holds rank0000.jsonl",
        "empty": r"holds no rank0000.jsonl",
        "no step": r"1 ranks, no complete step yet: the run is starting, or stopped.*--follow waits",
        "ended": r"the run has ended without one",
    }
    run = Run(directory)
    run.poll()
    with pytest.raises(OffloadError, match=told[what]):
        run.require_steps()


def test_foreign_files_in_the_directory_are_none_of_ours(tmp_path):
    write(tmp_path, 0, [1])
    (tmp_path / "rank0001.jsonl.bak").write_text(json.dumps({"step": 9}))
    (tmp_path / "rank0002.jsonl").mkdir()
    run = Run(tmp_path)
    run.poll()
    assert list(run.logs) == [0]


WRONG = [
    {"step": None},
    {"step": "2"},
    {"step_seconds": None},
    {"step_seconds": "0.1"},
    {"started_at": None},
    {"loss": "low"},
    {"hit_count": None},
    {"bytes_read": None},
    {"bytes_read": {"/a": None}},
    {"events": None},
    {"events": [["fetch", 0, None, 1.0, "/a"]]},
    {"events": [["fetch", 0, 0.0, "1", "/a"]]},
    {"events": [[["fetch"], 0, 0.0, 1.0, "/a"]]},
    {"events": [7]},
]


@pytest.mark.parametrize("wrong", WRONG, ids=map(str, WRONG))
def test_a_step_with_values_of_a_wrong_type_is_damaged_like_a_torn_one(tmp_path, wrong):
    write(tmp_path, 0, [1, 2, 3], {"time": 1.0})
    file = tmp_path / "rank0000.jsonl"
    header, one, two, three, end = file.read_text().splitlines()
    file.write_text("\n".join([header, one, json.dumps(json.loads(two) | wrong), three, end, ""]))
    run = Run(tmp_path)
    run.poll()
    assert (steps_of(run), run.logs[0].torn_count) == ([1, 3], 1)
    analyze({0: list(run.logs[0].steps)}, {0: run.logs[0].header})


PATH = {"directory": "/a", "read": 1, "write": None, "origin": "measured"}
WRONG_LINES = [7, None, ["header"], "end", {"header": None}, {"header": [1]}]
WRONG_LINES += [{"header": {"time": None}}, {"header": {"subgroup_count": "7"}}, {"header": {"subgroup_count": 7}}]
WRONG_LINES += [
    {"header": {"paths": value}} for value in (None, ["/a"], [PATH | {"read": "fast"}], [PATH | {"directory": 1}])
]
WRONG_LINES += [{"header": {"paths": [{"directory": "/a"}]}}]


@pytest.mark.parametrize("wrong", WRONG_LINES, ids=map(str, WRONG_LINES))
def test_a_header_that_is_none_is_damaged_like_a_torn_one(tmp_path, wrong):
    write(tmp_path, 0, [1, 2], {"time": 1.0, "paths": [PATH]}, end=False)
    with open(tmp_path / "rank0000.jsonl", "a") as file:
        file.write(json.dumps(wrong) + "\n")
    write(tmp_path, 0, [3])
    run = Run(tmp_path)
    run.poll()
    log = run.logs[0]
    assert (steps_of(run), log.torn_count, log.start_count, run.paths()) == ([1, 2, 3], 1, 1, ["/a"])
