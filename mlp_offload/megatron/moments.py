"""``optimizer.state`` of an offloaded optimizer: Adam's moments by parameter, as torch's optimizers show them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from .shard_states import ShardStates
from .shards import Shard

_NAMES = ("exp_avg", "exp_avg_sq")


class ShardMoments(Mapping[str, torch.Tensor]):
    """``exp_avg`` and ``exp_avg_sq`` of one shard; empty, as in torch, until a step, a checkpoint or someone set them.

    What is read is a copy (flat, fp32, on the shard's device): changing it changes nothing, assigning it does.
    """

    def __init__(self, shard: Shard, index: int, states: ShardStates, is_set: "Callable[[int], bool]"):
        self._shard, self._index, self._states, self._is_set = shard, index, states, is_set

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in tuple(iter(self)):
            raise KeyError(name)
        return self._states.read(self._index)[name].to(self._shard.view.device)

    def __setitem__(self, name: str, value: torch.Tensor) -> None:
        """Write one moment to where the state lives; any dtype and device.

        Raises:
            KeyError: it is no moment of Adam's.
            ConfigError: it has another number of elements than the shard.
        """
        if name not in _NAMES:
            raise KeyError(f"{name!r} is not one of {', '.join(_NAMES)}")
        self._states.stage(self._index, self._states.read(self._index) | {name: value}, self._shard.numel)
        self._states.flush()

    def __iter__(self) -> "Iterator[str]":
        return iter(_NAMES if self._is_set(self._index) else ())

    def __len__(self) -> int:
        return sum(1 for _ in self)


class Moments(Mapping[torch.Tensor, ShardMoments]):
    """The moments of every shard, by what Megatron steps (``param_groups[...]["params"]``)."""

    def __init__(self, shards: "Sequence[Shard]", states: ShardStates, is_set: "Callable[[int], bool]"):
        self._of = {shard.view: ShardMoments(shard, index, states, is_set) for index, shard in enumerate(shards)}

    def __getitem__(self, view: torch.Tensor) -> ShardMoments:
        return self._of[view]

    def __iter__(self) -> "Iterator[torch.Tensor]":
        return (view for view, moments in self._of.items() if len(moments))

    def __len__(self) -> int:
        return sum(1 for _ in self)
