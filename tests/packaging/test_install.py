"""Wheel and sdist hold all that is needed: installed elsewhere, away from the checkout, the README's example runs."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from megatron_trees import unpack

REPOSITORY = Path(__file__).resolve().parents[2]


def readme_example():
    """The first Python block of the README."""
    return re.search(r"```python\n(.*?)```", (REPOSITORY / "README.md").read_text(), re.S).group(1)


def call(*command, cwd, **options):
    done = subprocess.run([str(c) for c in command], cwd=cwd, capture_output=True, text=True, timeout=1500, **options)
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def distributions(tmp_path_factory):
    """An sdist of a copy of the checkout's tracked files, and a wheel built from that sdist."""
    place = tmp_path_factory.mktemp("dist")
    source = place / "source"
    source.mkdir()
    files = call("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=REPOSITORY).split("\0")
    for name in filter(None, files):
        target = source / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((REPOSITORY / name).read_bytes())
    call(sys.executable, "setup.py", "-q", "sdist", "-d", place, cwd=source)
    (sdist,) = place.glob("*.tar.gz")
    pip = (sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", place)
    call(*pip, sdist, cwd=place)
    (wheel,) = place.glob("*.whl")
    return sdist, wheel


def test_the_readme_example_runs_from_a_wheel_away_from_the_checkout(distributions, tmp_path):
    _, wheel = distributions
    installed = tmp_path / "installed"
    call(sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", installed, wheel, cwd=tmp_path)
    code = readme_example() + "\nimport mlp_offload; print('from', mlp_offload.__file__)\n"
    out = call(sys.executable, "-c", code, cwd=tmp_path, env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(installed)})
    assert f"from {installed}" in out
    out = call(
        sys.executable,
        "-m",
        "mlp_offload",
        "--help",
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(installed)},
    )
    assert "run" in out
    plan = (sys.executable, "-m", "mlp_offload", "plan", "gpt-70b")
    out = call(*plan, cwd=tmp_path, env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(installed)})
    assert "Llama 2 70B" in out and "it fits" in out
    tree = unpack("0.19.2", tmp_path / "tree")
    command = (sys.executable, "-m", "mlp_offload", "patch", "check", tree)
    out = call(*command, cwd=tmp_path, env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(installed)})
    assert "Megatron-Core 0.19.2" in out and "it applies cleanly" in out


@pytest.mark.full
def test_wheel_and_sdist_install_into_empty_environments(distributions, tmp_path):
    for distribution in distributions:
        environment = tmp_path / distribution.suffix.strip(".")
        call(sys.executable, "-m", "venv", environment, cwd=tmp_path)
        python = environment / "bin" / "python"
        call(python, "-m", "pip", "install", "-q", "torch>=2.6,<=2.13.0", distribution, cwd=tmp_path)
        call(python, "-c", readme_example(), cwd=tmp_path)
        call(environment / "bin" / "mlp-offload", "--help", cwd=tmp_path)
