"""``scripts/build_wheels.sh``: what it collects installs where there is no network."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = REPOSITORY / "scripts" / "build_wheels.sh"
CODE = """
import torch
from mlp_offload import OffloadedAdamW
weight = torch.nn.Parameter(torch.ones(100_000))
optimizer = OffloadedAdamW([weight], lr=1e-3, paths=["."], host_memory="1MiB", subgroup_size=16384)
weight.grad = torch.ones_like(weight)
optimizer.step()
optimizer.close()
print("stepped", float(weight.detach()[0]) < 1)
"""


def build_wheels(*arguments, **options):
    command = ["bash", str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, **options)


def test_a_dry_run_shows_what_would_be_collected(tmp_path):
    done = build_wheels("--dry-run", "--python", sys.executable, "--torch", "2.9.0", tmp_path / "wheels", timeout=60)
    assert done.returncode == 0, done.stderr
    for part in (f"{tmp_path}/wheels", "torch==2.9.0", "megatron-core==0.1", "examples"):
        assert part in done.stdout
    assert not (tmp_path / "wheels").exists()


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "no DIR"),
        (["--pyton", "x", "wheels"], "unknown option --pyton"),
        (["one", "two"], "one DIR only"),
        (["--python", "/nowhere/python", "wheels"], "--python /nowhere/python cannot be run"),
    ],
)
def test_wrong_arguments_are_refused(tmp_path, arguments, message):
    done = build_wheels(*arguments, cwd=tmp_path, timeout=60)
    assert done.returncode == 2 and message in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.full
@pytest.mark.timeout(2400)
def test_all_of_it_installs_and_trains_without_a_network(tmp_path):
    python = shutil.which("python3.11")  # whose torch is the smaller one
    if python is None:
        pytest.skip("no python3.11")
    probe = ["unshare", "--map-root-user", "--net", "true"]
    if subprocess.run(probe, capture_output=True).returncode != 0:
        pytest.skip("no network namespaces here (unshare --net)")
    wheels, venv = tmp_path / "wheels", tmp_path / "venv"
    done = build_wheels("--python", python, wheels, timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr
    subprocess.run([python, "-m", "venv", venv], check=True, timeout=60)
    offline = [*probe[:-1], "env", "-i", "PATH=/usr/bin:/bin", f"HOME={tmp_path}"]
    install = [
        venv / "bin/pip",
        "install",
        "-q",
        "--no-index",
        "--find-links",
        wheels,
        "-r",
        wheels / "requirements.txt",
    ]
    for command in (install, [venv / "bin/python", "-c", CODE], [venv / "bin/mlp-offload", "run", "--help"]):
        done = subprocess.run([*offline, *map(str, command)], capture_output=True, text=True, timeout=600, cwd=tmp_path)
        assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
        assert "-c" not in command or done.stdout == "stepped True\n"
