"""Adam on one subgroup after another: the work that the pipeline calls."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import torch

from .adam.kernel import DTYPE_CODES, AdamKernel, AdamScalars
from .errors import ConfigError
from .plan.subgroups import Segment, Subgroup
from .tiers import StateView
from .transfers import transfers_for


class AdamWork:
    """Updates the state and weights of one space with the gradients of one step.

    Args:
        kernel: the Adam kernel.
        weights: one flat contiguous tensor a shard, fp32, bf16 or fp16, all on one device; written in place.
        subgroup_numel: elements of the largest subgroup.

    Raises:
        ConfigError: a weight is not flat, contiguous and of a dtype that the kernel knows.
    """

    def __init__(self, kernel: AdamKernel, weights: Sequence[torch.Tensor], subgroup_numel: int):
        for i, weight in enumerate(weights):
            if weight.dim() != 1 or not weight.is_contiguous() or weight.dtype not in DTYPE_CODES:
                raise ConfigError(
                    f"weight {i} has shape {tuple(weight.shape)}, strides {weight.stride()} and dtype {weight.dtype}; "
                    f"offload takes contiguous parameters in {', '.join(str(d) for d in DTYPE_CODES)}"
                )
        self._kernel = kernel
        self._weights = [w.detach() for w in weights]
        self._transfers = transfers_for(self._weights, subgroup_numel)
        self._weight_codes = np.array([DTYPE_CODES[w.dtype] for w in weights], np.int64)
        self._grad_codes = np.zeros(len(weights), np.int64)
        self._group_index = np.zeros(len(weights), np.int64)
        self._scalars: "Sequence[AdamScalars]" = ()
        self._stale: "frozenset[int]" = frozenset()

    def begin(
        self,
        gradients: "Sequence[torch.Tensor | None]",
        scalars: Sequence[AdamScalars],
        group_index: Sequence[int],
        stale: Collection[int] = (),
    ) -> None:
        """A step begins.

        Args:
            gradients: one flat contiguous tensor a shard, or None: then state and weight stay as they are.
            scalars: one a group.
            group_index: for each shard its position in ``scalars``.
            stale: shards whose weight was changed by someone else since the last step; see ``refresh``.
        """
        for i, (gradient, weight) in enumerate(zip(gradients, self._weights)):
            if gradient is None:
                continue
            if gradient.shape != weight.shape or not gradient.is_contiguous() or gradient.dtype not in DTYPE_CODES:
                raise ConfigError(
                    f"gradient {i} has shape {tuple(gradient.shape)}, strides {gradient.stride()} and dtype {gradient.dtype}; "
                    f"its weight has shape {tuple(weight.shape)}: pass flat contiguous gradients in fp32, bf16 or fp16"
                )
            self._grad_codes[i] = DTYPE_CODES[gradient.dtype]
        self._scalars, self._stale = scalars, frozenset(stale)
        self._group_index[:] = group_index
        self._transfers.begin(gradients)

    def prepare(self, subgroup: Subgroup) -> None:
        self._transfers.prepare(subgroup)

    def update(self, subgroup: Subgroup, state: StateView) -> None:
        self.refresh(subgroup, state, self._stale)
        shards = np.array([s.shard for s in subgroup.segments], np.int64)
        rows = np.empty((len(shards), 7), np.int64)
        rows[:, 0] = [s.offset for s in subgroup.segments]
        rows[:, 1] = [s.numel for s in subgroup.segments]
        rows[:, 2], rows[:, 3] = self._transfers.addresses(subgroup)
        rows[:, 4] = self._grad_codes[shards]
        rows[:, 5] = self._weight_codes[shards]
        rows[:, 6] = self._group_index[shards]
        self._kernel.update(state.address, state.stride_numel, rows, self._scalars)
        self._transfers.send(subgroup)

    def end(self) -> None:
        """Order all weights before later work on the caller's stream."""
        self._transfers.end()

    def load_weights(self, subgroup: Subgroup, state: StateView) -> None:
        """Make main_param of the subgroup from the weights."""
        main_param = torch.from_numpy(state.main_param)
        for s in subgroup.segments:
            main_param[s.offset : s.offset + s.numel].copy_(self._weight(s))

    def refresh(self, subgroup: Subgroup, state: StateView, shards: Collection[int]) -> None:
        """Make main_param of ``shards`` from the weights again, but keep it where it still rounds to the weight."""
        for s in subgroup.segments:
            if s.shard in shards:
                main_param = torch.from_numpy(state.main_param)[s.offset : s.offset + s.numel]
                weight = self._weight(s).cpu()
                main_param.copy_(torch.where(main_param.to(weight.dtype) == weight, main_param, weight.float()))

    def _weight(self, segment: Segment) -> torch.Tensor:
        start = segment.shard_offset
        return self._weights[segment.shard][start : start + segment.numel]
