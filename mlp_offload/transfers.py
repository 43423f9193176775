"""Gradients to the host and weights to the device, for one subgroup at a time.

``HostTransfers`` is for tensors in host memory: nothing moves, the kernel reads and writes them in place.
``CudaTransfers`` goes through pinned staging on two copy streams; the caller's stream only ever waits for events.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from .plan.subgroups import Segment, Subgroup
from .units import format_bytes

log = logging.getLogger(__name__)

STAGING_COUNT = 2
"""Subgroups whose gradients (and weights) may be in staging at once: one updating, one on its way."""


class Transfers(Protocol):
    """Where the kernel finds gradients and leaves weights."""

    def begin(self, gradients: "Sequence[torch.Tensor | None]") -> None:
        """A step begins with these gradients, one a shard; they are ready on the caller's stream."""

    def prepare(self, subgroup: Subgroup) -> None:
        """Begin to bring a subgroup's gradients; does not wait."""

    def addresses(self, subgroup: Subgroup) -> "tuple[np.ndarray, np.ndarray]":
        """Host addresses of gradient and weight, one a segment (0: no gradient); waits until they may be used."""

    def send(self, subgroup: Subgroup) -> None:
        """The kernel is done with the subgroup: its weights may leave. Does not wait."""

    def end(self) -> None:
        """Order all weights sent so far before later work on the caller's stream."""


def transfers_for(weights: Sequence[torch.Tensor], subgroup_numel: int) -> Transfers:
    """The transfers that fit where ``weights`` live; all must be on one device."""
    if any(w.is_cuda for w in weights):
        return CudaTransfers(weights, subgroup_numel)
    return HostTransfers(weights)


def staging_bytes(weights: Sequence[torch.Tensor], subgroup_numel: int, grad_itemsize: int) -> int:
    """Pinned host memory that the transfers take, bytes; 0 for tensors in host memory."""
    if not any(w.is_cuda for w in weights):
        return 0
    return STAGING_COUNT * subgroup_numel * (grad_itemsize + max(w.element_size() for w in weights))


def pinned_memory(nbytes: int) -> "torch.Tensor | None":
    """Pinned bytes, shape (nbytes,); None, and a warning, where they are refused."""
    try:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        log.warning("no %s of pinned memory for staging (%s); going on, slower", format_bytes(nbytes), reason)
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

    def send(self, subgroup: Subgroup) -> None:
        pass

    def end(self) -> None:
        self._gradients = ()


@dataclass
class _Staging:
    """One subgroup's worth of pinned memory, and the event after which it may be touched again."""

    memory: torch.Tensor  # uint8
    event: "torch.cuda.Event"
    subgroup: int = -1
    busy: bool = False

    def part(self, segment: Segment, dtype: torch.dtype, itemsize: int) -> torch.Tensor:
        """The segment's elements; segments keep their place in the subgroup, in slots of ``itemsize`` bytes."""
        start = segment.offset * itemsize
        return self.memory[start : start + segment.numel * dtype.itemsize].view(dtype)

    def wait(self) -> None:
        if self.busy:
            self.event.synchronize()
            self.busy = False


class CudaTransfers:
    """Weights and gradients on a GPU.

    Order: gradients leave after the caller's stream has made them (event at ``begin``); the kernel reads them after
    their copy (event a subgroup); a staging buffer is reused after the copy out of it (event a buffer); later work of
    the caller comes after the last weight (event at ``end``).
    """

    def __init__(self, weights: Sequence[torch.Tensor], subgroup_numel: int):
        self._weights = weights
        self._numel = subgroup_numel
        self._device = weights[0].device
        self._to_host = torch.cuda.Stream(self._device)
        self._to_device = torch.cuda.Stream(self._device)
        self._weight_itemsize = max(w.element_size() for w in weights)
        self._pin = True
        self._out = [self._staging(self._weight_itemsize) for _ in range(STAGING_COUNT)]
        self._grad_itemsize = 0
        self._in: "list[_Staging]" = []
        self._gradients: "Sequence[torch.Tensor | None]" = ()

    def _staging(self, itemsize: int) -> _Staging:
        nbytes = self._numel * itemsize
        memory = pinned_memory(nbytes) if self._pin else None
        if memory is None:  # copies through pageable memory wait where these would not, and are right as well
            self._pin = False
            memory = torch.empty(nbytes, dtype=torch.uint8)
        return _Staging(memory, torch.cuda.Event())

    def begin(self, gradients: "Sequence[torch.Tensor | None]") -> None:
        itemsize = max((g.element_size() for g in gradients if g is not None), default=0)
        if itemsize > self._grad_itemsize:
            self._grad_itemsize = itemsize
            self._in = [self._staging(itemsize) for _ in range(STAGING_COUNT)]
        self._gradients = gradients
        self._to_host.wait_stream(torch.cuda.current_stream(self._device))
        for staging in self._in:
            staging.subgroup = -1

    def prepare(self, subgroup: Subgroup) -> None:
        if not self._in or any(s.subgroup == subgroup.index for s in self._in):
            return
        staging = next((s for s in self._in if s.subgroup < 0), None)
        if staging is None:
            return  # both hold subgroups that are still to be updated; addresses() will fetch this one
        self._copy_in(subgroup, staging)

    def _copy_in(self, subgroup: Subgroup, staging: _Staging) -> None:
        staging.wait()
        with torch.cuda.stream(self._to_host):
            for segment in subgroup.segments:
                grad = self._gradients[segment.shard]
                if grad is not None:
                    source = grad[segment.shard_offset : segment.shard_offset + segment.numel]
                    staging.part(segment, grad.dtype, self._grad_itemsize).copy_(source, non_blocking=True)
            staging.event.record(self._to_host)
        staging.subgroup, staging.busy = subgroup.index, True

    def addresses(self, subgroup: Subgroup) -> "tuple[np.ndarray, np.ndarray]":
        grads = np.zeros(len(subgroup.segments), np.int64)
        if self._in:
            staging = next((s for s in self._in if s.subgroup == subgroup.index), None)
            if staging is None:
                staging = next((s for s in self._in if s.subgroup < 0), self._in[0])
                self._copy_in(subgroup, staging)
            staging.wait()
            staging.subgroup = -1  # free after this update, which reads it before the next prepare() can be called
            for i, segment in enumerate(subgroup.segments):
                grad = self._gradients[segment.shard]
                if grad is not None:
                    grads[i] = staging.part(segment, grad.dtype, self._grad_itemsize).data_ptr()
        out = self._out[0]
        out.wait()
        weights = [
            out.part(s, self._weights[s.shard].dtype, self._weight_itemsize).data_ptr() for s in subgroup.segments
        ]
        return grads, np.array(weights, np.int64)

    def send(self, subgroup: Subgroup) -> None:
        out = self._out.pop(0)
        self._out.append(out)  # the other one is next
        with torch.cuda.stream(self._to_device):
            for segment in subgroup.segments:
                weight = self._weights[segment.shard]
                if self._gradients[segment.shard] is None:
                    continue  # no gradient: the kernel left the staging as it was
                target = weight[segment.shard_offset : segment.shard_offset + segment.numel]
                target.copy_(out.part(segment, weight.dtype, self._weight_itemsize), non_blocking=True)
            out.event.record(self._to_device)
        out.busy = True

    def end(self) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._to_device)
        self._gradients = ()
