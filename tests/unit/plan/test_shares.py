"""Shares follow bandwidth within room; small differences move nothing."""

import pytest

from mlp_offload.plan.shares import apportion, follow, interleave


@pytest.mark.parametrize(
    "count, rates, room, quota",
    [
        (10, [6, 4], [99, 99], [6, 4]),
        (10, [400, 200], [99, 99], [7, 3]),
        (0, [1, 1], [5, 5], [0, 0]),
        (10, [6, 4], [2, 99], [2, 8]),
        (7, [1e9, 1], [99, 99], [7, 0]),
        (9, [1, 1, 1], [99, 1, 99], [4, 1, 4]),
    ],
)
def test_all_paths_finish_together_within_their_room(count, rates, room, quota):
    assert apportion(count, rates, room) == quota


def test_paths_alternate_in_proportion():
    assert "".join("AB"[i] for i in interleave([6, 4])) == "ABABAABABA"
    assert interleave([0, 3]) == [1, 1, 1] and interleave([]) == []


def test_a_path_that_slowed_down_hands_over_a_part():
    homes = dict(zip(range(12), interleave([8, 4])))  # 2:1
    new = follow(range(12), homes, [200.0, 200.0], [99, 99], 0.05)
    assert [list(new.values()).count(i) for i in range(2)] == [6, 6]
    back = follow(range(12), new, [400.0, 200.0], [99, 99], 0.05)
    assert [list(back.values()).count(i) for i in range(2)] == [8, 4]


def test_noise_moves_nothing_and_room_binds():
    homes = dict(zip(range(12), interleave([8, 4])))
    assert follow(range(12), homes, [385.0, 205.0], [99, 99], 0.05) == homes
    new = follow(range(12), homes, [100.0, 400.0], [99, 6], 0.05)
    assert [list(new.values()).count(i) for i in range(2)] == [6, 6]
    assert follow([], {}, [1.0, 1.0], [9, 9], 0.05) == {}
