"""The step pipeline with work that can be followed by eye: each update adds its step number to every element."""

import ctypes
import json
import os
import time

import numpy as np
import pytest

from mlp_offload.config import OffloadConfig
from mlp_offload.errors import ConfigError, OffloadError, PathIOError
from mlp_offload.pipeline import StepPipeline
from mlp_offload.storage import statefile
from mlp_offload.storage.engine import direct_supported
from mlp_offload.tiers import Where

RECORD_BYTES = 4096  # of a subgroup of up to 336 elements
SHARDS = {"dense": [1000, 0, 1, 2345], "expert": [700]}


class Adds:
    """Adds ``amount`` to all three arrays of every subgroup and notes the order; may be slow, or fail."""

    def __init__(self, amount, seconds=0.0, fail_at=None):
        self.amount, self.seconds, self.fail_at = amount, seconds, fail_at
        self.updated, self.calls = [], []

    def prepare(self, subgroup):
        assert subgroup.index not in self.updated
        self.calls.append(("prepare", subgroup.index))

    def update(self, subgroup, state):
        if subgroup.index == self.fail_at:
            raise ZeroDivisionError("in the update")
        time.sleep(self.seconds)
        self.updated.append(subgroup.index)
        self.calls.append(("update", subgroup.index))
        for i, array in enumerate((state.main_param, state.exp_avg, state.exp_avg_sq)):
            array += (i + 1) * self.amount


@pytest.fixture
def make(tmp_path):
    made = []

    def pipeline(buffers=6, spaces=SHARDS, **options):
        directories = [tmp_path / name for name in "ab"]
        for directory in directories:
            directory.mkdir(exist_ok=True)
        settings = {"paths": [str(d) for d in directories], "subgroup_size": 300, "host_memory": buffers * RECORD_BYTES}
        config = OffloadConfig.from_mapping({**settings, **options})
        made.append(StepPipeline(config, spaces, name=f"optimizer{len(made)}"))
        return made[-1]

    yield pipeline
    for item in made:
        item.close()
    assert not list(tmp_path.rglob("*.state")), "state files must go"


def fill(space, subgroup, view):
    assert not view.exp_avg.any() and not view.exp_avg_sq.any()
    for segment in subgroup.segments:
        part = slice(segment.offset, segment.offset + segment.numel)
        view.main_param[part] = 1000 * segment.shard + np.arange(
            segment.shard_offset, segment.shard_offset + segment.numel
        )


def check(pipeline, space, total):
    """Every element of the state is what ``fill`` made of it plus the sum of all updates."""
    for subgroup in pipeline.subgroups[space]:
        with pipeline.read(space, subgroup) as view:
            for segment in subgroup.segments:
                part = slice(segment.offset, segment.offset + segment.numel)
                start = 1000 * segment.shard + np.arange(segment.shard_offset, segment.shard_offset + segment.numel)
                np.testing.assert_array_equal(view.main_param[part], (start + total).astype(np.float32))
                np.testing.assert_array_equal(view.exp_avg[part], 2 * total)
                np.testing.assert_array_equal(view.exp_avg_sq[part], 3 * total)


@pytest.mark.parametrize("buffers", [3, 4, 5, 6, 9, 14, 15, 100])
def test_every_subgroup_is_updated_once_a_step_whatever_the_budget(make, buffers):
    pipeline = make(buffers)
    pipeline.initialize(fill)
    total = 0
    for step in range(1, 6):
        total += step
        for space, subgroups in pipeline.subgroups.items():
            work = Adds(step)
            record = pipeline.step(space, work)
            assert sorted(work.updated) == list(range(len(subgroups)))
            assert record.hit_count + record.fetch_count == len(subgroups)
            if buffers < 15:
                assert record.fetch_count > 0
    for space in pipeline.subgroups:
        check(pipeline, space, total)
    tiers = pipeline.tiers
    assert tiers.pool.free_count == tiers.pool.buffer_count - sum(e.where is Where.HOST for e in tiers.table)
    in_use = sum(file.slot_count - file.free_count for file in tiers.files)
    assert in_use == sum(e.where is Where.STORED for e in tiers.table), "a slot leaked"


