"""What each rank runs: every scenario of a JSON file, with stock and with ours, in one process group.

    torchrun --nproc-per-node N worker.py SCENARIOS.json RESULTS.json

RESULTS.json maps a scenario's name to what its function returned on each rank: a list.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import pkgutil
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest import mock

from mlp_offload.megatron import cpu_device

cpu_device.activate(announce=False)

import megatron.core  # noqa: E402
import megatron.core.optimizer as factory_module  # noqa: E402
import memory_use  # noqa: E402
import resharding  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from fused_adam import megatron_with_fused_adam  # noqa: E402
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue  # noqa: E402
from megatron.core.optimizer import clip_grads  # noqa: E402
from megatron.core.optimizer import optimizer as stock_module  # noqa: E402
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer  # noqa: E402
from tiny_gpt import Layout, Training  # noqa: E402

from mlp_offload.config import OffloadConfig  # noqa: E402
from mlp_offload.errors import ConfigError, SelfCheckError, WeightsChangedError  # noqa: E402
from mlp_offload.megatron import install, streaming, wheel_gaps  # noqa: E402


@contextlib.contextmanager
def training(kind: str, layout: Layout, offload: "dict[str, Any]"):
    """A fresh ``Training`` of one kind: "stock", "ours", or "patched", which is ours by ``OptimizerConfig`` alone.

    What it holds is given back at the end.
    """
    layout.initialize()
    with contextlib.ExitStack() as stack:
        if layout.tensor_norm:  # whether Megatron has this function decides whether its norms are tensors
            stack.enter_context(mock.patch.object(clip_grads, "multi_tensor_scale_tensor_impl", _scale_by_tensor))
        if kind == "stock":
            stack.enter_context(megatron_with_fused_adam())
        elif kind == "patched":
            switch = {"optimizer_offload": OffloadConfig.from_mapping(offload)}
            layout = replace(layout, optimizer=layout.optimizer | switch)
            stack.callback(install.uninstall)
        else:
            install.install(OffloadConfig.from_mapping(offload))
            stack.callback(install.uninstall)
        run = Training(layout, factory_module.get_megatron_optimizer)
        try:
            yield run
        finally:
            for part in run.optimizer.chained_optimizers if kind != "stock" else ():
                part.close()
            run = None
            gc.collect()


def train(run: Training, steps: "list[int]") -> "list[dict[str, Any]]":
    return [asdict(run.step(number)) for number in steps]


def outcome(run: Training, steps: "list[dict[str, Any]]") -> "dict[str, Any]":
    """Everything that must be equal."""
    return {"steps": steps, "weights": run.weights_hash(), "state": run.state_hash()}


def compare(scenario: "dict[str, Any]", offload: "dict[str, Any]") -> "dict[str, Any]":
    """The same steps with both; and how many subgroups ours fetched and found in memory in the last step.

    Where that means nothing, "lacks" says what this Megatron lacks, or "stock_fails" how stock fails.
    """
    if scenario["needs"] and not _has(scenario["needs"]):
        return {"lacks": scenario["needs"].rpartition(":")[2].rpartition(".")[2]}
    layout, result = Layout(**scenario["layout"]), {}
    for kind in ("stock", "ours"):
        try:
            stack = contextlib.ExitStack()
            run = stack.enter_context(training(kind, layout, offload))
        except AssertionError as error:
            if kind == "stock" and scenario["stock_may_fail"]:
                return {"stock_fails": str(error)}
            raise
        with stack:
            result[kind] = outcome(run, train(run, list(range(scenario["steps"]))))
            if kind == "ours":
                records = [part.last_record for part in run.optimizer.chained_optimizers if part.last_record]
                result["fetch_count"] = sum(record.fetch_count for record in records)
                result["hit_count"] = sum(record.hit_count for record in records)
    return result


def fused_adam(scenario: "dict[str, Any]", offload: "dict[str, Any]") -> "dict[str, Any]":
    """A FusedAdam is installed, as with Transformer Engine or Apex: ours meets its groups, and goes on from tensors."""
    layout, result = Layout(**scenario["layout"]), {}
    for kind in ("stock", "ours"):
        with megatron_with_fused_adam(), training(kind, layout, offload) as run:
            fresh = [sorted(group) for group in run.optimizer.state_dict()["optimizer"]["param_groups"]]
            train(run, [0, 1])
            saved = run.optimizer.state_dict()
            groups = saved["optimizer"]["param_groups"]
            keys = [sorted(group) for group in groups]
            if kind == "ours":
                for group in groups:
                    group["step"] = torch.tensor([group["step"]], dtype=torch.int32)  # as its capturable mode saves it
                for group in run.optimizer.param_groups:
                    group["step"] = 0
                run.optimizer.load_state_dict(saved)
            result[kind] = outcome(run, train(run, [2, 3])) | {"fresh": fresh, "keys": keys}
    return result


def moments(scenario: "dict[str, Any]", offload: "dict[str, Any]") -> "dict[str, Any]":
    """``optimizer.state`` before and after steps, and after another moment is put there; the learning rate is set in the groups only."""
    layout, result = Layout(**scenario["layout"]), {}
    for kind in ("stock", "ours"):
        with megatron_with_fused_adam(), training(kind, layout, offload) as run:
            (part,) = run.optimizer.chained_optimizers
            counts = [len(part.state)]
            for group in part.param_groups:
                group["lr"] = 1e-2
            train(run, [0, 1])
            counts.append(len(part.state))
            views = [view for group in part.param_groups for view in group["params"]]
            read = [
                part.state[view][name].double().sum().item() for view in views for name in ("exp_avg", "exp_avg_sq")
            ]
            for view in views:
                part.state[view]["exp_avg"] = part.state[view]["exp_avg"] * 3
            result[kind] = outcome(run, train(run, [2, 3])) | {
                "counts": counts,
                "keys": sorted({key for moments in part.state.values() for key in moments}),
                "sums": read,
            }
    return result


def set_state(scenario: "dict[str, Any]", offload: "dict[str, Any]") -> "dict[str, Any]":
    """Other state than belongs to the weights, as when a checkpoint's optimizer state is loaded without its model."""
    layout, result = Layout(**scenario["layout"]), {}
    for kind in ("stock", "ours"):
        with training(kind, layout, offload) as run:
            train(run, [0])
            (part,) = run.optimizer.chained_optimizers
            for param in part.model_param_group_index_map:
                tensors = part._get_main_param_and_optimizer_states(param)
                with torch.no_grad():
                    part._set_main_param_and_optimizer_states(param, tensors | {"param": tensors["param"] * 1.01})
            at_once = outcome(run, [])
            result[kind] = [at_once, outcome(run, train(run, [1, 2]))]
    return result


