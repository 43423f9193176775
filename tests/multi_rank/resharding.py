"""Save in one layout, load in another: what runs on each rank, and the state of all ranks put together by name."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import tiny_gpt
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core import parallel_state as ps
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from torch.distributed.checkpoint.api import CheckpointException

from mlp_offload.checkpoint import pieces
from mlp_offload.errors import OffloadError, PathIOError
from mlp_offload.megatron import streaming

BEFORE, AFTER = (0, 1, 2, 3, 4), (5, 6, 7, 8, 9)
KEYS = ("param", "exp_avg", "exp_avg_sq")


def save(training: "Callable[..., Any]", scenario: "dict[str, Any]", offload: "dict[str, Any]") -> "dict[str, Any]":
    """Train, and save."""
    directory = Path(scenario["checkpoint"])
    if dist.get_rank() == 0:
        directory.mkdir()
    dist.barrier()
    layout = tiny_gpt.Layout(**scenario["layout"])
    with model_settings(scenario["model"]), training(scenario["by"], layout, offload) as run:
        for number in BEFORE:
            run.step(number)
        run.weights_hash()  # gathers what is still to be gathered
        if scenario["by"] == "ours" and not scenario.get("hooked", True):
            streaming.remove_hooks()
        try:
            save_as_training_does(run, directory, scenario["format"])
        except CheckpointException as error:
            return {"error": str(error)}
        return {"whole": whole_state(run)}


def save_as_training_does(run: Any, directory: Path, format: str) -> None:
    """With ``--ckpt-fully-parallel-save``, the default of Megatron's training."""
    base = TorchDistSaveShardedStrategy("torch_dist", 1)
    strategy = FullyParallelSaveStrategyWrapper(base, ps.get_data_parallel_group(with_context_parallel=True))
    dist_checkpointing.save(
        run._sharded_state_dict(format, is_loading=False), str(directory), sharded_strategy=strategy
    )


def load(training: "Callable[..., Any]", scenario: "dict[str, Any]", offload: "dict[str, Any]") -> "dict[str, Any]":
    """Load what ``save`` wrote, and train on."""
    layout = tiny_gpt.Layout(**scenario["layout"])
    if not (Path(scenario["checkpoint"]) / ".metadata").exists():
        return {"error": "there is no checkpoint"}
    with model_settings(scenario["model"]), training(scenario["by"], layout, offload) as run:
        run.load(scenario["checkpoint"], scenario["format"])
        whole = whole_state(run)
        steps = [[step.loss, step.grad_norm] for step in map(run.step, AFTER)]
        return {"whole": whole, "steps": steps, "weights": run.weights_hash(), "state": run.state_hash()}


def failing(training: "Callable[..., Any]", scenario: "dict[str, Any]", offload: "dict[str, Any]") -> "dict[str, Any]":
    """On the last rank reading the state fails while it is saved, then while it is loaded; what each rank is told."""
    directory, layout, result = Path(scenario["checkpoint"]), tiny_gpt.Layout(), {}
    for name in ("save", "load"):
        if dist.get_rank() == 0:
            (directory / name).mkdir(parents=True)
    dist.barrier()
    last = dist.get_rank() == dist.get_world_size() - 1

    def no_disk(*args: Any) -> None:
        raise PathIOError("/path/state", "read", 0, 4096, errno.EIO)

    with training("ours", layout, offload) as run:
        run.step(0)
        save_as_training_does(run, directory / "load", "dp_reshardable")
        with mock.patch.object(pieces.Piece, "of", no_disk) if last else contextlib.nullcontext():
            try:
                save_as_training_does(run, directory / "save", "dp_reshardable")
            except CheckpointException as error:
                result["save"] = str(error)
        result["complete"] = (directory / "save" / ".metadata").exists()
        before = run.state_hash()
        run.step(1)  # training can go on after a save that failed
        result["changed"] = run.state_hash() != before
    broken = mock.patch.object(pieces.StoredPiece, "load", no_disk) if last else contextlib.nullcontext()
    with training("ours", layout, offload) as run, broken:
        try:
            run.load(str(directory / "load"), "dp_reshardable")
        except OffloadError as error:
            result["load"] = str(error)
    return result


