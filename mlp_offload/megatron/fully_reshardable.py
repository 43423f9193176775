"""Megatron's fully_reshardable checkpoint format, in which every state tensor has the shape of its model parameter.

Each rank states its own part of each parameter as boxes; nothing is gathered. Megatron-Core up to 0.19.2 gathers, without
the padding at the end of buckets, and then cuts parameters out at offsets that count the padding: with several buckets
(overlapped reduction, tied embeddings with pipeline parallelism) what it writes is shifted. Keys and shapes are stock's,
so stock loads what is written here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories

from ..checkpoint.pieces import DeferredTensor, Piece
from ..checkpoint.rectangles import rectangles
from ..errors import ConfigError
from .shard_states import NAMES, ShardStates
from .shards import Shard


def sharded_pieces(
    shards: Sequence[Shard],
    states: ShardStates,
    model_sharded_state_dict: "dict[str, Any]",
    instance: int,
    is_loading: bool,
) -> "dict[str, ShardedTensor]":
    """This rank's part of the state of all parameters, one entry a box.

    Args:
        instance: which of several optimizers with the same shards this is; the first one's state is written.
        is_loading: the boxes are to be loaded.
    Raises:
        ConfigError: a parameter is not in ``model_sharded_state_dict``, or stands there in a form without boxes.
    """
    entries, _ = extract_sharded_tensors_and_factories(model_sharded_state_dict)
    entry_of = {entry.data: entry for entry in nested_values(entries)}
    tensors: "dict[str, ShardedTensor]" = {}
    for index, shard in enumerate(shards):
        if shard.model_param not in entry_of:
            raise ConfigError(
                f"checkpoint: a parameter of shape {tuple(shard.model_param.shape)} is not in the model's sharded state "
                "dict; build it with keep_vars=True"
            )
        entry = entry_of[shard.model_param]
        for name, ours in NAMES.items():
            for part, base in _parts(entry, f"optimizer.state.{name}.{entry.key}", shard.model_param.shape):
                for subgroup, segment in states.pieces_of(index):
                    first = shard.start + segment.shard_offset - base  # in the flattened part
                    start, stop = max(first, 0), min(first + segment.numel, part.data.numel())
                    for box in rectangles(part.local_shape, start, stop):
                        # Axes that the checkpoint has and the parameter lacks (layers, experts) lead, with size 1.
                        lead = part.prepend_axis_num
                        place = (0,) * lead + box.offset
                        shape = (1,) * lead + box.shape
                        piece = Piece(ours, subgroup.index, segment.offset + box.start - first, shape)
                        tensors[str(len(tensors))] = ShardedTensor(
                            part.key,
                            DeferredTensor(piece, None if is_loading else states),
                            torch.float32,
                            shape,
                            tuple(part.global_shape),
                            tuple(a + b for a, b in zip(part.global_offset, place)),
                            axis_fragmentations=None,
                            replica_id=(*part.replica_id[:2], instance),
                            allow_shape_mismatch=part.allow_shape_mismatch,
                        )
    return tensors


def _parts(entry: Any, key: str, shape: torch.Size) -> "Iterator[tuple[ShardedTensor, int]]":
    """The sharded tensors that hold a parameter, and where each begins in the flattened parameter."""
    whole = torch.empty(shape, device="meta")
    if not isinstance(entry, ShardedTensorFactory):
        yield replace(entry, key=key, data=whole, dtype=whole.dtype), 0
        return
    storage = whole.untyped_storage()._cdata
    for part in nested_values({"parts": replace(entry, key=key, data=whole).build()}):
        if part.data.untyped_storage()._cdata != storage or not part.data.is_contiguous():
            raise ConfigError(
                f"checkpoint: the model saves {entry.key} rearranged, which the fully_reshardable format of offloaded "
                "state cannot hold: use dp_reshardable (no --dist-ckpt-optim-fully-reshardable)"
            )
        yield part, part.data.storage_offset()
