"""Subgroups: the rank's concatenated shards, cut every ``subgroup_size`` elements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_CACHE_LINE_BYTES = 64  # where each array of a record starts


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
    main_itemsize: int = 4  # bytes: 4 = fp32 main_param; 2 = the 16 bits of it that a bf16 weight lacks

    @property
    def stride_numel(self) -> int:
        """Elements of each array of the record, with padding."""
        align = _CACHE_LINE_BYTES // self.main_itemsize
        return -(-self.numel // align) * align

    @property
    def record_bytes(self) -> int:
        """Bytes of ``[main_param or remainder | exp_avg | exp_avg_sq]``, the moments in fp32."""
        return (self.main_itemsize + 8) * self.stride_numel


def cut(shard_numels: Sequence[int], subgroup_size: int, main_itemsize: int = 4) -> "tuple[Subgroup, ...]":
    """Cut concatenated shards into subgroups; a cut may fall inside a shard, empty shards vanish.

    Shards of 3 and 4 elements, ``subgroup_size`` 5: one subgroup of 5 (3 from the first shard, 2 from the
    second), one of 2. Adam is elementwise, so where the cuts fall changes no bits.
    """
    subgroups: "list[Subgroup]" = []
    segments: "list[Segment]" = []
    filled = 0

    def close() -> None:
        nonlocal filled, segments
        subgroups.append(Subgroup(len(subgroups), filled, tuple(segments), main_itemsize))
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
