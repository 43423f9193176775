"""Shares of paths in proportion to their bandwidth, and how a running step moves towards new ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def apportion(
    count: int, rates: Sequence[float], room: Sequence[int], given: "Sequence[int] | None" = None
) -> "list[int]":
    """Divide ``count`` subgroups among paths so that all finish at nearly the same time.

    Args:
        rates: bandwidth of each path, in any unit.
        room: the most that each path can take; their sum is at least ``count``.
        given: what each path has already, counted in its time and not in the result.
    """
    given = given or [0] * len(rates)
    quota = [0] * len(rates)
    for _ in range(count):
        # the path that would be done first with one more, among those with room
        open_paths = [i for i in range(len(rates)) if quota[i] < room[i]]
        quota[max(open_paths, key=lambda i: (rates[i] / (given[i] + quota[i] + 1), -i))] += 1
    return quota


def interleave(quota: Sequence[int]) -> "list[int]":
    """A path index for each of ``sum(quota)`` subgroups, mixed evenly: quotas 6 and 4 give A B A B A A B A B A."""
    count, placed, homes = sum(quota), [0] * len(quota), []
    for n in range(1, count + 1):
        i = max(range(len(quota)), key=lambda i: (quota[i] * n / count - placed[i], -i))
        homes.append(i)
        placed[i] += 1
    return homes


def follow(
    order: Sequence[int], homes: "Mapping[int, int]", rates: Sequence[float], room: Sequence[int], tolerance: float
) -> "dict[int, int]":
    """New homes for subgroups that are about to be flushed, so that the paths' shares follow their bandwidth.

    A subgroup that is flushed is in memory anyway, so another path costs nothing. Small differences are left alone,
    lest every step's noise moves subgroups.

    Args:
        order: all streamed subgroups, in the order of this step.
        homes: where they live now.
        rates: measured bandwidth of each path.
        room: the most subgroups that each path can hold.
        tolerance: share of the slowest path's time that must be gained, 0 to 1.
    Returns:
        ``homes`` as they should be; the same when nothing is gained.
    """
    now = [0] * len(rates)
    for subgroup in order:
        now[homes[subgroup]] += 1
    # Each path keeps at least one, or nobody would notice that it has become fast again.
    first = [min(1, r) if len(order) >= len(rates) else 0 for r in room]
    rest = apportion(len(order) - sum(first), rates, [r - f for r, f in zip(room, first)], first)
    wanted = [f + r for f, r in zip(first, rest)]

    def slowest(counts: Sequence[int]) -> float:
        return max(count / rate for count, rate in zip(counts, rates))

    if not order or slowest(wanted) >= slowest(now) * (1 - tolerance):
        return dict(homes)
    return {**homes, **dict(zip(order, interleave(wanted)))}
