"""Saving and loading take the memory of two subgroups, whatever the size of the state.

Measured on every rank against the moment before, in which the host-memory budget is already in use; no other process may
be started for it. Beside state there are Megatron's plans, some 10 KiB of Python objects for each of 700 pieces.
"""

from __future__ import annotations

import pytest
from launch import run_scenarios

MIB = 2**20
MODEL = {
    "TransformerConfig": {"num_layers": 22},
    "globals": {"HIDDEN": 256, "VOCABULARY": 1024},
}  # 18 million parameters
SUBGROUP_NUMEL = 2**18
BUDGETS = {1: 24 * MIB, 2: 12 * MIB}  # by number of ranks; the state of one is eight times as large
CASES = ((1, "dp_reshardable"), (2, "dp_reshardable"), (2, "fully_reshardable"))
PLANS_BYTES = 8 * MIB


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    found = {}
    for count, budget in BUDGETS.items():
        options = {"subgroup_size": SUBGROUP_NUMEL // count, "host_memory": budget}
        common = {"kind": "memory", "model": MODEL, "options": options}
        scenarios = {format: common | {"format": format} for number, format in CASES if number == count}
        ranks_of = run_scenarios(count, scenarios, tmp_path_factory.mktemp(f"memory{count}"))
        found |= {(count, format): ranks for format, ranks in ranks_of.items()}
    return found


@pytest.mark.parametrize(("count", "format"), CASES)
@pytest.mark.parametrize("phase", ["save", "load"])
def test_memory_is_two_subgroups(results, count, format, phase):
    budget = BUDGETS[count]
    for rank in results[count, format]:
        assert rank["state_bytes"] > 8 * budget
        assert rank["reads"] == rank["subgroup_count"] > 50  # each one once
        assert rank[phase]["growth"] <= 2 * rank["subgroup_bytes"] + PLANS_BYTES < budget, rank
        assert rank[phase]["children"] == 0
        assert rank[phase]["samples"] > 10
