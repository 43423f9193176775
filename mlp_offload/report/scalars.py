"""The numbers of some steps as named scalars, for TensorBoard and W&B."""

from __future__ import annotations

from collections.abc import Sequence

from ..telemetry import union_seconds
from .numbers import DIRECTIONS, StepNumbers


def scalars(steps: "Sequence[StepNumbers]", paths: "Sequence[str]") -> "dict[str, float]":
    """Means of ``steps`` (at least one) of one rank, by name: ``mlp-offload/step-seconds``, ``mlp-offload/hit-rate``, ...

    Args:
        paths: the directories in the order of the options. A path is named by its place there (``path-0``): a directory
            may have another name in the next job or on the next node.
    """
    count = len(steps)
    found = {"step-seconds": sum(s.step_seconds for s in steps) / count}
    for phase in steps[0].phases:
        found[f"{phase.replace(' ', '-')}-seconds"] = sum(s.phases[phase] for s in steps if phase in s.phases) / count
    touched = sum(s.hit_count + s.fetch_count for s in steps)
    found["hit-rate"] = sum(s.hit_count for s in steps) / touched if touched else 0.0
    for i, path in enumerate(paths):
        for direction in DIRECTIONS:
            moved = [s.traffic[path, direction] for s in steps if (path, direction) in s.traffic]
            seconds = sum(union_seconds(traffic.spans) for traffic in moved)
            rate = sum(traffic.nbytes for traffic in moved) / seconds if seconds else 0.0
            found[f"path-{i}-{direction}-GB-per-second"] = rate / 1e9
    return {f"mlp-offload/{name}": value for name, value in found.items()}
