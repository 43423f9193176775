"""Check on one GPU what cannot be checked without one: bash scripts/gpu_check.sh [--parts PART,...] [--wheels DIR]

Part by part, each in a process of its own and with a time limit; a part that fails is told, and the next one runs:

    build      the native module and the CUDA kernels, in place
    tests      tests/gpu
    benchmark  benchmarks/gpu.py: transfers, Adam, overlap, bits, GPU memory
    sanitizer  compute-sanitizer (memcheck, racecheck) over every kernel, where it is installed
    megatron   a tiny GPT on Megatron-Core, five iterations with offload and five with the stock optimizer: losses,
               gradient norms and all parameters have to be equal bit for bit; where Megatron-Core is installed or brought

The last line of the output is one JSON object with all results, also written to $OUT/gpu_check.json (OUT unset:
.work/gpu_check.json). The exit status is 0 only if nothing failed.

Runs with the Python that has torch; needs no network and installs nothing. What that Python lacks is taken from wheels in
--wheels (default: .work/gpu-wheels), unpacked below .work/. --fetch-wheels fills that directory (about 25 MB) where there
is a network; run it with the same Python version as the GPU machine's.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

REPOSITORY = Path(__file__).resolve().parent.parent
WORK = REPOSITORY / ".work"
MOST_SECONDS = 345.0
LIMITS = {"start": 60.0, "build": 170.0, "tests": 120.0, "benchmark": 70.0, "sanitizer": 100.0, "megatron": 120.0}
MOST_WHEEL_BYTES = 64 * 2**20

WHEELS = {  # module -> what pip fetches
    "numpy": "numpy",
    "setuptools": "setuptools>=68",
    "pybind11": "pybind11>=2.12",
    "pytest": "pytest>=8",
    "pytest_timeout": "pytest-timeout>=2.3",
    "iniconfig": "iniconfig",
    "pluggy": "pluggy",
    "packaging": "packaging>=24.2",
    "pygments": "pygments",
    "psutil": "psutil",
    "rich": "rich>=13",
    "markdown_it": "markdown-it-py",
    "mdurl": "mdurl",
    "yaml": "pyyaml",
    "einops": "einops",
    "omegaconf": "omegaconf>=2.3",
    "antlr4": "antlr4-python3-runtime==4.9.*",
    "megatron": "megatron-core==0.19.2",
}
GPT = """
    --num-layers 2 --hidden-size 128 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64
    --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights --make-vocab-size-divisible-by 64 --use-cpu-initialization
    --bf16 --use-distributed-optimizer --micro-batch-size 4 --global-batch-size 8 --clip-grad 1.0 --seed 1234
    --lr 3e-3 --weight-decay 0.1 --train-iters 5 --lr-decay-iters 5 --mock-data --tokenizer-type NullTokenizer
    --vocab-size 255 --split 99,1,0 --eval-iters 0 --eval-interval 1000 --num-workers 0 --log-interval 1
"""
OFFLOAD = "--optimizer-offload mlp --mlp-offload-subgroup-size 20000 --mlp-offload-host-memory 1MiB"
FIND_NVCC = """
import runpy, sys
sys.argv = ["setup.py", "--version"]
print("\\n" + (runpy.run_path("setup.py")["find_nvcc"]() or ""))
"""
VERSIONS = """
import json, torch
gpu = torch.cuda.get_device_properties(0) if torch.cuda.is_available() else None
found = {"gpu": gpu and f"{gpu.name}, compute capability {gpu.major}.{gpu.minor}"}
print(json.dumps(found | {"torch": torch.__version__, "cuda": torch.version.cuda}))
"""
DETERMINISTIC = """
    CUDA_DEVICE_MAX_CONNECTIONS=1 CUBLAS_WORKSPACE_CONFIG=:4096:8 NCCL_ALGO=Ring NVTE_ALLOW_NONDETERMINISTIC_ALGO=0
