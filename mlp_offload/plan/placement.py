"""Which subgroups live in host memory, and on which path each of the others has its home."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..config import PathConfig
from ..errors import CapacityError, ConfigError
from ..units import format_bytes, round_up_bytes
from .devices import spread
from .shares import apportion, interleave


@dataclass(frozen=True)
class Residency:
    """How the host-memory budget is spent.

    Attributes:
        buffer_count: buffers of one subgroup record each, ``resident_count`` + ``staging_count``.
        staging_count: buffers in motion (fetching, updating, flushing).
        residents: subgroups that stay in host memory and never touch a path. They are spread evenly, so
            that their updates fill the time between arrivals from storage.
        device_residents: those that stay in GPU memory.
        passing_count: buffers in GPU memory through which others pass; see ``devices``.
    """

    buffer_count: int
    staging_count: int
    residents: "frozenset[int]"
    device_residents: "frozenset[int]" = frozenset()
    passing_count: int = 0

    def streams(self, subgroup: int) -> bool:
        """Whether a subgroup has its home on a path."""
        return subgroup not in self.residents and subgroup not in self.device_residents


RECORD_ALIGNMENT = 4096
"""Records begin and end on this many bytes: what direct I/O asks for on nearly every file system."""

MINIMUM_STAGING = 3
"""One buffer fetching, one updating, one flushing."""


def choose_residents(
    subgroup_count: int,
    buffer_bytes: int,
    host_memory: int,
    staging_count: int,
    reserved_bytes: int = 0,
    device_residents: "frozenset[int]" = frozenset(),
    passing_count: int = 0,
) -> Residency:
    """Spend ``host_memory`` bytes on buffers of ``buffer_bytes``: staging first, residents with the rest.

    Args:
        reserved_bytes: part of ``host_memory`` that is spent elsewhere, in proportion to the subgroup size.
        device_residents: subgroups that need none of it, but one buffer together, through which they are read and written
            between steps.

    Raises:
        ConfigError: the budget holds fewer than three buffers and not the whole state; says how much it
            would take, and which subgroup size would fit.
    """
    affordable = max(0, host_memory - reserved_bytes) // buffer_bytes
    others = [i for i in range(subgroup_count) if i not in device_residents]
    between = 1 if device_residents else 0
    if affordable >= len(others) + between:
        return Residency(len(others) + between, between, frozenset(others), device_residents, passing_count)
    if affordable < MINIMUM_STAGING:
        piped = MINIMUM_STAGING * buffer_bytes + reserved_bytes
        needed = min(piped, (len(others) + between) * buffer_bytes + reserved_bytes)  # all of a small state may be less
        fits = buffer_bytes * host_memory // piped // RECORD_ALIGNMENT * RECORD_ALIGNMENT // 12 // 16 * 16
        shrink = f", or lower subgroup_size to {fits}" if fits >= 1024 else ""
        reserved = f" beside {format_bytes(reserved_bytes)} for gradients and weights" if reserved_bytes else ""
        raise ConfigError(
            f"host_memory {format_bytes(host_memory)} holds {affordable} buffers of {format_bytes(buffer_bytes)}{reserved}; the pipeline "
            f"needs {MINIMUM_STAGING} (one fetching, one updating, one flushing): raise host_memory to {round_up_bytes(needed)}{shrink}"
        )
    staging = min(staging_count, affordable)
    resident_count = affordable - staging
    return Residency(affordable, staging, spread(others, resident_count), device_residents, passing_count)


def snapshot_slots(home_counts: Sequence[int], copy_count: int) -> "list[int]":
    """Slots that each path needs beside its usual ones while a snapshot is held.

    Args:
        home_counts: subgroups that live on each path; each is flushed to another slot while its old one is held.
        copy_count: slots with copies of what is in host memory only, which may lie anywhere.
    """
    copies = apportion(copy_count, [count + 1 for count in home_counts], [copy_count] * len(home_counts))
    return [homes + more for homes, more in zip(home_counts, copies)]


def weights_a_slot(slot_bytes: int, subgroup_numel: int) -> int:
    """How many subgroups' bf16 weights go into one slot of a snapshot."""
    return max(1, slot_bytes // (2 * subgroup_numel))


def place(
    count: int,
    paths: Sequence[PathConfig],
    slot_bytes: int,
    free_bytes: Sequence[int],
    spare_count: int = 0,
    rank_count: int = 1,
) -> "tuple[int, ...]":
    """Spread ``count`` subgroups over paths in proportion to sustained bandwidth; returns a path index each.

    Path i gets a share b_i / sum(b), b_i = min(read, write) in bytes/s, interleaved so that all paths are busy
    at once. Ten subgroups on 6 GB/s and 4 GB/s: 6 and 4, as A B A B A A B A B A. Where a rate is not known, paths
    share equally. A path whose capacity is short gets what it can hold and the others take the rest.

    Args:
        slot_bytes: bytes of one slot.
        free_bytes: what each path can give this rank.
        spare_count: further slots that every used path must hold (flushes go to a free slot).
        rank_count: ranks of this node, which all need as much; for the message.

    Raises:
        CapacityError: all paths together cannot hold the state; names each path, needed and free bytes.
    Source: MLP-Offload (SC'25), the I/O performance model in its simplest form.
    """
    rates = [path.bytes_per_second for path in paths]
    if None in rates:
        rates = [1] * len(paths)
    room = [max(0, free // slot_bytes - spare_count) for free in free_bytes]
    if sum(room) < count:
        held = "; ".join(
            f"{p.directory!r} has {format_bytes(f)} for this rank, room for {r} of them"
            for p, f, r in zip(paths, free_bytes, room)
        )
        # On one path, and enough: the least that makes room for what the others do not hold, spares included.
        short, i = min(
            ((count - sum(room) + room[i] + spare_count) * slot_bytes - free_bytes[i], i) for i in range(len(paths))
        )
        amount, name, capacity = round_up_bytes(short * rank_count), repr(paths[i].directory), paths[i].capacity
        limited = capacity is not None and free_bytes[i] == capacity // rank_count
        step = f"Raise the capacity of {name} by {amount}" if limited else f"Free {amount} on {name}"
        ranks = f" (for {rank_count} ranks)" if rank_count > 1 else ""
        raise CapacityError(
            f"the paths cannot hold the state: {count} slots of {format_bytes(slot_bytes)} = {format_bytes(count * slot_bytes)} are needed, "
            f"and {spare_count} spare ones on each path; {held}. {step}{ranks}, add a path, or raise host_memory"
        )
    return tuple(interleave(apportion(count, rates, room)))
