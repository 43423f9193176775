"""Megatron's dp_reshardable checkpoint format (its default): one flat tensor a bucket, padding between parameters included.

Keys and shapes are stock's, and either loads what the other has written. Only the data-parallel size may differ.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

from ..checkpoint.pieces import DeferredTensor, Piece
from ..errors import ConfigError
from .shard_states import NAMES

if TYPE_CHECKING:
    from .distributed_optimizer import MLPDistributedOptimizer

_SIZES = ("per_bucket_numel", "per_bucket_numel_unpadded")


def sharded_buckets(optimizer: "MLPDistributedOptimizer", is_loading: bool) -> "dict[str, Any]":
    """This rank's part of every bucket, one entry a piece of a subgroup; when saving also the padding that it owns."""
    rank, instance = optimizer.data_parallel_group.rank(), optimizer.distributed_optimizer_instance_id
    prefix = f"optimizer.distributed.dp_group_idx_{optimizer.data_parallel_group_idx}"
    tensors: "dict[str, ShardedTensor]" = {}

    def add(key: str, data: torch.Tensor, bucket_numel: int, offset: int) -> None:
        tensors[str(len(tensors))] = ShardedTensor(
            key,
            data,
            torch.float32,
            tuple(data.shape),
            (bucket_numel,),
            (offset,),
            axis_fragmentations=None,
            replica_id=(instance, 0, 0),
        )

    shard = 0
    for buffer_index, (buffer, dtypes) in enumerate(zip(optimizer.buffers, optimizer.gbuf_ranges)):
        for dtype, ranges_of_buckets in dtypes.items():
            for bucket_index, (bucket, ranges) in enumerate(zip(buffer.buckets, ranges_of_buckets)):
                local_numel = bucket.grad_data.numel() // optimizer.data_parallel_group.size()
                begin, bucket_numel = rank * local_numel, bucket.numel_unpadded
                key = f"{prefix}.gbuf_idx_{buffer_index}.dtype_{dtype}.bucket_idx_{bucket_index}"
                filled = begin  # up to here the bucket is in ``tensors``
                for where in (maps["gbuf_local"] for maps in ranges["param_map"].values()):
                    _pad(add, key, bucket_numel, filled, begin + where.start, is_loading)
                    for subgroup, segment in optimizer.states.pieces_of(shard):
                        offset = begin + where.start + segment.shard_offset
                        for name, ours in NAMES.items():
                            piece = Piece(ours, subgroup.index, segment.offset, (segment.numel,))
                            data = DeferredTensor(piece, None if is_loading else optimizer.states)
                            add(f"{key}.{name}", data, bucket_numel, offset)
                    filled, shard = begin + where.end, shard + 1
                _pad(add, key, bucket_numel, filled, begin + local_numel, is_loading)
    sizes = {
        name: ShardedObject(f"{prefix}.{name}", getattr(optimizer, name), (1,), (0,), replica_id=(instance, 0, rank))
        for name in _SIZES
    }
    return sizes | {"pieces": tensors}


def _pad(add: Any, key: str, bucket_numel: int, start: int, stop: int, is_loading: bool) -> None:
    """Elements that belong to no parameter: the format has them, except those behind the last parameter."""
    stop = min(stop, bucket_numel)
    if start < stop and not is_loading:
        for name in NAMES:
            add(f"{key}.{name}", torch.zeros(stop - start), bucket_numel, start)


def check_sizes(optimizer: "MLPDistributedOptimizer", loaded: "dict[str, Any]") -> None:
    """Are the checkpoint's buckets this optimizer's?

    Raises:
        ConfigError: no; it was saved with another model or layout.
    """
    found = loaded.get("per_bucket_numel_unpadded", optimizer.per_bucket_numel_unpadded)
    if found != optimizer.per_bucket_numel_unpadded:
        raise ConfigError(
            f"checkpoint: its buckets hold {found} elements and this run's {optimizer.per_bucket_numel_unpadded}: the "
            "dp_reshardable format allows another data-parallel size only; save with --dist-ckpt-optim-fully-reshardable "
            "in the layout of the checkpoint, or load with --no-load-optim"
        )
