"""Gradients to the host and weights to the device, for one subgroup at a time.

``HostTransfers`` is for tensors in host memory: nothing moves, the kernel reads and writes them in place.
``CudaTransfers`` goes through pinned staging on two copy streams; the caller's stream only ever waits for events.
"""

from __future__ import annotations

import contextlib
import logging
import os
import weakref
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch

from . import cuda
from .adam.kernel import DTYPE_CODES
from .errors import CudaError
from .plan.subgroups import Segment, Subgroup
from .storage.buffers import BufferPool, Lease
from .units import format_bytes

log = logging.getLogger(__name__)

STAGING_COUNT = 2
"""Subgroups whose gradients and weights may be in staging at once: one updating, one on its way."""

_GRADIENT_ITEMSIZE = 4  # room for the widest: gradients may change their dtype from step to step
_SMALL_BYTES = 2**20  # see [Note: copy engine or kernel]
_MOST_COPIES = 8


class Transfers(Protocol):
    """Where the kernel finds gradients, and weights where it reads them, and leaves weights."""

    def begin(self, gradients: "Sequence[torch.Tensor | None]") -> None:
        """A step begins with these gradients, one a shard; they are ready on the caller's stream."""

    def prepare(self, subgroup: Subgroup) -> None:
        """Begin to bring what the kernel reads of a subgroup; does not wait."""

    def addresses(self, subgroup: Subgroup) -> "tuple[np.ndarray, np.ndarray]":
        """Host addresses of gradient and weight, one a segment; waits until they may be used.

        0 is a gradient that does not exist; then the weight's address means nothing.
        """

    def weight(self, segment: Segment) -> torch.Tensor:
        """The weight of one segment as it was before the step, in host memory; waits for it."""

    def send(self, subgroup: Subgroup) -> None:
        """The kernel is done with the subgroup, the last that ``addresses`` was called for: its weights may leave."""

    def end(self) -> None:
        """Order all weights sent so far before later work on the caller's stream."""


def transfers_for(weights: Sequence[torch.Tensor], subgroup_numel: int, reads_weights: bool) -> Transfers:
    """The transfers that fit where ``weights`` live; all must be on one device.

    Args:
        reads_weights: the kernel needs the old weights beside the gradients.

    Raises:
        CapacityError: host memory does not hold the staging.
    """
    if any(w.is_cuda for w in weights):
        return CudaTransfers(weights, subgroup_numel, reads_weights)
    return HostTransfers(weights)


def staging_bytes(weights: Sequence[torch.Tensor], subgroup_numel: int) -> int:
    """Host memory that the transfers of ``weights`` take, bytes; 0 for tensors in host memory."""
    if not any(w.is_cuda for w in weights):
        return 0
    return STAGING_COUNT * subgroup_numel * (_GRADIENT_ITEMSIZE + _weight_itemsize(weights))


def pin_memory(address: int, nbytes: int, what: str = "state buffers") -> "Callable[[], object] | None":
    """Pin host memory for CUDA and give what undoes it; where that is refused one warning, None, and slower copies."""
    runtime = torch.cuda.cudart()
    error = runtime.cudaHostRegister(address, nbytes, 0)
    if error == runtime.cudaError.success:
        return lambda: runtime.cudaHostUnregister(address)
    log.warning(
        "host memory: CUDA does not pin the %s of %s (%s); going on without, copies to and from them are slower",
        format_bytes(nbytes),
        what,
        runtime.cudaGetErrorString(error),
    )
    # The runtime keeps the error for whoever looks next, which would be an innocent kernel: look now, with one of ours.
    with contextlib.suppress(RuntimeError, AssertionError):
        torch.zeros(1, device="cuda")
    return None


class HostTransfers:
    """Weights and gradients in host memory: the kernel uses them where they are."""

    def __init__(self, weights: Sequence[torch.Tensor]):
        self._weights = weights
        self._gradients: "Sequence[torch.Tensor | None]" = ()

    def begin(self, gradients: "Sequence[torch.Tensor | None]") -> None:
        self._gradients = gradients

    def prepare(self, subgroup: Subgroup) -> None:
        pass

    def addresses(self, subgroup: Subgroup) -> "tuple[np.ndarray, np.ndarray]":
        def address(tensor: "torch.Tensor | None", segment: Segment) -> int:
            return 0 if tensor is None else tensor.data_ptr() + segment.shard_offset * tensor.element_size()

        grads = [address(self._gradients[s.shard], s) for s in subgroup.segments]
        weights = [address(self._weights[s.shard], s) for s in subgroup.segments]
        return np.array(grads, np.int64), np.array(weights, np.int64)

    def weight(self, segment: Segment) -> torch.Tensor:
        return _of(self._weights[segment.shard], segment)

    def send(self, subgroup: Subgroup) -> None:
        pass

    def end(self) -> None:
        self._gradients = ()


