"""Adam on the GPU for some subgroups, by our kernels, while the CPU updates others. The bits are the same.

[Note: order on the device] A record that stays in GPU memory is updated in place; one in host memory passes through one of
two buffers there. Gradients and weights are used where they are.

    caller's stream --begin--> compute: sums of the old weights, kernels one after the other, sums of the new ones
    to_device: record -> buffer (when its last record has left) --> compute: kernel --> to_host: buffer -> record
    compute --end--> caller's stream, which may then use the weights and free the gradients

The host goes on meanwhile. It reads a record again, or lets storage read it, when its future is done, and sums when they
have come. ``tests/unit/test_device_updates.py`` takes away each of these waits and sees it missed.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from . import cuda
from .adam.kernel import DTYPE_CODES, AdamKernel, adam_scalars
from .config import OffloadConfig
from .errors import CapacityError, ConfigError, CudaError, OffloadError
from .plan.devices import Rates
from .records import DeviceRecord, StateView
from .storage.buffers import BufferPool, Lease
from .transfers import pin_memory
from .units import format_bytes

Launch = Callable[[int, int], None]
"""Called with the address of a record in GPU memory and a stream: enqueues its update there."""

_POLL_SECONDS = 1e-4
_MEASURED_BYTES = 18  # a parameter: a record of full masters, an fp32 gradient and a bf16 weight
_TRIES = 3


@dataclass(frozen=True)
class Gpu:
    """A GPU that updates subgroups; ``kernel`` is the CPU's, beside which it is measured."""

    kernels: "cuda.CudaKernels"
    device: torch.device
    kernel: AdamKernel

    def reserve(self, residents: Collection[int], passing_count: int, buffer_bytes: int) -> "GpuMemory":
        """Take GPU memory: a buffer for each of ``residents``, and ``passing_count`` more.

        Raises:
            CapacityError: the GPU does not have it.
        """
        return GpuMemory(self, residents, passing_count, buffer_bytes)


def gpu_for_updates(
    config: OffloadConfig, weights: Sequence[torch.Tensor], kernel: AdamKernel
) -> "tuple[Gpu | None, str]":
    """The GPU that updates subgroups, or None and why there is none.

    Raises:
        ConfigError: ``update_device=cuda``, and it is not possible.
    """
    if config.update_device == "cpu":
        return None, "update_device is cpu"
    if config.update_device == "auto" and not config.gpu_memory:
        return None, "gpu_memory is 0"
    reason = ""
    if not weights or not weights[0].is_cuda:
        reason = "the weights are in host memory"
    else:
        try:
            return Gpu(cuda.CudaKernels(weights[0].device.index), weights[0].device, kernel), ""
        except CudaError as error:
            reason = str(error)
    if config.update_device == "cuda":
        raise ConfigError(f"update_device cuda is not possible: {reason}. Set update_device to auto or cpu")
    return None, reason


class DeviceFuture:
    """An update on the device; when it is done, the record is back where it was."""

    def __init__(self, event: torch.cuda.Event):
        self._event = event

    def done(self) -> bool:
        return self._event.query()

    def wait(self, timeout_seconds: float) -> bool:
        """True once done, within at most ``timeout_seconds``."""
        deadline = time.monotonic() + timeout_seconds
        while not self.done():
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_SECONDS)
        return True

    def describe(self, begin: float) -> str:
        """For people: what has been waited for since ``begin``."""
        return f"An update on the GPU has not ended after {time.monotonic() - begin:.1f} s."

    def given_up(self, begin: float, timeout_seconds: float) -> OffloadError:
        """The error for an update that was waited for since ``begin`` and did not end."""
        return OffloadError(
            f"{self.describe(begin)} Giving up (timeout {timeout_seconds:g} s). Look at the GPU (nvidia-smi, dmesg), or set "
            "update_device to cpu, and restart from the last checkpoint."
        )


class _Buffer:
    """GPU memory that records pass through.

    Attributes:
        arrived, updated, left: where the last record was: here; with its new values; back in host memory.
    """

    def __init__(self, memory: torch.Tensor):
        self.memory = memory
        self.arrived, self.updated, self.left = (torch.cuda.Event() for _ in range(3))


