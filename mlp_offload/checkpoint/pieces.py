"""Pieces: parts of one subgroup's state that stand in a state dict as tensors, and hold no memory there.

[Note: streaming] A checkpoint library collects all tensors of a state dict before it writes the first, and makes room for
all before it reads the first. A ``DeferredTensor`` takes part in that as a tensor of its shape and holds nothing; the
writer and the loader, which know the pieces, then go subgroup by subgroup, so that one at a time is in memory. For
whoever does not know them, they read themselves when they are used: then all of them may be in memory at once.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol

import torch

from ..errors import ConfigError, OffloadError
from .stored import StoredTensors

NAMES = ("main_param", "exp_avg", "exp_avg_sq")


class StateSource(Protocol):
    """Where the state of subgroups is read from: the pipeline between two steps, or a snapshot that it pinned.

    Attributes:
        travels: it may be pickled and read in another process, while training goes on.
    """

    travels: bool

    def arrays(self, subgroup: int) -> "contextlib.AbstractContextManager[dict[str, torch.Tensor]]":
        """``NAMES``: flat fp32 arrays of a subgroup on the host, valid inside the ``with`` block."""


@dataclass(frozen=True)
class Piece:
    """A run of one array of a subgroup; in row-major order it is a box of a tensor.

    Attributes:
        name: one of ``NAMES``.
        offset: its first element in the subgroup.
        shape: of the box.
    """

    name: str
    subgroup: int
    offset: int
    shape: "tuple[int, ...]"

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def of(self, arrays: "dict[str, torch.Tensor]") -> torch.Tensor:
        """This piece of a subgroup's arrays, in its own shape; a tensor that shares their memory, and only its part."""
        run = arrays[self.name].numpy()[self.offset : self.offset + self.numel]
        return torch.from_numpy(run).view(self.shape)


@dataclass(frozen=True)
class StoredPiece:
    """Where a checkpoint has a piece: the box at ``offset`` of the tensor ``key``.

    Attributes:
        may_lack: elements that the tensor does not have are zero (a vocabulary that was padded to another size).
    """

    piece: Piece
    tensors: StoredTensors
    key: str
    offset: "tuple[int, ...]"
    may_lack: bool

    def load(self, arrays: "dict[str, torch.Tensor]") -> None:
        """Read it into a subgroup's arrays.

        Raises:
            ConfigError: the checkpoint lacks it, or a part of it.
        """
        target = self.piece.of(arrays).numpy()
        if self.may_lack:
            target.fill(0)
        found = self.tensors.read(self.key, self.offset, target)
        if found != target.size and not self.may_lack:
            raise ConfigError(
                f"checkpoint: {found} of {target.size} elements at {self.offset} of {self.key} are in it, whose shape is "
                f"{self.tensors.shape(self.key)}; it was saved with another model or layout: load it with --no-load-optim, "
                "or save it in the fully_reshardable format"
            )


class DeferredTensor(torch.Tensor):
    """An fp32 CPU tensor of a piece's shape without memory; see [Note: streaming].

    Args:
        source: where it reads itself from; None = it is to be loaded, and whoever uses it before is told so.
    """

    @staticmethod
    def __new__(cls, piece: Piece, source: "StateSource | None" = None):
        return torch.Tensor._make_wrapper_subclass(cls, piece.shape, dtype=torch.float32, device="cpu")

    def __init__(self, piece: Piece, source: "StateSource | None" = None):
        self.piece, self.source = piece, source

    def read(self) -> torch.Tensor:
        """A plain tensor with a copy of the piece."""
        if self.source is None:
            raise OffloadError(
                f"{self.piece}: offloaded state is loaded by the torch_dist strategies of Megatron only; load "
                "with dist_checkpointing.load() and give the result to load_state_dict() of the optimizer"
            )
        with self.source.arrays(self.piece.subgroup) as arrays:
            return self.piece.of(arrays).clone()

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.detach.default:
            return DeferredTensor(args[0].piece, args[0].source)
        if function is torch.ops.aten.is_pinned.default:  # plans ask for it
            return False
        args, kwargs = torch.utils._pytree.tree_map_only(cls, cls.read, (args, kwargs or {}))
        return function(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self.source is not None and self.source.travels:
            return DeferredTensor, (self.piece, self.source)
        return self.read().__reduce_ex__(protocol)

    def __repr__(self, **unused: Any) -> str:
        return f"DeferredTensor({self.piece})"


def by_subgroup(
    entries: "Iterable[tuple[DeferredTensor, Any]]",
) -> "Iterator[tuple[StateSource, int, list[tuple[DeferredTensor, Any]]]]":
    """(source, subgroup, its entries) in the order in which storage is read best; an entry is a tensor and a companion."""
    entries = list(entries)
    place = {id(tensor.source): i for i, (tensor, _) in enumerate(reversed(entries))}

    def position(entry: "tuple[DeferredTensor, Any]") -> "tuple[int, int, str, int]":
        piece = entry[0].piece
        return place[id(entry[0].source)], piece.subgroup, piece.name, piece.offset

    for _, group in groupby(sorted(entries, key=position), key=lambda entry: position(entry)[:2]):
        members = list(group)
        yield members[0][0].source, members[0][0].piece.subgroup, members
