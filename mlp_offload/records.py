"""The record of one subgroup as whoever updates it sees it: in host memory, or in GPU memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from .plan.devices import Rates
from .plan.subgroups import Subgroup
from .storage.buffers import Lease


@dataclass(frozen=True)
class StateView:
    """The record of one subgroup in host memory, as it is stored: three arrays of ``numel`` elements.

    Each lies ``stride_numel`` elements behind the start of the one before, the first at ``address``. Records hold either
    ``main_param`` (fp32) or ``remainder`` (int16; ``main_param`` is None then, and exp_avg_sq carries a sign); see
    ``adam.remainder``. ``record`` is all of it, uint8.
    """

    address: int
    stride_numel: int
    numel: int
    main_param: "np.ndarray | None"
    remainder: "np.ndarray | None"
    exp_avg: np.ndarray
    exp_avg_sq: np.ndarray
    record: np.ndarray

    @classmethod
    def of(cls, subgroup: Subgroup, lease: Lease) -> "StateView":
        stride, numel, itemsize = subgroup.stride_numel, subgroup.numel, subgroup.main_itemsize
        main = lease.array(0, numel, np.float32 if itemsize == 4 else np.int16)
        moments = [lease.array(stride * (itemsize + 4 * k), numel) for k in range(2)]
        main_param, remainder = (main, None) if itemsize == 4 else (None, main)
        record = lease.array(0, subgroup.record_bytes, np.uint8)
        return cls(lease.address, stride, numel, main_param, remainder, *moments, record)


@dataclass(frozen=True)
class DeviceRecord:
    """The record of one subgroup in GPU memory; as ``StateView``, without arrays."""

    address: int
    stride_numel: int


class DeviceFuture(Protocol):
    """An update under way on the GPU; see ``device_updates.DeviceFuture``."""

    def done(self) -> bool:
        """Whether it has ended; does not wait."""

    def wait(self, timeout_seconds: float) -> bool:
        """True once done, within at most ``timeout_seconds``."""


class DeviceTier(Protocol):
    """GPU memory with records that stay there; see ``device_updates.GpuMemory``."""

    nbytes: int

    def address(self, index: int) -> int:
        """Of the record of subgroup ``index``."""

    def read(self, index: int, target: np.ndarray) -> None:
        """Copy the record of subgroup ``index`` to host memory (uint8, as long as the record); waits for it."""

    def write(self, index: int, source: np.ndarray) -> None:
        """Replace the record of subgroup ``index``; waits for it."""

    def measure(self, lease: Lease, main_itemsize: int) -> Rates:
        """What the CPU, the GPU and their link do, tried out in a buffer; what was in it is lost."""

    def close(self) -> None:
        """Give the memory back when nothing uses it any more. Safe to call twice."""
