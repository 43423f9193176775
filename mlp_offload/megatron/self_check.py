"""Everything private that we rely on in Megatron-Core, checked by name before the optimizer is built."""

from __future__ import annotations

import inspect
from typing import Any

import megatron.core
import megatron.core.optimizer as factory_module
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelLoadStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy, TorchDistSaveShardedStrategy
from megatron.core.optimizer import clip_grads, optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from ..errors import SelfCheckError

PRECISION_AWARE = "use_precision_aware_optimizer_no_fp8_or_ds_fp8"

# Overridden, replaced or called: (owner, function, parameters that it must have).
_FUNCTIONS: "tuple[tuple[Any, str, tuple[str, ...]], ...]" = (
    (optimizer, "clip_grad_by_total_norm_fp32", ("parameters", "max_norm", "total_norm", "use_decoupled_grad")),
    (factory_module, "get_megatron_optimizer", ("config", "model_chunks")),
    (DistributedOptimizer, "_copy_model_grads_to_main_grads", ()),
    (DistributedOptimizer, "_unscale_main_grads_and_check_for_nan", ()),
    (DistributedOptimizer, "_copy_model_params_to_main_params", ("state_dict",)),
    (DistributedOptimizer, "_build_model_param_to_state_dict_param_map", ("state_dict",)),
    (DistributedOptimizer, "_get_main_param_and_optimizer_states", ("model_param",)),
    (DistributedOptimizer, "_set_main_param_and_optimizer_states", ("model_param", "tensors")),
    (DistributedOptimizer, "sharded_state_dict", ("model_sharded_state_dict", "is_loading")),
    (DistributedOptimizer, "load_parameter_state_from_dp_zero", ("state_dict",)),
    *(
        (DistributedOptimizer, f"sharded_param_state_{kind}", ("model_sharded_state_dict", "is_loading", "metadata"))
        for kind in ("dp_reshardable", "fully_reshardable")
    ),
    (DistributedOptimizer, "get_grad_stats_parallel_group", ()),
    (DistributedOptimizer, "offload_to_cpu", ()),
    (DistributedOptimizer, "restore_from_cpu", ()),
    (FileSystemWriterAsync, "prepare_write_data", ("plan", "planner")),
    (FileSystemWriterAsync, "get_save_function_and_args", ()),
    (filesystem_async, "_split_by_separation_hint", ("buckets", "separation_hint")),
    (TorchDistLoadShardedStrategy, "load", ("sharded_state_dict", "checkpoint_dir")),
    (FullyParallelLoadStrategyWrapper, "load", ("sharded_state_dict", "checkpoint_dir")),
)

# Names that a function must look up, or overriding and replacing them has no effect: (owner, function, names).
_LOOKUPS: "tuple[tuple[Any, str, tuple[str, ...]], ...]" = (
    (factory_module, "_get_megatron_optimizer_based_on_param_groups", ("DistributedOptimizer",)),
    (factory_module, "get_megatron_optimizer", ("ChainedOptimizer",)),
    (optimizer.ChainedOptimizer, "step", ("clip_grad_by_total_norm_fp32", PRECISION_AWARE)),
    (optimizer.ChainedOptimizer, "count_zeros", ("count_zeros_fp32", PRECISION_AWARE)),
    (
        optimizer.MixedPrecisionOptimizer,
        "prepare_grads",
        ("_copy_model_grads_to_main_grads", "_unscale_main_grads_and_check_for_nan"),
    ),
    (DistributedOptimizer, "_build_model_and_main_param_groups", (PRECISION_AWARE,)),
    (DistributedOptimizer, "_copy_model_grads_to_main_grads", (PRECISION_AWARE, "decoupled_grad")),
    (DistributedOptimizer, "_copy_main_params_to_model_params", (PRECISION_AWARE,)),
    (FileSystemWriterAsync, "retrieve_write_results", ("results_queue", "write_buckets")),
    (TorchDistSaveShardedStrategy, "_get_save_and_finalize_callbacks", ("get_save_function_and_args",)),
)
_NORM_GRADIENTS = ("get_main_grads_for_grad_norm", "get_grads_for_grad_norm")  # up to 0.18, from 0.19


def megatron_version() -> str:
    """Version of the installed Megatron-Core."""
    return str(getattr(megatron.core, "__version__", "of unknown version"))


def check_internals() -> None:
    """Is every private name, parameter and look-up there that the offloaded optimizer builds on?

    Raises:
        SelfCheckError: lists what is missing and the version of Megatron-Core.
    """
    missing = []
    for owner, name, parameters in _FUNCTIONS:
        function = getattr(owner, name, None)
        if function is None:
            missing.append(f"{owner.__name__}.{name}")
            continue
        has = inspect.signature(function).parameters
        missing += [f"parameter {p} of {owner.__name__}.{name}" for p in parameters if p not in has]
    for owner, name, names in _LOOKUPS:
        function = getattr(owner, name, None)
        label = f"{owner.__name__}.{name}"
        used = _names_used(function) if function is not None else set()
        missing += [f"{looked_up} in {label}" for looked_up in names if looked_up not in used]
    if not any(hasattr(DistributedOptimizer, name) for name in _NORM_GRADIENTS):
        missing.append(" or ".join(f"DistributedOptimizer.{name}" for name in _NORM_GRADIENTS))
    if not hasattr(clip_grads, "l2_norm_impl"):
        missing.append("clip_grads.l2_norm_impl")
    if not hasattr(optimizer, "param_group_identifier_keys"):
        missing.append("optimizer.param_group_identifier_keys")
    _refuse(missing)


def check_built(offloaded: Any) -> None:
    """Did the optimizer take the path that allocates no fp32 weights?

    Raises:
        SelfCheckError: it did not; it would hold the state in memory twice.
    """
    masters = [p for group in offloaded.shard_fp32_from_float16_groups for p in group if p is not None]
    if masters:
        numel = sum(p.numel() for p in masters)
        _refuse([f"{PRECISION_AWARE} had no effect: {numel} fp32 elements were allocated"])


def _refuse(missing: "list[str]") -> None:
    if missing:
        raise SelfCheckError(
            f"Megatron-Core {megatron_version()} lacks what offload relies on: {'; '.join(missing)}. Use a supported "
            "version (0.16.1 to 0.19.2) or --optimizer-offload none"
        )


def _names_used(function: Any) -> "set[str]":
    """Global and attribute names in a function's code, nested functions included."""
    names: "set[str]" = set()
    todo = [inspect.unwrap(getattr(function, "__func__", function)).__code__]
    while todo:
        code = todo.pop()
        names |= set(code.co_names)
        todo += [constant for constant in code.co_consts if inspect.iscode(constant)]
    return names
