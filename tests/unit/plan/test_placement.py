"""Host memory is spent on staging first; paths get subgroups by bandwidth, within their capacity."""

import re

import pytest

from mlp_offload.config import PathConfig
from mlp_offload.errors import CapacityError, ConfigError
from mlp_offload.plan.placement import RECORD_ALIGNMENT, choose_residents, place
from mlp_offload.plan.subgroups import cut
from mlp_offload.units import parse_bytes

FAST, SLOW = PathConfig("/fast", read=6, write=9), PathConfig("/slow", read=8, write=4)


def test_shares_follow_the_slower_direction_and_interleave():
    assert "".join("AB"[p] for p in place(10, [FAST, SLOW], 1, [99, 99])) == "ABABAABABA"


def test_unknown_rates_share_equally():
    homes = place(9, [PathConfig("/a"), PathConfig("/b", read=10, write=10), PathConfig("/c")], 1, [99] * 3)
    assert [homes.count(i) for i in range(3)] == [3, 3, 3]


def test_a_short_path_takes_what_it_holds_and_the_others_the_rest():
    homes = place(10, [FAST, SLOW], 100, [399, 10**6], spare_count=1)  # 3 slots, one of them spare
    assert [homes.count(i) for i in range(2)] == [2, 8]


def test_too_little_room_is_an_error_with_the_numbers():
    free = [3 * 2**20, 5 * 2**20 + 1]
    with pytest.raises(CapacityError, match=r"10 slots of 1\.0 MiB = 10\.0 MiB.*'/fast' has 3\.0 MiB") as caught:
        place(10, [FAST, SLOW], 2**20, free, spare_count=1, rank_count=2)
    assert "Free 8192KiB on '/slow' (for 2 ranks)" in str(caught.value)
    free[1] += 4 * 2**20 - 1
    assert len(place(10, [FAST, SLOW], 2**20, free, spare_count=1)) == 10
    with pytest.raises(CapacityError, match="Free 1KiB on"):
        place(10, [FAST, SLOW], 2**20, [free[0], free[1] - 1], spare_count=1)


def test_the_advice_counts_spares_of_a_path_that_holds_not_even_those():
    with pytest.raises(CapacityError, match="Free 504KiB on '/slow'"):
        place(10, [SLOW], 36 * 2**10, [0], spare_count=4)


def test_where_the_capacity_that_was_set_is_the_limit_it_is_to_be_raised():
    path = PathConfig("/a", capacity=20 * 2**10)
    with pytest.raises(CapacityError, match=r"Raise the capacity of '/a' by 988KiB \(for 2 ranks\)"):
        place(10, [path], 36 * 2**10, [10 * 2**10], spare_count=4, rank_count=2)
    place(10, [PathConfig("/a", capacity=1008 * 2**10)], 36 * 2**10, [504 * 2**10], spare_count=4, rank_count=2)


def test_nothing_to_place():
    assert place(0, [FAST, SLOW], 1, [0, 0]) == ()


@pytest.mark.parametrize(
    "budget, staging, residents", [(300, 3, 0), (400, 4, 0), (500, 4, 1), (999, 4, 5), (1000, 0, 10)]
)
def test_budget_buys_staging_then_residents_then_everything(budget, staging, residents):
    residency = choose_residents(10, 100, budget, staging_count=4)
    assert (residency.staging_count, len(residency.residents)) == (staging, residents)
    assert residency.buffer_count * 100 <= budget
    assert all(0 <= i < 10 for i in residency.residents)


def test_residents_are_spread_evenly():
    assert choose_residents(12, 100, 700, staging_count=4).residents == {2, 6, 10}


@pytest.mark.parametrize("host_memory, subgroup_size", [(102400, 10000), (25165440, 2**20), (2**30 + 5, 2**25 + 1)])
@pytest.mark.parametrize("reserved_per_element", [0, 12])
def test_a_budget_below_three_buffers_says_what_would_fit_and_that_does(
    host_memory, subgroup_size, reserved_per_element
):
    def residents(host_memory: int, subgroup_size: int):
        (subgroup,) = cut([subgroup_size], subgroup_size)
        buffer_bytes = -(-subgroup.record_bytes // RECORD_ALIGNMENT) * RECORD_ALIGNMENT
        return choose_residents(10, buffer_bytes, host_memory, 4, reserved_per_element * subgroup_size)

    with pytest.raises(ConfigError, match="needs 3 .*one flushing") as caught:
        residents(host_memory, subgroup_size)
    advice = re.search(r"raise host_memory to (\w+), or lower subgroup_size to (\d+)$", str(caught.value))
    assert residents(parse_bytes(advice[1]), subgroup_size).staging_count == 3
    assert residents(host_memory, int(advice[2])).staging_count == 3
    assert int(advice[2]) > 0.9 * host_memory / (3 * 12 + reserved_per_element)


def test_a_small_state_needs_no_more_than_itself():
    with pytest.raises(ConfigError, match="raise host_memory to 12KiB"):
        choose_residents(1, 12288, 4096, staging_count=4)
    assert choose_residents(1, 12288, 12288, staging_count=4).staging_count == 0


def test_a_budget_too_small_for_any_subgroup_only_asks_for_more():
    with pytest.raises(ConfigError, match="raise host_memory to 36KiB$"):
        choose_residents(10, 12288, 4096, staging_count=4)
