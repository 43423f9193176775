"""From steps to numbers: medians, bytes and efficiency of each system, and what makes a measurement impossible. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

Step = "dict[str, Any]"  # one answer of a worker, see systems/worker.py

BUSY_SHARE = 0.01
"""Bytes on a device that the system does not use, as a share of all: above this somebody else is using it."""


@dataclass(frozen=True)
class Caps:
    """Bandwidth of the paths from ``since`` (monotonic clock, s) on: [(read, write), ...] in bytes/s, one a path."""

    since: float
    rates: "Sequence[tuple[float, float]]"


@dataclass
class Measured:
    """The steady steps of one system. With several ranks each step is that of the slowest.

    Attributes:
        training: steps with forward and backward (or their pause).
        saturated: updates one after the other, with nothing between them; efficiency is theirs.
        paths: indices of the paths that the system uses, among all whose counters are read.
    """

    paths: "Sequence[int]"
    facts: "dict[str, Any]"
    training: "list[Step]" = field(default_factory=list)
    saturated: "list[Step]" = field(default_factory=list)
    ranks: "list[list[Step]]" = field(default_factory=list)
    losses: "list[float | None]" = field(default_factory=list)
    checksums: "list[list[int]]" = field(default_factory=list)
    peak_rss_bytes: int = 0


def slowest(steps: "Sequence[Step]") -> Step:
    """One step of all ranks: each time is that of the slowest rank, the devices' counters are common."""
    times = {key: max(step[key] for step in steps) for key in steps[0] if key.endswith("_seconds") or key == "end"}
    return steps[0] | times


def moved(step: Step, paths: "Sequence[int]", since: int = 0, until: int = 2) -> "tuple[int, int]":
    """(bytes read, bytes written) on ``paths`` from one reading of the counters to another: 0 begin, 1 computed, 2 end."""
    before, after = step["counters"][since], step["counters"][until]
    return tuple(sum(after[path][k] - before[path][k] for path in paths) for k in (0, 1))


def capacity(begin: float, end: float, paths: "Sequence[int]", history: "Sequence[Caps]") -> "tuple[float, float]":
    """(bytes that can be read, bytes that can be written) on ``paths`` from ``begin`` to ``end``."""
    total = [0.0, 0.0]
    for i, caps in enumerate(history):
        until = history[i + 1].since if i + 1 < len(history) else end
        seconds = max(0.0, min(end, until) - max(begin, caps.since))
        for k in (0, 1):
            total[k] += seconds * sum(caps.rates[path][k] for path in paths)
    return total[0], total[1]


def efficiency(steps: "Sequence[Step]", paths: "Sequence[int]", history: "Sequence[Caps]") -> float:
    """Bytes moved in all of ``steps`` over what the paths can move in that time, in the direction that limits."""
    bytes_moved = [sum(moved(step, paths)[k] for step in steps) for k in (0, 1)]
    spans = [capacity(step["begin"], step["end"], paths, history) for step in steps]
    return max(bytes_moved[k] / sum(span[k] for span in spans) for k in (0, 1))


def median_and_spread(values: "Sequence[float]") -> "tuple[float, list[float]]":
    return statistics.median(values), [min(values), max(values)]


def summarize(
    measured: Measured, history: "Sequence[Caps] | None", compute_seconds: "float | None" = None
) -> "dict[str, Any]":
    """The fields of one system in the JSON file.

    Args:
        history: None where the speed of the paths is not known; efficiency is then None.
        compute_seconds: of a step without any offload; None: the system's own forward and backward.
    """
    result: "dict[str, Any]" = dict(measured.facts)
    training, parameters = measured.training, measured.facts["parameters"]
    for name in ("update", "iteration", "forward", "backward"):
        key = f"{name}_seconds"
        result[key], result[f"{key}_spread"] = median_and_spread([step[key] for step in training])
    own = [step["forward_seconds"] + step["backward_seconds"] for step in training]
    result["compute_seconds"] = statistics.median(own) if compute_seconds is None else compute_seconds
    read, written = (statistics.fmean(moved(step, measured.paths)[k] for step in training) for k in (0, 1))
    result |= {
        "steps": len(training),
        "bytes_read": read,
        "bytes_written": written,
        "bytes_per_parameter": (read + written) / parameters,
        "bytes_read_per_parameter": read / parameters,
        "bytes_written_per_parameter": written / parameters,
        "peak_rss_bytes": measured.peak_rss_bytes,
        "losses": measured.losses,
        "efficiency": None,
        "efficiency_spread": None,
        "efficiency_steps": len(measured.saturated),
        "overlap_seconds": None,
    }
    if history is not None:
        single = [efficiency([step], measured.paths, history) for step in measured.saturated]
        result["efficiency"], result["efficiency_spread"] = median_and_spread(single)
        result["efficiency_window"] = efficiency(measured.saturated, measured.paths, history)
        # What was moved while the model computed, as the time that it would have taken afterwards.
        hidden = [moved(step, measured.paths, 0, 1) for step in training]
        rates = capacity(0.0, 1.0, measured.paths, [Caps(0.0, history[-1].rates)])
        result["overlap_seconds"] = statistics.median(max(h[k] / rates[k] for k in (0, 1)) for h in hidden)
    if len(measured.ranks) > 1:
        updates = [statistics.median(step["update_seconds"] for step in steps) for steps in measured.ranks]
        result["rank_update_seconds"] = updates
        result["rank_skew"] = max(updates) / min(updates) - 1
    return result


