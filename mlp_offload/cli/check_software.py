"""What is installed and built, told by loading it: our native parts here, torch and Megatron in a process of their own."""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .findings import NOTE, OK, PROBLEM, Finding
from .patch import releases

TESTED_MEGATRON = ("0.16.1", "0.19.2")
"""Releases of Megatron-Core that the whole test suite runs on; in between, the patches."""

_PACKAGE = Path(__file__).resolve().parents[1]
_AREA = "software"
_LOAD_SECONDS = 300.0
_DRIVER_SECONDS = 20.0

# Its last line is one JSON object: versions, or why something does not load. A crash in there is an answer, too.
_LOAD = """
import json, sys
found = {}
try:
    import torch
    found["torch"] = torch.__version__
    found["torch_cuda"] = torch.version.cuda
    found["gpus"] = torch.cuda.device_count()
except Exception as error:
    found["torch_error"] = f"{type(error).__name__}: {error}"
else:
    try:
        from mlp_offload.cuda import available
        found["kernels"] = [available(i) for i in range(found["gpus"])]
    except Exception as error:
        found["kernels"] = [[False, f"{type(error).__name__}: {error}"]]
    try:
        import mlp_offload.megatron.self_check as self_check
        found["megatron"] = self_check.megatron_version()
        self_check.check_internals()
    except Exception as error:
        found["megatron_error"] = f"{type(error).__name__}: {error}"
print()
print(json.dumps(found))
"""


def native_module() -> "tuple[Any, str]":
    """The native module, or None and why it does not load."""
    try:
        return importlib.import_module("mlp_offload._native"), ""
    except ImportError as error:
        return None, str(error)


def check_software() -> "Iterator[Finding]":
    """Ours first, then what it builds on."""
    yield Finding(_AREA, "Python", OK, f"{platform.python_version()}, {sys.executable}")
    native, reason = native_module()
    if native is None:
        advice = "Build it: pip install . (or python setup.py build_ext --inplace in a checkout), with this Python"
        yield Finding(_AREA, "native module", PROBLEM, f"does not load: {reason}", advice)
    else:
        yield Finding(_AREA, "native module", OK, str(native.__file__))
        yield _uring_built(native)
        yield Finding(_AREA, "Adam kernel", OK, f"{', '.join(native.adam_variants())} run on this processor")
    loaded = _load()
    yield from _torch(loaded)
    yield from _cuda(loaded)
    yield from _megatron(loaded)
    yield from _optional()


def _uring_built(native: Any) -> Finding:
    if native.io_uring_compiled:
        return Finding(_AREA, "io_uring engine", OK, "built in")
    found = "not built in: liburing was not found; the threads engine serves"
    return Finding(_AREA, "io_uring engine", NOTE, found, "Install liburing-dev and build again")


