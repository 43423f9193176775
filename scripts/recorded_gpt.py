"""GPT pre-training that writes down, exactly, what it computed: for comparing two runs bit for bit.

Run it with ``mlp-offload run scripts/recorded_gpt.py --record DIR [--hash-at N] [--fused-adam] MEGATRON_ARGS...``.
Each rank appends one JSON line an iteration to DIR/rank0000.jsonl: loss and gradient norm as hexadecimal floats, seconds,
and the bytes that this process has read and written on block devices since its start, as counted by the kernel
(/proc/self/io; None where the kernel does not tell). Iteration N also has the sha256 of all parameters. The first line
is the state before training; its iteration is 0, or that of the checkpoint.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import megatron.training.training as training
import torch
from fused_adam import megatron_with_fused_adam
from megatron.training import get_args

from mlp_offload.megatron.pretrain_gpt import main


class Recorder:
    """Stands for Megatron's ``train_step`` and writes a line after each call."""

    def __init__(self, train_step: Any, directory: Path, hash_at: int):
        functools.update_wrapper(self, train_step)  # others wrap it too, and look at its name and arguments
        directory.mkdir(parents=True, exist_ok=True)
        self._file = open(directory / f"rank{int(os.environ['RANK']):04d}.jsonl", "w", buffering=1)  # noqa: SIM115
        self._train_step, self._hash_at, self._iteration = train_step, hash_at, -1

    def __call__(self, forward_step: Any, batches: Any, model: "list[Any]", *args: Any, **settings: Any) -> Any:
        if self._iteration < 0:
            self._iteration = get_args().iteration
            numel = sum(p.numel() for chunk in model for p in chunk.parameters())
            self._write(iteration=self._iteration, parameter_numel=numel)
        begin = time.monotonic()
        result = self._train_step(forward_step, batches, model, *args, **settings)
        seconds = time.monotonic() - begin
        self._iteration += 1
        line = {"iteration": self._iteration, "seconds": seconds, "skipped": bool(result[1])}
        line["loss"] = exactly(next(iter(result[0].values()), None))
        line["grad_norm"] = exactly(result[5])
        if self._iteration == self._hash_at:
            line["parameters_sha256"] = hash_parameters(model)
        self._write(**line)
        return result

    def _write(self, **line: Any) -> None:
        self._file.write(json.dumps(line | kernel_counters()) + "\n")


def exactly(value: Any) -> "str | None":
    """All bits of a number, as in 0x1.921fb6p+1."""
    return None if value is None else float(value).hex()


def hash_parameters(model: "list[Any]") -> str:
    """sha256 of the names and bytes of all parameters on this rank."""
    digest = hashlib.sha256()
    for chunk in model:
        for name, parameter in chunk.named_parameters():
            digest.update(name.encode())
            digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def kernel_counters() -> "dict[str, int | None]":
    """Bytes that the kernel read from and wrote to storage for this process."""
    names = ("read_bytes", "write_bytes")
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return dict.fromkeys(names)
    found = {key: int(value) for key, value in (line.split(": ") for line in lines)}
    return {name: found[name] for name in names}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    parser.add_argument("--record", type=Path, required=True)
    parser.add_argument("--hash-at", type=int, default=0)
    parser.add_argument("--fused-adam", action="store_true")
    options, sys.argv[1:] = parser.parse_known_args()
    training.train_step = Recorder(training.train_step, options.record, options.hash_at)
    with megatron_with_fused_adam() if options.fused_adam else contextlib.nullcontext():
        main()
