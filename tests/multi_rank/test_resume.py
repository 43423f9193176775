"""Training that goes on from a torch_dist checkpoint, saved and loaded by ours and by stock in all directions."""

from __future__ import annotations

import pytest
from launch import run_scenarios
from scenarios import CHECKPOINTS


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return run_scenarios(2, CHECKPOINTS, tmp_path_factory.mktemp("checkpoints"))


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_resumed_run_has_the_bits_of_the_uninterrupted_one(results, name):
    for rank in results[name]:
        assert rank["resumed"] == rank["uninterrupted"]
        executed = [step["executed"] for step in rank["resumed"]["steps"]]
        assert any(executed) and ("skipped" in name or all(executed))