def two(scenario: "dict[str, Any]", offload: "dict[str, Any]") -> "dict[str, Any]":
    """Two models with an optimizer each in one process, stepped in turn."""
    layout, result = Layout(**scenario["layout"]), {}
    for kind in ("stock", "ours"):
        with training(kind, layout, offload) as run:
            other = Training(layout, factory_module.get_megatron_optimizer)
            steps: "tuple[list[Any], list[Any]]" = ([], [])
            for number in range(3):
                steps[0].extend(train(run, [number]))
                steps[1].extend(train(other, [number + 1]))
            result[kind] = [outcome(run, steps[0]), outcome(other, steps[1])]
            for part in other.optimizer.chained_optimizers if kind == "ours" else ():
                part.close()
    return result


def _has(name: str) -> bool:
    with contextlib.suppress(ImportError, AttributeError):
        pkgutil.resolve_name(name)
        return True
    return False


def _scale_by_tensor(chunk_size: int, flag: torch.Tensor, lists: "list[list[torch.Tensor]]", scale: torch.Tensor):
    """What Transformer Engine's ``multi_tensor_scale_tensor`` does: a factor that is still on the device."""
    for source, target in zip(*lists):
        target.copy_(source * scale)


def patched(scenario: "dict[str, Any]", offload: "dict[str, Any]") -> "dict[str, Any]":
    """Patched source: the same steps with stock and with ours by ``OptimizerConfig``; and what asks for it wrongly."""
    layout, steps, result = Layout(**scenario["layout"]), list(range(scenario["steps"])), {}
    for kind in ("stock", "patched"):
        with training(kind, layout, offload) as run:
            result[kind] = outcome(run, train(run, steps))
            result[f"{kind} class"] = type(run.optimizer.chained_optimizers[0]).__name__
            result[f"{kind} field"] = type(run.optimizer.config.optimizer_offload).__name__
    result["errors"] = []
    for wrong in ("mlp", {"paths": []}, {"path": "/x"}):
        try:
            with training("stock", replace(layout, optimizer={"optimizer_offload": wrong}), offload):
                pass
        except ConfigError as error:
            result["errors"].append(str(error))
    result["core"] = megatron.core.__file__
    return result


