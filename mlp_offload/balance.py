"""Which path gets which share while running: measure what each path gave, and move subgroups when they are flushed."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from .plan.shares import follow
from .plan.sustained import Sample, SustainedRates
from .telemetry import StepRecord, union_seconds
from .tiers import Tiers
from .units import format_rate

log = logging.getLogger(__name__)

MINIMUM_BYTES = 16 * 2**20
"""What a path must have read, and written, in one step to count as measured: below that the time is mostly latency."""

TOLERANCE = 0.05
"""Share of the step that must be gained before subgroups move."""


class Balance:
    """Keeps the homes of streamed subgroups in proportion to measured bandwidth."""

    def __init__(self, tiers: Tiers):
        self._tiers = tiers
        self._rates = SustainedRates([r.path.bytes_per_second for r in tiers.rates[: len(tiers.files)]])

    @property
    def rates(self) -> "list[float | None]":
        """Bytes/s of each path in its slower direction; None before anything is known."""
        return self._rates.values

    def observe(self, record: StepRecord) -> None:
        """Learn from the transfers of one step."""
        transfers = [e for e in record.events if e.phase in ("fetch", "flush")]
        if transfers:
            seconds = max(e.end for e in transfers)
            self._rates.observe([self._sample(d, record, seconds) for d in self._tiers.directories[: len(self.rates)]])

    @staticmethod
    def _sample(directory: str, record: StepRecord, step_seconds: float) -> "Sample | None":
        """The slower direction of one path, and the longer busy time of the two."""
        rates, busy = [], []
        for phase, moved in (("fetch", record.bytes_read), ("flush", record.bytes_written)):
            spans = ((e.begin, e.end) for e in record.events if e.phase == phase and e.path == directory)
            seconds = union_seconds(spans)
            if moved.get(directory, 0) < MINIMUM_BYTES or seconds == 0:
                return None
            rates.append(moved[directory] / seconds)
            busy.append(seconds)
        return Sample(min(rates), max(busy) / step_seconds)

    def rehome(self, order: Sequence[int]) -> None:
        """Give the streamed subgroups of ``order`` new homes where that makes the step shorter.

        A path that has too few slots grows when its file system has room; otherwise it takes what it can.
        """
        tiers = self._tiers
        if len(self.rates) < 2 or None in self.rates or not order:
            return
        spare = tiers.residency.staging_count
        elsewhere = [tiers.homes_on(i) - sum(tiers.homes[s] == i for s in order) for i in range(len(self.rates))]
        room = [len(order)] * len(self.rates)
        while True:
            homes = follow(order, tiers.homes, self.rates, room, TOLERANCE)
            if homes == tiers.homes:  # also where a path that failed left another one with more than it has room for
                return
            counts = [sum(homes[s] == i for s in order) for i in range(len(self.rates))]
            for i, file in enumerate(tiers.files):
                missing = counts[i] + elsewhere[i] + spare - file.slot_count
                if missing > 0 and not file.grow(missing):
                    room[i] = max(0, file.slot_count - spare - elsewhere[i])
                    break
            else:
                break
            if sum(room) < len(order):
                return
        rates = ", ".join(f"{d} {format_rate(r)}" for d, r in zip(tiers.directories, self.rates))
        log.info("subgroups follow the measured bandwidth (%s): %s a path", rates, counts)
        tiers.homes = homes
