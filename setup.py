"""Builds the native extension ``mlp_offload._native`` and, where nvcc is found, the CUDA kernels ``mlp_offload/_cuda.so``;
everything else is declared in setup.cfg.

A missing liburing costs the io_uring engine, a missing or failing nvcc the CUDA kernels; neither costs the build.
``python setup.py build_cuda`` builds the CUDA kernels alone, and fails where they cannot be built.
``MLP_OFFLOAD_WERROR=1`` (set in CI) turns warnings into errors.
"""

import os
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path

from pybind11.setup_helpers import Pybind11Extension, build_ext
from setuptools import Command, setup

CSRC = Path("mlp_offload/csrc")
CUDA_LIBRARY = "mlp_offload/_cuda.so"
CUDA_ARCHITECTURES = ("80", "90", "100")  # machine code for these, and PTX of the last for what comes after it
WERROR = os.environ.get("MLP_OFFLOAD_WERROR") == "1"


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


def find_nvcc() -> "str | None":
    """$NVCC, where it is set; else nvcc on PATH, in $CUDA_HOME, in /usr/local/cuda, or of the PyPI packages
    nvidia-cuda-nvcc and friends."""
    if wanted := os.environ.get("NVCC"):
        return shutil.which(wanted)
    packages = Path(sysconfig.get_path("purelib"), "nvidia")
    homes = [os.environ.get("CUDA_HOME"), "/usr/local/cuda", *sorted(map(str, packages.glob("cu*")), reverse=True)]
    return shutil.which("nvcc") or next((c for h in homes if h and (c := shutil.which(f"{h}/bin/nvcc"))), None)


def nvcc_command(nvcc: str, output: Path) -> "list[str]":
    """The command that builds the CUDA kernels: rounding is IEEE's, nothing is fused that is not written so."""
    known = subprocess.run([nvcc, "--list-gpu-arch"], capture_output=True, text=True, check=True).stdout.split()
    architectures = [a for a in CUDA_ARCHITECTURES if f"compute_{a}" in known]
    if not architectures:
        raise RuntimeError(f"{nvcc} compiles for none of compute_{', compute_'.join(CUDA_ARCHITECTURES)}")
    code = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in architectures]
    code.append(f"-gencode=arch=compute_{architectures[-1]},code=compute_{architectures[-1]}")
    warnings = ["-Wall", "-Wextra", *(["-Werror"] if WERROR else [])]
    host = ",".join(["-fPIC", "-fvisibility=hidden", "-ffp-contract=off", *warnings])
    rounding = ["-fmad=false", "-ftz=false", "-prec-div=true", "-prec-sqrt=true"]
    return [
        *(nvcc, "-std=c++17", "-O3", "-shared", "-cudart", "static", *rounding, *code, f"-Xcompiler={host}"),
        *(["-Werror", "all-warnings"] if WERROR else []),
        # The PyPI packages have their libraries in lib, where nvcc does not look.
        *(f"-L{lib}" for lib in [Path(nvcc).resolve().parents[1] / "lib"] if lib.is_dir()),
        *("-I", str(CSRC), str(CSRC / "cuda" / "library.cu"), "-o", str(output)),
    ]


def build_cuda_library(output: Path) -> None:
    """Build the CUDA kernels, unless ``output`` is newer than all it is made from; RuntimeError says why it cannot be."""
    made_from = [Path(__file__), *CSRC.rglob("*.h"), *CSRC.rglob("*.cu")]
    if output.exists() and output.stat().st_mtime > max(p.stat().st_mtime for p in made_from):
        return
    output.unlink(missing_ok=True)  # a library of older sources is worse than none
    nvcc = find_nvcc()
    if nvcc is None:
        raise RuntimeError(
            "nvcc not found: neither NVCC, PATH and CUDA_HOME nor the PyPI packages nvidia-cuda-nvcc and friends have it"
        )
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(nvcc_command(nvcc, output), capture_output=True, text=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise RuntimeError(f"{nvcc} does not run: {error}") from error
    if done.returncode != 0:
        raise RuntimeError(f"{nvcc} failed:\n{(done.stdout + done.stderr)[-4000:]}")


class BuildExtensions(build_ext):
    """The extension modules, then the CUDA kernels beside them."""

    def run(self):
        super().run()
        output = Path(CUDA_LIBRARY) if self.inplace else Path(self.build_lib, CUDA_LIBRARY)
        try:
            build_cuda_library(output)
        except RuntimeError as error:
            print(f"mlp-offload: building without CUDA kernels (nothing else needs them): {error}")

    def get_outputs(self):
        built = Path(self.build_lib, CUDA_LIBRARY)
        return super().get_outputs() + ([str(built)] if built.exists() else [])


class BuildCuda(Command):
    """The CUDA kernels alone."""

    user_options = [("output=", "o", f"where to put the library (default: {CUDA_LIBRARY})")]

    def initialize_options(self):
        self.output = CUDA_LIBRARY

    def finalize_options(self):
        self.output = Path(self.output)

    def run(self):
        try:
            build_cuda_library(self.output)
        except RuntimeError as error:
            raise SystemExit(f"mlp-offload: {error}") from error


uring = liburing_link_args()
if uring is None:
    print("mlp-offload: liburing not found; building without the io_uring engine (the threads engine is always there)")

# setuptools passes -DNDEBUG, which would remove the checks inside assert(): keep them.
compile_args = ["-UNDEBUG", "-O3", "-Wall", "-Wextra", "-pthread", "-fvisibility=hidden", "-ffp-contract=off"]
if WERROR:
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
    cmdclass={"build_ext": BuildExtensions, "build_cuda": BuildCuda},
)
