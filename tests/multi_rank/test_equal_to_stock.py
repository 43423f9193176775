"""Our distributed optimizer against stock's, bit for bit: loss, gradient norm, zero count, weights and fp32 state.

Oracle: stock Megatron-Core with torch.optim.AdamW(fused=True) as its Adam (``scripts/fused_adam.py``), trained in the same
process group from the same weights on the same batches. Clipping is active; parameters are cut by subgroups.
"""

from __future__ import annotations

import functools
from importlib import metadata

import layout_table
import pytest
from launch import run_scenarios
from scenarios import HOOKS, LAYOUTS


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Results of all scenarios of a number of processes; launched when first asked for."""

    @functools.cache
    def of(process_count: int):
        return run_scenarios(process_count, LAYOUTS[process_count], tmp_path_factory.mktemp("layouts"))

    return of


def _of_kind(kind: str):
    return [
        pytest.param(count, name, id=name)
        for count, scenarios in LAYOUTS.items()
        for name, scenario in scenarios.items()
        if scenario["kind"] == kind
    ]


@pytest.mark.parametrize(("process_count", "name"), _of_kind("compare"))
def test_trains_the_bits_of_stock(results, process_count, name):
    ranks = results(process_count)[name]
    assert len(ranks) == process_count
    if LAYOUTS[process_count][name]["stock_may_fail"]:
        assert all("stock_fails" in rank for rank in ranks) or all(rank["ours"] == rank["stock"] for rank in ranks)
        return
    if "lacks" in ranks[0]:
        pytest.skip(f"there is no {ranks[0]['lacks']}")
    for rank in ranks:
        assert rank["ours"]["steps"] == rank["stock"]["steps"]
        assert rank["ours"]["weights"] == rank["stock"]["weights"]
        assert rank["ours"]["state"] == rank["stock"]["state"]
    steps = ranks[0]["stock"]["steps"]
    executed = [step for step in steps if step["executed"]]
    assert len(executed) >= 5
    if "overflow" in name or "left out" in name:
        assert len(executed) < len(steps)
    if "owns nothing" not in name:  # the oracle is worth nothing where clipping never happens or weights stand still
        assert max(step["grad_norm"] for step in executed) > 0.5
        assert len({step["loss"] for step in steps}) > 1


def test_most_of_the_state_streams(results):
    (rank,) = results(1)["bf16"]
    assert rank["fetch_count"] > rank["hit_count"] > 0


@pytest.mark.parametrize(("process_count", "name"), _of_kind("reload"))
def test_reloaded_weights_become_main_params(results, process_count, name):
    for rank in results(process_count)[name]:
        assert rank["ours"] == rank["stock"]


def test_reload_from_state_dict_keeps_its_precision(results):
    (rough,), (precise,) = results(1)["reload"], results(1)["reload from state_dict"]
    assert rough["ours"]["reloaded"] != precise["ours"]["reloaded"]


def test_a_touched_weight_stops_the_run_where_its_master_is_lost(results):
    (lost,), (kept,) = results(1)["touched, remainder"], results(1)["touched, full"]
    assert "changed by other hands" in lost["ours"] and "reload_model_params" in lost["ours"]
    assert kept["ours"] == kept["stock"]


def test_groups_of_a_fused_adam_are_kept_and_their_step_may_be_a_tensor(results):
    (rank,) = results(1)["groups of FusedAdam"]
    assert rank["ours"] == rank["stock"]
    assert all({"bias_correction", "step"} <= set(keys) for keys in rank["ours"]["keys"])


def test_moments_can_be_read_and_set_where_torch_has_them(results):
    (rank,) = results(1)["moments by hand"]
    assert rank["ours"] == rank["stock"]
    assert rank["ours"]["counts"][0] == 0 < rank["ours"]["counts"][1]


@pytest.mark.parametrize(("process_count", "name"), _of_kind("set_state"))
def test_state_that_does_not_belong_to_the_weights_has_the_effect_of_stock(results, process_count, name):
    (rank,) = results(process_count)[name]
    assert rank["ours"] == rank["stock"]


def test_two_optimizers_of_one_process_do_not_meet(results):
    (rank,) = results(1)["two at once"]
    assert rank["ours"] == rank["stock"]
    assert rank["ours"][0] != rank["ours"][1]


def test_fp32_weights_are_their_own_masters(results):
    (rank,) = results(1)["touched, fp32"]
    assert rank["ours"] == rank["stock"]


@pytest.mark.parametrize(("process_count", "name"), _of_kind("compare"))
def test_the_page_in_the_docs_says_what_this_run_found(results, process_count, name):
    columns, version = layout_table.parse(layout_table.PAGE.read_text()), metadata.version("megatron-core")
    ranks = results(process_count)[name]
    needed = LAYOUTS[process_count][name]["needs"]
    if "lacks" in ranks[0] and ":" not in needed:
        pytest.skip(f"{needed} is not installed")
    if version not in columns:
        pytest.skip(f"the page has no column for {version}")
    assert columns[version][name] == layout_table.verdict(ranks), "run scripts/layout_table.py"


def test_the_page_in_the_docs_is_as_the_script_writes_it():
    page = layout_table.PAGE.read_text()
    columns = layout_table.parse(page)
    assert layout_table.render(columns) == page, "run scripts/layout_table.py"
    names = [name for _, name in layout_table.comparisons()]
    assert len(set(names)) == len(names)
    for verdicts in columns.values():
        assert not {layout_table.NOT_RUN, layout_table.NOT_EQUAL} & set(verdicts.values())


@pytest.mark.parametrize("function", HOOKS)
def test_a_step_refuses_when_a_hook_is_not_called(results, function):
    (rank,) = results(1)[f"unhooked {function}"]
    assert rank["error"] is not None and function in rank["error"] and "no weight was changed" in rank["error"]
    assert rank["unchanged"]