"""


class Failed(Exception):
    """Why a part failed."""


class Skipped(Exception):
    """A part cannot run here; the message is its reason."""


def main() -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="gpu_check.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", default=",".join(PARTS), help="which, in order (default: %(default)s)")
    parser.add_argument("--wheels", type=Path, default=WORK / "gpu-wheels", metavar="DIR", help="wheels brought along")
    parser.add_argument("--fetch-wheels", action="store_true", help="fetch the wheels, check nothing")
    parser.add_argument(
        "--patience", type=float, default=1.0, metavar="FACTOR", help="all time limits times this (default: 1)"
    )
    parser.add_argument("--commit", help="what is checked, for the result; where git cannot tell")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try this script without a GPU"
    )
    options = parser.parse_args()
    parts = options.parts.split(",")
    if unknown := [part for part in parts if part not in PARTS]:
        parser.error(f"--parts: {', '.join(unknown)} unknown; choose from {', '.join(PARTS)}")
    if options.fetch_wheels:
        return fetch_wheels(options.wheels)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what a part has started ends, too
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as scratch:
        return Check(options.device, options.wheels, Path(scratch), options.patience).run(parts, options.commit)


def fetch_wheels(directory: Path) -> int:
    """Let this Python's pip put all of WHEELS into ``directory``; what was in it goes."""
    shutil.rmtree(directory, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(directory)]
    done = subprocess.run([*command, *WHEELS.values()])
    if done.returncode != 0:
        return done.returncode
    wheels = list(directory.glob("*.whl"))
    nbytes = sum(wheel.stat().st_size for wheel in wheels)
    print(f"gpu_check: {len(wheels)} wheels, {nbytes / 1e6:.1f} MB in {directory}")
    return 0 if nbytes <= MOST_WHEEL_BYTES else sys.exit("gpu_check: that is more than 64 MiB")