@contextlib.contextmanager
def model_settings(settings: "dict[str, dict[str, Any]]") -> "Iterator[None]":
    """Models built meanwhile have these settings: of the config, of the GPT, or names of ``tiny_gpt``."""
    with contextlib.ExitStack() as stack:
        for name, extra in settings.items():
            if name == "globals":
                stack.enter_context(mock.patch.multiple(tiny_gpt, **extra))
            else:
                stock = getattr(tiny_gpt, name)
                replacement = lambda *a, stock=stock, extra=extra, **k: stock(*a, **(k | extra))  # noqa: E731
                stack.enter_context(mock.patch.object(tiny_gpt, name, replacement))
        yield


# ------------------------------------------------------------------------------ all ranks together


def whole_state(run: Any) -> "dict[str, str]":
    """sha256 of every weight, main_param, exp_avg and exp_avg_sq in the shape of the unsharded model, by name; and steps.

    Put together here from the shards of all ranks, by what is known of the layout: checkpoints have no part in it.
    """
    mine = []
    for part in run.optimizer.chained_optimizers:
        for ranges in tiny_gpt._param_maps(part):
            for param, where in ranges.items():
                tensors = part._get_main_param_and_optimizer_states(param)
                arrays = {key: tensors[key].detach().cpu().float().numpy().copy() for key in KEYS}
                mine.append((*_place(run.model, param), where["param"].start, tuple(param.shape), arrays))
    every: "list[Any]" = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    local: "dict[tuple[str, int], dict[str, torch.Tensor]]" = defaultdict(dict)
    axis_of: "dict[str, tuple[int | None, bool]]" = {}
    for name, tp_rank, axis, gated, start, shape, arrays in (entry for entries in every for entry in entries):
        axis_of[name] = axis, gated
        for key, array in arrays.items():
            whole = local[name, tp_rank].setdefault(key, torch.full(shape, float("nan")))
            whole.view(-1)[start : start + len(array)] = torch.from_numpy(array)
    hashes: "dict[str, str]" = {}
    for name, (axis, gated) in axis_of.items():
        ranks = sorted(tp_rank for other, tp_rank in local if other == name)
        for key in KEYS:
            parts = [local[name, tp_rank][key] for tp_rank in ranks]
            if axis is None:  # all ranks have the same
                assert all(torch.equal(parts[0], part) for part in parts[1:]), name
                whole = parts[0]
            elif gated:  # each rank has its part of both halves
                halves = zip(*(part.chunk(2, axis) for part in parts))
                whole = torch.cat([torch.cat(half, axis) for half in halves], axis)
            else:
                whole = torch.cat(parts, axis)
            assert not whole.isnan().any(), f"{name}: no rank has all of {key}"
            hashes[f"{name}.{key}"] = hashlib.sha256(whole.contiguous().numpy().tobytes()).hexdigest()
    steps = {int(group["step"]) for part in run.optimizer.chained_optimizers for group in part.param_groups}
    return hashes | {"steps": str(sorted(steps))}


def _place(model: torch.nn.Module, param: torch.nn.Parameter) -> "tuple[str, int, int | None, bool]":
    """(name in the unsharded model, tensor-parallel rank, axis that is split, whether it is a gated layer's)."""
    name = next(name for name, other in model.named_parameters() if other is param)
    owner = model
    for number, word in enumerate(words := name.split(".")[:-1]):
        owner = getattr(owner, word)
        if words[number - 1] == "layers":  # pipeline stages count their layers from 0
            name = name.replace(f"layers.{word}.", f"layers.{owner.layer_number - 1}.", 1)
    experts = re.search(r"local_experts\.(\d+)\.", name)
    if experts:
        per_rank = model.config.num_moe_experts // model.config.expert_model_parallel_size
        first_expert = ps.get_expert_model_parallel_rank() * per_rank
        name = name.replace(experts[0], f"local_experts.{first_expert + int(experts[1])}.")
    axis = param.partition_dim if getattr(param, "tensor_model_parallel", False) else None
    gated = model.config.gated_linear_unit and "linear_fc1" in name
    if any(getattr(module, "share_embeddings_and_output_weights", False) for module in model.modules()):
        name = name.replace("output_layer", "embedding.word_embeddings")  # the last pipeline stage has it again
    return name.removeprefix("module."), ps.get_tensor_model_parallel_rank(), axis, gated
