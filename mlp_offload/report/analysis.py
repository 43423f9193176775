"""From the steps of all ranks to the numbers of a run.

[Note: how a run is counted]
- Ranks step together: a step of the run takes as long as its slowest rank. Only steps that all ranks have are counted,
  and not the first of a start, which finds nothing in host memory that a step before left there.
- A phase's seconds are those in which at least one of its events was under way (phases overlap), of one rank; the share
  is that of all ranks' steps together. Flushes may go on after the step has returned.
- A path's rate is of one node: bytes of all its ranks over the time in which at least one of them moved some.
- *Share of the bound*: the bytes that were moved over what the paths could have moved at their given or measured rates
  while a step or its transfers were under way, in the direction that limits (the efficiency of ``benchmarks/step.py``,
  where a step is followed by the next at once). 100 % is the best that the paths allow for these bytes; a device whose
  reads and writes share its bandwidth stays well below it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ..errors import OffloadError
from ..telemetry import PHASES, union_seconds
from ..units import finite
from .numbers import GPU_UPDATE, StepNumbers, Traffic

Header = Mapping[str, Any]
Rates = Mapping[str, "tuple[float | None, float | None]"]
"""Path directory -> (read, write) in bytes/s, None where not known."""

DAY_SECONDS = 24 * 3600
_NOTHING = Traffic(0, ())


@dataclass(frozen=True)
class Phase:
    """``seconds``: median of ranks and steps; ``share`` of the time in steps, 0 to 1 or, as flushes go on, above."""

    seconds: float
    share: float


@dataclass(frozen=True)
class PathUse:
    """One path in one direction, on one node (the mean of the nodes where there are several).

    Attributes:
        bytes_a_step: of the node's ranks together.
        bytes_per_second: while something was moved.
        known_bytes_per_second: as given or measured at start-up; None where it was not. ``origin`` says which.
        busy_seconds: of the path in a step, both directions together; ``busy_share`` is that of the time in which a step
            or its transfers were under way.
        bytes_a_day: at the pace of the counted steps; None where their times are not known.
    """

    path: str
    direction: str
    bytes_a_step: float
    bytes_per_second: float
    known_bytes_per_second: "float | None"
    origin: str
    busy_seconds: float
    busy_share: float
    bytes_a_day: "float | None"


@dataclass(frozen=True)
class Skew:
    """Of ranks in the same step.

    Attributes:
        slowest_over_median: median over the steps.
        rank: the one that was slowest most often, in ``share_of_steps`` of them.
        rank_over_median: median over the steps of its time over that of the median rank.
        phase: in which it loses most of the difference.
    """

    slowest_over_median: float
    rank: int
    share_of_steps: float
    rank_over_median: float
    phase: str


@dataclass(frozen=True)
class Report:
    """The numbers of a run; see [Note: how a run is counted]. Times in seconds, sizes in bytes.

    Attributes:
        steps: (first, last) of those that were counted; ``iterations`` likewise, where the trainer told them.
        iteration_p50: from the start of a step to that of the next; None where not known.
        efficiency: share of the bound; None where the rates of the paths are not known.
        hit_rate, planned_hit_rate: subgroups found in host memory, 0 to 1.
        host_memory_bytes: of the state buffers, of one rank (the largest); ``state_bytes`` of all ranks.
        loss, grad_norm: (first, last) of the start.
        header: of the slowest rank's start; empty where not known.
        typical_step: (rank, step) to look at: the slowest rank in a step of median time.
    """

    ranks: "list[int]"
    node_count: int
    step_count: int
    steps: "tuple[int, int]"
    iterations: "tuple[int, int] | None"
    step_p50: float
    step_p99: float
    step_max: float
    slowest_step: int
    iteration_p50: "float | None"
    phases: "dict[str, Phase]"
    stall_p99: float
    paths: "list[PathUse]"
    efficiency: "float | None"
    hit_rate: float
    planned_hit_rate: "float | None"
    fetch_count: float
    skew: "Skew | None"
    host_memory_bytes: int
    state_bytes: "int | None"
    loss: "tuple[float, float] | None"
    grad_norm: "tuple[float, float] | None"
    typical_step: "tuple[int, int]"
    header: "dict[str, Any]" = field(repr=False)

    def as_dict(self) -> "dict[str, Any]":
        """For JSON, which has no infinity and no NaN: these are None."""
        return finite(asdict(self))


def analyze(
    ranks: "Mapping[int, Sequence[StepNumbers]]",
    headers: "Mapping[int, Header] | None" = None,
    given: "Rates | None" = None,
) -> Report:
    """The numbers of a run, measured or simulated.

    Args:
        ranks: rank -> its steps, in order.
        headers: rank -> what is known of its start.
        given: rates of paths, over those in the headers.

    Raises:
        OffloadError: there is no rank, or the ranks have no step in common.
    """
    headers = headers or {}
    common = set.intersection(*({s.step for s in steps} for steps in ranks.values())) if ranks else set()
    if not common:
        last = ", ".join(f"rank {r}: {steps[-1].step if steps else 'none'}" for r, steps in list(ranks.items())[:4])
        raise OffloadError(f"the ranks have no step in common to report on (newest steps: {last or 'no ranks'})")
    wanted = sorted(common - {1} or common)
    by_rank = {r: {s.step: s for s in steps if s.step in common} for r, steps in ranks.items()}
    counted = {r: [steps[k] for k in wanted] for r, steps in by_rank.items()}
    every = [s for steps in counted.values() for s in steps]
    seconds = [max(steps[i].step_seconds for steps in counted.values()) for i in range(len(wanted))]
    middle = sorted(range(len(seconds)), key=seconds.__getitem__)[(len(seconds) - 1) // 2]
    typical = max(counted, key=lambda r: counted[r][middle].step_seconds)
    first = next(iter(counted.values()))
    iterations = [s.iteration for s in first if s.iteration is not None]
    nodes: "dict[str, list[int]]" = {}
    for rank in counted:
        nodes.setdefault(headers.get(rank, {}).get("host", ""), []).append(rank)
    uses, efficiency = _paths(counted, nodes, headers, given or {})
    planned = [h["planned_hit_count"] / h["subgroup_count"] for h in headers.values() if h.get("subgroup_count")]
    touched = sum(s.hit_count + s.fetch_count for s in every)
    stalls = [max(steps[i].phases["stall"] for steps in counted.values()) for i in range(len(wanted))]
    return Report(
        ranks=sorted(counted),
        node_count=len(nodes),
        step_count=len(wanted),
        steps=(wanted[0], wanted[-1]),
        iterations=(iterations[0], iterations[-1]) if iterations else None,
        step_p50=statistics.median(seconds),
        step_p99=percentile(seconds, 0.99),
        step_max=max(seconds),
        slowest_step=wanted[seconds.index(max(seconds))],
        iteration_p50=_iteration_seconds(list(by_rank[min(by_rank)].values())),
        phases=_phases(every),
        stall_p99=percentile(stalls, 0.99),
        paths=uses,
        efficiency=efficiency,
        hit_rate=sum(s.hit_count for s in every) / touched if touched else 0.0,
        planned_hit_rate=statistics.fmean(planned) if len(planned) == len(counted) else None,
        fetch_count=statistics.fmean(s.fetch_count for s in every),
        skew=_skew(counted),
        host_memory_bytes=max(s.host_memory_bytes for s in every),
        state_bytes=sum(h.get("state_bytes", 0) for h in headers.values()) if len(headers) == len(counted) else None,
        loss=_ends(by_rank, "loss"),
        grad_norm=_ends(by_rank, "grad_norm"),
        typical_step=(typical, wanted[middle]),
        header=dict(headers.get(typical, {})),
    )


def percentile(values: "Sequence[float]", share: float) -> float:
    """The smallest of ``values`` that at least ``share`` of them do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