def reload(scenario: "dict[str, Any]", offload: "dict[str, Any]") -> "dict[str, Any]":
    """The weights change by other hands between steps; main_param follows, from the weights or from fp32 ones."""
    layout, result = Layout(**scenario["layout"]), {}
    for kind in ("stock", "ours"):
        with training(kind, layout, offload) as run:
            train(run, [0])
            precise = {name: p.detach().float() * 1.01 for name, p in run.model.named_parameters()}
            with torch.no_grad():
                for name, p in run.model.named_parameters():
                    p.copy_(precise[name])
            run.optimizer.reload_model_params(precise if scenario["from_state_dict"] else None)
            reloaded = run.state_hash()
            result[kind] = outcome(run, train(run, [1, 2])) | {"reloaded": reloaded}
    return result


def resume(scenario: "dict[str, Any]", offload: "dict[str, Any]") -> "dict[str, Any]":
    """Some steps, save, more; then a fresh run that loads and does the latter again."""
    layout, format, result = Layout(**scenario["layout"]), scenario["format"], {}
    steps = list(range(scenario["before"] + scenario["after"]))
    before, after = steps[: scenario["before"]], steps[scenario["before"] :]
    directory = [None]
    if dist.get_rank() == 0:
        directory = [tempfile.mkdtemp(dir=scenario["directory"])]
    dist.broadcast_object_list(directory)
    with training(scenario["saved_by"], layout, offload) as run:
        train(run, before)
        run.save(directory[0], format)
        saved = run.state_hash() if before else None  # stock has no moments before its first step
        change_rates(run, scenario["change"])
        result["uninterrupted"] = outcome(run, train(run, after)) | {"saved": saved}
    with training(scenario["loaded_by"], layout, offload) as run:
        run.load(directory[0], format)
        loaded = run.state_hash() if before else None
        change_rates(run, scenario["change"])
        result["resumed"] = outcome(run, train(run, after)) | {"saved": loaded}
    return result


def change_rates(run: Training, change: bool) -> None:
    """As the scheduler of a run with other options does after loading."""
    for group in run.optimizer.param_groups if change else ():
        group["lr"], group["weight_decay"] = group["lr"] * 0.3, group["weight_decay"] * 2


def touched(scenario: "dict[str, Any]", offload: "dict[str, Any]") -> "dict[str, Any]":
    """A weight changes and nobody tells the optimizer: stock lets the master win."""
    layout, result = Layout(**scenario["layout"]), {}
    for kind in ("stock", "ours"):
        with training(kind, layout, offload) as run:
            train(run, [0])
            with torch.no_grad():
                max(run.model.parameters(), key=torch.numel).view(-1)[-1] += 0.5
            try:
                result[kind] = outcome(run, train(run, [1, 2]))
            except WeightsChangedError as error:
                result[kind] = str(error)
    return result


