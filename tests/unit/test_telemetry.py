import json
import time

import pytest

from mlp_offload.errors import ConfigError
from mlp_offload.telemetry import StepLog, StepRecord, read_line, read_steps, union, union_seconds


def test_union_counts_overlapping_time_once():
    assert union_seconds([(0, 2), (1, 3), (5, 6), (5, 5.5)]) == 4
    assert union_seconds([]) == 0
    assert union([(3, 4), (0, 2), (1, 2.5), (4, 5)]) == [(0, 2.5), (3, 5)]


def test_a_start_after_a_torn_line_begins_a_line_of_its_own(tmp_path):
    first = StepLog(tmp_path, rank=0)
    first.start({"host": "n1"})
    first.write(StepRecord(step=1))
    first._stream.write('{"step": 2, "events": [["fet')  # killed here
    first._stream.flush()
    second = StepLog(tmp_path, rank=0)
    second.start({"host": "n2"})
    second.write(StepRecord(step=1))
    lines = [read_line(line) for line in second.file.read_text().splitlines()]
    assert [lines[0], lines[3]] == [{"header": {"rank": 0, "host": host}} for host in ("n1", "n2")]
    assert lines[2] is None and [lines[1].step, lines[4].step] == [1, 1]
    assert [step.step for step in read_steps(second.file)] == [1, 1]


@pytest.mark.parametrize("line", ["", "{", "[]", "{}", '{"step": 1}', '{"step": 1, "events": [[1]]}', "17"])
def test_a_line_that_is_no_step_is_none(line):
    assert read_line(line) is None


def test_a_record_becomes_one_json_line_with_its_phases(tmp_path):
    record = StepRecord(step=3, started=100.0, bytes_read={"/a": 5}, hit_count=1, fetch_count=3)
    record.add("fetch", 0, 100.0, 101.0, "/a")
    record.add("fetch", 1, 100.5, 102.0, "/a")
    record.add("update", 0, 101.0, 101.25)
    log = StepLog(tmp_path / "runs", rank=2)
    log.write(record)
    log.close()
    line, end = (tmp_path / "runs" / "rank0002.jsonl").read_text().splitlines()
    items = json.loads(line)
    assert json.loads(end)["end"] == pytest.approx(time.time(), abs=60)
    assert (items["fetch_seconds"], items["update_seconds"], items["flush_seconds"]) == (2.0, 0.25, 0.0)
    assert items["events"][1] == ["fetch", 1, 0.5, 2.0, "/a"]
    assert items["loss"] is None and "started" not in items
    assert items["started_at"] == pytest.approx(time.time() - time.monotonic() + 100.0, abs=60)
    read = read_line(line)
    assert (read.step, read.events, read.started) == (3, record.events, items["started_at"])
    assert [step.events for step in read_steps(log.file)] == [read.events]
    assert "fetch 2000 | update 250" in record.summary() and "hits 1/4" in record.summary()


def test_two_spaces_of_one_step_merge():
    dense = StepRecord(step=1, started=10.0, step_seconds=2.0, bytes_read={"/a": 1}, hit_count=1)
    experts = StepRecord(step=1, started=12.0, step_seconds=3.0, bytes_read={"/a": 2, "/b": 4}, fetch_count=2)
    experts.add("flush", 7, 12.0, 13.0)
    both = dense.merge(experts)
    assert both.bytes_read == {"/a": 3, "/b": 4} and both.step_seconds == 5.0 and both.hit_rate == pytest.approx(1 / 3)
    assert (both.events[0].begin, both.events[0].end) == (2.0, 3.0)


def test_a_directory_that_cannot_be_made_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="telemetry directory"):
        StepLog(tmp_path / "file" / "x", 0)