# ------------------------------------------------------------------------------------------ helpers


def _iteration_seconds(steps: "list[StepNumbers]") -> "float | None":
    """Median time from the start of one step to that of the next; the first is left out with the start-up."""
    pairs = [(a, b) for a, b in zip(steps, steps[1:]) if b.step == a.step + 1 and b.started > a.started]
    return statistics.median(b.started - a.started for a, b in pairs) if pairs else None


def _phases(every: "list[StepNumbers]") -> "dict[str, Phase]":
    names = [*PHASES, *([GPU_UPDATE] if any(GPU_UPDATE in s.phases for s in every) else [])]
    total = sum(s.step_seconds for s in every)
    result = {}
    for name in names:
        values = [s.phases.get(name, 0.0) for s in every]
        result[name] = Phase(statistics.median(values), sum(values) / total if total else 0.0)
    return result


def _ends(by_rank: "Mapping[int, Mapping[int, StepNumbers]]", name: str) -> "tuple[float, float] | None":
    """First and last value of the rank that knows it (the loss is known on the last pipeline stage)."""
    for rank in sorted(by_rank, reverse=True):
        values = [v for s in by_rank[rank].values() if (v := getattr(s, name)) is not None]
        if values:
            return values[0], values[-1]
    return None


def _skew(counted: "Mapping[int, list[StepNumbers]]") -> "Skew | None":
    if len(counted) < 2:
        return None
    over: "dict[int, list[float]]" = {rank: [] for rank in counted}
    slowest: "list[int]" = []
    for i in range(len(next(iter(counted.values())))):
        times = {rank: steps[i].step_seconds for rank, steps in counted.items()}
        median = statistics.median_low(times.values())
        slowest.append(max(times, key=times.__getitem__))
        for rank, time in times.items():
            over[rank].append(time / median if median else 1.0)
    rank = max(counted, key=slowest.count)

    def loss(phase: str) -> float:
        """How much longer the rank is in ``phase`` than the median rank."""
        means = {r: statistics.fmean(s.phases[phase] for s in steps) for r, steps in counted.items()}
        return means[rank] - statistics.median_low(means.values())

    return Skew(
        slowest_over_median=statistics.median(max(o[i] for o in over.values()) for i in range(len(slowest))),
        rank=rank,
        share_of_steps=slowest.count(rank) / len(slowest),
        rank_over_median=statistics.median(over[rank]),
        phase=max(("stall", "update"), key=loss),  # the trainer's thread is in one of them, or between
    )


