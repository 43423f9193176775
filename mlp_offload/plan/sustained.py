"""What bandwidth each path sustains, told from the steps of a run.

A path that was busy all step long gave what it can. One that had time left is harder to read: a device with a cache, a
burst allowance or a throttle takes a while at any speed, so "bytes over busy time" may be many times what it sustains.
Believing that number sends it too much, the next step is long, the other paths now have time left and look too fast in
turn: the shares swing for ever. So a path with time left is only *tried* with more; where it cannot keep up, the next
try comes later, and later again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

NEW_SHARE = 0.85
"""Weight of the last step in the running average: a path that halves its speed must be seen at once."""

SATURATED = 0.9
"""Share of a step during which a path is busy that shows what it sustains."""

IDLE = 0.7
"""Share of a step below which a path's busy time shows that it may do more; in between, it tells nothing."""

MOST_MORE = 2.0
"""The largest factor by which more is tried."""

KEPT_UP = 0.9
"""Share of the tried rate that must be reached for the try to have gone well."""

LONGEST_WAIT = 32
"""Steps between tries of a path that never kept up."""


@dataclass(frozen=True)
class Sample:
    """One path in one step: bytes/s while it was busy, and the share of the step during which it was, 0 to 1."""

    rate: float
    load: float


@dataclass
class _Path:
    rate: "float | None"
    tried: bool = False
    wait: int = 0  # steps before more may be tried (again)
    backoff: int = 1

    def settle(self, rate: float) -> None:
        if self.tried and rate < KEPT_UP * self.rate:
            self.wait = self.backoff = min(2 * self.backoff, LONGEST_WAIT)
            self.rate = rate
        else:
            if self.tried or rate < KEPT_UP * self.rate:  # it kept up, or has changed: what was learnt is old
                self.wait, self.backoff = 0, 1
            self.rate = NEW_SHARE * rate + (1 - NEW_SHARE) * self.rate
        self.tried = False

    def try_more(self, sample: Sample) -> None:
        if self.wait:
            self.wait -= 1
            return
        self.rate = min(sample.rate, MOST_MORE * self.rate, self.rate / sample.load)
        self.tried = True


class SustainedRates:
    """Sustained bytes/s of each path; ``None`` where nothing is known yet.

    Args:
        known: what the user or a probe says, to begin with.
    """

    def __init__(self, known: "Sequence[float | None]"):
        self._paths = [_Path(rate) for rate in known]
        self._moving = False

    @property
    def values(self) -> "list[float | None]":
        return [path.rate for path in self._paths]

    def observe(self, samples: "Sequence[Sample | None]") -> None:
        """Learn from one step; None for a path that moved too little to tell."""
        before = self.values
        held_up = False
        idle: "list[tuple[_Path, Sample]]" = []
        for path, sample in zip(self._paths, samples):
            if sample is None:
                continue
            if path.rate is None:
                path.rate = sample.rate
            elif sample.load >= SATURATED or sample.rate <= path.rate:
                held_up |= sample.load >= SATURATED
                path.settle(sample.rate)
            elif sample.load < IDLE:
                idle.append((path, sample))
        # New shares are written in the next step and read in the one after. Until then a path may be idle because of the
        # old ones, or because another has just become slower.
        settled = not self._moving and not self._changed(before)
        for path, sample in idle if held_up and settled else ():
            path.try_more(sample)
        self._moving = self._changed(before)

    def _changed(self, before: "Sequence[float | None]") -> bool:
        return any(old and abs(new / old - 1) > 1 - KEPT_UP for old, new in zip(before, self.values))
