"""Which subgroups pass through GPU memory to be updated there: measured at start-up, and followed while running."""

from __future__ import annotations

from collections.abc import Sequence

from .config import AUTO
from .plan.devices import Rates, device_count, spread
from .tiers import Tiers


class DeviceShare:
    """Chooses for each step. With ``update_device=auto`` CPU, GPU and their link are tried out first."""

    def __init__(self, tiers: Tiers):
        self._tiers = tiers
        self.rates: "Rates | None" = None
        if tiers.residency.passing_count and tiers.config.update_device == AUTO:
            with tiers.pool.lease() as lease:
                self.rates = tiers.device.measure(lease, tiers.subgroups[0].main_itemsize)

    def choose(self, indices: Sequence[int], path_rates: "Sequence[float | None]") -> "frozenset[int]":
        """Those of ``indices``, not in GPU memory, that the GPU updates in a step.

        Args:
            path_rates: bytes/s of each path in its slower direction; where one is not known, storage counts as fast.
        """
        tiers = self._tiers
        others = [i for i in indices if i not in tiers.residency.device_residents]
        if not tiers.residency.passing_count or not others:
            return frozenset()
        if self.rates is None:
            return frozenset(others)
        streamed_bytes = sum(tiers.subgroups[i].record_bytes for i in others if tiers.residency.streams(i))
        known = [rate for rate in path_rates if rate]
        storage_seconds = streamed_bytes / sum(known) if known and len(known) == len(path_rates) else 0.0
        largest = max((tiers.subgroups[i] for i in others), key=lambda subgroup: subgroup.numel)
        count = device_count(len(others), largest.numel, largest.record_bytes, self.rates, storage_seconds)
        return spread(others, count)