def _starts(steps: "list[StepNumbers]") -> "list[float]":
    """When each step began; where that is not known, as if each followed the one before at once."""
    if all(b.started > a.started for a, b in zip(steps, steps[1:])):
        return [s.started for s in steps]
    starts = [0.0]
    for s in steps:
        starts.append(starts[-1] + s.window_seconds)
    return starts[:-1]


def _paths(
    counted: "Mapping[int, list[StepNumbers]]",
    nodes: "Mapping[str, list[int]]",
    headers: "Mapping[int, Header]",
    given: Rates,
) -> "tuple[list[PathUse], float | None]":
    """The use of each path, and the share of the bound."""
    starts = {rank: _starts(steps) for rank, steps in counted.items()}
    found: "dict[tuple[str, str], list[PathUse]]" = {}
    moved, possible = {"read": 0.0, "write": 0.0}, {"read": 0.0, "write": 0.0}
    all_known = True
    for ranks in nodes.values():
        rates = _known_rates([headers.get(rank, {}) for rank in ranks], given)
        own = [(s, begin) for rank in ranks for s, begin in zip(counted[rank], starts[rank])]
        window = union_seconds((begin, begin + s.window_seconds) for s, begin in own)
        elapsed = _elapsed([starts[rank] for rank in ranks])
        directories = dict.fromkeys([*rates, *(path for s, _ in own for path, _ in s.traffic)])
        for path in directories:
            spans = {
                d: [(begin + a, begin + b) for s, begin in own for a, b in s.traffic.get((path, d), _NOTHING).spans]
                for d in moved
            }
            busy = union_seconds(spans["read"] + spans["write"])
            for k, direction in enumerate(moved):
                nbytes = sum(s.traffic.get((path, direction), _NOTHING).nbytes for s, _ in own)
                active = union_seconds(spans[direction])
                read, write, origin = rates.get(path, (None, None, "not known"))
                known = (read, write)[k]
                moved[direction] += nbytes
                if known is None:
                    all_known = False
                else:
                    possible[direction] += known * window
                use = PathUse(
                    path=path,
                    direction=direction,
                    bytes_a_step=nbytes / len(counted[ranks[0]]),
                    bytes_per_second=nbytes / active if active else 0.0,
                    known_bytes_per_second=known,
                    origin=origin,
                    busy_seconds=busy / len(counted[ranks[0]]),
                    busy_share=busy / window if window else 0.0,
                    bytes_a_day=nbytes / elapsed * DAY_SECONDS if elapsed else None,
                )
                found.setdefault((path, direction), []).append(use)
    shares = [moved[d] / possible[d] for d in moved if possible[d]]
    return [_mean(uses) for uses in found.values()], max(shares) if all_known and shares else None


def _known_rates(headers: "list[Header]", given: Rates) -> "dict[str, tuple[float | None, float | None, str]]":
    """Path -> (read, write, where they come from): the user's word, else that of the node's ranks."""
    known = {p["directory"]: (p["read"], p["write"], p["origin"]) for h in headers for p in h.get("paths", ())}
    return known | {path: (*rates, "given") for path, rates in given.items() if path in known or not known}


def _elapsed(starts: "list[list[float]]") -> "float | None":
    """Seconds that the counted steps took with all that lies between them: as if the last was as long as the others."""
    firsts, lasts, count = starts[0][0], starts[0][-1], len(starts[0])
    return (lasts - firsts) * count / (count - 1) if count > 1 and lasts > firsts else None


def _mean(uses: "list[PathUse]") -> PathUse:
    """One path on several nodes: the mean of each number, where all have it."""
    values: "dict[str, Any]" = asdict(uses[0])
    for name in (
        "bytes_a_step",
        "bytes_per_second",
        "known_bytes_per_second",
        "busy_seconds",
        "busy_share",
        "bytes_a_day",
    ):
        of_nodes = [getattr(use, name) for use in uses]
        values[name] = None if None in of_nodes else statistics.fmean(of_nodes)
    return PathUse(**values)
