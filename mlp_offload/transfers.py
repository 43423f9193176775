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
    """Where the kernel finds gradients, and weights where it reads them, and leaves weights."""

    def begin(self, gradients: "Sequence[torch.Tensor | None]") -> None:
        """A step begins with these gradients, one a shard; they are ready on the caller's stream."""

    def prepare(self, subgroup: Subgroup) -> None:
        """Begin to bring what the kernel reads of a subgroup; does not wait."""

    def addresses(self, subgroup: Subgroup) -> "tuple[np.ndarray, np.ndarray]":
        """Host addresses of gradient and weight, one a segment (0: no gradient); waits until they may be used."""

    def send(self, subgroup: Subgroup) -> None:
        """The kernel is done with the subgroup: its weights may leave. Does not wait."""

    def end(self) -> None:
        """Order all weights sent so far before later work on the caller's stream."""


def transfers_for(weights: Sequence[torch.Tensor], subgroup_numel: int, reads_weights: bool) -> Transfers:
    """The transfers that fit where ``weights`` live; all must be on one device.

    Args:
        reads_weights: the kernel needs the old weights beside the gradients.
    """
    if any(w.is_cuda for w in weights):
        return CudaTransfers(weights, subgroup_numel, reads_weights)
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
    """Pinned memory for what one subgroup's update reads and writes: its gradients and its weights.

    Segments keep their place in the subgroup, in slots as wide as the widest element.
    """

    gradients: torch.Tensor  # uint8
    weights: torch.Tensor  # uint8
    arrived: "torch.cuda.Event"  # after it the kernel may read, and write the weights
    sent: "torch.cuda.Event"  # after it the weights may be overwritten
    subgroup: int = -1


class CudaTransfers:
    """Weights and gradients on a GPU.

    Order: what an update reads leaves after the caller's stream has made it (``begin``), into staging whose weights have
    been sent (event ``sent``); the kernel starts when it has come (event ``arrived``); later work of the caller comes
    after the last weight (``end``).
    """

    def __init__(self, weights: Sequence[torch.Tensor], subgroup_numel: int, reads_weights: bool):
        self._weights = weights
        self._numel = subgroup_numel
        self._reads_weights = reads_weights
        self._device = weights[0].device
        self._to_host = torch.cuda.Stream(self._device)
        self._to_device = torch.cuda.Stream(self._device)
        self._weight_itemsize = max(w.element_size() for w in weights)
        self._grad_itemsize = 0
        self._pin = True
        self._stagings: "list[_Staging]" = []
        self._updating: "_Staging | None" = None
        self._gradients: "Sequence[torch.Tensor | None]" = ()

    def _memory(self, nbytes: int) -> torch.Tensor:
        memory = pinned_memory(nbytes) if self._pin else None
        if memory is None:  # copies through pageable memory wait where these would not, and are right as well
            self._pin = False
            memory = torch.empty(nbytes, dtype=torch.uint8)
        return memory

    def begin(self, gradients: "Sequence[torch.Tensor | None]") -> None:
        itemsize = max((g.element_size() for g in gradients if g is not None), default=1)
        if itemsize > self._grad_itemsize:
            self._to_device.synchronize()  # the staging that goes may still be on its way
            self._grad_itemsize = itemsize
            self._stagings = [
                _Staging(
                    self._memory(self._numel * itemsize),
                    self._memory(self._numel * self._weight_itemsize),
                    torch.cuda.Event(),
                    torch.cuda.Event(),
                )
                for _ in range(STAGING_COUNT)
            ]
        self._gradients = gradients
        self._to_host.wait_stream(torch.cuda.current_stream(self._device))
        for staging in self._stagings:
            staging.subgroup = -1

    def prepare(self, subgroup: Subgroup) -> None:
        if any(s.subgroup == subgroup.index for s in self._stagings):
            return
        staging = next((s for s in self._stagings if s.subgroup < 0), None)
        if staging is None:
            return  # both hold subgroups that are still to be updated; addresses() will fetch this one
        self._copy_in(subgroup, staging)

    def _copy_in(self, subgroup: Subgroup, staging: _Staging) -> None:
        self._to_host.wait_event(staging.sent)
        with torch.cuda.stream(self._to_host):
            for segment in subgroup.segments:
                grad, weight = self._gradients[segment.shard], self._weights[segment.shard]
                if grad is None:
                    continue
                self._part(staging.gradients, segment, grad.dtype).copy_(_of(grad, segment), non_blocking=True)
                if self._reads_weights:
                    self._part(staging.weights, segment, weight.dtype).copy_(_of(weight, segment), non_blocking=True)
            staging.arrived.record(self._to_host)
        staging.subgroup = subgroup.index

    def addresses(self, subgroup: Subgroup) -> "tuple[np.ndarray, np.ndarray]":
        staging = next((s for s in self._stagings if s.subgroup == subgroup.index), None)
        if staging is None:  # it was not prepared, or came before its turn
            staging = next((s for s in self._stagings if s.subgroup < 0), self._stagings[0])
            self._copy_in(subgroup, staging)
        staging.arrived.synchronize()
        self._updating = staging
        grads = np.zeros(len(subgroup.segments), np.int64)
        weights = np.zeros(len(subgroup.segments), np.int64)
        for i, segment in enumerate(subgroup.segments):
            grad, weight = self._gradients[segment.shard], self._weights[segment.shard]
            if grad is not None:
                grads[i] = self._part(staging.gradients, segment, grad.dtype).data_ptr()
                weights[i] = self._part(staging.weights, segment, weight.dtype).data_ptr()
        return grads, weights

    def send(self, subgroup: Subgroup) -> None:
        staging = self._updating
        with torch.cuda.stream(self._to_device):
            for segment in subgroup.segments:
                weight = self._weights[segment.shard]
                if self._gradients[segment.shard] is not None:
                    part = self._part(staging.weights, segment, weight.dtype)
                    _of(weight, segment).copy_(part, non_blocking=True)
            staging.sent.record(self._to_device)
        staging.subgroup = -1  # free for the next one, behind ``sent``

    def end(self) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._to_device)
        self._gradients = ()

    def _part(self, memory: torch.Tensor, segment: Segment, dtype: torch.dtype) -> torch.Tensor:
        start = segment.offset * (memory.numel() // self._numel)
        return memory[start : start + segment.numel * dtype.itemsize].view(dtype)


def _of(shard: torch.Tensor, segment: Segment) -> torch.Tensor:
    return shard[segment.shard_offset : segment.shard_offset + segment.numel]
