"""Subgroups: the rank's concatenated shards, cut every ``subgroup_size`` elements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ARRAYS = ("main_param", "exp_avg", "exp_avg_sq")
"""The fp32 arrays of a subgroup record, in the order in which they lie in it."""

_ALIGN_NUMEL = 16  # 64 bytes: each array of a record starts on a cache line


@dataclass(frozen=True)
class Segment:
    """A run of elements that lies in one shard and in one subgroup."""

    shard: int
    shard_offset: int
    offset: int  # first element within the subgroup
    numel: int


@dataclass(frozen=True)
class Subgroup:
    """Up to ``subgroup_size`` consecutive elements of a space's concatenated shards."""

    index: int  # within its space
    numel: int
    segments: "tuple[Segment, ...]"

    @property
    def stride_numel(self) -> int:
        """Elements from the start of one array of the record to the start of the next."""
        return -(-self.numel // _ALIGN_NUMEL) * _ALIGN_NUMEL

    @property
    def record_bytes(self) -> int:
        """Bytes of ``[main_param | exp_avg | exp_avg_sq]`` in fp32."""
        return len(ARRAYS) * 4 * self.stride_numel


def cut(shard_numels: Sequence[int], subgroup_size: int) -> "tuple[Subgroup, ...]":
    """Cut concatenated shards into subgroups; a cut may fall inside a shard, empty shards vanish.

    Shards of 3 and 4 elements, ``subgroup_size`` 5: one subgroup of 5 (3 from the first shard, 2 from the
    second), one of 2. Adam is elementwise, so where the cuts fall changes no bits.
    """
    subgroups: "list[Subgroup]" = []
    segments: "list[Segment]" = []
    filled = 0

    def close() -> None:
        nonlocal filled, segments
        subgroups.append(Subgroup(len(subgroups), filled, tuple(segments)))
        filled, segments = 0, []

    for shard, numel in enumerate(shard_numels):
        taken = 0
        while taken < numel:
            run = min(numel - taken, subgroup_size - filled)
            segments.append(Segment(shard, taken, filled, run))
            taken, filled = taken + run, filled + run
            if filled == subgroup_size:
                close()
    if filled:
        close()
    return tuple(subgroups)
