"""Updates on a virtual clock: those of the CPU, those of the GPU, and the link between the two."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from .plan.devices import GRADIENT_BYTES, WEIGHT_BYTES, Rates
from .plan.subgroups import Subgroup
from .records import DeviceRecord, StateView
from .virtual import NEVER, Clock

STAGING_COUNT = 2
"""Subgroups whose gradients and weights may be on their way at once; as in ``transfers``, which needs torch."""


class Link:
    """Between host and GPU, both directions at once, each in the order of the requests."""

    def __init__(self, bytes_per_second: float):
        self._rate = bytes_per_second
        self.to_host_free = self.to_device_free = 0.0

    def to_host(self, when: float, nbytes: float) -> float:
        """When what is sent at ``when`` has come."""
        self.to_host_free = max(self.to_host_free, when) + nbytes / self._rate
        return self.to_host_free

    def to_device(self, when: float, nbytes: float) -> float:
        self.to_device_free = max(self.to_device_free, when) + nbytes / self._rate
        return self.to_device_free


class GpuUpdate:
    """One record that passes through GPU memory: what ``device_updates.DeviceFuture`` is for a real one."""

    def __init__(self, clock: Clock, subgroup: Subgroup):
        self._clock, self.subgroup = clock, subgroup
        self.until = 0.0  # when it has been updated or, if it is leaving, is back
        self.leaving = self.finished = False

    def done(self) -> bool:
        return self.finished

    def wait(self, timeout_seconds: float) -> bool:
        """Sleep until something is done, this or another; true when this is."""
        if not self.finished:
            self._clock.sleep()
        return self.finished


class Gpu:
    """What ``device_updates.GpuMemory`` is for a real GPU; a device of the clock.

    Args:
        host_rate, rate: parameters a second that the CPU and the GPU update.
        copy_rate: bytes a second of the link, each way.
    """

    def __init__(self, clock: Clock, link: Link, host_rate: float, rate: float, copy_rate: float):
        self._clock, self._link, self._rate = clock, link, rate
        self._rates = Rates(host_rate, rate, copy_rate, copy_rate)
        self._moving: "list[GpuUpdate]" = []  # at most one a buffer
        self._waiting: "list[GpuUpdate]" = []  # for a buffer
        self._buffer_count = 0
        self.free = 0.0  # when its last update has ended
        self.nbytes = 0
        self.change = NEVER

    def reserve(self, residents: Collection[int], passing_count: int, buffer_bytes: int) -> "Gpu":
        self._buffer_count = passing_count
        self.nbytes = (len(residents) + passing_count) * buffer_bytes
        return self

    def update(self, subgroup: Subgroup, stays: bool) -> "GpuUpdate | None":
        """Begin an update; None for a record that stays in GPU memory."""
        now = self._clock.now
        if stays:
            self._compute(now, subgroup)
            return None
        update = GpuUpdate(self._clock, subgroup)
        if len(self._moving) < self._buffer_count:
            self._send(update, now)
        else:
            self._waiting.append(update)
        return update

    def advance(self, until: float) -> bool:
        done = False
        while self.change <= until:
            update = min(self._moving, key=lambda moving: moving.until)
            when = update.until
            if not update.leaving:
                update.leaving = True
                update.until = self._link.to_host(when, update.subgroup.record_bytes)
            else:
                self._moving.remove(update)
                update.finished = done = True
                if self._waiting:
                    self._send(self._waiting.pop(0), when)
            self._look_ahead()
        return done

    def _send(self, update: GpuUpdate, when: float) -> None:
        update.until = self._compute(self._link.to_device(when, update.subgroup.record_bytes), update.subgroup)
        self._moving.append(update)
        self._look_ahead()

    def _compute(self, when: float, subgroup: Subgroup) -> float:
        self.free = max(self.free, when) + subgroup.numel / self._rate
        return self.free

    def _look_ahead(self) -> None:
        self.change = min((moving.until for moving in self._moving), default=NEVER)

    # What else the tiers ask of GPU memory.

    def address(self, index: int) -> int:
        return 0

    def read(self, index: int, target: Any) -> None:
        pass

    def write(self, index: int, source: Any) -> None:
        pass

    def measure(self, lease: Any, main_itemsize: int) -> Rates:
        return self._rates

    def close(self) -> None:
        pass


class Work:
    """Durations of updates, and of the copies that ``transfers.CudaTransfers`` makes beside those of the CPU.

    Weights leave faster than the next gradients come, so nobody waits for a staging buffer that they still fill.

    Args:
        link: None: weights and gradients are in host memory and used in place.
    """

    def __init__(
        self, clock: Clock, parameters_per_second: float, link: "Link | None", gpu: "Gpu | None", reads_weights: bool
    ):
        self._clock, self._link, self._gpu = clock, link, gpu
        self._rate = parameters_per_second
        self._to_host_bytes = GRADIENT_BYTES + (WEIGHT_BYTES if reads_weights else 0)
        self.begin()

    def begin(self) -> None:
        """A step begins."""
        self._staged: "dict[int, float]" = {}  # subgroup -> when its gradients (and old weights) are on the host

    @property
    def end(self) -> float:
        """When all weights are on the device, so that the next forward pass may begin."""
        return max(
            self._clock.now,
            self._link.to_device_free if self._link else 0.0,
            self._gpu.free if self._gpu else 0.0,
        )

    def prepare(self, subgroup: Subgroup) -> None:
        if self._link and subgroup.index not in self._staged and len(self._staged) < STAGING_COUNT:
            self._bring(subgroup, self._link)

    def update(self, subgroup: Subgroup, state: StateView) -> None:
        clock = self._clock
        begin = clock.now
        if self._link:
            if subgroup.index not in self._staged:  # it comes before its turn
                if len(self._staged) == STAGING_COUNT:  # another one gives way, and is brought again
                    del self._staged[next(iter(self._staged))]
                self._bring(subgroup, self._link)
            begin = max(begin, self._staged.pop(subgroup.index))
        clock.advance(begin + subgroup.numel / self._rate)
        if self._link:
            self._link.to_device(clock.now, subgroup.numel * WEIGHT_BYTES)

    def start_on_device(self, subgroups: Sequence[Subgroup]) -> None:
        pass

    def update_on_device(self, subgroup: Subgroup, record: "StateView | DeviceRecord") -> "GpuUpdate | None":
        assert self._gpu is not None
        return self._gpu.update(subgroup, stays=isinstance(record, DeviceRecord))

    def _bring(self, subgroup: Subgroup, link: Link) -> None:
        self._staged[subgroup.index] = link.to_host(self._clock.now, subgroup.numel * self._to_host_bytes)
