"""Every subgroup is updated once a step; what stays at the end of one step is what the next begins with."""

import pytest

from mlp_offload.plan.schedule import Row, Waiting, plan_step


@pytest.mark.parametrize("residents", [set(), {1, 4}, {0, 8}])
@pytest.mark.parametrize("keep_count", [0, 2])
def test_steps_alternate_and_kept_subgroups_are_the_next_hits(residents, keep_count):
    homes = {i: i % 2 for i in range(9) if i not in residents}
    cached: set = set()
    for step in range(1, 5):
        plan = plan_step(step, range(9), residents, cached, homes, keep_count)
        order = [row.subgroup for row in plan.rows]
        assert order == (list(range(9)) if step % 2 else list(range(8, -1, -1)))
        assert {row.subgroup for row in plan.rows if row.hit} == residents | cached
        cached = {row.subgroup for row in plan.rows if row.keep} - residents
        assert len(cached) == keep_count
        assert all(row.keep or row.path == homes[row.subgroup] for row in plan.rows)
        streamed = [row for row in plan.rows if row.subgroup not in residents]
        assert all(row.keep for row in streamed[len(streamed) - keep_count :])
        if step > 1:
            assert all(row.hit for row in streamed[:keep_count])
            assert plan.hit_count == len(residents) + keep_count


def test_a_space_of_another_offset_keeps_its_indices():
    plan = plan_step(2, range(5, 8), {6}, (), {5: 0, 7: 1}, 0)
    assert [(r.subgroup, r.hit, r.keep, r.path) for r in plan.rows] == [
        (7, False, False, 1),
        (6, True, True, -1),
        (5, False, False, 0),
    ]


def test_the_first_row_that_is_ready_is_taken():
    rows = [Row(subgroup, subgroup in (4, 1), True, -1) for subgroup in (5, 4, 3, 2, 1)]
    waiting = Waiting(rows)
    assert waiting.first.subgroup == 5
    # 5 and 3 are on their way, 9 is somebody else's.
    taken = [waiting.take(arrived) for arrived in ([], [9, 3, 5], [3], [], [3])]
    assert [row and row.subgroup for row in taken] == [4, 5, 3, 1, None]
    assert [row.subgroup for row in waiting] == [2] and waiting.first is rows[3] and waiting
    assert waiting.take([2]) is rows[3] and waiting.first is None and not waiting
