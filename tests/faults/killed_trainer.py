"""A training on two paths that may be killed at any moment; started again, it goes on from its last whole save.

    python killed_trainer.py DIRECTORY STEPS

DIRECTORY has the paths ``a`` and ``b`` for the state, and ``saved.pt``. Tells on stdout where it is, a line each:
"starting", "started STEP", "step STEP" after each step, "finished SHA256" of all parameters and optimizer state.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

from mlp_offload import OffloadedAdamW

SAVE_INTERVAL = 3
ORPHAN_SECONDS = 1.5


class Model(torch.nn.Module):
    """90 thousand bf16 parameters and some fp32 ones."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(64, 700), torch.nn.GELU(), torch.nn.Linear(700, 64)).bfloat16()
        self.head = torch.nn.Linear(64, 33)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x.bfloat16()).float())


def train(directory: Path, steps: int) -> str:
    """The digest after ``steps`` steps, those before the last save not repeated."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, saved = Model(), directory / "saved.pt"
    tell("starting")
    with_state = {"paths": [str(directory / "a"), str(directory / "b")], "host_memory": "512KiB", "job": "kills"}
    optimizer = OffloadedAdamW(model.parameters(), lr=1e-2, subgroup_size=4099, **with_state)
    done = 0
    if saved.exists():
        checkpoint = torch.load(saved)
        done = checkpoint["step"]
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
    outlive_us()
    tell("started", done)
    while done < steps:
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(done))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        done += 1
        if done % SAVE_INTERVAL == 0:
            save({"step": done, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, saved)
        tell("step", done)
    digest = digest_of(model, optimizer.state_dict()["state"])
    optimizer.close()
    return digest


def save(checkpoint: "dict[str, Any]", file: Path) -> None:
    """``file`` is the old checkpoint or the new one, never a part of one."""
    with open(file.with_suffix(".part"), "wb") as part:
        torch.save(checkpoint, part)
        part.flush()
        os.fsync(part.fileno())
    os.replace(part.name, file)


def digest_of(model: torch.nn.Module, state: "dict[int, dict[str, torch.Tensor]]") -> str:
    digest = hashlib.sha256()
    for tensor in (*model.parameters(), *(entry[name] for entry in state.values() for name in sorted(entry))):
        digest.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def outlive_us() -> None:
    """A child with copies of all our descriptors that is still there when we are killed, as a data loader's may be."""
    if os.fork() == 0:
        time.sleep(ORPHAN_SECONDS)
        os._exit(0)


def tell(*words: object) -> None:
    print(*words, flush=True)


if __name__ == "__main__":
    tell("finished", train(Path(sys.argv[1]), int(sys.argv[2])))
