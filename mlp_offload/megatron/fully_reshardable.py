"""Megatron's fully_reshardable checkpoint format, written from the right offsets.

The format holds every state tensor in the shape of its model parameter. Megatron-Core up to 0.19.2 gathers a buffer's
state without the padding at the end of buckets, and then cuts parameters out of it at offsets that count the padding:
with several buckets (overlapped reduction) all but the first are shifted, and the checkpoint is wrong without an error.
Files written here have stock's keys and shapes; stock loads them.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories

from ..errors import ConfigError
from .shard_states import NAMES

if TYPE_CHECKING:
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer


def sharded_param_state(
    optimizer: "DistributedOptimizer", model_sharded_state_dict: "dict[str, Any]", is_loading: bool, on_all_ranks: bool
) -> "dict[int, dict[str, Any]] | None":
    """State of all parameters that ``optimizer`` and its data-parallel peers own, by position in the buffers.

    Args:
        is_loading: only shapes are wanted; the tensors are to be filled.
        on_all_ranks: gather on every data-parallel rank through the device, else on the first one through the host.
    Returns:
        Position -> Megatron's state name -> sharded tensor; None on ranks that do not write.
    Raises:
        ConfigError: a parameter is not in ``model_sharded_state_dict``.
    """
    gathered = optimizer.get_parameter_state_dp_zero(
        use_gloo_comm=not on_all_ranks, empty_data=is_loading, return_on_all_ranks=on_all_ranks or is_loading
    )
    if gathered is None:
        return None
    entries, _ = extract_sharded_tensors_and_factories(model_sharded_state_dict)
    entry_of = {entry.data: entry for entry in nested_values(entries)}
    state: "dict[int, dict[str, Any]]" = {}
    for index, buffer in enumerate(optimizer.buffers):
        (tensors,) = gathered[index].values()
        ends = list(accumulate(bucket.numel_unpadded for bucket in buffer.buckets))
        for param, (start, end, bucket_index) in buffer.param_index_map.items():
            if param not in entry_of:
                raise ConfigError(
                    f"checkpoint: a parameter of shape {tuple(param.shape)} is not in the model's sharded state dict; "
                    "build it with keep_vars=True"
                )
            bucket = buffer.buckets[bucket_index]
            begin = ends[bucket_index] - bucket.numel_unpadded + start - bucket.offset
            state[len(state)] = {
                name: _like(entry_of[param], name, tensors[name][begin : begin + end - start]) for name in NAMES
            }
    return state


def _like(entry: Any, name: str, flat: Any) -> Any:
    """The model's sharded tensor (or factory of several) with a state tensor in its place."""
    data = flat.reshape(entry.data.shape)
    changes = {"key": f"optimizer.state.{name}.{entry.key}", "data": data}
    if not isinstance(entry, ShardedTensorFactory):
        changes["dtype"] = data.dtype
    return replace(entry, **changes)