def unhooked(scenario: "dict[str, Any]", offload: "dict[str, Any]") -> "dict[str, Any]":
    """A Megatron that stops calling one of our functions: the next step must refuse, with the weights unchanged."""
    name = scenario["function"]
    with training("ours", Layout(**scenario["layout"]), offload) as run:
        (part,) = run.optimizer.chained_optimizers
        run.step(0)
        if hasattr(stock_module, name):
            setattr(stock_module, name, getattr(stock_module, name).stock)
        for method in (name, f"get_{name}", f"get_main_{name}"):
            if hasattr(DistributedOptimizer, method):
                setattr(part, method, getattr(DistributedOptimizer, method).__get__(part))
        before = run.weights_hash()
        try:
            run.step(1)
            error = None
        except SelfCheckError as caught:
            error = str(caught)
        return {"error": error, "unchanged": run.weights_hash() == before}


def background(scenario: "dict[str, Any]", offload: "dict[str, Any]") -> "dict[str, Any]":
    """A save in the background that is slow, three more steps meanwhile; then a fresh run loads it and does the three again."""
    layout, directory, result = Layout(**scenario["layout"]), [None], {}
    if dist.get_rank() == 0:
        directory = [tempfile.mkdtemp(dir=scenario["directory"])]
    dist.broadcast_object_list(directory)
    write = streaming._write

    def slow_write(*args: Any) -> None:  # in the forked process
        time.sleep(scenario["delay_seconds"])
        write(*args)

    with training("ours", layout, offload) as run:
        train(run, [0, 1, 2])
        if scenario["delay_seconds"]:
            streaming._write = slow_write
        request = run.save_in_background(directory[0], scenario["format"])
        streaming._write = write
        tiers = next(part for part in run.optimizer.chained_optimizers if part.pipeline).pipeline.tiers
        queue = AsyncCallsQueue(persistent=scenario["persistent"])
        queue.schedule_async_request(request)
        result["saved"] = run.state_hash()
        result["pinned"] = len(tiers.pinned)
        result["uninterrupted"] = outcome(run, train(run, [3, 4, 5]))
        result["unfinished"] = queue.get_num_unfinalized_calls()
        if scenario["delay_seconds"]:
            result["unfinished"] -= len(queue.maybe_finalize_async_calls(blocking=False))
        queue.maybe_finalize_async_calls(blocking=True)
        queue.close()
        result["pinned_after"] = len(tiers.pinned)
    with training("ours", layout, offload) as run:
        run.load(directory[0], scenario["format"])
        result["loaded"] = run.state_hash()
        result["resumed"] = outcome(run, train(run, [3, 4, 5]))
    return result


SCENARIO_KINDS = {
    "background": background,
    "compare": compare,
    "fused_adam": fused_adam,
    "moments": moments,
    "patched": patched,
    "reload": reload,
    "resume": resume,
    "save": functools.partial(resharding.save, training),
    "load": functools.partial(resharding.load, training),
    "failing": functools.partial(resharding.failing, training),
    "memory": functools.partial(memory_use.memory, training),
    "set_state": set_state,
    "touched": touched,
    "two": two,
    "unhooked": unhooked,
}


def main() -> None:
    scenarios, results = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    torch.set_num_threads(1)
    wheel_gaps.fill()
    dist.init_process_group("gloo")
    gathered: "dict[str, Any]" = {}
    for name, scenario in scenarios["scenarios"].items():
        begin = time.monotonic()
        try:
            offload = scenarios["offload"] | scenario.get("offload", {})
            mine = SCENARIO_KINDS[scenario["kind"]](scenario, offload)
        except Exception:
            print(f"scenario {name!r} failed on rank {dist.get_rank()}", flush=True)
            raise  # the other ranks may be inside a collective; the launcher ends them
        every: "list[Any]" = [None] * dist.get_world_size()
        dist.all_gather_object(every, mine)
        gathered[name] = every
        if dist.get_rank() == 0:
            print(f"{name}: {time.monotonic() - begin:.1f} s", flush=True)
    if dist.get_rank() == 0:
        results.write_text(json.dumps(gathered))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
