"""Checkpoints that Megatron's writer process writes while training goes on hold the state at the moment of the call."""

from __future__ import annotations

import pytest
from launch import run_scenarios
from scenarios import BACKGROUND


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return run_scenarios(2, BACKGROUND, tmp_path_factory.mktemp("background"))


@pytest.mark.parametrize("name", BACKGROUND)
def test_it_is_the_state_at_the_call(results, name):
    for rank in results[name]:
        assert rank["loaded"] == rank["saved"]
        assert rank["resumed"] == rank["uninterrupted"]


@pytest.mark.parametrize("name", [name for name in BACKGROUND if "slow" in name])
def test_three_steps_were_made_while_it_was_written(results, name):
    for rank in results[name]:
        assert rank["unfinished"] == 1 and rank["pinned"] > 0 and rank["pinned_after"] == 0


def test_without_room_training_waits(results):
    for rank in results["no room"]:
        assert rank["pinned"] == 0