class _Staging:
    """Host memory for what one subgroup's update reads and writes: its gradients and its weights, as bytes.

    Segments keep their place in the subgroup, in slots as wide as the widest element.

    Attributes:
        arrived: after it the kernel may read gradients and weights, and write the weights.
        sent: after it the weights may be overwritten.
        subgroup: whose gradients it holds; None = free, behind ``sent``.
    """

    def __init__(self, lease: Lease, numel: int, weight_itemsize: int):
        gradient_bytes = numel * _GRADIENT_ITEMSIZE
        self.gradients = torch.from_numpy(lease.array(0, gradient_bytes, np.uint8))
        self.weights = torch.from_numpy(lease.array(gradient_bytes, numel * weight_itemsize, np.uint8))
        self.arrived = torch.cuda.Event()
        self.sent = torch.cuda.Event()
        self.subgroup: "int | None" = None


class _OnDevice:
    """Tensors on the device, one a shard.

    Attributes:
        table: a row a tensor: address (0: there is none), address of its storage, dtype code, itemsize.
        width: bytes of a slot in staging.
    """

    def __init__(self, tensors: "Sequence[torch.Tensor | None]"):
        self.tensors = tensors
        self.table = np.array([_where(t) for t in tensors], np.int64).reshape(-1, 4)
        self.width = max((t.element_size() for t in tensors if t is not None), default=_GRADIENT_ITEMSIZE)

    def pieces(self, segments: np.ndarray) -> np.ndarray:
        """Shape (pieces, 4): shard, first element in it, byte in staging, elements; neighbours on both sides are one piece.

        Neighbours of another storage are not, since a copy may not cross from one allocation into the next.

        Args:
            segments: shape (segments, 4): shard, first element in it, first element in the subgroup, elements.
        """
        shards, starts, offsets, numels = segments.T
        addresses, storages, codes, itemsizes = self.table[shards].T
        pieces = np.stack([shards, starts, offsets * self.width, numels], axis=1)
        apart = np.ones(len(pieces), bool)
        apart[1:] = np.diff(addresses + starts * itemsizes) != (numels * itemsizes)[:-1]
        apart[1:] |= np.diff(pieces[:, 2]) != (numels * itemsizes)[:-1]
        apart[1:] |= (np.diff(storages) != 0) | (np.diff(codes) != 0)
        first = np.flatnonzero(apart)
        pieces = pieces[first]
        if len(first):
            pieces[:, 3] = np.add.reduceat(numels, first)
        return pieces


def _where(tensor: "torch.Tensor | None") -> "tuple[int, int, int, int]":
    if tensor is None:
        return 0, 0, 0, 0
    return tensor.data_ptr(), tensor.untyped_storage().data_ptr(), DTYPE_CODES[tensor.dtype], tensor.element_size()


