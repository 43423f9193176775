"""Subgroups cover the concatenated shards exactly once, whatever the sizes."""

import pytest

from mlp_offload.plan.subgroups import cut

SIZES = [0, 1, 15, 16, 17, 4095, 4096, 4097, 3 * 4096 + 513]


@pytest.mark.parametrize("subgroup_size", [1, 2, 16, 4095, 4096, 10**6])
def test_segments_cover_every_element_once_and_in_order(subgroup_size):
    numels = [n for n in SIZES if n <= 4097] if subgroup_size < 16 else SIZES
    subgroups = cut(numels, subgroup_size)
    position, expected = 0, [(shard, i) for shard, n in enumerate(numels) for i in (0, n - 1) if n]
    ends = []
    for i, subgroup in enumerate(subgroups):
        assert subgroup.index == i
        assert sum(s.numel for s in subgroup.segments) == subgroup.numel
        assert subgroup.numel == subgroup_size or i == len(subgroups) - 1
        offset = 0
        for segment in subgroup.segments:
            assert segment.offset == offset and segment.numel > 0
            assert sum(numels[: segment.shard]) + segment.shard_offset == position
            offset, position = offset + segment.numel, position + segment.numel
            if segment.shard_offset == 0:
                ends.append((segment.shard, 0))
            if segment.shard_offset + segment.numel == numels[segment.shard]:
                ends.append((segment.shard, numels[segment.shard] - 1))
    assert position == sum(numels)
    assert sorted(ends) == sorted(expected)


def test_arrays_of_a_record_start_on_cache_lines_and_do_not_overlap():
    for numel in (1, 15, 16, 17, 4097):
        (subgroup,) = cut([numel], 10**6)
        assert subgroup.stride_numel >= numel and subgroup.stride_numel % 16 == 0
        assert subgroup.stride_numel - numel < 16
        assert subgroup.record_bytes == 12 * subgroup.stride_numel


def test_no_elements_no_subgroups():
    assert cut([], 10) == () and cut([0, 0], 10) == ()