class GpuMemory:
    """Records in the memory of one GPU, for good or passing through; all spaces of a rank share it.

    Attributes:
        nbytes: of all buffers.
        kernels: of this GPU.
    """

    def __init__(self, gpu: Gpu, residents: Collection[int], passing_count: int, buffer_bytes: int):
        self.kernels, self._kernel, self._device = gpu.kernels, gpu.kernel, gpu.device
        self.nbytes = (len(residents) + passing_count) * buffer_bytes
        self._compute, self._to_device, self._to_host = (torch.cuda.Stream(gpu.device) for _ in range(3))
        try:
            with torch.cuda.stream(self._compute):
                memory = torch.empty(self.nbytes, dtype=torch.uint8, device=gpu.device)
        except torch.cuda.OutOfMemoryError as error:
            free, total = torch.cuda.mem_get_info(gpu.device)
            raise CapacityError(
                f"gpu_memory: {gpu.device} does not give {format_bytes(self.nbytes)} for {len(residents)} subgroups that stay "
                f"and {passing_count} that pass through; {format_bytes(free)} of {format_bytes(total)} are free. Lower "
                "gpu_memory or subgroup_size"
            ) from error
        self._to_device.wait_stream(self._compute)  # whoever had the memory before
        buffers = [memory[start : start + buffer_bytes] for start in range(0, self.nbytes, buffer_bytes)]
        self._records = dict(zip(residents, buffers))
        self._passing = [_Buffer(buffer) for buffer in buffers[len(residents) :]]
        self._sums: "list[WeightSums]" = []
        self._pid = os.getpid()

    # ------------------------------------------------------------------------------------ a step

    def begin(self) -> None:
        """What comes now is ordered after all that the caller's stream was asked for."""
        self._compute.wait_stream(torch.cuda.current_stream(self._device))

    def update(self, record: "StateView | DeviceRecord", launch: Launch) -> "DeviceFuture | None":
        """Begin to update one record; does not wait.

        Returns:
            None for a record that stays here. One in host memory must not be touched until the future is done.
        """
        if isinstance(record, DeviceRecord):
            launch(record.address, self._compute.cuda_stream)
            return None
        done = torch.cuda.Event()
        host = torch.from_numpy(record.record)
        buffer = self._passing.pop(0)
        self._passing.append(buffer)
        there = buffer.memory[: len(host)]
        with torch.cuda.stream(self._to_device):
            self._to_device.wait_event(buffer.left)
            there.copy_(host, non_blocking=True)
            buffer.arrived.record(self._to_device)
        self._compute.wait_event(buffer.arrived)
        launch(there.data_ptr(), self._compute.cuda_stream)
        buffer.updated.record(self._compute)
        with torch.cuda.stream(self._to_host):
            self._to_host.wait_event(buffer.updated)
            host.copy_(there, non_blocking=True)
            done.record(self._to_host)
        buffer.left = done
        return DeviceFuture(done)

    def end(self) -> None:
        """Order all updates before later work on the caller's stream."""
        torch.cuda.current_stream(self._device).wait_stream(self._compute)

    def sums(self) -> "WeightSums":
        """A place for sums of weights, given back with this memory."""
        self._sums.append(WeightSums(self.kernels, self._compute, self._device))
        return self._sums[-1]

    # ------------------------------------------------------------------------------- between the steps

    def address(self, index: int) -> int:
        """Of the record of subgroup ``index``, which stays here."""
        return self._records[index].data_ptr()

    def read(self, index: int, target: np.ndarray) -> None:
        """Copy the record of subgroup ``index`` to host memory (uint8, as long as the record); waits for it."""
        with torch.cuda.stream(self._compute):
            torch.from_numpy(target).copy_(self._records[index][: len(target)])

    def write(self, index: int, source: np.ndarray) -> None:
        """Replace the record of subgroup ``index``; waits for it."""
        with torch.cuda.stream(self._compute):
            self._records[index][: len(source)].copy_(torch.from_numpy(source))

    def measure(self, lease: Lease, main_itemsize: int) -> Rates:
        """What CPU, GPU and their link do with the record of one subgroup, tried out in ``lease`` and a buffer here."""
        there = self._passing[0].memory
        host = torch.from_numpy(lease.array(0, len(there), np.uint8))
        host.zero_()
        numel = len(there) // _MEASURED_BYTES // 64 * 64
        scalars = [adam_scalars(0.0, (0.9, 0.95), 1e-8, 0.0, step=1)]

        def rows(address: int) -> np.ndarray:
            codes = DTYPE_CODES[torch.float32], DTYPE_CODES[torch.bfloat16]
            return np.array([[0, numel, address + 12 * numel, address + 16 * numel, *codes, 0]], np.int64)

        def copy(target: torch.Tensor, source: torch.Tensor, stream: torch.cuda.Stream) -> None:
            with torch.cuda.stream(stream):
                target.copy_(source, non_blocking=True)
            stream.synchronize()

        def on_device() -> None:
            address, stream = there.data_ptr(), self._compute.cuda_stream
            self.kernels.update(address, numel, rows(address), scalars, main_itemsize, stream)
            self._compute.synchronize()

        def on_host() -> None:
            self._kernel.update(lease.address, numel, rows(lease.address), scalars, main_itemsize)

        return Rates(
            numel / _seconds(on_host),
            numel / _seconds(on_device),
            len(there) / _seconds(partial(copy, there, host, self._to_device)),
            len(there) / _seconds(partial(copy, host, there, self._to_host)),
        )

    def close(self) -> None:
        """Give the memory back when nothing uses it any more. Safe to call twice; a forked child has none of it."""
        if self._pid != os.getpid() or not self.nbytes:
            return
        with contextlib.suppress(RuntimeError):  # where CUDA has failed, somebody was told, and nothing moves any more
            for stream in (self._to_device, self._compute, self._to_host):
                stream.synchronize()  # a step that failed may have left something on its way
        for sums in self._sums:
            sums.close()
        self._records, self._passing, self._sums, self.nbytes = {}, [], [], 0


