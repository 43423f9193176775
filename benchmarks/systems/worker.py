"""One system in a process of its own, driven over pipes by ``benchmarks/step.py``. Needs nothing but torch.

One JSON object a line. First the worker says ``{"ready": {...}}``. To ``{"run": N, "compute": true}`` it makes N steps
without a pause, answers one line as each ends and at last ``{"done": {...}}``; with ``"compute": false`` steps are
updates only, one right after the other, with the gradients as they are. At the end of its input it leaves.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
import time
import traceback
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.gpt import fill_gradients, make_batch, make_gpt

SECTOR_BYTES = 512  # of the kernel's counters, whatever the device's own sector is
PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None, use_errno=True)


def device_of(directory: str) -> str:
    """The block device under a directory, as "MAJOR:MINOR".

    Raises:
        RuntimeError: there is none whose counters the kernel shows (tmpfs, overlay, network file systems).
    """
    number = os.stat(directory).st_dev
    device = f"{os.major(number)}:{os.minor(number)}"
    if not os.path.exists(f"/sys/dev/block/{device}/stat"):
        raise RuntimeError(
            f"{directory}: device {device} has no counters in /sys/dev/block; bytes are read from the kernel's counters "
            "only: give directories on local block devices, or use --capped"
        )
    return device


def read_counters(devices: Sequence[str]) -> "list[list[int]]":
    """[bytes read, bytes written] of each device since it exists."""
    counters = []
    for device in devices:
        with open(f"/sys/dev/block/{device}/stat") as file:
            fields = file.read().split()
        counters.append([int(fields[2]) * SECTOR_BYTES, int(fields[6]) * SECTOR_BYTES])
    return counters


def write_back(directory: str) -> None:
    """Wait until nothing of a file system is left to be written from the page cache (DeepSpeed leaves some there).

    Raises:
        OSError: the kernel could not write it.
    """
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        if LIBC.syncfs(descriptor) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), directory)
    finally:
        os.close(descriptor)


class System:
    """A training loop without an optimizer: the model, the batch, forward and backward. Subclasses add their optimizer.

    Args:
        settings: params (million), batch, tokens, seed, lr, betas, eps, weight_decay, threads, compute_seconds (None: a
            real forward and backward), host_memory (bytes), paths, devices, rank, rank_count, rendezvous.
    """

    def __init__(self, settings: "dict[str, Any]"):
        self.settings = settings
        torch.set_num_threads(settings["threads"])
        self.model = make_gpt(settings["params"], settings["tokens"], settings["seed"] + settings["rank"])
        self.batch = make_batch(settings["params"], settings["batch"], settings["tokens"], settings["seed"])
        self.parameters = list(self.model.parameters())
        self.numels = [parameter.numel() for parameter in self.parameters]
        if settings["compute_seconds"] is not None:
            fill_gradients(self.parameters, settings["seed"])
        if settings["rank_count"] > 1:
            torch.distributed.init_process_group(
                "gloo",
                init_method=f"file://{settings['rendezvous']}",
                rank=settings["rank"],
                world_size=settings["rank_count"],
            )
        self.loss: "torch.Tensor | None" = None

    def zero_grad(self) -> None:
        """Before a real forward pass. Buffers stay, as in Megatron."""
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad.zero_()

    def forward(self) -> None:
        self.loss = self.model(self.batch)

    def backward(self) -> None:
        self.loss.backward()

    def refill(self) -> None:
        """What a backward pass does to the gradients on storage; called where none runs."""

    def update(self) -> None:
        """The optimizer's step."""

    def settle(self) -> None:
        """Wait for what is in flight after the last step of a block."""

    def facts(self) -> "dict[str, Any]":
        """What the report says about this system's settings; ``buffer_bytes`` is host memory for buffers."""
        return {}

    def measured(self) -> "dict[str, float]":
        """What the block that just ended told beside its times; goes to the facts."""
        return {}

    def close(self) -> None:
        """Remove all files."""

    def weights_crc32(self) -> int:
        """Of all weights, in order: equal if and (nearly) only if every bit is equal."""
        crc = 0
        for parameter in self.parameters:
            crc = zlib.crc32(parameter.detach().view(torch.int16).numpy(), crc)
        return crc

    # ------------------------------------------------------------------------------------- a block

    def barrier(self) -> None:
        if self.settings["rank_count"] > 1:
            torch.distributed.barrier()

    def run(self, steps: int, compute: bool, answer: "Callable[[dict[str, Any]], None]") -> None:
        """Steps without a pause. An iteration lasts from the end of the one before to its own end: nothing is left out."""
        pause = self.settings["compute_seconds"]
        devices = self.settings["devices"]
        self.barrier()
        end, counters = time.monotonic(), read_counters(devices)
        for _ in range(steps):
            begin, counters_begin = end, counters
            if compute and pause is None:
                self.zero_grad()
                self.forward()
                forward_end = time.monotonic()
                self.backward()
            elif compute:
                time.sleep(pause / 3)
                forward_end = time.monotonic()
                time.sleep(pause * 2 / 3)
                self.refill()
            else:
                forward_end = begin
                self.refill()
            backward_end, counters_computed = time.monotonic(), read_counters(devices)
            self.barrier()  # where ranks meet to reduce gradients
            update_begin = time.monotonic()
            self.update()
            end, counters = time.monotonic(), read_counters(devices)
            answer(
                {
                    "begin": begin,
                    "end": end,
                    "forward_seconds": forward_end - begin,
                    "backward_seconds": backward_end - forward_end,
                    "update_seconds": end - update_begin,
                    "iteration_seconds": end - begin,
                    "counters": [counters_begin, counters_computed, counters],
                    "loss": self.loss.item() if compute and self.loss is not None else None,
                }
            )


def serve(make: "Callable[[dict[str, Any]], System]") -> None:
    """The main program of a worker; settings are the first argument, as JSON."""
    # Nothing of ours may go on when the parent is gone, however it went; the input may end in the middle of a block.
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    settings = json.loads(sys.argv[1])
    if os.getppid() != settings["parent"]:
        sys.exit(1)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # libraries print where they like; only answers go to the parent

    def answer(message: "dict[str, Any]") -> None:
        answers.write(json.dumps(message) + "\n")

    system = None
    try:
        system = make(settings)
        answer({"ready": {"parameters": sum(system.numels), **system.facts()}})
        for line in sys.stdin:
            command = json.loads(line)
            system.run(command["run"], command["compute"], answer)
            system.settle()
            for path in settings["paths"]:
                write_back(path.split(",")[0])
            done = {"weights_crc32": system.weights_crc32(), "peak_rss_bytes": peak_rss_bytes()}
            answer({"done": done | {"measured": system.measured()}})
    except (Exception, KeyboardInterrupt):
        with contextlib.suppress(OSError):
            answer({"error": traceback.format_exc()})
    finally:
        if system is not None:
            system.close()


def peak_rss_bytes() -> int:
    """Largest resident set of this process so far."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))
