"""The parameter-gather benchmark, tiny: what it says has to be complete and consistent. Never how fast anything is."""

import pytest
from bench_tools import run_benchmark

SMALL = ("--layers", 1, "--hidden", 64, "--tokens", 16, "--iterations", 3, "--drop", 1)


@pytest.mark.full
def test_each_bucket_size_is_measured(tmp_path):
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        path.mkdir()
    status, said, result = run_benchmark(
        "param_gather",
        *("--paths", *paths, *SMALL, "--bucket-sizes", 20_000, 10_000_000),
        json_file=tmp_path / "out.json",
    )
    assert status == 0, said
    small, whole = result["bucket_sizes"]
    assert small["bucket_count"] > whole["bucket_count"] == 1
    for size in (small, whole):
        for median, low, high in (
            size[name] for name in ("wait_seconds", "step_seconds", "iteration_seconds", "bound")
        ):
            assert 0 < low <= median <= high
        assert size["iteration_seconds"][1] >= size["step_seconds"][1]
        assert size["wait_seconds"][2] >= size["first_wait_seconds"][2]
        assert size["bound"][2] < 1
    # Of one bucket the first wait is all there is, but for asking again whether it is there.
    assert whole["wait_seconds"] == pytest.approx(whole["first_wait_seconds"], rel=0.1)
    assert not any(file.is_file() for path in paths for file in path.rglob("*"))


def test_one_rank_is_refused(tmp_path):
    status, said, result = run_benchmark(
        "param_gather", "--paths", tmp_path, "--ranks", 1, json_file=tmp_path / "out.json"
    )
    assert status == 2 and "one rank gathers nothing" in said and result is None
