"""What to do about it: a few rules on the numbers of a run, each with the numbers it goes by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..units import format_bytes, format_rate
from .analysis import PathUse, Report
from .numbers import GPU_UPDATE

# Shares of the step. The trainer's thread either updates or waits for storage ("stall"), so these two divide the step.
STALLED, UPDATING = 0.10, 0.75
SATURATED = 0.9
"""Busy share above which a path gives what it can, as ``plan.sustained`` has it."""

SKEWED = 1.2
SLOW_PATH = 0.7
SMALL = 0.05
"""Share of an iteration below which nothing in the optimizer step is worth a change."""

SPIKE, SPIKE_STEPS = 3.0, 20
HIT_TOLERANCE = 0.02


@dataclass(frozen=True)
class Finding:
    """``kind`` is for programs, ``text`` one or two sentences that say what was seen and what helps."""

    kind: str
    text: str


def judge(report: Report) -> "list[Finding]":
    """What bounds the run, first; then whatever is not as it should be."""
    rules = (_bound, _skewed, _hits, _slow_paths, _spikes)
    return [finding for rule in rules for finding in rule(report)]


def _bound(report: Report) -> "list[Finding]":
    stall, update = report.phases["stall"].share, report.phases["update"].share
    place = ""
    if report.iteration_p50:
        share = report.step_p50 / report.iteration_p50
        if _is_small(report):
            text = f"compute-bound: the optimizer step is {share:.1%} of an iteration; nothing to gain here."
            return [Finding("compute-bound", text)]
        place = f" The step is {share:.0%} of an iteration."
    busy = {use.path: use.busy_share for use in report.paths}
    saturated = [path for path, share in busy.items() if share >= SATURATED]
    if saturated and stall >= STALLED:
        return [Finding("storage-bound", _saturated(report, stall, saturated) + place)]
    if stall > update:
        busiest = max(busy, key=busy.__getitem__, default="")
        staging = report.header.get("staging_count")
        text = (
            f"storage-bound: {stall:.0%} of the step waits for storage, yet no path is saturated (busiest: {busiest}, "
            f"{busy.get(busiest, 0):.0%} of the time). More staging_count{f' (now {staging})' if staging else ''} keeps more "
            "subgroups in motion, more host_memory keeps more of them resident."
        )
        return [Finding("storage-bound", text + place)]
    if update >= UPDATING:
        return [Finding("update-bound", _update_bound(report, update) + place)]
    return [Finding("balanced", f"balanced: {update:.0%} of the step updates, {stall:.0%} waits for storage." + place)]


def _is_small(report: Report) -> bool:
    return report.iteration_p50 is not None and report.step_p50 < SMALL * report.iteration_p50


def _saturated(report: Report, stall: float, paths: "list[str]") -> str:
    """A saturated path sets the time of the step, however much of the update hides in it."""
    named = " and ".join(f"{path} ({_speeds(report.paths, path)})" for path in paths)
    several = len(paths) > 1
    text = f"storage-bound: {stall:.0%} of the step waits for storage; path{'s' if several else ''} {named} "
    text += f"{'are' if several else 'is'} saturated. "
    header = report.header
    if header.get("buffer_bytes") and report.fetch_count:
        half = report.fetch_count / 2 * header["buffer_bytes"]
        return (
            text
            + f"{format_bytes(half)} more host_memory a rank would halve what is moved; a further path helps as well."
        )
    return text + "More host_memory or a further path would help."


def _speeds(uses: "list[PathUse]", path: str) -> str:
    return ", ".join(
        f"{u.direction} {format_rate(u.bytes_per_second)}" for u in uses if u.path == path and u.bytes_a_step
    )


def _update_bound(report: Report, update: float) -> str:
    text = f"update-bound: {update:.0%} of the step is Adam and its copies, and storage keeps up. "
    if GPU_UPDATE in report.phases:
        return text + f"{report.phases[GPU_UPDATE].share / update:.0%} of that is on the GPU."
    header: "dict[str, Any]" = report.header
    threads, cores, ranks = (header.get(key) for key in ("update_threads", "cores", "local_rank_count"))
    if not threads:
        return text + "More update_threads help as long as there are idle cores."
    fair = max(1, cores // ranks) if cores >= ranks else cores
    if threads < fair:
        return text + f"Give it more update_threads: {threads} now, {fair} cores for each rank are there."
    return (
        text
        + f"It has {threads} threads on {cores} cores for {ranks} ranks: more cores a rank help (srun --cpus-per-task), "
        "more storage does not."
    )


def _skewed(report: Report) -> "list[Finding]":
    skew = report.skew
    if skew is None or skew.slowest_over_median < SKEWED or _is_small(report):
        return []
    if skew.rank_over_median >= SKEWED:  # in more than half of the steps
        where = (
            "waits longer for storage: look at its paths"
            if skew.phase == "stall"
            else "updates slower: look at its cores"
        )
        return [
            Finding(
                "skew",
                f"rank {skew.rank} is {skew.rank_over_median:.1f}x slower than the median rank, and all wait for it; it {where}.",
            )
        ]
    return [
        Finding(
            "skew",
            f"the slowest rank takes {skew.slowest_over_median:.1f}x the median, but not always the same rank: they get in each "
            "other's way, or others use the nodes or the storage.",
        )
    ]


def _hits(report: Report) -> "list[Finding]":
    planned = report.planned_hit_rate
    if planned is None or report.hit_rate >= planned - HIT_TOLERANCE:
        return []
    return [
        Finding(
            "hit-rate",
            f"hit rate lower than planned: {report.hit_rate:.0%} of subgroups were found in host memory, not {planned:.0%}. "
            "Whatever reads or changes the state between steps (checkpoints, --log-params-norm) takes the buffers.",
        )
    ]


def _slow_paths(report: Report) -> "list[Finding]":
    """A path that had something to do all the time and gave less than was expected; an idle one may be slow for lack of work.

    Rates are given and measured one direction at a time, and on many devices reads and writes share them: so the shares
    of both directions are added.
    """
    found = []
    for path in dict.fromkeys(use.path for use in report.paths):
        uses = [use for use in report.paths if use.path == path]
        if any(not use.known_bytes_per_second for use in uses) or uses[0].busy_share < SATURATED:
            continue
        share = sum(use.bytes_a_step / use.known_bytes_per_second for use in uses) / uses[0].busy_seconds
        if share < SLOW_PATH:
            expected = ", ".join(f"{use.direction} {format_rate(use.known_bytes_per_second)}" for use in uses)
            found.append(
                Finding(
                    "slow-path",
                    f"path {path} gives {_speeds(uses, path)}: {share:.0%} of what was expected ({expected}; {uses[0].origin}), "
                    f"though busy {uses[0].busy_share:.0%} of the time: others use it, or it has slowed down.",
                )
            )
    return found


def _spikes(report: Report) -> "list[Finding]":
    if report.step_count < SPIKE_STEPS or report.step_p99 < SPIKE * report.step_p50:
        return []
    return [
        Finding(
            "spikes",
            f"a few steps are long: p99 is {report.step_p99 / report.step_p50:.1f}x the median, the longest is step "
            f"{report.slowest_step} with {report.step_max:.2f} s: a checkpoint at that time, or others on the storage.",
        )
    ]
