"""Which subgroups the GPU updates, and which of them live in its memory. The bits are the same whatever is chosen here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..config import AUTO, OffloadConfig
from ..errors import ConfigError
from ..units import format_bytes, round_up_bytes

PASSING_COUNT = 2
"""Buffers in GPU memory for records that pass through: one on its way in while another one is on its way out."""

AUTO_LEAST_COUNT = 4
"""Buffers below which ``auto`` lets none pass through: a resident subgroup saves more than the buffer it takes."""

TOLERANCE = 0.05
"""Share of the step by which the GPU must shorten it: below that, it and its link are left alone."""

GRADIENT_BYTES, WEIGHT_BYTES = 4, 2
"""A parameter that the CPU updates: its gradient and its old weight come to the host, its new weight goes back."""


GPU_ADAM_RATE = 4e10
"""Parameters a second that a GPU updates where nothing was measured: 28 bytes each, at 1.1 TB/s of its memory."""


@dataclass(frozen=True)
class Rates:
    """What one rank can do, a second.

    Attributes:
        host_parameters, device_parameters: Adam on the CPU, and on the GPU with the record in its memory.
        to_device_bytes, to_host_bytes: copies between pinned host memory and the GPU, in one direction.
    """

    host_parameters: float
    device_parameters: float
    to_device_bytes: float
    to_host_bytes: float


def updates_on_gpu(config: OffloadConfig) -> bool:
    """Whether the options ask for updates on the GPU."""
    return config.update_device == "cuda" or (config.update_device == AUTO and config.gpu_memory > 0)


def choose_device_residents(
    subgroup_count: int, buffer_bytes: int, gpu_memory: int, every: bool
) -> "tuple[frozenset[int], int]":
    """Spend ``gpu_memory`` bytes on buffers of ``buffer_bytes``: (subgroups that live there, buffers to pass through).

    Args:
        every: the GPU updates all subgroups (``update_device=cuda``); then it takes its two buffers even with 0 bytes.

    Raises:
        ConfigError: the budget is too small to be of use; says how much it would take.
    """
    affordable = gpu_memory // buffer_bytes
    if affordable >= subgroup_count:
        return frozenset(range(subgroup_count)), 0
    least = PASSING_COUNT if every else 1
    if affordable < least and gpu_memory:
        alternative = "set it to 0, which takes them alone" if every else "set it to 0"
        raise ConfigError(
            f"gpu_memory {format_bytes(gpu_memory)} holds {affordable} buffers of {format_bytes(buffer_bytes)}; it needs "
            f"{least}: raise it to {round_up_bytes(least * buffer_bytes)}, {alternative}, or lower subgroup_size"
        )
    passing = PASSING_COUNT if every or affordable >= AUTO_LEAST_COUNT else 0
    return spread(range(subgroup_count), max(0, affordable - passing)), passing


def spread(subgroups: Sequence[int], count: int) -> "frozenset[int]":
    """``count`` of ``subgroups``, evenly spread."""
    return frozenset(subgroups[(2 * i + 1) * len(subgroups) // (2 * count)] for i in range(count))


def step_seconds(
    on_device: int, count: int, numel: int, record_bytes: int, rates: Rates, storage_seconds: float
) -> float:
    """Time of a step in which ``on_device`` of ``count`` subgroups pass through the GPU: that of its slowest part.

    Storage, the CPU, the GPU and each direction of the link work at once. That they share the host's memory bandwidth is
    not in it.

    Args:
        numel, record_bytes: of one subgroup.
        storage_seconds: for all fetches and flushes of the step.
    """
    on_host = count - on_device
    return max(
        storage_seconds,
        on_host * numel / rates.host_parameters,
        on_device * numel / rates.device_parameters,
        (on_device * record_bytes + on_host * numel * WEIGHT_BYTES) / rates.to_device_bytes,
        (on_device * record_bytes + on_host * numel * (GRADIENT_BYTES + WEIGHT_BYTES)) / rates.to_host_bytes,
    )


def device_count(count: int, numel: int, record_bytes: int, rates: Rates, storage_seconds: float) -> int:
    """How many of ``count`` subgroups pass through the GPU: the fewest with which the step is as short as it can be.

    Where storage takes longer than the CPU's updates that is none.
    """
    seconds = [step_seconds(n, count, numel, record_bytes, rates, storage_seconds) for n in range(count + 1)]
    return next(n for n, s in enumerate(seconds) if s <= min(seconds) * (1 + TOLERANCE))