class CudaTransfers:
    """Weights and gradients on a GPU.

    [Note: order of transfers] Gradients leave when the caller's stream has made them (``begin``). Old weights, and later
    the kernel's new ones, enter staging whose last weights have been sent (event ``sent``); the kernel starts when all
    has come (event ``arrived``). New weights leave when the kernel is done, so after all that the caller's stream did
    with the old ones before ``begin``; its later work comes after the last weight (``end``). Copies of one direction
    keep their order. ``tests/unit/test_transfers.py`` takes away each of these waits and sees it missed.

    [Note: copy engine or kernel] Segments that are neighbours on the device, as DDP lays them out, are one piece. A copy
    engine moves a piece at the full rate of the bus and leaves the multiprocessors alone, but each copy costs the host
    some 5 us, in which the bus could have moved a few hundred KiB. So pieces from 1 MiB on are copies; where more than
    eight are smaller, those are one launch of a kernel that reads or writes the staging (if that is pinned, and the
    kernels were built).
    """

    def __init__(self, weights: Sequence[torch.Tensor], subgroup_numel: int, reads_weights: bool):
        self._weights = _OnDevice(weights)
        self._gradients = _OnDevice(())
        self._reads_weights = reads_weights
        self._device = weights[0].device
        self._to_host = torch.cuda.Stream(self._device)
        self._to_device = torch.cuda.Stream(self._device)
        itemsize = self._weights.width
        pool = BufferPool(STAGING_COUNT, subgroup_numel * (_GRADIENT_ITEMSIZE + itemsize))
        unpin = pin_memory(*pool.region, "staging for gradients and weights")
        leases = [pool.lease() for _ in range(STAGING_COUNT)]
        self._stagings = [_Staging(lease, subgroup_numel, itemsize) for lease in leases]
        self._updating = self._stagings[0]
        self._segments_of: "dict[int, np.ndarray]" = {}  # by the subgroup's index
        self._kernels: "cuda.CudaKernels | None" = None
        if unpin is not None:
            with contextlib.suppress(CudaError):
                self._kernels = cuda.CudaKernels(self._device.index)
        weakref.finalize(self, _give_back, os.getpid(), self._to_host, self._to_device, unpin, pool, leases)

    def begin(self, gradients: "Sequence[torch.Tensor | None]") -> None:
        self._gradients = _OnDevice(gradients)
        self._to_host.wait_stream(torch.cuda.current_stream(self._device))
        for staging in self._stagings:
            staging.subgroup = None

    def prepare(self, subgroup: Subgroup) -> None:
        if self._holding(subgroup.index) is None:
            free = self._holding(None)
            if free is not None:  # else both hold others that are still to be updated; addresses() will bring this one
                self._bring(subgroup, free)

    def addresses(self, subgroup: Subgroup) -> "tuple[np.ndarray, np.ndarray]":
        staging = self._holding(subgroup.index)
        if staging is None:  # it comes before its turn; one that was prepared for later is brought again
            staging = self._holding(None) or self._stagings[0]
            self._bring(subgroup, staging)
        staging.arrived.synchronize()
        self._updating = staging
        shards, _, offsets, _ = self._segments(subgroup).T
        grads = staging.gradients.data_ptr() + offsets * self._gradients.width
        weights = staging.weights.data_ptr() + offsets * self._weights.width
        return np.where(self._gradients.table[shards, 0] != 0, grads, 0), weights

    def weight(self, segment: Segment) -> torch.Tensor:
        with torch.cuda.stream(self._to_host):
            return _of(self._weights.tensors[segment.shard], segment).cpu()

    def send(self, subgroup: Subgroup) -> None:
        staging = self._updating
        with torch.cuda.stream(self._to_device):
            self._move(subgroup, self._weights, staging.weights, to_host=False)
            staging.sent.record(self._to_device)
        staging.subgroup = None

    def end(self) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._to_device)
        self._gradients = _OnDevice(())

    def _bring(self, subgroup: Subgroup, staging: _Staging) -> None:
        with torch.cuda.stream(self._to_host):
            self._move(subgroup, self._gradients, staging.gradients, to_host=True)
            self._to_host.wait_event(staging.sent)  # after the gradients: they may come while the last weights leave
            if self._reads_weights:
                self._move(subgroup, self._weights, staging.weights, to_host=True)
            staging.arrived.record(self._to_host)
        staging.subgroup = subgroup.index

    def _move(self, subgroup: Subgroup, there: _OnDevice, here: torch.Tensor, to_host: bool) -> None:
        """Let the current stream copy the segments that have a gradient from ``there`` to the bytes ``here``, or back."""
        segments = self._segments(subgroup)
        pieces = there.pieces(segments[self._gradients.table[segments[:, 0], 0] != 0])
        small = pieces[:, 3] * there.table[pieces[:, 0], 3] < _SMALL_BYTES
        if self._kernels is None or small.sum() <= _MOST_COPIES:
            small[:] = False
        for shard, start, slot, numel in pieces[~small].tolist():
            tensor = there.tensors[shard]
            on_device = tensor.as_strided((numel,), (1,), tensor.storage_offset() + start)
            on_host = here[slot : slot + on_device.nbytes].view(tensor.dtype)
            target, source = (on_host, on_device) if to_host else (on_device, on_host)
            target.copy_(source, non_blocking=True)
        if small.any():
            shards, starts, slots, numels = pieces[small].T
            addresses, _, codes, itemsizes = there.table[shards].T
            ends = addresses + starts * itemsizes, here.data_ptr() + slots
            rows = np.stack([*(ends if to_host else ends[::-1]), numels, codes, codes], axis=1)
            self._kernels.copy(rows, stream=torch.cuda.current_stream(self._device).cuda_stream)

    def _holding(self, subgroup: "int | None") -> "_Staging | None":
        return next((s for s in self._stagings if s.subgroup == subgroup), None)

    def _segments(self, subgroup: Subgroup) -> np.ndarray:
        """Shape (segments, 4): shard, first element in it, first element in the subgroup, elements."""
        if subgroup.index not in self._segments_of:
            rows = [(s.shard, s.shard_offset, s.offset, s.numel) for s in subgroup.segments]
            self._segments_of[subgroup.index] = np.array(rows, np.int64)
        return self._segments_of[subgroup.index]


def _give_back(
    pid: int,
    to_host: torch.cuda.Stream,
    to_device: torch.cuda.Stream,
    unpin: "Callable[[], object] | None",
    pool: BufferPool,
    leases: Sequence[Lease],
) -> None:
    """Give the memory of all staging back when nothing moves through it any more."""
    if pid != os.getpid():  # a forked child has neither the memory nor CUDA
        return
    to_host.synchronize()  # a step that failed may have left something on its way
    to_device.synchronize()
    if unpin is not None:
        unpin()
    for lease in leases:
        lease.release()
    pool.close()


def _of(shard: torch.Tensor, segment: Segment) -> torch.Tensor:
    return shard[segment.shard_offset : segment.shard_offset + segment.numel]


def _weight_itemsize(weights: Sequence[torch.Tensor]) -> int:
    return max(w.element_size() for w in weights)
