"""Which subgroups the GPU updates: cases that can be computed by hand."""

import pytest

from mlp_offload.errors import ConfigError
from mlp_offload.plan.devices import Rates, choose_device_residents, device_count, spread, step_seconds
from mlp_offload.plan.placement import choose_residents
from mlp_offload.plan.schedule import plan_step

NUMEL, RECORD_BYTES = 10**6, 10**7
# A second: 10 subgroups on the CPU, 1000 on the GPU; 100 records in, 50 out.
RATES = Rates(host_parameters=1e7, device_parameters=1e9, to_device_bytes=1e9, to_host_bytes=5e8)


def seconds(on_device, count=40, storage=0.0, rates=RATES):
    return step_seconds(on_device, count, NUMEL, RECORD_BYTES, rates, storage)


def chosen(count=40, storage=0.0, rates=RATES):
    return device_count(count, NUMEL, RECORD_BYTES, rates, storage)


def test_the_slowest_part_counts():
    assert seconds(0) == pytest.approx(40 / 10)  # the CPU
    assert seconds(20) == pytest.approx(20 / 10)
    assert seconds(40) == pytest.approx(40 / 50)  # the way out
    # 34 records and 6 subgroups' gradients and weights (6 bytes a parameter) go out
    assert seconds(34) == pytest.approx((34 * RECORD_BYTES + 6 * 6 * NUMEL) / 5e8)
    assert seconds(20, storage=3.0) == 3.0
    slow_gpu = Rates(1e7, 1e6, 1e9, 1e9)
    assert seconds(20, rates=slow_gpu) == pytest.approx(20)


def test_without_storage_cpu_and_gpu_end_together():
    # 6 on the CPU: 0.6 s, and (34 * 10 + 6 * 6) / 500 = 0.752 s on the way out; 7: 0.7 and 0.744; 8: 0.8. The best is
    # 0.744 s, and what is within 5 % of it (0.781 s) with the fewest on the GPU is 7 on the CPU.
    assert chosen() == 33
    assert chosen(1) == 1 and chosen(0) == 0


def test_where_storage_bounds_the_step_the_gpu_is_left_alone():
    assert chosen(storage=4.0) == 0
    assert chosen(storage=3.9) == 0  # within 5 % of what is possible
    assert chosen(storage=100.0) == 0


def test_where_storage_is_a_little_faster_only_what_is_needed_goes_to_the_gpu():
    # 2 s of storage, 5 % tolerance: 21 subgroups on the CPU
    assert chosen(storage=2.0) == 19


def test_a_gpu_or_a_link_slower_than_the_cpu_gets_little():
    assert chosen(rates=Rates(1e9, 1e9, 1e8, 1e8)) == 0  # a link of 10 records a second beside a CPU of 1000
    # 1 subgroup a second on the GPU, 10 on the CPU: 4 take 4 s, 36 take 3.6 s; 3 and 37: 3.7 s is the best
    assert chosen(rates=Rates(1e7, 1e6, 1e12, 1e12)) == 2  # 38 on the CPU: 3.8 s, within 5 % of 3.7 s


def test_subgroups_are_spread_evenly():
    assert spread(range(10), 0) == frozenset()
    assert spread(range(10), 5) == {1, 3, 5, 7, 9}
    assert spread([7, 8, 20], 1) == {8}
    assert spread(range(4), 4) == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("gpu_memory", "every", "residents", "passing"),
    [
        (0, False, 0, 0),
        (0, True, 0, 2),
        (1, False, 1, 0),
        (2, True, 0, 2),
        (3, False, 3, 0),
        (3, True, 1, 2),
        (4, False, 2, 2),
        (9, False, 7, 2),
        (10, False, 10, 0),
        (10, True, 10, 0),
        (99, True, 10, 0),
    ],
)
def test_gpu_memory_is_for_residents_and_two_buffers(gpu_memory, every, residents, passing):
    chosen, passing_count = choose_device_residents(10, 4096, gpu_memory * 4096, every)
    assert (len(chosen), passing_count) == (residents, passing)
    assert chosen <= set(range(10))


@pytest.mark.parametrize(
    ("gpu_memory", "every", "message"),
    [
        (4095, False, "holds 0 buffers of 4.0 KiB; it needs 1: raise it to 4KiB, set it to 0, or lower subgroup_size"),
        (8191, True, "holds 1 buffers of 4.0 KiB; it needs 2: raise it to 8KiB, set it to 0, which takes them alone"),
    ],
)
def test_gpu_memory_that_is_of_no_use_is_refused(gpu_memory, every, message):
    with pytest.raises(ConfigError, match=message):
        choose_device_residents(10, 4096, gpu_memory, every)


def test_what_is_in_gpu_memory_takes_one_buffer_of_host_memory_between_the_steps():
    there = frozenset({1, 3, 5})
    everything = choose_residents(10, 4096, 8 * 4096, 3, 0, there, 2)
    assert everything.residents == set(range(10)) - there and everything.buffer_count == 8
    assert not any(everything.streams(i) for i in range(10))
    less = choose_residents(10, 4096, 7 * 4096, 3, 0, there, 2)
    assert len(less.residents) == 4 and less.staging_count == 3 and not less.residents & there
    assert sum(less.streams(i) for i in range(10)) == 3
    assert (less.device_residents, less.passing_count) == (there, 2)
    assert choose_residents(3, 4096, 4096, 3, 0, frozenset(range(3))).buffer_count == 1
    with pytest.raises(ConfigError, match="raise host_memory to 8KiB"):
        choose_residents(4, 4096, 4096, 3, 0, frozenset({1, 2, 3}))


def test_the_gpus_own_come_first_in_a_plan():
    homes = dict.fromkeys((0, 2, 4, 6), 0)
    plan = plan_step(2, range(8), {3, 7}, {6}, homes, 1, device_residents={1, 5}, passing={2, 3})
    assert [row.subgroup for row in plan.rows] == [5, 1, 7, 6, 4, 3, 2, 0]
    assert {row.subgroup for row in plan.rows if row.device} == {1, 2, 3, 5}
    assert {row.subgroup for row in plan.rows if row.keep} == {0, 1, 3, 5, 7}
    assert {row.subgroup for row in plan.rows if row.hit} == {1, 3, 5, 6, 7}
