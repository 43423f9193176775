"""Numbers of a run from steps whose numbers are known."""

import pytest

from mlp_offload.errors import OffloadError
from mlp_offload.report.analysis import analyze, percentile
from mlp_offload.report.numbers import GPU_UPDATE, StepNumbers, Traffic
from mlp_offload.report.scalars import scalars
from mlp_offload.telemetry import StepRecord


def record(step, started=0.0, seconds=1.0, read=None, written=None, events=(), hits=1, fetches=3, **more):
    """A step; events are (phase, subgroup, begin, end, path) in seconds since its start."""
    made = StepRecord(step=step, step_seconds=seconds, hit_count=hits, fetch_count=fetches, started=started, **more)
    made.bytes_read, made.bytes_written = read or {}, written or {}
    for phase, subgroup, begin, end, *path in events:
        made.add(phase, subgroup, started + begin, started + end, *path)
    return made


def numbers(*records):
    return [StepNumbers.of(r) for r in records]


def step(k, seconds=1.0, every=2.0, **more):
    """Two paths: /a reads 400 bytes in 0.8 s and writes 100 in 0.5 s, the last 0.2 s after the step; /b reads 100 in 0.1 s."""
    events = [("fetch", 0, 0.0, 0.5, "/a"), ("fetch", 1, 0.4, 0.8, "/a"), ("flush", 0, 0.7, 1.2, "/a")]
    events += [("fetch", 2, 0.0, 0.1, "/b"), ("update", 0, 0.5, 0.7), ("update", 1, 0.8, 0.9), ("stall", 0, 0.0, 0.5)]
    moved = {"read": {"/a": 400, "/b": 100}, "written": {"/a": 100}}
    return record(k, started=1000.0 + every * (k - 1), seconds=seconds, events=events, **moved, **more)


HEADER = {"host": "n1", "state_bytes": 1000, "subgroup_count": 4, "planned_hit_count": 2} | {
    "paths": [
        {"directory": p, "read": r, "write": w, "origin": "measured now"}
        for p, r, w in (("/a", 500, 400), ("/b", 1000, 800))
    ]
}


def test_a_record_without_its_events_keeps_what_moved_when():
    found = StepNumbers.of(step(1), offset=17)
    assert found.window_seconds == pytest.approx(1.2) and found.offset == 17
    assert {p: pytest.approx(s) for p, s in found.phases.items()} == {
        "fetch": 0.8,
        "update": 0.3,
        "flush": 0.5,
        "stall": 0.5,
    }
    assert found.traffic["/a", "read"].nbytes == 400
    assert found.traffic["/a", "read"].spans == (pytest.approx((0.0, 0.8)),)
    assert found.traffic["/b", "read"] == Traffic(100, (pytest.approx((0.0, 0.1)),))


def test_updates_on_the_gpu_are_a_phase_of_their_own():
    found = StepNumbers.of(record(1, events=[("update", 0, 0.0, 0.5), ("update", 1, 0.4, 0.9, "cuda")]))
    assert found.phases["update"] == pytest.approx(0.9) and found.phases[GPU_UPDATE] == pytest.approx(0.5)
    assert found.traffic == {}
    assert analyze({0: [found]}).phases[GPU_UPDATE].share == pytest.approx(0.5)


def test_one_rank_by_hand():
    report = analyze({0: numbers(*(step(k) for k in range(1, 5)))}, {0: HEADER})
    assert (report.step_count, report.steps, report.step_p50) == (3, (2, 4), 1.0)
    assert report.iteration_p50 == pytest.approx(2.0)
    assert report.phases["fetch"].seconds == pytest.approx(0.8) and report.phases["flush"].share == pytest.approx(0.5)
    uses = {(u.path, u.direction): u for u in report.paths}
    assert uses["/a", "read"].bytes_per_second == pytest.approx(500) and uses["/a", "read"].bytes_a_step == 400
    assert uses["/a", "write"].bytes_per_second == pytest.approx(200)
    assert uses["/a", "write"].known_bytes_per_second == 400 and uses["/a", "write"].origin == "measured now"
    # under way from 0.0 to 1.2 of 1.2 s; in the day of 86400 s there are 43200 iterations
    assert uses["/a", "read"].busy_share == pytest.approx(1.0) and uses["/b", "read"].busy_share == pytest.approx(
        0.1 / 1.2
    )
    assert uses["/a", "write"].bytes_a_day == pytest.approx(43200 * 100)
    # 500 bytes read of (500 + 1000) * 1.2 possible ones; 100 written of 1200 * 1.2
    assert report.efficiency == pytest.approx(500 / 1800)
    assert report.hit_rate == 0.25 and report.planned_hit_rate == 0.5
    assert report.state_bytes == 1000 and report.skew is None and report.typical_step[0] == 0


def test_back_to_back_steps_count_overlapping_time_once():
    """Flushes of one step go on in the next: the window of three steps of 1.0 s and a tail of 0.2 s is 3.2 s."""
    report = analyze({0: numbers(*(step(k, every=1.0) for k in range(1, 5)))}, {0: HEADER})
    assert report.efficiency == pytest.approx(3 * 500 / (1500 * 3.2))