def sequential_bound_share(measured: Measured, history: "Sequence[Caps]") -> float:
    """(bytes / read cap + bytes / write cap) / time of an update: how much of its time a system without overlap spends
    on storage alone. 1.0 is the best that such a system can do, but for what a cap lets through at once after a pause
    (about 0.1 s of it, in each read and each write): it goes a little above 1.0 where these are short."""
    shares = []
    for step in measured.saturated:
        read, written = moved(step, measured.paths)
        read_rate, write_rate = capacity(0.0, 1.0, measured.paths, [Caps(0.0, history[-1].rates)])
        shares.append((read / read_rate + written / write_rate) / step["iteration_seconds"])
    return statistics.median(shares)


def impossible(systems: "dict[str, dict[str, Any]]", measured: "dict[str, Measured]", path_count: int) -> "list[str]":
    """Everything that says that the measurement is wrong; empty for an honest one."""
    errors = []
    for name, result in systems.items():
        for key in ("efficiency", "efficiency_window"):
            value = result.get(key)
            if value is not None and round(value, 2) > 1.00:
                errors.append(
                    f"{name}: {key} is {value:.3f}; above 1.00 the measurement is wrong (the caps do not hold, the steps "
                    "are too short for them, or somebody else uses the devices)"
                )
        others = [path for path in range(path_count) if path not in measured[name].paths]
        steps = measured[name].training
        strange = sum(sum(moved(step, others)) for step in steps)
        own = sum(sum(moved(step, measured[name].paths)) for step in steps)
        if strange > BUSY_SHARE * max(own, 1) and own:
            errors.append(
                f"{name}: {strange} bytes went over a path that it does not use: somebody else uses the device"
            )
    errors += drifted(measured)
    errors += differences({name: m for name, m in measured.items() if name in EXACT and len(m.ranks) <= 1})
    return errors


EXACT = ("mlp", "mlp_one_path", "sequential")
"""Systems whose numbers are the same, bit for bit: they have one Adam and the same gradients."""


LOSS_TOLERANCE = 0.01
"""Relative; DeepSpeed's Adam rounds differently from ours, which stays far below this for a few dozen steps."""


def drifted(measured: "dict[str, Measured]") -> "list[str]":
    """Says so when DeepSpeed does not train as the others do: a baseline that skips work is no baseline."""
    theirs = measured["deepspeed"].losses if "deepspeed" in measured else []
    for name in EXACT:
        if name in measured and len(measured[name].ranks) <= 1:
            for step, (a, b) in enumerate(zip(theirs, measured[name].losses)):
                if a is not None and b is not None and not abs(a - b) <= LOSS_TOLERANCE * abs(b):
                    return [
                        f"deepspeed: its loss is {a:.4f} where that of {name} is {b:.4f} (loss {step + 1}): it does other work"
                    ]
    return []


def differences(measured: "dict[str, Measured]") -> "list[str]":
    """Systems that did not compute the same: then they did not do the same work."""
    errors = []
    for name, other in measured.items():
        first_name, first = next(iter(measured.items()))
        if other.losses != first.losses:
            errors.append(f"{name}: losses {other.losses} differ from those of {first_name}, {first.losses}")
        if other.checksums != first.checksums:
            errors.append(
                f"{name}: after some block its weights differ from those of {first_name} (crc32 {other.checksums}, "
                f"{first.checksums})"
            )
    return errors


def ratios(systems: "dict[str, dict[str, Any]]") -> "dict[str, float]":
    """How many times faster ours is, by update and by iteration."""
    result = {}
    for ours in ("mlp", "mlp_one_path"):
        for other in ("deepspeed", "sequential"):
            if ours in systems and other in systems:
                for key in ("update", "iteration"):
                    quotient = systems[other][f"{key}_seconds"] / systems[ours][f"{key}_seconds"]
                    result[f"{key}_{other}_over_{ours}"] = quotient
    return result