def _load() -> "dict[str, Any]":
    """What ``_LOAD`` says, or the keys that tell that it does not."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(_PACKAGE.parent), *filter(None, sys.path)])}
    command = [sys.executable, "-c", _LOAD]
    pipes = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True, "errors": "replace"}
    try:
        done = subprocess.run(command, env=environment, timeout=_LOAD_SECONDS, **pipes)
    except subprocess.TimeoutExpired:
        return {"torch_error": f"did not load within {_LOAD_SECONDS:g} s"}
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [""])[-1]
        return {"torch_error": f"loading it ended with status {done.returncode}: {last}"}
    return json.loads(done.stdout.splitlines()[-1])


def _torch(loaded: "dict[str, Any]") -> "Iterator[Finding]":
    if "torch_error" in loaded:
        yield Finding(_AREA, "PyTorch", PROBLEM, loaded["torch_error"], "Install it: pip install 'torch>=2.6'")
        return
    built = f"built for CUDA {loaded['torch_cuda']}" if loaded["torch_cuda"] else "built for the CPU only"
    found = f"{loaded['torch']}, {built}; it sees {loaded['gpus']} GPUs"
    if tuple(map(int, loaded["torch"].split(".")[:2])) < (2, 6):
        yield Finding(_AREA, "PyTorch", PROBLEM, found, "Install 2.6 or later")
    else:
        yield Finding(_AREA, "PyTorch", OK, found)


def _cuda(loaded: "dict[str, Any]") -> "Iterator[Finding]":
    driver = _driver()
    gpus = [line for line in _driver_gpus() if line]
    if driver or gpus:
        yield Finding(
            _AREA, "GPUs", OK, f"driver {driver or 'of unknown version'}: {'; '.join(gpus) or 'it lists none'}"
        )
    else:
        yield Finding(_AREA, "GPUs", NOTE, "no NVIDIA driver here: runs use the CPU, which is for trials")
    if gpus and loaded.get("gpus") == 0:
        yield Finding(
            *(_AREA, "PyTorch and GPUs", PROBLEM, "the driver has GPUs that PyTorch does not see"),
            "Look at CUDA_VISIBLE_DEVICES, and install a PyTorch for the driver's CUDA",
        )
    library, nvcc = _PACKAGE / "_cuda.so", _nvcc()
    compiler = f"nvcc here: {nvcc}" if nvcc else "no nvcc here"
    if not library.exists():
        advice = "Load the CUDA toolkit (nvcc) and build again" if gpus else ""
        yield Finding(_AREA, "CUDA kernels", NOTE, f"not built ({compiler}); nothing else needs them", advice)
        return
    try:
        ctypes.CDLL(str(library))
    except OSError as error:
        yield Finding(_AREA, "CUDA kernels", NOTE, f"built, but do not load: {error}", "Build again on this machine")
        return
    refused = [reason for works, reason in loaded.get("kernels", ()) if not works]
    if refused:
        yield Finding(_AREA, "CUDA kernels", NOTE, f"built ({compiler}); {refused[0]}", "Build again for this GPU")
    elif loaded.get("kernels"):
        yield Finding(_AREA, "CUDA kernels", OK, f"built, and load on {len(loaded['kernels'])} GPUs")
    else:
        yield Finding(_AREA, "CUDA kernels", OK, f"built ({compiler}); no GPU to run them on, which is no obstacle")


def _megatron(loaded: "dict[str, Any]") -> "Iterator[Finding]":
    if "torch_error" in loaded:
        return
    version, error = loaded.get("megatron"), loaded.get("megatron_error")
    if version is None:
        found = f"does not load ({error}); OffloadedAdamW, for plain PyTorch, needs none"
        yield Finding(
            _AREA,
            "Megatron-Core",
            NOTE,
            found,
            f"For `mlp-offload run`: pip install megatron-core=={TESTED_MEGATRON[-1]}",
        )
    elif error is not None:
        yield Finding(_AREA, "Megatron-Core", PROBLEM, f"{version}: {error}", f"Install one of {', '.join(releases())}")
    elif version.partition("+")[0] in TESTED_MEGATRON:  # behind + is the commit of any repository that it lies in
        yield Finding(_AREA, "Megatron-Core", OK, f"{version}, tested; what offload relies on is there")
    else:
        found = f"{version}: what offload relies on is there; the test suite runs on {' and '.join(TESTED_MEGATRON)}"
        yield Finding(_AREA, "Megatron-Core", NOTE, found, "Compare the first losses with --optimizer-offload none")


def _optional() -> "Iterator[Finding]":
    version = _version("transformer-engine")
    text = (
        f"{version}; the test suite runs without it"
        if version
        else "not there: Megatron's own layers serve (--transformer-impl local)"
    )
    yield Finding(_AREA, "Transformer Engine", NOTE if version else OK, text)
    if importlib.util.find_spec("apex") is None:
        yield Finding(_AREA, "Apex", OK, "not there; not needed")
    elif importlib.util.find_spec("amp_C") is None:
        advice = "pip uninstall apex: PyPI's apex is another project"
        yield Finding(_AREA, "Apex", NOTE, "a package of this name is there, without NVIDIA's kernels (amp_C)", advice)
    else:
        yield Finding(_AREA, "Apex", NOTE, "there; the test suite runs without it")
    version = _version("matplotlib")
    advice = "" if version else "pip install matplotlib"
    yield Finding(_AREA, "matplotlib", OK if version else NOTE, version or "not there: no plots", advice)


# ------------------------------------------------------------------------------------------ helpers


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _nvcc() -> str:
    homes = [os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    return shutil.which("nvcc") or next((c for h in homes if h and (c := shutil.which(f"{h}/bin/nvcc"))), "")


def _driver() -> str:
    """Version of the NVIDIA driver; empty where there is none."""
    try:
        words = Path("/proc/driver/nvidia/version").read_text().splitlines()[0].split()
    except (OSError, IndexError):
        return ""
    return next((word for word in words if word[0].isdigit() and "." in word), "of unknown version")


def _driver_gpus() -> "list[str]":
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_DRIVER_SECONDS)
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.strip().splitlines() if done.returncode == 0 else []
