"""Shards: the parts of model parameters that this rank owns, in the order in which their state is laid out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ..errors import SelfCheckError

if TYPE_CHECKING:
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer


@dataclass(frozen=True, eq=False)
class Shard:
    """One rank's part of one model parameter; every tensor is flat and has ``numel`` elements.

    Attributes:
        model_param: the whole parameter, in its own shape.
        start: first element of the shard within the flattened ``model_param``.
        view: what Megatron steps: a view of the model weight that carries ``decoupled_grad`` and the attributes
            (shared, tensor-parallel duplicate) by which the gradient norm is filtered.
        weight: the same elements of the DDP parameter buffer, where the updated weight is written for the all-gather.
        group: index into ``param_groups``.
    """

    model_param: torch.nn.Parameter
    start: int
    view: torch.Tensor
    weight: torch.Tensor
    group: int

    @property
    def numel(self) -> int:
        return self.view.numel()

    @property
    def gradient(self) -> "torch.Tensor | None":
        """The reduced gradient as DDP left it: its own precision, times the loss scale. None before it is ready."""
        return getattr(self.view, "decoupled_grad", None)

    def slice_of(self, whole: torch.Tensor) -> torch.Tensor:
        """These elements of a tensor that has the shape of ``model_param``."""
        return whole.detach().reshape(-1)[self.start : self.start + self.numel]


def collect_shards(optimizer: "DistributedOptimizer") -> "tuple[Shard, ...]":
    """Every shard of ``optimizer``, in the order buffer, bucket, parameter.

    Raises:
        SelfCheckError: a shard's view is not the memory that DDP gathers from.
    """
    shards = []
    for buffer, dtypes in zip(optimizer.buffers, optimizer.gbuf_ranges):
        for ranges_of_buckets in dtypes.values():
            for bucket, ranges in zip(buffer.buckets, ranges_of_buckets):
                for model_param, ranges_of_param in ranges["param_map"].items():
                    group, position = optimizer.model_param_group_index_map[model_param]
                    where = ranges_of_param["gbuf_world_in_bucket"]
                    shard = Shard(
                        model_param=model_param,
                        start=ranges_of_param["param"].start,
                        view=optimizer.param_groups[group]["params"][position],
                        weight=bucket.param_data.view(-1)[where.start : where.end],
                        group=group,
                    )
                    if shard.view.data_ptr() != shard.weight.data_ptr() or shard.weight.numel() != shard.numel:
                        raise SelfCheckError(
                            f"a shard of {shard.numel} elements at {shard.start} of a parameter of shape "
                            f"{tuple(model_param.shape)} is not the part of the DDP buffer ({shard.weight.numel()} "
                            "elements) that is gathered: this Megatron-Core lays out its buffers in another way; "
                            "use a supported version (0.16.1 to 0.19.2) or --optimizer-offload none"
                        )
                    shards.append(shard)
    return tuple(shards)
