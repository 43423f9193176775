"""Shares follow what the paths were seen to give; the state stays right while subgroups move."""

import numpy as np
import pytest

from mlp_offload.balance import MINIMUM_BYTES
from mlp_offload.config import OffloadConfig
from mlp_offload.pipeline import StepPipeline
from mlp_offload.telemetry import StepRecord


class AddOne:
    def prepare(self, subgroup):
        pass

    def update(self, subgroup, state):
        np.add(state.main_param, 1, out=state.main_param)


@pytest.fixture
def make(tmp_path):
    made = []

    def pipeline(capacity=None, subgroup_count=24):
        paths = []
        for name in "ab":
            (tmp_path / name).mkdir(exist_ok=True)
            paths.append({"directory": str(tmp_path / name), "capacity": capacity})
        config = OffloadConfig.from_mapping({"paths": paths, "subgroup_size": 300, "host_memory": 4 * 4096})
        made.append(StepPipeline(config, {"all": [300 * subgroup_count]}))
        made[-1].initialize(lambda space, subgroup, view: view.main_param.fill(subgroup.index))
        return made[-1]

    yield pipeline
    for item in made:
        item.close()


def seen(pipeline, seconds, nbytes=MINIMUM_BYTES):
    """A record of a step in which each path needed so many seconds for ``nbytes`` in each direction."""
    record = StepRecord(started=0.0)
    for directory, took in zip(pipeline.tiers.directories, seconds):
        record.bytes_read[directory] = record.bytes_written[directory] = nbytes
        record.add("fetch", 0, 0.0, took / 2, directory)
        record.add("flush", 0, 0.0, took, directory)
    return record


def counts(pipeline):
    pipeline.tiers.settle()
    return [sum(e.path == i for e in pipeline.tiers.table if e.slot >= 0) for i in range(2)]


def steps(pipeline, count):
    """Steps during which nothing is measured, and what the state must be after them."""
    for _ in range(count):
        pipeline.step("all", AddOne())


def test_subgroups_move_to_the_faster_path_and_back_and_stay_right(make):
    pipeline = make()
    for step, (seconds, expected) in enumerate([((1, 3), 18), ((1, 1), 12), ((3, 1), 6)], 1):
        for _ in range(12):  # the average forgets what was before
            pipeline.balance.observe(seen(pipeline, seconds))
        steps(pipeline, 2)
        assert [pipeline.tiers.homes_on(i) for i in range(2)] == [expected, 24 - expected]
        kept = 24 - sum(counts(pipeline))
        assert abs(counts(pipeline)[0] - expected) <= kept
        for subgroup in pipeline.subgroups["all"]:
            with pipeline.read("all", subgroup) as view:
                np.testing.assert_array_equal(view.main_param, subgroup.index + 2 * step)


def test_a_path_without_room_takes_what_it_holds(make):
    pipeline = make(capacity=20 * 4096)
    slots = [file.slot_count for file in pipeline.tiers.files]
    for _ in range(12):
        pipeline.balance.observe(seen(pipeline, (1, 9)))
    steps(pipeline, 2)
    held = pipeline.tiers.files[0]
    assert slots[0] <= held.slot_count <= 20
    assert pipeline.tiers.homes_on(0) + pipeline.tiers.residency.staging_count <= held.slot_count


@pytest.mark.timeout(60)
def test_a_path_that_took_over_more_than_it_has_room_for_keeps_it(make):
    pipeline = make(capacity=28 * 4096, subgroup_count=48)  # 24 and four spare ones: what it needs
    tiers = pipeline.tiers
    for _ in range(3):
        pipeline.balance.observe(seen(pipeline, (1, 1)))
    lost = next(index for index, home in tiers.homes.items() if home == 0)
    tiers.homes[lost] = 1  # as after a flush that failed
    assert tiers.homes_on(1) + tiers.residency.staging_count > tiers.files[1].slot_count
    before = dict(tiers.homes)
    steps(pipeline, 2)
    assert tiers.homes == before and not tiers.files[1].grow(1)


def test_little_is_no_measurement_and_noise_moves_nothing(make):
    pipeline = make()
    before = dict(pipeline.tiers.homes)
    pipeline.balance.observe(seen(pipeline, (1, 9), nbytes=MINIMUM_BYTES - 1))
    assert pipeline.balance.rates == [None, None]
    pipeline.balance.observe(seen(pipeline, (1.0, 1.04)))
    steps(pipeline, 1)
    assert pipeline.tiers.homes == before


def test_the_slower_direction_counts(make):
    pipeline = make()
    pipeline.balance.observe(seen(pipeline, (2, 4)))
    assert pipeline.balance.rates == [MINIMUM_BYTES / 2, MINIMUM_BYTES / 4]
