"""What several folders of unit tests use."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

CSRC = Path(__file__).resolve().parents[2] / "mlp_offload" / "csrc"


@pytest.fixture(scope="session")
def host_library(tmp_path_factory):
    """csrc/cuda/library.cu built without CUDA."""
    compiler = os.environ.get("CXX", "c++").split()
    if shutil.which(compiler[0]) is None:
        pytest.skip(f"no C++ compiler {compiler[0]} to build the kernels' sources with")
    library = tmp_path_factory.mktemp("cuda") / "host_kernels.so"
    flags = ("-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", "-ffp-contract=off", "-fvisibility=hidden")
    source = CSRC / "cuda" / "library.cu"
    command = [*compiler, *flags, "-fPIC", "-shared", "-I", CSRC, "-x", "c++", source, "-o", library]
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return library
