"""What the simulator says of the steps that ``benchmarks/step.py`` measures, from the same options."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.report import Caps
from mlp_offload.simulator import SimulatedPath, simulate

STEPS = 8
"""Enough for shares and buffers to settle."""


def predict(
    result: "dict[str, Any]",
    used: "Sequence[int]",
    history: "Sequence[Caps] | None",
    rank_count: int,
    staging_count: int,
) -> "dict[str, float | None]":
    """Fields to add to those of one of our systems: the update as simulated, and its relative error.

    Nothing is fitted: the paths are their caps, and the parameters a second are those at which Adam ran.

    Args:
        result: of ``report.summarize``.
        used: indices of the paths that the system uses.
        history: None where the speed of the paths is not known; so is the prediction then.
    """
    if history is None:
        return {"predicted_update_seconds": None, "prediction_error": None}
    rates = [history[0].rates[path] for path in used]
    records = simulate(
        [result["parameters"] // rank_count],
        paths=[SimulatedPath(f"path{i}", *rate) for i, rate in enumerate(rates)],
        host_memory_bytes=result["buffer_bytes"] // rank_count,
        subgroup_size=result["subgroup_size"],
        main_itemsize=result["main_itemsize"],
        adam_parameters_per_second=result["adam_parameters_per_second"],
        compute_seconds=result["compute_seconds"],
        local_rank_count=rank_count,
        staging_count=staging_count,
        steps=STEPS,
    )
    seconds = statistics.median(record.step_seconds for record in records[2:])
    return {"predicted_update_seconds": seconds, "prediction_error": seconds / result["update_seconds"] - 1}
