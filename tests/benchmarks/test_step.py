"""The step benchmark, tiny: what it says has to be complete and consistent. Never how fast anything is."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from bench_tools import NO_CAPS_HERE, REPOSITORY, deepspeed_is_here, other_errors, run_benchmark

from benchmarks.prediction import predict
from benchmarks.report import Caps

FIELDS = {
    "update_seconds",
    "iteration_seconds",
    "compute_seconds",
    "bytes_read",
    "bytes_written",
    "bytes_per_parameter",
    "efficiency",
}
SMALL = ("--rounds", 1, "--steps", 2, "--threads", 1, "--tokens", 16)
CAPS = ("--capped", "200:200", "100:100")


def test_all_systems_in_one_run(tmp_path):
    memory = 14 * 2**20
    status, said, result = run_benchmark(
        "step",
        *("--params", 4, *CAPS, *SMALL, "--capped-where", tmp_path, "--host-memory", memory),
        *("--deepspeed-option", "buffer_count=12"),
        json_file=tmp_path / "out.json",
    )
    if result is None:
        assert NO_CAPS_HERE in said
        return
    assert other_errors(result) == []
    assert (status == 0) == (result["errors"] == [])
    ours_and_sequential = ["mlp", "mlp_one_path", "sequential"]
    assert result["equal_in_every_bit"] == ours_and_sequential
    if deepspeed_is_here():
        names = {*ours_and_sequential, "deepspeed"}
        assert result["deepspeed"]["subgroup_count"] > 1
        assert len(result["deepspeed"]["losses"]) == 4
        # It starts from the same weights and sees the same batch.
        assert result["deepspeed"]["losses"][0] == pytest.approx(result["mlp"]["losses"][0], rel=1e-2)
    else:
        names = set(ours_and_sequential)
        assert any("deepspeed is left out" in note for note in result["notes"])
    assert set(result["settings"]["systems"]) == names
    for name in names:
        system = result[name]
        assert system.keys() >= FIELDS, name
        assert system["steps"] == system["efficiency_steps"] == 2
        assert system["iteration_seconds"] >= system["update_seconds"] > 0
        assert system["bytes_per_parameter"] == pytest.approx(
            (system["bytes_read"] + system["bytes_written"]) / system["parameters"]
        )
        assert 0 < system["buffer_bytes"] <= memory
        assert (round(max(system["efficiency"], system["efficiency_window"]), 2) > 1) == any(
            error.startswith(f"{name}:") for error in result["errors"]
        )
    for name in ("mlp", "mlp_one_path"):
        system = result[name]
        assert system["adam_parameters_per_second"] > 0
        assert system["prediction_error"] == pytest.approx(
            system["predicted_update_seconds"] / system["update_seconds"] - 1
        )
        # No faster than the caps allow for the bytes that the kernel counted; how near it came is not looked at here.
        cap = {"mlp": 300e6, "mlp_one_path": 200e6}[name]
        assert system["predicted_update_seconds"] > 0.9 * system["bytes_read"] / cap
    assert "predicted_update_seconds" not in result["sequential"]
    # The kernel's own count of what this one must move: every byte of the state, once each way, and nothing else.
    for key in ("bytes_read_per_parameter", "bytes_written_per_parameter"):
        assert result["sequential"][key] == pytest.approx(12, rel=0.02)
        assert 0 < result["mlp"][key] < 12
        assert 0 < result["mlp_one_path"][key] < 12
    drawn = tmp_path / "out.png"
    subprocess.run([sys.executable, REPOSITORY / "benchmarks" / "plot.py", tmp_path / "out.json", drawn], check=True)
    assert drawn.read_bytes().startswith(b"\x89PNG")
    assert result["sequential"]["losses"] == result["mlp"]["losses"]
    assert len(set(result["mlp"]["losses"])) == 4


def test_two_ranks_a_pause_and_a_cap_that_changes(tmp_path):
    status, said, result = run_benchmark(
        "step",
        *("--params", 4, *CAPS, *SMALL, "--capped-where", tmp_path, "--systems", "mlp", "mlp_one_path", "--ranks", 2),
        *("--compute-seconds", 0.2, "--throttle", "--throttle-steps", 3),
        json_file=tmp_path / "out.json",
    )
    if result is None:
        assert NO_CAPS_HERE in said
        return
    assert other_errors(result) == []
    assert (status == 0) == (result["errors"] == [])
    mlp, throttle = result["mlp"], result["throttle"]
    assert mlp["compute_seconds"] == pytest.approx(0.2, rel=0.5)
    assert mlp["compute_seconds"] >= 0.2
    assert mlp["parameters"] == pytest.approx(4e6, rel=0.3)
    assert len(mlp["rank_update_seconds"]) == 2
    assert mlp["rank_skew"] == pytest.approx(max(mlp["rank_update_seconds"]) / min(mlp["rank_update_seconds"]) - 1)
    assert (throttle["lowered_before_step"], throttle["restored_before_step"]) == (6, 9)
    assert len(throttle["steps"]) == 11
    second = {tuple(step["caps"][1]) for step in throttle["steps"]}
    assert all(read == pytest.approx(100e6, abs=2) for read, _ in second)
    first = [step["caps"][0][0] / 1e6 for step in throttle["steps"]]
    # Whole steps under one cap; where it changed, a step may see a bit of both.
    assert first[:5] == pytest.approx([200] * 5, abs=0.1)
    assert first[6:8] == pytest.approx([100] * 2, abs=0.1)
    assert first[9:] == pytest.approx([200] * 2, abs=0.1)


def test_a_prediction_is_the_simulators():
    result = {
        "parameters": 2 * 10**7,
        "buffer_bytes": 4 * 10**7,
        "subgroup_size": 10**5,
        "main_itemsize": 2,
        "adam_parameters_per_second": 1e9,
        "compute_seconds": 0.1,
        "update_seconds": 1.0,
    }
    caps = [Caps(0.0, [(4e8, 4e8), (2e8, 1e8), (1e8, 2e8)])]
    found = predict(result, [0, 1], caps, rank_count=2, staging_count=0)
    # 200 MB of state, of which both ranks' buffers hold 40; shares go by each path's slower direction, 4e8 and 1e8.
    assert 0.32 < found["predicted_update_seconds"] < 1.1 * 0.32
    assert found["prediction_error"] == found["predicted_update_seconds"] - 1
    slower = predict(result, [1, 2], caps, rank_count=2, staging_count=0)
    assert slower["predicted_update_seconds"] > 2 * found["predicted_update_seconds"]
    assert predict(result, [0], None, 1, 0) == {"predicted_update_seconds": None, "prediction_error": None}


def test_paths_whose_bytes_cannot_be_told_apart_are_refused(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    status, said, result = run_benchmark(
        "step", "--params", 1, "--paths", tmp_path / "a", tmp_path / "b", json_file=tmp_path / "out.json"
    )
    assert status == 1 and result is None
    assert "each path needs one of its own" in said or "has no counters" in said


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_run_that_is_stopped_takes_everything_away(tmp_path, number):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    command = [sys.executable, str(REPOSITORY / "benchmarks" / "step.py"), "--params", "4", *CAPS, "--rounds", "99"]
    process = subprocess.Popen(
        [*command, "--capped-where", str(tmp_path), "--systems", "mlp", "sequential", "--threads", "1"],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(scratch)},
    )
    said = ""
    while "round 1" not in said and (line := process.stderr.readline()):
        said += line
    if NO_CAPS_HERE in said:
        return
    workers = children(process.pid)
    assert len(workers) >= 3
    process.send_signal(number)
    process.stderr.read()
    assert process.wait(60) != 0
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() for pid in workers) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [pid for pid in workers if Path(f"/proc/{pid}").exists()] == []
    assert [path for path in scratch.iterdir() if not path.name.startswith("torch")] == []  # torch's own caches
    assert list(tmp_path.iterdir()) == [scratch]
    assert str(tmp_path) not in Path("/proc/self/mounts").read_text()


def children(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