def test_bytes_are_those_of_the_subgroups_that_are_not_in_memory(make):
    pipeline = make(6, spaces={"dense": [300 * 12]}, staging_count=4)
    pipeline.initialize(fill)
    records = [pipeline.step("dense", Adds(1)) for _ in range(4)]
    pipeline.tiers.settle()
    # 12 subgroups, 2 resident, 2 kept in staging from step to step
    assert [r.fetch_count for r in records] == [10, 8, 8, 8]
    for record in records:
        assert sum(record.bytes_read.values()) == record.fetch_count * RECORD_BYTES
        assert sum(record.bytes_written.values()) == 8 * RECORD_BYTES
        assert set(record.bytes_read) == set(record.bytes_written) and len(record.bytes_read) == 2


def test_what_a_caller_changes_between_steps_is_kept(make):
    pipeline = make(4)
    pipeline.initialize(fill)
    pipeline.step("dense", Adds(1))
    for subgroup in pipeline.subgroups["dense"]:
        with pipeline.modify("dense", subgroup) as view:
            for i, array in enumerate((view.main_param, view.exp_avg, view.exp_avg_sq)):
                array += (i + 1) * 10
    pipeline.step("dense", Adds(100))
    check(pipeline, "dense", 111)
    check(pipeline, "expert", 0)


def test_fetch_update_and_flush_of_different_subgroups_overlap(make, tmp_path):
    pipeline = make(8, spaces={"dense": [300 * 24]}, telemetry=str(tmp_path / "runs"))
    pipeline.initialize(fill)
    for _ in range(3):
        pipeline.step("dense", Adds(1, seconds=0.002))
    pipeline.close()
    lines = [json.loads(line) for line in (tmp_path / "runs" / "rank0000.jsonl").read_text().splitlines()]
    assert "end" in lines.pop()
    assert [line["step"] for line in lines] == [1, 2, 3]
    for line in lines:
        events = {phase: [e for e in line["events"] if e[0] == phase] for phase in ("fetch", "update", "flush")}
        assert len(events["fetch"]) == line["fetch_count"] and len(events["update"]) == 24
        for other in ("fetch", "flush"):
            assert any(a[2] < b[3] and b[2] < a[3] and a[1] != b[1] for a in events["update"] for b in events[other]), (
                f"no {other} ran during an update of another subgroup"
            )
        assert line["step_seconds"] >= line["update_seconds"] >= 24 * 0.002


def test_the_gradients_of_another_subgroup_are_asked_for_before_each_update(make):
    pipeline = make(4)
    pipeline.initialize(fill)
    work = Adds(1)
    pipeline.step("dense", work)
    assert work.calls[0][0] == "prepare"
    assert len(work.calls) == 2 * len(work.updated)
    for before, call in zip(work.calls[1:-1:2], work.calls[2:-1:2]):
        assert before[0] == "prepare" and call[0] == "update" and before[1] != call[1]


def test_after_an_error_in_the_middle_nothing_goes_on(make):
    pipeline = make(4)
    pipeline.initialize(fill)
    with pytest.raises(ZeroDivisionError):
        pipeline.step("dense", Adds(1, fail_at=5))
    for use in (
        lambda: pipeline.step("dense", Adds(1)),
        lambda: pipeline.read("dense", pipeline.subgroups["dense"][0]).__enter__(),
    ):
        with pytest.raises(OffloadError, match="no longer be used: step 1 ended with ZeroDivisionError: in the update"):
            use()


