"""The state of one optimizer, for checkpoints: records on the tiers in, torch tensors out, and back."""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from ..checkpoint.pieces import StoredPiece
from ..errors import ConfigError, OffloadError
from ..pipeline import StepPipeline
from ..plan.subgroups import Segment, Subgroup
from ..updates import AdamWork

# Megatron's name of a state tensor -> ours.
NAMES = {"param": "main_param", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}


class ShardStates:
    """Reads and writes one space of the pipeline: by subgroup, and by shard for formats that are not streamed.

    It is a ``StateSource``. Several shards share a subgroup and are asked for one after the other, so the subgroup read last is kept as a copy
    (12 bytes an element) until ``forget``; writes are collected with ``stage`` and done by subgroup in ``flush``.
    """

    travels = False

    def __init__(self, pipeline: StepPipeline, space: str, work: AdamWork):
        self._pipeline, self._space, self._work = pipeline, space, work
        self._pieces: "dict[int, list[tuple[Subgroup, Segment]]]" = defaultdict(list)
        for subgroup in pipeline.subgroups[space]:
            for segment in subgroup.segments:
                self._pieces[segment.shard].append((subgroup, segment))
        self._pid = os.getpid()
        self._kept: "tuple[int, dict[str, torch.Tensor]] | None" = None
        self._staged: "dict[int, Mapping[str, torch.Tensor]]" = {}
        self.replaced: "set[int]" = set()  # shards whose state was set from outside, by a checkpoint or by hand

    def pieces_of(self, shard: int) -> "Sequence[tuple[Subgroup, Segment]]":
        """Where a shard lies, in order."""
        return self._pieces[shard]

    @contextlib.contextmanager
    def arrays(self, subgroup: int) -> "Iterator[dict[str, torch.Tensor]]":
        """``main_param``, ``exp_avg`` and ``exp_avg_sq`` of a subgroup, fp32; valid inside the ``with`` block."""
        if os.getpid() != self._pid:
            raise OffloadError(
                "offloaded state can be read by the process that trains only, and this is a fork of it: save with a strategy "
                "of Megatron that was made after mlp_offload.megatron.install, and without --async-save"
            )
        which = self._pipeline.subgroups[self._space][subgroup]
        with self._pipeline.read(self._space, which) as view:
            yield self._work.read(which, view)

    @property
    def pipeline(self) -> StepPipeline:
        return self._pipeline

    @property
    def space(self) -> str:
        return self._space

    @property
    def work(self) -> AdamWork:
        return self._work

    def load(self, pieces: "Sequence[StoredPiece]") -> None:
        """Replace the whole state by what a checkpoint has, one subgroup at a time.

        Raises:
            ConfigError: pieces are missing; nothing was changed. Or the checkpoint lacks elements of one.
        """
        by_subgroup: "dict[int, list[StoredPiece]]" = defaultdict(list)
        for stored in pieces:
            by_subgroup[stored.piece.subgroup].append(stored)
        subgroups = self._pipeline.subgroups[self._space]
        for subgroup in subgroups:
            found = sum(stored.piece.numel for stored in by_subgroup[subgroup.index])
            if found != len(NAMES) * subgroup.numel:
                raise ConfigError(
                    f"checkpoint: it has {found} elements of the {len(NAMES) * subgroup.numel} of subgroup {subgroup.index}; "
                    "it was saved with another model or layout: load it with --no-load-optim"
                )
        self.forget()
        for subgroup in subgroups:
            modified = self._pipeline.modify(self._space, subgroup)
            with modified as view, self._work.edit(subgroup, view) as arrays:
                for stored in by_subgroup[subgroup.index]:
                    stored.load(arrays)
        self.replaced.update(self._pieces)

    def read(self, shard: int) -> "dict[str, torch.Tensor]":
        """Copies of the shard's fp32 state on the host, flat, by Megatron's names."""
        pieces = [
            {name: kept[segment.offset : segment.offset + segment.numel] for name, kept in self._copy(subgroup).items()}
            for subgroup, segment in self._pieces[shard]
        ]
        return {name: torch.cat([piece[name] for piece in pieces]) for name in NAMES}

    def stage(self, shard: int, tensors: "Mapping[str, torch.Tensor]", numel: int) -> None:
        """Remember a shard's new state until ``flush``.

        Raises:
            ConfigError: a tensor is missing or has another size than the shard.
        """
        for name in NAMES:
            found = tensors[name].numel() if name in tensors else None
            if found != numel:
                raise ConfigError(
                    f"checkpoint: {name} of a shard of {numel} elements has {'nothing' if found is None else found}; "
                    "it was saved by another optimizer or with another layout; load it with --no-load-optim or from "
                    "the fully_reshardable format"
                )
        self._staged[shard] = tensors
        self.replaced.add(shard)

    def flush(self) -> None:
        """Write everything staged, one subgroup at a time."""
        staged, self._staged = self._staged, {}

        def write(arrays: "dict[str, torch.Tensor]", segment: Segment) -> None:
            for name, ours in NAMES.items():
                new = staged[segment.shard][name].detach().reshape(-1)
                _of(arrays[ours], segment).copy_(new[segment.shard_offset : segment.shard_offset + segment.numel])

        self._modify(write, staged)

    def set_main_params(self, sources: "Sequence[torch.Tensor]") -> None:
        """Replace ``main_param`` of every shard by its source (flat, any dtype); moments stay."""

        def write(arrays: "dict[str, torch.Tensor]", segment: Segment) -> None:
            source = sources[segment.shard][segment.shard_offset : segment.shard_offset + segment.numel]
            _of(arrays["main_param"], segment).copy_(source)

        self._modify(write, self._pieces)

    def forget(self) -> None:
        """Drop the kept copy: call it whenever the state may have changed."""
        self._kept = None

    def _modify(
        self, write: "Callable[[dict[str, torch.Tensor], Segment], None]", shards: "Mapping[int, object]"
    ) -> None:
        self.forget()
        for subgroup in self._pipeline.subgroups[self._space]:
            segments = [segment for segment in subgroup.segments if segment.shard in shards]
            if segments:
                modified = self._pipeline.modify(self._space, subgroup)
                with modified as view, self._work.edit(subgroup, view) as arrays:
                    for segment in segments:
                        write(arrays, segment)

    def _copy(self, subgroup: Subgroup) -> "dict[str, torch.Tensor]":
        if self._kept is None or self._kept[0] != subgroup.index:
            with self._pipeline.read(self._space, subgroup) as view:
                arrays = self._work.read(subgroup, view)
                copies = {name: arrays[ours].clone() for name, ours in NAMES.items()}
            self._kept = (subgroup.index, copies)
        return self._kept[1]


def _of(array: torch.Tensor, segment: Segment) -> torch.Tensor:
    return array[segment.offset : segment.offset + segment.numel]