def test_ranks_of_a_node_share_its_paths_and_nodes_do_not():
    steps = {r: numbers(*(step(k) for k in (1, 2, 3))) for r in range(4)}
    one_node = analyze(steps, dict.fromkeys(range(4), HEADER))
    two_nodes = analyze(steps, {r: HEADER | {"host": f"n{r // 2}"} for r in range(4)})
    assert (one_node.node_count, two_nodes.node_count) == (1, 2)
    # all ranks move at the same moments, so a node's path gives as many times what one rank sees
    assert one_node.paths[0].bytes_per_second == pytest.approx(4 * 500)
    assert two_nodes.paths[0].bytes_per_second == pytest.approx(2 * 500)
    assert one_node.efficiency == pytest.approx(4 * 500 / 1800) and two_nodes.efficiency == pytest.approx(
        2 * 500 / 1800
    )
    assert one_node.state_bytes == 4000


def test_given_rates_win_and_unknown_ones_leave_the_bound_open():
    steps = {0: numbers(step(1), step(2), step(3))}
    assert analyze(steps).efficiency is None and analyze(steps, {0: HEADER}, {"/b": (None, 5)}).efficiency is None
    report = analyze(steps, {}, {"/a": (400, 100), "/b": (100, 100)})
    assert report.efficiency == pytest.approx(500 / (500 * 1.2)) and report.paths[0].origin == "given"


def test_only_steps_that_all_ranks_have_are_counted():
    report = analyze({0: numbers(step(1), step(2), step(3)), 1: numbers(step(2), step(3), step(4))})
    assert report.steps == (2, 3)
    with pytest.raises(OffloadError, match=r"no step in common .*rank 0: 2, rank 1: 3"):
        analyze({0: numbers(step(2)), 1: numbers(step(3))})
    with pytest.raises(OffloadError, match="no ranks"):
        analyze({})


def test_the_first_step_of_a_start_counts_only_where_there_is_no_other():
    assert analyze({0: numbers(step(1, seconds=9.0))}).step_p50 == 9.0
    assert analyze({0: numbers(step(1, seconds=9.0), step(2))}).step_max == 1.0


def test_simulated_steps_without_a_clock_follow_each_other():
    steps = numbers(*(record(k, events=[("fetch", 0, 0.0, 1.0, "/a")], read={"/a": 100}) for k in range(1, 4)))
    report = analyze({0: steps}, {}, {"/a": (200, 200)})
    assert report.efficiency == pytest.approx(0.5) and report.iteration_p50 is None


def test_the_slowest_rank_gives_the_step_and_is_named():
    def times(rank):
        return numbers(
            *(
                record(k, seconds=2.8 if rank == 3 else 2.0, events=[("update", 0, 0, 1.9 if rank == 3 else 1)])
                for k in range(1, 6)
            )
        )

    report = analyze({r: times(r) for r in range(4)})
    assert report.step_p50 == 2.8
    skew = report.skew
    assert (skew.rank, skew.share_of_steps, skew.phase) == (3, 1.0, "update")
    assert skew.slowest_over_median == skew.rank_over_median == pytest.approx(1.4)
    assert report.typical_step[0] == 3


def test_losses_come_from_the_rank_that_knows_them():
    def steps(*losses):
        return numbers(
            *(record(k + 1, iteration=k + 11, loss=loss, grad_norm=1.0 + k) for k, loss in enumerate(losses))
        )

    report = analyze({0: steps(None, None, None), 1: steps(9.0, 8.0, 7.0)})
    assert report.loss == (9.0, 7.0) and report.grad_norm == (1.0, 3.0) and report.iterations == (12, 13)


def test_numbers_that_json_cannot_hold_become_null():
    report = analyze({0: numbers(record(1, loss=float("nan")), record(2, loss=2.5))})
    assert report.as_dict()["loss"] == [None, 2.5]


@pytest.mark.parametrize("count, expected", [(1, 1), (2, 2), (99, 99), (100, 99), (101, 100), (200, 198)])
def test_percentile_is_a_value_that_99_of_100_do_not_exceed(count, expected):
    assert percentile(list(range(1, count + 1)), 0.99) == expected


def test_scalars_are_means_of_the_interval_by_place_of_the_path():
    found = scalars(numbers(step(1, hits=0, fetches=4), step(2, seconds=3.0)), ["/b", "/a", "/c"])
    expected = {
        "step-seconds": 2.0,
        "fetch-seconds": 0.8,
        "update-seconds": 0.3,
        "flush-seconds": 0.5,
        "stall-seconds": 0.5,
    }
    expected |= {"hit-rate": 1 / 8, "path-1-read-GB-per-second": 5e-7, "path-1-write-GB-per-second": 2e-7}
    expected |= {"path-0-read-GB-per-second": 1e-6, "path-0-write-GB-per-second": 0.0}
    expected |= {"path-2-read-GB-per-second": 0.0, "path-2-write-GB-per-second": 0.0}
    assert found == {f"mlp-offload/{name}": pytest.approx(value) for name, value in expected.items()}
