"""How much host memory a save and a load take, on each rank, beyond what the process had just before."""

from __future__ import annotations

import ctypes
import gc
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import resharding
import tiny_gpt
import torch.distributed as dist

_SAMPLE_SECONDS = 0.003


class PeakMemory:
    """Growth of this process and its children while the ``with`` block runs, bytes.

    Of this process by the kernel's own high-water mark, which misses nothing: resident memory, of which what is
    not anonymous (libraries) does not grow any more. Of children by samples; each counts with all that it holds.
    """

    def __enter__(self) -> "PeakMemory":
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # what was freed before would hide as much growth
        Path("/proc/self/clear_refs").write_text("5")  # forget the mark so far
        self._before = _status("self", "VmRSS")
        self._known = {child.pid for child in psutil.Process().children(recursive=True)}
        self.children, self.samples, self._end = 0, 0, threading.Event()
        self._thread = threading.Thread(target=self._watch_children)
        self._thread.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._end.set()
        self._thread.join()
        self.growth = _status("self", "VmHWM") - self._before

    def _watch_children(self) -> None:
        while not self._end.wait(_SAMPLE_SECONDS):
            found = [child.pid for child in psutil.Process().children(recursive=True) if child.pid not in self._known]
            self.children = max(self.children, sum(_status(pid, "RssAnon") for pid in found))
            self.samples += 1


def _status(pid: "int | str", field: str) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:  # it has ended
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":")), 0)


def memory(training: "Callable[..., Any]", scenario: "dict[str, Any]", offload: "dict[str, Any]") -> "dict[str, Any]":
    """Save and load a state much larger than the budget, after a small one has loaded every module that takes part."""
    directory, kind = Path(scenario["directory"]), scenario["format"]
    layout, result = tiny_gpt.Layout(), {}
    for name in ("small", "large"):
        place = directory / f"{name} {kind}"
        if dist.get_rank() == 0:
            place.mkdir()
        dist.barrier()
        model, options = (scenario["model"], scenario["options"]) if name == "large" else ({}, {})
        with resharding.model_settings(model):
            with training("ours", layout, offload | options) as run:
                run.step(0)
                pipeline = run.optimizer.chained_optimizers[0].pipeline
                reads = mock.patch.object(pipeline, "read", side_effect=pipeline.read)
                with PeakMemory() as peak, reads as counted:
                    resharding.save_as_training_does(run, place, kind)
                saved = run.state_hash()
                result["save"] = {"growth": peak.growth, "children": peak.children, "samples": peak.samples}
                result["reads"] = counted.call_count
            with training("ours", layout, offload | options) as run:
                with PeakMemory() as peak:
                    run.load(str(place), kind)
                assert run.state_hash() == saved
                result["load"] = {"growth": peak.growth, "children": peak.children, "samples": peak.samples}
                (part,) = run.optimizer.chained_optimizers
                subgroups = part.pipeline.subgroups["dense"]
                result["state_bytes"] = 12 * sum(subgroup.numel for subgroup in subgroups)
                result["subgroup_count"] = len(subgroups)
                result["subgroup_bytes"] = 12 * max(subgroup.numel for subgroup in subgroups)
    return result
