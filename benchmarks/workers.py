"""The systems of ``benchmarks/step.py`` as worker processes: start them, run blocks of steps, keep what they measured."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import report
from benchmarks.capped import CappedPath
from benchmarks.gpt import GPT, shape_for
from benchmarks.systems.worker import device_of
from mlp_offload.config import PathConfig

REPOSITORY = Path(__file__).resolve().parents[1]
STATE_BYTES = 12  # a parameter
DEFAULT_MEMORY_SHARE = 0.3  # of the state
SUBGROUPS_IN_MEMORY = 32
PAGE_BYTES = 4096


class BenchmarkError(Exception):
    """The benchmark cannot be run, or a system failed."""


class Worker:
    """A system in its own process (one of its ranks)."""

    def __init__(self, module: str, python: str, settings: "dict[str, Any]", log: Path, environment: "dict[str, str]"):
        self.name, self.log = settings["name"], log
        # The worker's output ends when it does, so nothing here waits for a dead process.
        with open(log, "w") as errors:
            self.process = subprocess.Popen(
                [python, "-m", f"benchmarks.systems.{module}", json.dumps(settings)],
                cwd=REPOSITORY,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                bufsize=1,
            )

    def answer(self) -> "dict[str, Any]":
        """Its next line."""
        line = self.process.stdout.readline()
        message = json.loads(line) if line else {"error": f"it ended with {self.process.wait()}"}
        if "error" in message:
            tail = "".join(self.log.read_text(errors="replace").splitlines(keepends=True)[-15:])
            raise BenchmarkError(f"{self.name}: {message['error'].strip()}\n{tail}")
        return message

    def ask(self, steps: int, compute: bool) -> None:
        self.process.stdin.write(json.dumps({"run": steps, "compute": compute}) + "\n")

    def close(self) -> None:
        """Let it remove its files; after a while, end it."""
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Bench:
    """All workers of one run, and what they measured."""

    def __init__(self, options: argparse.Namespace, paths: "list[PathConfig]", scratch: Path):
        self.options, self.paths, self.scratch = options, paths, scratch
        self.workers: "dict[str, list[Worker]]" = {}
        self.measured: "dict[str, report.Measured]" = {}
        self.devices = [device_of(path.resolved_directory()) for path in paths]
        if len(set(self.devices)) < len(self.devices):
            raise BenchmarkError(
                f"paths {[path.directory for path in paths]} lie on devices {self.devices}: their bytes are read from the "
                "counters of the devices, so each path needs one of its own"
            )
        known = all(path.read and path.write for path in paths)
        self.history = [report.Caps(0.0, [(path.read, path.write) for path in paths])] if known else None
        self.faster = max(range(len(paths)), key=lambda i: (paths[i].bytes_per_second or 0, -i))
        with torch.device("meta"):
            model = GPT(*shape_for(options.params), options.tokens)
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        self.host_memory = options.host_memory or int(DEFAULT_MEMORY_SHARE * STATE_BYTES * self.parameters)

    # ------------------------------------------------------------------------------------ workers

    def start(self, name: str) -> None:
        """Start the processes of a system; `ready` waits for them."""
        options = self.options
        module = "mlp" if name == "mlp_one_path" else name
        ranks = options.ranks if module == "mlp" else 1
        told = [str(self.paths[i]) if options.rates else self.paths[i].directory for i in self.used_by(name)]
        memory = self.host_memory // ranks
        settings = {
            "name": name,
            "parent": os.getpid(),
            "params": options.params / ranks,
            "paths": told,
            "devices": self.devices,
            "host_memory": self.host_memory,
            "subgroup_size": options.subgroup_size or max(1, (memory // SUBGROUPS_IN_MEMORY - PAGE_BYTES) // 12 - 16),
            "threads": max(1, options.threads // ranks),
            "rank_count": ranks,
            "rendezvous": str(self.scratch / f"rendezvous-{name}"),
            "options": {"mlp": options.mlp_option, "deepspeed": options.deepspeed_option}.get(module, {}),
            "betas": [0.9, 0.95],
            "eps": 1e-8,
            "weight_decay": 0.1,
        } | {key: getattr(options, key) for key in ("batch", "tokens", "seed", "lr", "compute_seconds")}
        python, environment = sys.executable, os.environ | {"OMP_NUM_THREADS": str(settings["threads"])}
        if module == "deepspeed":
            venv = Path(options.deepspeed_venv).resolve()
            python = str(venv / "bin" / "python")
            environment.pop("PYTHONPATH", None)  # its packages are of another Python
            environment |= {
                "PATH": f"{venv}/bin{os.pathsep}{os.environ.get('PATH', '')}",
                "TORCH_EXTENSIONS_DIR": str(venv / "torch_extensions"),
                "DS_ACCELERATOR": "cpu",
            }
        workers = self.workers[name] = []
        for rank in range(ranks):
            log = self.scratch / f"{name}-{rank}.log"
            workers.append(Worker(module, python, settings | {"rank": rank}, log, environment))

    def used_by(self, name: str) -> "list[int]":
        """Indices of the paths that a system uses."""
        return list(range(len(self.paths))) if name == "mlp" else [self.faster]

    def ready(self, name: str) -> None:
        """Wait until the state of a system is written."""
        workers = self.workers[name]
        facts = [worker.answer()["ready"] for worker in workers]
        for key in ("parameters", "buffer_bytes"):
            if key in facts[0]:
                facts[0][key] = sum(fact[key] for fact in facts)
        self.measured[name] = report.Measured(self.used_by(name), facts[0], ranks=[[] for _ in workers])

    def run(
        self, name: str, steps: int, compute: bool, on_step: "Callable[[int], None] | None" = None
    ) -> "list[list[dict[str, Any]]]":
        """One block; the steps of each rank. ``on_step`` is called as each step of rank 0 ends."""
        workers, measured = self.workers[name], self.measured[name]
        for worker in workers:
            worker.ask(steps, compute)
        blocks: "list[list[dict[str, Any]]]" = [[] for _ in workers]
        for step in range(steps):
            for block, worker in zip(blocks, workers):
                block.append(worker.answer())
            if on_step is not None:
                on_step(step)
        ends = [worker.answer()["done"] for worker in workers]
        measured.checksums.append([end["weights_crc32"] for end in ends])
        if compute:
            measured.facts |= {key: min(end["measured"][key] for end in ends) for key in ends[0]["measured"]}
        measured.losses += [step["loss"] for step in blocks[0]] if compute else []
        measured.peak_rss_bytes = sum(end["peak_rss_bytes"] for end in ends)
        return blocks

    def measure(self, name: str) -> None:
        """One round of a system."""
        options, measured = self.options, self.measured[name]
        steps = options.drop + options.steps
        training = self.run(name, steps, compute=True)
        for rank, block in zip(measured.ranks, training):
            rank += block[options.drop :]
        if name == "stateless" or options.compute_seconds == 0:
            saturated = training
        else:
            saturated = self.run(name, steps, compute=False)
        for target, blocks in ((measured.training, training), (measured.saturated, saturated)):
            target += [report.slowest(ranks) for ranks in zip(*blocks)][options.drop :]

    def close(self) -> None:
        for worker in [worker for workers in self.workers.values() for worker in workers]:
            worker.close()

    # ------------------------------------------------------------------------------------- throttle

    def throttle(self, path: CappedPath) -> "dict[str, Any]":
        """Halve both caps of the faster path during a run of ours, and restore them; efficiency of every step."""
        options, used = self.options, self.measured["mlp"].paths
        before = (path.read, path.write)
        lowered_at, restored_at = options.drop + options.throttle_steps, options.drop + 2 * options.throttle_steps
        history = list(self.history)

        def change(step: int) -> None:
            if step + 1 in (lowered_at, restored_at):
                factor = 0.5 if step + 1 == lowered_at else 1.0
                path.set_caps(before[0] * factor, before[1] * factor)
                rates = list(self.history[0].rates)
                rates[self.faster] = (path.read, path.write)
                history.append(report.Caps(time.monotonic(), rates))

        try:
            blocks = self.run("mlp", restored_at + options.throttle_steps, compute=False, on_step=change)
        finally:
            path.set_caps(*before)
        self.measured["mlp"].checksums.pop()  # nobody else made these steps
        steps = [report.slowest(ranks) for ranks in zip(*blocks)]
        values = [report.efficiency([step], used, history) for step in steps]
        return {
            "steps": [
                {
                    "step": i + 1,
                    "caps": [[int(b / (s["end"] - s["begin"])) for b in _span(s, [p], history)] for p in used],
                    "iteration_seconds": s["iteration_seconds"],
                    "efficiency": value,
                }
                for i, (s, value) in enumerate(zip(steps, values))
            ],
            "lowered_before_step": lowered_at + 1,
            "restored_before_step": restored_at + 1,
            # Steps after the change until one is above 0.90 again; None: none was.
            "steps_to_recover_when_lowered": _first_above(values[lowered_at:restored_at]),
            "steps_to_recover_when_restored": _first_above(values[restored_at:]),
        }


def _span(step: "dict[str, Any]", paths: "list[int]", history: "list[report.Caps]") -> "tuple[float, float]":
    return report.capacity(step["begin"], step["end"], paths, history)


def _first_above(values: "list[float]", limit: float = 0.90) -> "int | None":
    return next((i + 1 for i, value in enumerate(values) if value > limit), None)