def test_closing_twice_and_in_a_forked_child_is_harmless(make, tmp_path):
    pipeline = make(4)
    pipeline.initialize(fill)
    pid = os.fork()
    if pid == 0:
        pipeline.close()
        os._exit(0 if list(tmp_path.rglob("*.state")) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    pipeline.step("dense", Adds(1))
    check(pipeline, "dense", 1)
    pipeline.close()
    pipeline.close()


@pytest.mark.parametrize(
    "options, message",
    [
        ({"host_memory": 2 * RECORD_BYTES}, "holds 2 buffers of 4.0 KiB; the pipeline needs 3"),
        ({"subgroup_size": 10**9, "host_memory": 1000}, "holds 0 buffers"),
        ({"paths": ["/nowhere/x"]}, "/nowhere/x"),
        ({"paths": ["$NOT_SET_ANYWHERE/x"]}, "NOT_SET_ANYWHERE is not set"),
    ],
)
def test_what_cannot_work_is_refused_before_a_file_is_made(make, options, message):
    with pytest.raises(ConfigError, match=message):
        make(**options)


def test_progress_reaches_the_end(tmp_path):
    calls = []
    config = OffloadConfig(paths=str(tmp_path), subgroup_size=300, host_memory=4 * RECORD_BYTES)
    pipeline = StepPipeline(config, {"dense": [3000]}, on_progress=lambda done, total: calls.append((done, total)))
    pipeline.initialize(fill)
    pipeline.close()
    assert calls[-1][0] == calls[-1][1] and [done for done, _ in calls] == sorted(done for done, _ in calls)


def test_reading_can_be_broken_off_without_losing_a_buffer(make):
    pipeline = make(3, spaces={"dense": [300 * 6]})
    pipeline.initialize(fill)
    free = pipeline.tiers.pool.free_count
    for subgroup in pipeline.subgroups["dense"]:
        with pytest.raises(KeyError), pipeline.read("dense", subgroup):
            raise KeyError("in the reader")
    assert pipeline.tiers.pool.free_count == free
    pipeline.step("dense", Adds(1))
    check(pipeline, "dense", 1)


def test_a_read_that_meets_broken_storage_ends_the_use_of_the_state(make):
    pipeline = make(3, spaces={"dense": [300 * 6]})
    pipeline.initialize(fill)
    lost = next(i for i, entry in enumerate(pipeline.tiers.table) if entry.where is Where.STORED)
    os.truncate(pipeline.tiers.files[pipeline.tiers.table[lost].path].path, 0)
    with pytest.raises(PathIOError, match=f"only copy of subgroup {lost}"):
        pipeline.read("dense", pipeline.subgroups["dense"][lost]).__enter__()
    with pytest.raises(OffloadError, match="no longer be used: reading subgroup"):
        pipeline.step("dense", Adds(1))


def test_an_error_while_the_state_is_made_gives_all_memory_back(make, caplog):
    pipeline = make(4)
    caplog.clear()

    def fails(space, subgroup, view):
        if subgroup.index == 2:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        pipeline.initialize(fails)
    pipeline.close()
    assert not caplog.records


def test_an_error_on_one_path_stops_the_filling_of_the_others(make, tmp_path):
    calls = []

    def progress(done, total):
        calls.append(done)
        if len(calls) == 1:
            raise KeyboardInterrupt
        time.sleep(0.02)

    pipeline = make(4, spaces={"dense": [2**20] * 40}, subgroup_size=2**20, host_memory=4 * 12 * 2**20)
    pipeline._on_progress = progress
    blocks = pipeline.tiers.files[1].nbytes // (8 * 2**20)
    assert blocks > 25
    with pytest.raises(KeyboardInterrupt):
        pipeline.initialize(fill)
    assert len(calls) < blocks / 2


@pytest.mark.parametrize("alignment", [512, 65536])
def test_paths_may_ask_for_different_alignments(make, monkeypatch, alignment):
    """No file system here asks for more than 4096 bytes: what the probe says of one path is raised, the engine insists."""

    def probe(directory):
        found = direct_supported(directory)
        return found._replace(alignment=alignment) if directory.parent.name == "b" else found

    monkeypatch.setattr(statefile, "direct_supported", probe)
    pipeline = make(4)
    assert pipeline.tiers.files[1].alignment == alignment
    pipeline.initialize(fill)
    for _ in range(3):
        for space in pipeline.subgroups:
            record = pipeline.step(space, Adds(1))
            assert record.fetch_count > 0 and len(record.bytes_read) == 2
    check(pipeline, "dense", 3)
    check(pipeline, "expert", 3)


def test_pinned_memory_is_unpinned_before_it_is_unmapped(tmp_path):
    config = OffloadConfig(paths=str(tmp_path), subgroup_size=300, host_memory=4 * RECORD_BYTES)
    pinned = []

    def pin(address, nbytes):
        pinned.append((address, nbytes))
        return lambda: pinned.remove(pipeline.tiers.pool.region) or ctypes.string_at(address, nbytes)

    pipeline = StepPipeline(config, {"dense": [3000]}, pin=pin)
    assert pinned == [pipeline.tiers.pool.region]
    pipeline.close()
    assert not pinned
    pipeline.close()


def test_an_error_in_pinning_leaves_nothing_behind(tmp_path):
    config = OffloadConfig(paths=str(tmp_path), subgroup_size=300, host_memory=4 * RECORD_BYTES)
    with pytest.raises(ZeroDivisionError):
        StepPipeline(config, {"dense": [3000]}, pin=lambda address, nbytes: 1 // 0)
    assert not list(tmp_path.iterdir())
