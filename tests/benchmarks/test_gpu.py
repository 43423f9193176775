"""The GPU benchmark and the GPU check, as far as they go without a GPU."""

import json
import os
import subprocess
import sys
import time
import zipfile

import pytest
from bench_tools import REPOSITORY, run_benchmark

sys.path.insert(0, str(REPOSITORY / "scripts"))
import gpu_check


def test_on_the_cpu_the_benchmark_compares_bits_and_tells_how_well_a_step_overlaps(tmp_path):
    file = tmp_path / "gpu.json"
    status, said, found = run_benchmark("gpu", "--device", "cpu", "--params", "0.1", "--rounds", "1", json_file=file)
    assert status == 0, said
    assert found["bits_equal"] == {"bfloat16": True, "float32": True}
    assert found["transfers"] is None and found["memory"] is None
    for rates in found["adam"].values():
        assert rates["update_over_copy"] == pytest.approx(rates["update"] / rates["copy"])
    overlap = found["overlap"]
    parts = overlap["parts_seconds"]
    assert set(parts) == {"storage", "cpu_update"} and min(parts.values()) > 0
    assert overlap["step_over_largest_part"] == pytest.approx(overlap["step_seconds"] / max(parts.values()))
    state_bytes = 10 * found["params"]
    assert 0.5 * 2 * state_bytes < overlap["bytes_moved_a_step"] < 1.2 * 2 * state_bytes  # most is read and written
    assert json.loads(said.strip().splitlines()[-1]) == found


def test_without_a_gpu_the_check_says_so_and_fails(tmp_path):
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OUT": str(tmp_path), "PYTHON": sys.executable}
    command = ["bash", "scripts/gpu_check.sh", "--commit", "abc"]
    done = subprocess.run(command, env=environment, cwd=REPOSITORY, capture_output=True, text=True, timeout=100)
    assert done.returncode == 1, done.stderr
    first, last = done.stdout.splitlines()
    assert first.startswith("gpu_check: no GPU here that torch ")
    result = json.loads(last)
    assert result == json.loads((tmp_path / "gpu_check.json").read_text())
    assert not result["ok"] and result["commit"] == "abc" and "no GPU" in result["errors"]["start"]


def test_a_part_that_fails_or_takes_too_long_is_told_and_the_next_one_runs(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("OUT", str(tmp_path))
    monkeypatch.setattr(gpu_check, "LIMITS", {"start": 100, "fails": 100, "hangs": 0.1, "breaks": 1, "works": 100})

    def skips(check):
        raise gpu_check.Skipped("not here")

    parts = {
        "fails": lambda check: check._python("fails", "-c", "print('why'); raise SystemExit(3)"),
        "hangs": lambda check: check._python("hangs", "-c", "import time; time.sleep(90)"),
        "breaks": lambda check: {}["key"],
        "skips": skips,
        "works": lambda check: json.loads(check._python("works", "-c", "print(5)")),
    }
    monkeypatch.setattr(gpu_check, "LIMITS", gpu_check.LIMITS | {"skips": 1})
    monkeypatch.setattr(gpu_check, "PARTS", parts)
    begin = time.monotonic()
    # The patience is for the hanging part: 0.1 s are too little to start a Python anyway.
    assert gpu_check.Check("cpu", tmp_path, tmp_path, 20).run(list(parts), None) == 1
    assert time.monotonic() - begin < 80
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["errors"] == {
        "fails": "status 3: why",
        "hangs": "stopped after 2 s: no output",
        "breaks": "KeyError: 'key'",
    }
    assert result["skipped"] == {"skips": "not here"}
    assert result["works"] == 5
    assert set(result["seconds"]) == {*parts, "all"}


def test_what_this_python_lacks_comes_from_wheels(monkeypatch, tmp_path):
    monkeypatch.setattr(
        gpu_check, "WHEELS", {"no_such_module": "no-such.module>=1", "json": "json", "absent": "absent"}
    )
    monkeypatch.setattr(gpu_check, "WORK", tmp_path / "work")
    for name in ("no_such.module-1.0-py3-none-any.whl", "json-1.0-py3-none-any.whl"):
        with zipfile.ZipFile(tmp_path / name, "w") as wheel:
            wheel.writestr("no_such_module.py", "value = 7\n")
    directories = gpu_check.Check("cpu", tmp_path, tmp_path)._unpacked()
    assert directories == [str(tmp_path / "work" / "gpu-site" / "no_such.module-1.0-py3-none-any")]
    code = "import no_such_module; print(no_such_module.value)"
    environment = os.environ | {"PYTHONPATH": directories[0]}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.stdout == "7\n"
