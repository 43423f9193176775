"""Builds the native extension ``mlp_offload._native``; everything else is declared in setup.cfg.

A missing liburing costs the io_uring engine, not the build. ``MLP_OFFLOAD_WERROR=1`` (set in CI) turns
warnings into errors.
"""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from pybind11.setup_helpers import Pybind11Extension, build_ext
from setuptools import setup

CSRC = Path("mlp_offload/csrc")


def liburing_link_args() -> "list[str] | None":
    """Arguments that link liburing into a shared object, static first so that a wheel runs where
    the library is not installed; None when it cannot be found."""
    compiler = os.environ.get("CXX", "c++").split()
    if shutil.which(compiler[0]) is None:
        return None
    program = "#include <liburing.h>\nint probe() { io_uring r; return io_uring_queue_init(1, &r, 0); }\n"
    for args in (["-l:liburing.a"], ["-luring"]):
        with tempfile.TemporaryDirectory() as scratch:
            source = Path(scratch, "probe.cpp")
            source.write_text(program)
            command = [*compiler, "-shared", "-fPIC", str(source), "-o", str(Path(scratch, "probe.so")), *args]
            if subprocess.run(command, capture_output=True).returncode == 0:
                return args
    return None


uring = liburing_link_args()
if uring is None:
    print("mlp-offload: liburing not found; building without the io_uring engine (the threads engine is always there)")

# setuptools passes -DNDEBUG, which would remove the checks inside assert(): keep them.
compile_args = ["-UNDEBUG", "-O3", "-Wall", "-Wextra", "-pthread", "-fvisibility=hidden", "-ffp-contract=off"]
if os.environ.get("MLP_OFFLOAD_WERROR") == "1":
    compile_args.append("-Werror")

setup(
    ext_modules=[
        Pybind11Extension(
            "mlp_offload._native",
            sorted(str(p) for p in CSRC.rglob("*.cpp")),
            include_dirs=[str(CSRC)],
            depends=sorted(str(p) for p in CSRC.rglob("*.h")),
            define_macros=[("MLP_OFFLOAD_HAVE_LIBURING", "1")] if uring else [],
            extra_compile_args=compile_args,
            extra_link_args=["-pthread", *(uring or [])],
            cxx_std=17,
        )
    ],
    cmdclass={"build_ext": build_ext},
)
