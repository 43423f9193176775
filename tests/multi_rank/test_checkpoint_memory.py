"""Saving and loading take little memory, whatever the size of the state: less than budget and two subgroups together.

Measured on every rank against the moment before, in which the budget is already in use; no other process may be started
for it. What is seen is mostly Megatron's plans, some KiB of Python objects for each of 2000 pieces.
"""

from __future__ import annotations

import pytest
from launch import run_scenarios

MIB = 2**20
# 18 million parameters, none of them large: Megatron's own loader holds whole weights
MODEL = {"TransformerConfig": {"num_layers": 22}, "globals": {"HIDDEN": 256, "VOCABULARY": 1024}}
SUBGROUP_NUMEL = 2**18
BUDGETS = {1: 24 * MIB, 2: 12 * MIB}  # by number of ranks; the state of one is eight times as large
CASES = ((1, "dp_reshardable"), (2, "dp_reshardable"), (2, "fully_reshardable"))


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    found = {}
    for count, budget in BUDGETS.items():
        options = {"subgroup_size": SUBGROUP_NUMEL, "staging_count": 4, "host_memory": budget}
        common = {"kind": "memory", "model": MODEL, "options": options}
        scenarios = {format: common | {"format": format} for number, format in CASES if number == count}
        ranks_of = run_scenarios(count, scenarios, tmp_path_factory.mktemp(f"memory{count}"))
        found |= {(count, format): ranks for format, ranks in ranks_of.items()}
    return found


@pytest.mark.parametrize(("count", "format"), CASES)
@pytest.mark.parametrize("phase", ["save", "load"])
def test_memory_does_not_follow_the_state(results, count, format, phase):
    budget = BUDGETS[count]
    for rank in results[count, format]:
        assert rank["state_bytes"] > 8 * budget
        assert rank["reads"] == rank["subgroup_count"] > 30  # each one once
        assert rank[phase]["growth"] <= budget + 2 * rank["subgroup_bytes"], rank
        assert rank[phase]["children"] == 0
        assert rank[phase]["samples"] > 10