class WeightSums:
    """Sums of weights as they are at one point of the stream: asked for there, read by the host later."""

    def __init__(self, kernels: "cuda.CudaKernels", stream: torch.cuda.Stream, device: torch.device):
        self._kernels, self._stream, self._device = kernels, stream, device
        self._come = torch.cuda.Event()
        self._room = self._count = 0

    def ask(self, runs: np.ndarray) -> None:
        """Sum runs of 16-bit words, shape (runs, 2) of address and count. Does not wait; what was asked before was read."""
        self._count = len(runs)
        if not self._count:
            return
        if self._count > self._room:
            self._make_room(self._count)
        self._kernels.sum_words(runs, self._there.data_ptr(), self._stream.cuda_stream)
        with torch.cuda.stream(self._stream):
            self._here[: len(runs)].copy_(self._there[: len(runs)], non_blocking=True)
            self._come.record(self._stream)

    def read(self) -> np.ndarray:
        """What was asked for last, uint32; waits for it."""
        if not self._count:
            return np.empty(0, np.uint32)
        self._come.synchronize()
        return self._here[: self._count].clone().numpy().view(np.uint32)

    def close(self) -> None:
        """Give the memory back; nothing must be on its way."""
        if self._room:
            if self._unpin is not None:
                self._unpin()
            self._here = None
            self._lease.release()
            self._pool.close()
            self._room = 0

    def _make_room(self, count: int) -> None:
        self.close()
        self._room = 1 << (count - 1).bit_length()
        self._pool = BufferPool(1, 4 * self._room)
        self._unpin = pin_memory(*self._pool.region, "sums of weights")
        self._lease = self._pool.lease()
        self._here = torch.from_numpy(self._lease.array(0, self._room, np.int32))
        with torch.cuda.stream(self._stream):
            self._there = torch.empty(self._room, dtype=torch.int32, device=self._device)


def _seconds(work: "Callable[[], object]") -> float:
    """The shortest of a few tries."""
    tries = []
    for _ in range(_TRIES):
        begin = time.perf_counter()
        work()
        tries.append(time.perf_counter() - begin)
    return max(min(tries), 1e-9)
