"""What each rank runs: every scenario of a JSON file, with stock and with ours, in one process group.

    torchrun --nproc-per-node N worker.py SCENARIOS.json RESULTS.json

RESULTS.json maps a scenario's name to ``{"stock": [...], "ours": [...]}``, one entry a rank, or to ``{"error": text}``.
"""

from __future__ import annotations

import contextlib
import gc
import json
import sys
import tempfile
import time
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mlp_offload.megatron import cpu_device

cpu_device.activate(announce=False)

import megatron.core.optimizer as factory_module  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from oracle import stock_with_fused_adam  # noqa: E402
from tiny_gpt import Layout, Training  # noqa: E402

from mlp_offload.config import OffloadConfig  # noqa: E402
from mlp_offload.megatron import install, wheel_gaps  # noqa: E402


@contextlib.contextmanager
def training(kind: str, layout: Layout, offload: "dict[str, Any]"):
    """A fresh ``Training`` of one kind, "stock" or "ours"; what it holds is given back."""
    layout.initialize()
    with contextlib.ExitStack() as stack:
        if kind == "stock":
            stack.enter_context(stock_with_fused_adam())
        else:
            install.install(OffloadConfig.from_mapping(offload))
            stack.callback(install.uninstall)
        run = Training(layout, factory_module.get_megatron_optimizer)
        yield run
        for part in run.optimizer.chained_optimizers:
            if kind == "ours":
                part.close()
    del run
    gc.collect()


def train(run: Training, steps: "list[int]") -> "list[dict[str, Any]]":
    return [asdict(run.step(number)) for number in steps]


def compare(scenario: "dict[str, Any]", offload: "dict[str, Any]") -> "dict[str, Any]":
    """The same steps with both."""
    layout = Layout(**scenario["layout"])
    result = {}
    for kind in ("stock", "ours"):
        with training(kind, layout, offload) as run:
            steps = train(run, list(range(scenario["steps"])))
            result[kind] = {"steps": steps, "weights": run.weights_hash(), "state": run.state_hash()}
    return result


def resume(scenario: "dict[str, Any]", offload: "dict[str, Any]") -> "dict[str, Any]":
    """Three steps, save, two more; then a fresh run that loads and does the two again."""
    layout, kind = Layout(**scenario["layout"]), scenario["format"]
    directory = [tempfile.mkdtemp(prefix="mlp-offload-test-")]
    dist.broadcast_object_list(directory)
    with training(scenario["saved_by"], layout, offload) as run:
        train(run, [0, 1, 2])
        run.save(directory[0], kind)
        saved = run.state_hash()
        whole = {"steps": train(run, [3, 4]), "weights": run.weights_hash(), "state": run.state_hash(), "saved": saved}
    with training(scenario["loaded_by"], layout, offload) as run:
        run.load(directory[0], kind)
        loaded = run.state_hash()
        rest = {"steps": train(run, [3, 4]), "weights": run.weights_hash(), "state": run.state_hash(), "saved": loaded}
    return {"stock": whole, "ours": rest}


def main() -> None:
    scenarios, results = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    torch.set_num_threads(1)
    wheel_gaps.fill()
    dist.init_process_group("gloo")
    gathered: "dict[str, Any]" = {}
    for name, scenario in scenarios["scenarios"].items():
        begin = time.monotonic()
        try:
            mine = {"compare": compare, "resume": resume}[scenario["kind"]](scenario, scenarios["offload"])
        except Exception:
            # The other ranks may be inside a collective: tell why, and let the launcher end them.
            results.with_suffix(f".error{dist.get_rank()}").write_text(f"{name}\n{traceback.format_exc()}")
            raise
        every: "list[Any]" = [None] * dist.get_world_size()
        dist.all_gather_object(every, mine)
        gathered[name] = {kind: [rank[kind] for rank in every] for kind in ("stock", "ours")}
        gathered[name]["seconds"] = time.monotonic() - begin
    if dist.get_rank() == 0:
        results.write_text(json.dumps(gathered))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
