"""The numbers of the step benchmark, on steps made by hand."""

import pytest
from bench_tools import REPOSITORY  # noqa: F401 - makes `benchmarks` importable

from benchmarks.report import (
    Caps,
    Measured,
    capacity,
    differences,
    drifted,
    efficiency,
    impossible,
    ratios,
    sequential_bound_share,
    slowest,
    summarize,
)

CAPS = [Caps(0.0, [(400.0, 400.0), (200.0, 100.0)])]


def step(begin, end, first=(0, 0), second=(0, 0), computed=((0, 0), (0, 0)), compute=0.0):
    """A step that moves (read, written) bytes on each of two paths, ``computed`` of them before its update."""
    return {
        "begin": begin,
        "end": end,
        "forward_seconds": compute / 3,
        "backward_seconds": compute * 2 / 3,
        "update_seconds": end - begin - compute,
        "iteration_seconds": end - begin,
        "counters": [[[0, 0], [0, 0]], [list(c) for c in computed], [list(first), list(second)]],
        "loss": 1.0,
    }


def test_efficiency_is_that_of_the_direction_that_limits():
    # 10 s: 6000 bytes can be read, 5000 written.
    assert efficiency([step(0, 10, (3000, 3000), (600, 1000))], [0, 1], CAPS) == pytest.approx(0.8)
    assert efficiency([step(0, 10, (3000, 100), (2400, 0))], [0, 1], CAPS) == pytest.approx(0.9)
    # On the first path alone, over two steps together.
    steps = [step(0, 1, (400, 0), (999, 999)), step(1, 4, (0, 1200))]
    assert efficiency(steps, [0], CAPS) == pytest.approx(0.75)


def test_capacity_follows_caps_that_change_in_the_middle():
    history = [*CAPS, Caps(4.0, [(200.0, 200.0), (200.0, 100.0)])]
    assert capacity(0.0, 10.0, [0, 1], history) == (4 * 600 + 6 * 400, 4 * 500 + 6 * 300)
    assert capacity(5.0, 6.0, [1], history) == (200, 100)
    assert capacity(1.0, 2.0, [0], history) == (400, 400)


def test_summary_keeps_compute_and_overlap_apart():
    steps = [step(0, 10, (2000, 2000), (400, 400), ((0, 400), (0, 100)), compute=4.0)] * 3
    measured = Measured([0, 1], {"parameters": 200}, training=steps, saturated=[step(0, 5, (1900, 1000), (900, 0))] * 3)
    result = summarize(measured, CAPS)
    assert (result["update_seconds"], result["iteration_seconds"], result["compute_seconds"]) == (6.0, 10.0, 4.0)
    assert (result["bytes_read"], result["bytes_written"], result["bytes_per_parameter"]) == (2400, 2400, 24.0)
    assert result["efficiency"] == pytest.approx(2800 / 3000)
    assert result["overlap_seconds"] == pytest.approx(1.0)  # 500 bytes written while computing, at 500 bytes/s
    assert summarize(measured, CAPS, compute_seconds=1.5)["compute_seconds"] == 1.5
    assert summarize(measured, None)["efficiency"] is None


def test_more_than_the_paths_can_do_is_called_wrong():
    measured = Measured([0], {"parameters": 1}, training=[step(0, 1, (1, 1))], saturated=[step(0, 1, (405, 0))])
    errors = impossible({"mlp": summarize(measured, CAPS)}, {"mlp": measured}, 2)
    assert errors and all("above 1.00 the measurement is wrong" in error for error in errors)
    measured.saturated = [step(0, 1, (401, 0))]
    assert impossible({"mlp": summarize(measured, CAPS)}, {"mlp": measured}, 2) == []


def test_bytes_on_a_path_that_is_not_used_are_called_wrong():
    measured = Measured([0], {"parameters": 1}, training=[step(0, 9, (100, 100), (5, 0))], saturated=[step(0, 9)])
    (error,) = impossible({"mlp_one_path": summarize(measured, CAPS)}, {"mlp_one_path": measured}, 2)
    assert "somebody else" in error


def test_systems_that_compute_something_else_are_called_wrong():
    a = Measured([0], {}, losses=[1.0, 0.5], checksums=[[7]])
    assert differences({"mlp": a, "sequential": Measured([0], {}, losses=[1.0, 0.5], checksums=[[7]])}) == []
    (loss,) = differences({"mlp": a, "sequential": Measured([0], {}, losses=[1.0, 0.6], checksums=[[7]])})
    assert "losses" in loss
    (weights,) = differences({"mlp": a, "sequential": Measured([0], {}, losses=[1.0, 0.5], checksums=[[8]])})
    assert "weights differ" in weights


def test_a_baseline_that_trains_otherwise_is_called_wrong():
    ours = Measured([0], {}, losses=[2.0, 1.0])
    assert drifted({"mlp": ours, "deepspeed": Measured([0], {}, losses=[2.0, 1.005])}) == []
    for losses in ([2.0, 1.02], [2.0, float("nan")]):
        (error,) = drifted({"mlp": ours, "deepspeed": Measured([0], {}, losses=losses)})
        assert "it does other work" in error


def test_a_step_of_several_ranks_is_that_of_the_slowest():
    merged = slowest([step(0, 2, compute=0.5), step(0, 3, compute=0.25)])
    assert (merged["iteration_seconds"], merged["update_seconds"], merged["end"]) == (3, 2.75, 3)
    measured = Measured([0], {"parameters": 1}, training=[step(0, 2)], saturated=[step(0, 2)])
    measured.ranks = [[step(0, 2)], [step(0, 3)]]
    assert summarize(measured, CAPS)["rank_skew"] == pytest.approx(0.5)


def test_sequential_bound_and_ratios():
    measured = Measured([0], {}, saturated=[step(0, 10, (1600, 2000))])
    assert sequential_bound_share(measured, CAPS) == pytest.approx(0.9)
    times = {
        "mlp": {"update_seconds": 2.0, "iteration_seconds": 3.0},
        "deepspeed": {"update_seconds": 8.0, "iteration_seconds": 9.0},
    }
    assert ratios(times) == {"update_deepspeed_over_mlp": 4.0, "iteration_deepspeed_over_mlp": 3.0}
