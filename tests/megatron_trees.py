"""The source of Megatron-Core's releases, from their wheels on PyPI (two to three MB each), kept in .work/megatron."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest

RELEASES = ("0.16.1", "0.17.1", "0.18.2", "0.19.2")
_CACHE = Path(__file__).resolve().parents[1] / ".work" / "megatron"
# Wheels of one Python for all: they hold the same source, and what is compiled is not needed.
_PIP = (sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "--python-version=3.12")


def unpack(release: str, directory: Path) -> Path:
    """A new tree of ``release`` in ``directory``, which is returned; skips the test where it cannot be downloaded."""
    with zipfile.ZipFile(_wheel(release)) as wheel:
        wheel.extractall(directory)
    return directory


def _wheel(release: str) -> Path:
    pattern = f"megatron_core-{release}-*.whl"
    _CACHE.mkdir(parents=True, exist_ok=True)
    if not any(_CACHE.glob(pattern)):
        with tempfile.TemporaryDirectory(dir=_CACHE) as place:
            command = [*_PIP, "--dest", place, f"megatron-core=={release}"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=200)
            if done.returncode != 0:
                pytest.skip(f"megatron-core {release} cannot be downloaded: {done.stderr.strip()[-500:]}")
            for file in Path(place).glob(pattern):
                file.replace(_CACHE / file.name)
    return next(_CACHE.glob(pattern))