class Check:
    """One run of the parts."""

    def __init__(self, device: str, wheels: Path, scratch: Path, patience: float = 1.0):
        self.device, self.wheels, self.scratch, self.patience = device, wheels, scratch, patience
        self.begin = time.monotonic()
        self.deadline = self.begin + patience * LIMITS["start"]  # of the part that is running
        self.result: "dict[str, Any]" = {"ok": False, "errors": {}, "skipped": {}, "seconds": {}}
        self.environment = os.environ | {"PYTHONUNBUFFERED": "1", "PYTHONWARNINGS": "ignore"}

    def run(self, parts: "list[str]", commit: "str | None") -> int:
        """Run ``parts``, print and write the result; returns the exit status."""
        file = Path(os.environ["OUT"]) if os.environ.get("OUT") else WORK
        file.mkdir(parents=True, exist_ok=True)
        try:
            self.result["commit"] = commit or self._commit()
            self.result["versions"] = self._versions()
            self.environment["PYTHONPATH"] = os.pathsep.join([str(REPOSITORY), *self._unpacked()])
            for part in parts:
                self._part(part)
        except Failed as error:  # nothing can run
            self.result["errors"]["start"] = str(error)
            say(str(error))
        self.result["ok"] = not self.result["errors"]
        self.result["seconds"]["all"] = round(time.monotonic() - self.begin, 1)
        text = json.dumps(self.result)
        (file / "gpu_check.json").write_text(text + "\n")
        print(text, flush=True)
        return 0 if self.result["ok"] else 1

    def _part(self, part: str) -> None:
        say(f"{part} ...")
        begin = time.monotonic()
        self.deadline = min(begin + self.patience * LIMITS[part], self.begin + self.patience * MOST_SECONDS)
        try:
            self.result[part] = PARTS[part](self)
        except Skipped as reason:
            self.result["skipped"][part] = str(reason)
            say(f"{part} skipped: {reason}")
        except Exception as error:  # told, and the next part runs
            self.result["errors"][part] = f"{'' if isinstance(error, Failed) else type(error).__name__ + ': '}{error}"
            say(f"{part} FAILED: {error}")
        self.result["seconds"][part] = round(time.monotonic() - begin, 1)

    # -------------------------------------------------------------------------------------- parts

    def build(self) -> "dict[str, str]":
        """How each library came to be there."""
        native, kernels = self._native(), REPOSITORY / "mlp_offload" / "_cuda.so"
        nvcc = self._python("build", "-c", FIND_NVCC).strip().splitlines()[-1]
        found = {"native": "built", "kernels": "built" if nvcc else "brought", "nvcc": nvcc}
        if not nvcc and kernels.exists():
            kernels.touch()  # else the build takes it for older than its sources, whose dates say nothing here
        try:
            self._python("build", "setup.py", "-q", "build_ext", "--inplace")
        except Failed as error:
            if native is None or not kernels.exists():
                raise
            say(f"the build failed, going on with {native.name}: {error}")
            found["native"] = "brought"
        code = "import mlp_offload._native; from mlp_offload.cuda import available; print(available()[1])"
        reason = self._python("build", "-c", code).strip().splitlines()[-1:]
        if not kernels.exists() or (self.device == "cuda" and reason not in ([], [""])):
            raise Failed(f"no usable CUDA kernels: {' '.join(reason) or 'not built'}")
        return found

    def tests(self) -> "dict[str, Any]":
        report = self.scratch / "tests.xml"
        failed = None
        try:
            self._python("tests", "-m", "pytest", "-q", "-rs", "tests/gpu", f"--junitxml={report}")
        except Failed as error:
            failed = error
        if not report.exists():
            raise failed or Failed("pytest wrote no report")
        suite = next(ElementTree.parse(report).getroot().iter("testsuite"))
        counts = {key: int(suite.get(key, 0)) for key in ("tests", "failures", "errors", "skipped")}
        bad = counts["failures"] + counts["errors"]
        found = {"passed": counts["tests"] - bad - counts["skipped"], "failed": bad, "skipped": counts["skipped"]}
        self.result["tests"] = found
        if failed:
            names = [c.get("name") for c in suite.iter("testcase") if c.find("failure") is not None]
            raise Failed(f"{bad} of {counts['tests']} failed: {', '.join(map(str, names[:5]))}" if bad else str(failed))
        if self.device == "cuda" and not found["passed"]:
            raise Failed("all tests were skipped")
        return found

    def benchmark(self) -> "dict[str, Any]":
        size = "64" if self.device == "cuda" else "0.5"
        said = self._python("benchmark", "benchmarks/gpu.py", "--device", self.device, "--params", size)
        return json.loads(said.strip().splitlines()[-1])

    def sanitizer(self) -> "dict[str, str]":
        tool = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
        if tool is None or self.device == "cpu":
            raise Skipped("compute-sanitizer is not installed" if tool is None else "needs a GPU")
        found, bad = {}, []
        for name in ("memcheck", "racecheck"):
            command = [
                tool,
                "--tool",
                name,
                "--error-exitcode",
                "9",
                sys.executable,
                "benchmarks/gpu.py",
                "--kernels-once",
            ]
            try:
                said = self._run("sanitizer", command)
                found[name] = next((line.strip("= ") for line in said.splitlines() if "SUMMARY" in line), "ended well")
            except Failed as error:
                found[name] = str(error)
                bad.append(name)
        self.result["sanitizer"] = found
        if bad:
            raise Failed("; ".join(f"{name}: {found[name]}" for name in bad))
        return found

    def megatron(self) -> "dict[str, Any]":
        if not self._has("megatron"):
            raise Skipped(f"no Megatron-Core: neither installed nor as a wheel in {self.wheels}; see --fetch-wheels")
        path = self.scratch / "path"
        path.mkdir()
        offload = [
            *OFFLOAD.split(),
            "--mlp-offload-path",
            str(path),
            "--mlp-offload-telemetry",
            str(self.scratch / "t"),
        ]
        records = {}
        for name, extra in (("stock", ["--fused-adam"]), ("offloaded", offload)):
            record = self.scratch / name
            arguments = [*GPT.split(), "--data-cache-path", str(self.scratch / "cache"), *extra]
            if self.device == "cuda":
                arguments.append("--deterministic-mode")
            script = ("-m", "mlp_offload", "run", "scripts/recorded_gpt.py", "--record", str(record), "--hash-at", "5")
            self._python("megatron", *script, *arguments)
            lines = (record / "rank0000.jsonl").read_text().splitlines()
            records[name] = [json.loads(line) for line in lines[1:]]
        telemetry = [json.loads(line) for line in (self.scratch / "t" / "rank0000.jsonl").read_text().splitlines()]
        same = {
            key: [line.get(key) for line in records["stock"]] == [line.get(key) for line in records["offloaded"]]
            for key in ("loss", "grad_norm", "parameters_sha256")
        }
        found = {
            "iterations": len(records["offloaded"]),
            "losses": [float.fromhex(line["loss"]) for line in records["offloaded"]],
            "stock_losses": [float.fromhex(line["loss"]) for line in records["stock"]],
            "same_bits": same,
            "bytes_read": sum(sum(record["bytes_read"].values()) for record in telemetry),
        }
        self.result["megatron"] = found
        if not all(same.values()) or found["iterations"] != 5 or records["stock"][-1].get("parameters_sha256") is None:
            raise Failed(f"not the bits of the stock optimizer: {same}, {found['iterations']} iterations")
        if not found["bytes_read"]:
            raise Failed("no state was read from the path, so nothing was offloaded")
        return found

    # ------------------------------------------------------------------------------------ helpers

    def _python(self, part: str, *arguments: str) -> str:
        """As ``_run``, of this Python."""
        return self._run(part, [sys.executable, *arguments])

    def _run(self, part: str, command: "list[str]") -> str:
        """Run a command of ``part`` in the repository; returns its output.

        Raises:
            Failed: it ended with another status than 0, or the part's time is up.
        """
        limit = self.deadline - time.monotonic()
        if limit <= 1:
            raise Failed("no time left for it")
        environment = self.environment | dict(x.split("=") for x in DETERMINISTIC.split() if part == "megatron")
        with open(self.scratch / f"{part}.log", "w+", errors="replace") as log:
            process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=environment, cwd=REPOSITORY, start_new_session=True
            )
            try:
                status: "int | None" = process.wait(limit)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            log.seek(0)
            said = log.read()
        if status == 0:
            return said
        print(said[-6000:], flush=True)
        last = next((line for line in reversed(said.splitlines()) if line.strip()), "no output")
        raise Failed(f"{f'status {status}' if status is not None else f'stopped after {limit:.0f} s'}: {last[-300:]}")

    def _unpacked(self) -> "list[str]":
        """Directories with what this Python lacks; a wheel needs no more than to be unpacked."""
        directories = []
        for module, wanted in WHEELS.items():
            if importlib.util.find_spec(module) is not None:
                continue
            name = re.split(r"[=<>]", wanted)[0].replace("-", "_")
            wheel = next(iter(sorted(self.wheels.glob(f"{name}-*.whl"), reverse=True)), None)
            if wheel is None:
                continue
            directory = WORK / "gpu-site" / wheel.stem
            if not directory.exists():
                with zipfile.ZipFile(wheel) as archive:
                    archive.extractall(directory)
            directories.append(str(directory))
        if directories:
            say(f"from wheels: {', '.join(Path(d).name.partition('-')[0] for d in directories)}")
        return directories

    def _has(self, module: str) -> bool:
        command = [sys.executable, "-c", f"import {module}"]
        return subprocess.run(command, env=self.environment, capture_output=True).returncode == 0

    def _versions(self) -> "dict[str, Any]":
        """Raises Failed where there is no torch, or no GPU that it can use."""
        if importlib.util.find_spec("torch") is None:
            raise Failed(f"{sys.executable} has no torch: set PYTHON to the Python that has it")
        found = json.loads(self._python("start", "-c", VERSIONS).strip().splitlines()[-1])
        if self.device == "cuda" and found["gpu"] is None:
            raise Failed(f"no GPU here that torch {found['torch']} can use")
        return {"python": platform.python_version()} | found

    @staticmethod
    def _native() -> "Path | None":
        return next(
            iter((REPOSITORY / "mlp_offload").glob(f"_native*{sys.version_info[0]}{sys.version_info[1]}*.so")), None
        )

    @staticmethod
    def _commit() -> "str | None":
        try:
            done = subprocess.run(
                ["git", "describe", "--always", "--dirty"], cwd=REPOSITORY, capture_output=True, text=True
            )
        except OSError:
            return None
        return done.stdout.strip() or None


def say(text: str) -> None:
    print(f"gpu_check: {text}", flush=True)


PARTS: "dict[str, Callable[[Check], Any]]" = {
    "build": Check.build,
    "tests": Check.tests,
    "benchmark": Check.benchmark,
    "sanitizer": Check.sanitizer,
    "megatron": Check.megatron,
}


if __name__ == "__main__":
    sys.exit(main())
