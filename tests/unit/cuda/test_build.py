"""The CUDA library: built for all targets, with IEEE rounding; and absent, or without a GPU, without harm."""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from mlp_offload import _native
from mlp_offload.cuda import CudaKernels, available
from mlp_offload.errors import CudaError

REPOSITORY = Path(__file__).resolve().parents[3]


def setup_py(*arguments: str, cwd: Path = REPOSITORY, **variables: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "setup.py", "-q", *arguments]
    return subprocess.run(command, cwd=cwd, env=os.environ | variables, capture_output=True, text=True, timeout=280)


@pytest.fixture(scope="module")
def nvcc_command():
    """The command with which setup.py builds the library."""
    code = (
        "import json, runpy, sys; sys.argv = ['setup.py', '--version']; names = runpy.run_path('setup.py')\n"
        "nvcc = names['find_nvcc'](); print(json.dumps(nvcc and names['nvcc_command'](nvcc, 'OUTPUT')))"
    )
    found = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    command = json.loads(found.stdout.splitlines()[-1])
    if not command:
        pytest.skip("no nvcc: install the CUDA toolkit 13.0 or the PyPI package nvidia-cuda-nvcc==13.0.*")
    return command


@pytest.fixture(scope="module")
def library(nvcc_command, tmp_path_factory):
    """The library as nvcc builds it with warnings as errors."""
    output = tmp_path_factory.mktemp("nvcc") / "_cuda.so"
    done = setup_py("build_cuda", "--output", str(output), MLP_OFFLOAD_WERROR="1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "warning" not in (done.stdout + done.stderr).lower()
    return output


def device_code(library: Path) -> "set[tuple[str, int]]":
    """(kind, architecture) of all that is in a library's fat binaries."""
    content, found = library.read_bytes(), set()
    for match in re.finditer(b"\x50\xed\x55\xba\x01\x00", content):
        _, _, header_bytes, nbytes = struct.unpack_from("<IHHQ", content, match.start())
        at = match.start() + header_bytes
        end = at + nbytes
        while at < end:
            kind, _, entry_header_bytes, entry_bytes = struct.unpack_from("<HHIQ", content, at)
            found.add(({1: "ptx", 2: "machine code"}[kind], struct.unpack_from("<I", content, at + 28)[0]))
            at += entry_header_bytes + entry_bytes
    return found


def test_nvcc_builds_all_targets_without_warnings(library):
    assert device_code(library) == {*(("machine code", a) for a in (80, 90, 100)), ("ptx", 100)}


def test_the_library_needs_neither_cuda_nor_torch_to_load(library):
    needed = subprocess.run(["readelf", "-d", library], capture_output=True, text=True, check=True).stdout
    names = re.findall(r"NEEDED.*\[(.*)\]", needed)
    assert names and not [n for n in names if re.search("cuda|torch|python", n)]


def test_device_arithmetic_is_rounded_once_and_loads_are_vectors(nvcc_command, tmp_path):
    """In the PTX every fp32 operation says .rn, so that the assembler fuses none, and none is approximate."""
    ptx = tmp_path / "library.ptx"
    command = [a for a in nvcc_command if a != "-shared" and not a.startswith("-gencode")]
    command[command.index("OUTPUT")] = str(ptx)
    subprocess.run([*command, "-ptx", "-arch=compute_80"], cwd=REPOSITORY, check=True, timeout=280)
    text = ptx.read_text()
    operations = re.findall(r"^\s+(?:@\S+ )?((?:add|sub|mul|div|sqrt|fma|mad|rcp|rsqrt)\.\S*f32)\b", text, re.M)
    assert {o.partition(".")[0] for o in operations} == {"add", "sub", "mul", "div", "sqrt", "fma"}
    assert {o for o in operations if ".rn.f32" not in o or "ftz" in o or "approx" in o} == set()
    for name in ("ld.global.v4.f32", "st.global.v4.f32", "ld.global.v4.u16", "st.global.v4.u16"):
        assert name in text


def test_without_a_gpu_the_built_library_says_so(library):
    """Loaded in a process of its own, which sees no device whatever the machine has."""
    code = (
        "import sys; from pathlib import Path; from mlp_offload.cuda import CudaKernels, CudaError\n"
        "try: CudaKernels(library=Path(sys.argv[1]))\n"
        "except CudaError as error: print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, library],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith("CUDA device 0 cannot be used: ")
    assert "no NVIDIA driver" in done.stdout or "cudaErrorNoDevice" in done.stdout


def test_without_a_working_nvcc_the_package_builds_and_says_what_is_missing(tmp_path):
    """In a copy of the tree whose extension is up to date, so that only the CUDA part is built."""
    shutil.copytree(REPOSITORY / "mlp_offload", tmp_path / "mlp_offload", ignore=shutil.ignore_patterns("_cuda.so"))
    for name in ("setup.py", "setup.cfg", "pyproject.toml", "README.md"):
        shutil.copy2(REPOSITORY / name, tmp_path)
    built = Path(_native.__file__)
    (tmp_path / "built" / "mlp_offload").mkdir(parents=True)
    shutil.copy(built, tmp_path / "built" / "mlp_offload" / built.name)
    failing = tmp_path / "failing-nvcc"
    failing.write_text(
        '#!/bin/sh\ncase "$1" in --list-gpu-arch) echo compute_80 ;; *) echo no licence; exit 7 ;; esac\n'
    )
    failing.chmod(0o755)
    for nvcc, reason in (("/nonexistent/nvcc", "nvcc not found"), (str(failing), "no licence")):
        done = setup_py("build_ext", "--inplace", "--build-lib", "built", cwd=tmp_path, NVCC=nvcc)
        assert done.returncode == 0, done.stderr
        assert "building without CUDA kernels" in done.stdout and reason in done.stdout
    alone = setup_py("build_cuda", cwd=tmp_path, NVCC=str(failing))
    assert alone.returncode != 0 and "no licence" in alone.stderr
    code = "from mlp_offload.cuda import available; from mlp_offload import OffloadedAdamW; print(available())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith("(False, ") and "was not built" in done.stdout and "nvidia-cuda-nvcc" in done.stdout


def test_a_file_that_is_no_library_is_an_error_with_a_next_step(tmp_path):
    library = tmp_path / "_cuda.so"
    library.write_text("text")
    with pytest.raises(CudaError, match="do not load: .*_cuda.so.* Build them again"):
        CudaKernels(library=library)


def test_available_gives_a_reason_or_none():
    usable, reason = available()
    assert usable == (reason == "")
