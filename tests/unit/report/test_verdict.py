"""Each rule speaks when its numbers say so, and only then."""

import pytest

from mlp_offload.report.analysis import analyze
from mlp_offload.report.numbers import StepNumbers
from mlp_offload.report.verdict import judge
from mlp_offload.telemetry import StepRecord

MB = 10**6
HEADER = {"subgroup_count": 8, "planned_hit_count": 2, "buffer_bytes": 2**20, "staging_count": 4, "state_bytes": 8 * MB}
HEADER |= {"update_threads": 2, "cores": 16, "local_rank_count": 2, "host": "n1"}


def run(
    stall=0.0,
    update=0.0,
    fetch=0.0,
    moved=0,
    seconds=1.0,
    every=1.0,
    hits=2,
    count=30,
    header=(),
    rank=0,
    path="update",
):
    """Steps 1.. of one rank: a stall, then an update, a fetch from /a all along; each ``seconds`` long or seconds(k)."""
    steps = []
    for k in range(1, count + 1):
        length = seconds(k) if callable(seconds) else seconds
        step = StepRecord(step=k, step_seconds=length, hit_count=hits, fetch_count=8 - hits, started=every * k)
        for phase, begin, end, where in (
            ("stall", 0, stall, ""),
            ("update", stall, stall + update, ""),
            ("fetch", 0, fetch, "/a"),
        ):
            if end > begin:
                step.add(phase, 0, step.started + begin, step.started + end, where)
        if moved:
            step.bytes_read = {"/a": moved}
        steps.append(StepNumbers.of(step))
    return steps


def findings(ranks, header=HEADER, given=None):
    ranks = ranks if isinstance(ranks, dict) else {0: ranks}
    return {f.kind: f.text for f in judge(analyze(ranks, dict.fromkeys(ranks, header) if header else {}, given))}


def test_a_saturated_path_is_named_with_the_memory_that_would_halve_its_work():
    found = findings(run(stall=0.6, update=0.4, fetch=0.95, moved=100 * MB))
    assert list(found) == ["storage-bound"]
    assert found["storage-bound"] == (
        "storage-bound: 60% of the step waits for storage; path /a (read 105.26 MB/s) is saturated. 3.0 MiB more "
        "host_memory a rank would halve what is moved; a further path helps as well. The step is 100% of an iteration."
    )


def test_a_saturated_path_bounds_the_step_even_where_updates_hide_most_of_it():
    assert "storage-bound" in findings(run(stall=0.15, update=0.85, fetch=0.95, moved=MB))
    assert "update-bound" in findings(run(stall=0.05, update=0.95, fetch=0.95, moved=MB))


def test_waiting_without_a_saturated_path_asks_for_more_in_motion():
    text = findings(run(stall=0.6, update=0.4, fetch=0.5, moved=MB))["storage-bound"]
    assert "no path is saturated (busiest: /a, 50% of the time). More staging_count (now 4)" in text


def test_update_bound_names_the_threads_that_are_there():
    text = findings(run(update=0.9, fetch=0.4, moved=MB))["update-bound"]
    assert "90% of the step is Adam" in text and "more update_threads: 2 now, 8 cores for each rank" in text
    text = findings(run(update=0.9, fetch=0.4, moved=MB), HEADER | {"update_threads": 8})["update-bound"]
    assert "8 threads on 16 cores for 2 ranks: more cores a rank help" in text
    bound = HEADER | {"update_threads": 8, "cores": 8, "local_rank_count": 16}  # cores of this rank alone
    assert "more cores a rank help" in findings(run(update=0.9), bound)["update-bound"]
    assert "as long as there are idle cores" in findings(run(update=0.9), None)["update-bound"]


def test_between_the_two_it_is_balanced():
    assert findings(run(stall=0.3, update=0.6, fetch=0.7, moved=MB)) == {
        "balanced": "balanced: 60% of the step updates, 30% waits for storage. The step is 100% of an iteration."
    }


def test_a_step_that_is_a_small_part_of_the_iteration_is_left_alone():
    assert list(findings(run(stall=0.6, update=0.4, fetch=0.95, moved=MB, every=21.0))) == ["compute-bound"]
    assert list(findings(run(stall=0.6, update=0.4, fetch=0.95, moved=MB, every=19.0))) == ["storage-bound"]


def test_a_slow_rank_is_named_with_where_it_loses_its_time():
    ranks = {r: run(update=0.9) for r in range(4)}
    assert "skew" not in findings(ranks)
    ranks[3] = run(stall=0.5, update=0.9, seconds=1.4)
    text = findings(ranks)["skew"]
    assert text.startswith("rank 3 is 1.4x slower than the median rank") and "waits longer for storage" in text
    ranks[3] = run(update=1.3, seconds=1.4)
    assert "updates slower: look at its cores" in findings(ranks)["skew"]
    assert list(findings({r: run(update=0.9, seconds=1.4 if r == 3 else 1.0, every=60.0) for r in range(4)})) == [
        "compute-bound"
    ]


def test_ranks_that_are_slow_in_turn_are_not_blamed_one_by_one():
    ranks = {r: run(update=0.9, seconds=lambda k, r=r: 1.5 if k % 3 == r else 1.0) for r in range(3)}
    assert "not always the same rank" in findings(ranks)["skew"]


def test_fewer_hits_than_planned_are_told():
    assert "hit-rate" not in findings(run(update=0.9, hits=2))
    assert "12% of subgroups were found in host memory, not 25%" in findings(run(update=0.9, hits=1))["hit-rate"]


@pytest.mark.parametrize("expected, told", [(200 * MB, True), (140 * MB, False)])
def test_a_busy_path_below_its_expected_rate_is_told(expected, told):
    found = findings(run(stall=0.6, update=0.4, fetch=1.0, moved=100 * MB), given={"/a": (expected, expected)})
    assert ("slow-path" in found) == told
    if told:
        assert (
            "path /a gives read 100.00 MB/s" in found["slow-path"]
            and ": 50% of what was expected" in found["slow-path"]
        )


def test_an_idle_path_is_not_called_slow():
    assert "slow-path" not in findings(run(update=0.9, fetch=0.5, moved=MB), given={"/a": (200 * MB, 200 * MB)})


def test_a_few_long_steps_are_told_with_the_longest():
    text = findings(run(update=0.9, seconds=lambda k: 4.0 if k == 17 else 1.0, every=5.0))["spikes"]
    assert "p99 is 4.0x the median, the longest is step 17 with 4.00 s" in text
    assert "spikes" not in findings(run(update=0.9, seconds=lambda k: 2.5 if k == 17 else 1.0, every=5.0))
