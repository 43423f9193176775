"""The plan of one step: a row a subgroup, in the order of the updates."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """What the pipeline does to one subgroup in one step.

    Attributes:
        subgroup: index.
        hit: its state is in host memory already; otherwise it is fetched.
        keep: it stays in host memory after the update; otherwise it is flushed.
        path: where it is flushed to; -1 with ``keep``.
        device: it is updated on the GPU.
    """

    subgroup: int
    hit: bool
    keep: bool
    path: int
    device: bool = False


@dataclass(frozen=True)
class StepPlan:
    """The rows of one step, in the order of the updates."""

    step: int
    rows: "tuple[Row, ...]"

    @property
    def hit_count(self) -> int:
        return sum(row.hit for row in self.rows)


class Waiting:
    """Rows that are still to be updated, in plan order.

    The first that is ready is taken, so that a slow path holds up only its own rows. That costs the same however many rows
    wait.
    """

    def __init__(self, rows: Iterable[Row]):
        self._rows = OrderedDict((row.subgroup, row) for row in rows)  # whose first is found at once
        self._place = {subgroup: place for place, subgroup in enumerate(self._rows)}
        self._hits = deque(row.subgroup for row in self._rows.values() if row.hit)

    def __bool__(self) -> bool:
        return bool(self._rows)

    def __iter__(self) -> "Iterator[Row]":
        return iter(self._rows.values())

    @property
    def first(self) -> "Row | None":
        return next(iter(self), None)

    def take(self, arrived: Iterable[int]) -> "Row | None":
        """Remove and return the first row whose state is in memory: a hit, or one of ``arrived``; None: there is none."""
        ready = [subgroup for subgroup in arrived if subgroup in self._rows]
        if self._hits:
            ready.append(self._hits[0])
        if not ready:
            return None
        taken = min(ready, key=self._place.__getitem__)
        if self._hits and taken == self._hits[0]:
            self._hits.popleft()
        return self._rows.pop(taken)


def plan_step(
    step: int,
    subgroups: Sequence[int],
    residents: Collection[int],
    cached: Collection[int],
    homes: Mapping[int, int],
    keep_count: int,
    device_residents: Collection[int] = (),
    passing: Collection[int] = (),
) -> StepPlan:
    """Plan one step.

    # [Note: alternating order]
    # Ascending on odd steps, descending on even ones. The last ``keep_count`` subgroups of a step stay in the
    # staging buffers, not flushed; the next step runs the other way and begins with them, so each saves a
    # fetch and a flush. Adam is elementwise: the order changes no bits.

    Args:
        step: 1 for the first.
        subgroups: indices, ascending.
        residents: subgroups that always stay in host memory.
        cached: other subgroups that are in host memory now.
        homes: subgroup -> path, for those that are not resident.
        keep_count: how many streamed subgroups may stay in the staging buffers at the end.
        device_residents: subgroups that always stay in GPU memory. They come first: the GPU updates them while others
            are fetched.
        passing: others that are updated on the GPU.
    """
    order = list(subgroups) if step % 2 else list(reversed(subgroups))
    order.sort(key=lambda s: s not in device_residents)
    stay = {*residents, *device_residents}
    here = {*stay, *cached}
    streamed = [s for s in order if s not in stay]
    kept = set(streamed[len(streamed) - keep_count :] if keep_count else ())
    rows = []
    for s in order:
        keep = s in stay or s in kept
        device = s in device_residents or s in passing
        rows.append(Row(s, s in here, keep, -1 if keep else homes[s], device))
    return StepPlan(step, tuple(rows))
