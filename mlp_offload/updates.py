"""Adam on one subgroup after another: the work that the pipeline calls, and the meaning of what a record holds."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NoReturn

import numpy as np
import torch

from .adam.kernel import DTYPE_CODES, AdamKernel, AdamScalars
from .adam.remainder import join, split
from .device_updates import DeviceFuture, GpuMemory
from .errors import ConfigError, WeightsChangedError
from .plan.subgroups import Segment, Subgroup
from .records import DeviceRecord, StateView
from .transfers import in_place, transfers_for

_BLOCK_NUMEL = 2**15  # elements whose intermediate values are in memory at once
_SIGN_CLEARED = np.uint32(0x7FFFFFFF)


def main_itemsize(master_weights: str, weights: Sequence[torch.Tensor]) -> int:
    """Bytes a parameter that records spend on masters: 2 where all weights are bf16 and the option allows it, else 4."""
    return 2 if master_weights == "remainder" and all(w.dtype == torch.bfloat16 for w in weights) else 4


class AdamWork:
    """Updates the state and weights of one space with the gradients of one step.

    Args:
        kernel: the Adam kernel.
        weights: one flat contiguous tensor a shard, fp32, bf16 or fp16, all on one device; written in place.
        subgroup_numel: elements of the largest subgroup.
        main_itemsize: of the records; with 2 all weights must be bf16, and each is watched by a sum ([Note: remainder]
            in ``adam.remainder``): its master is lost when somebody else changes it.
        adopt_changes: what then happens: True = the changed weight is the new master, of the whole part of the shard
            that lies in one subgroup; False = ``WeightsChangedError``.
        fp32_masters: fp32 weights are their own masters: whoever changes one changes its master, and the other way round.
        gpu: where the weights are; it may update subgroups.

    Raises:
        ConfigError: a weight is not flat, contiguous and of a dtype that the kernel knows.
        CapacityError: weights on a GPU, and host memory does not hold the staging.
    """

    def __init__(
        self,
        kernel: AdamKernel,
        weights: Sequence[torch.Tensor],
        subgroup_numel: int,
        main_itemsize: int = 4,
        adopt_changes: bool = False,
        fp32_masters: bool = False,
        gpu: "GpuMemory | None" = None,
    ):
        self._kernel = kernel
        self._gpu = gpu
        self._subgroup_numel = subgroup_numel
        self._reads_weights = main_itemsize == 2
        self._adopt_changes = adopt_changes
        self._own_masters = frozenset(i for i, w in enumerate(weights) if fp32_masters and w.dtype == torch.float32)
        self._known_sums: "dict[int, np.ndarray]" = {}  # subgroup -> sum of each segment's weights when they were written
        self._gradients: "Sequence[torch.Tensor | None]" = ()
        self._on_device: "dict[int, np.ndarray]" = {}  # subgroup that the GPU updates in this step -> the kernel's rows
        self._watched: "dict[int, tuple[np.ndarray, slice]]" = {}  # -> which segments are summed, and where the sums are
        self._written: "dict[int, tuple[np.ndarray, slice]]" = {}  # the same, of sums that are still to be read
        if gpu is not None:
            self._sums_before, self._sums_after = gpu.sums(), gpu.sums()
        self._grad_codes = np.zeros(len(weights), np.int64)
        self._group_index = np.zeros(len(weights), np.int64)
        self._scalars: "Sequence[AdamScalars]" = ()
        self._stale: "frozenset[int]" = frozenset()
        self.bind(weights)

    def bind(self, weights: Sequence[torch.Tensor]) -> None:
        """Go on with ``weights`` in other memory.

        Raises:
            ConfigError, CapacityError: as on construction.
        """
        for i, weight in enumerate(weights):
            if weight.dim() != 1 or not weight.is_contiguous() or weight.dtype not in DTYPE_CODES:
                raise ConfigError(
                    f"weight {i} has shape {tuple(weight.shape)}, strides {weight.stride()} and dtype {weight.dtype}; "
                    f"offload takes contiguous parameters in {', '.join(str(d) for d in DTYPE_CODES)}"
                )
        if self._gpu is not None and not all(w.is_cuda for w in weights):
            raise ConfigError(
                "weights moved from the GPU to host memory, and the GPU updates some of them: leave them there, or set "
                "update_device to cpu"
            )
        self._weights = [w.detach() for w in weights]
        self._transfers = None  # gives its memory back before the next takes some
        self._transfers = transfers_for(self._weights, self._subgroup_numel, self._reads_weights)
        self._weight_codes = np.array([DTYPE_CODES[w.dtype] for w in weights], np.int64)

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
            stale: shards whose weight was changed by someone else since the last step; see ``read``. Only for records
                of fp32 masters: with remainders the sums tell.
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
        self._gradients, self._on_device, self._watched = gradients, {}, {}
        if self._gpu is not None:
            self._gpu.begin()
        self._transfers.begin(gradients)

    def prepare(self, subgroup: Subgroup) -> None:
        self._transfers.prepare(subgroup)

    def update(self, subgroup: Subgroup, state: StateView) -> None:
        """Adam, in place, on the CPU; the weights are on their way when it returns."""
        if state.remainder is None:
            self._refresh(subgroup, state, self._stale, self._transfers.weight)
        rows = self._rows(subgroup, *self._transfers.addresses(subgroup))
        if state.remainder is None:
            self._kernel.update(state.address, state.stride_numel, rows, self._scalars)
        else:
            stepped = np.flatnonzero(rows[:, 2])  # those that have a gradient
            addresses, numels = rows[stepped, 3], rows[stepped, 1]
            changed = stepped[self._kernel.sum_words(addresses, numels) != self._sums()[subgroup.index][stepped]]
            self._restart(subgroup, state, self._allowed(subgroup, changed))
            self._kernel.update(state.address, state.stride_numel, rows, self._scalars, main_itemsize=2)
            self._sums()[subgroup.index][stepped] = self._kernel.sum_words(addresses, numels)
        self._transfers.send(subgroup)

    def start_on_device(self, subgroups: Sequence[Subgroup]) -> None:
        """These will be updated on the GPU in this step. Does not wait."""
        self._on_device = {
            s.index: self._rows(s, in_place(self._gradients, s), in_place(self._weights, s)) for s in subgroups
        }
        if self._reads_weights:
            self._watched, count = {}, 0
            for index, rows in self._on_device.items():
                stepped = np.flatnonzero(rows[:, 2])
                self._watched[index] = (stepped, slice(count, count + len(stepped)))
                count += len(stepped)
            self._sums_before.ask(self._runs())

    def update_on_device(self, subgroup: Subgroup, record: "StateView | DeviceRecord") -> "DeviceFuture | None":
        """As ``update``, on the GPU, for one of ``start_on_device``; see ``GpuMemory.update``."""
        rows = self._on_device[subgroup.index]
        if self._reads_weights:
            stepped, part = self._watched[subgroup.index]
            changed = stepped[self._sums_before.read()[part] != self._sums()[subgroup.index][stepped]]
            self._allowed(subgroup, changed)
        else:
            shards = self._stale | self._own_masters
            changed = np.flatnonzero([s.shard in shards for s in subgroup.segments])

        def launch(address: int, stream: int) -> None:
            if len(changed):
                self._gpu.kernels.restart(address, record.stride_numel, rows[changed], subgroup.main_itemsize, stream)
            self._gpu.kernels.update(address, record.stride_numel, rows, self._scalars, subgroup.main_itemsize, stream)

        return self._gpu.update(record, launch)

    def end(self) -> None:
        """Order all weights before later work on the caller's stream."""
        if self._gpu is not None:
            if self._watched:
                self._sums()  # of the step before, if nobody has asked for them
                self._sums_after.ask(self._runs())
                self._written = self._watched
            self._gpu.end()
        self._transfers.end()
        self._gradients, self._on_device, self._watched = (), {}, {}

    # ------------------------------------------------------------------------------- between the steps

    def load_weights(self, subgroup: Subgroup, state: StateView) -> None:
        """Make the masters of the subgroup from the weights."""
        if state.remainder is None:
            main_param = torch.from_numpy(state.main_param)
            for s in subgroup.segments:
                main_param[s.offset : s.offset + s.numel].copy_(self._weight(s))
        else:
            self._restart(subgroup, state, subgroup.segments)
            self._sums()[subgroup.index] = self._sum(subgroup)

    def read(self, subgroup: Subgroup, state: StateView, stale: Collection[int] = ()) -> "dict[str, torch.Tensor]":
        """``main_param``, ``exp_avg`` and ``exp_avg_sq`` of the subgroup, fp32; valid as long as ``state`` is.

        Where a shard in ``stale`` was changed, its weight is the master; elements that it still rounds to keep theirs.

        Raises:
            WeightsChangedError: a weight was changed by other hands, so that its master cannot be known.
        """
        if state.remainder is None:
            self._refresh(subgroup, state, stale, self._weight)
            return _arrays(state)
        changed = np.flatnonzero(self._sum(subgroup) != self._sums()[subgroup.index])
        return self._joined(subgroup, state, self._allowed(subgroup, changed))

    @contextlib.contextmanager
    def edit(self, subgroup: Subgroup, state: StateView) -> "Iterator[dict[str, torch.Tensor]]":
        """As ``read``, to change in place; weights that were changed count as masters. Stored when the block ends.

        Raises:
            WeightsChangedError: a new ``main_param`` does not round to the weight.
            ConfigError: a new ``exp_avg_sq`` is negative.
        """
        if state.remainder is None:
            self._refresh(subgroup, state, (), self._weight)
            arrays = _arrays(state)
            yield arrays
            for s in subgroup.segments:
                if s.shard in self._own_masters:  # whoever changes such a master changes its weight
                    self._weight(s).copy_(arrays["main_param"][s.offset : s.offset + s.numel])
            return
        sums = self._sum(subgroup)
        known = self._sums().get(subgroup.index, ~sums)
        arrays = self._joined(subgroup, state, [subgroup.segments[i] for i in np.flatnonzero(sums != known)])
        yield arrays
        negative = int((arrays["exp_avg_sq"] < 0).sum())
        if negative:  # its sign is spoken for, and a mean of squares has none
            raise ConfigError(
                f"subgroup {subgroup.index}: {negative} of {subgroup.numel} elements of exp_avg_sq are negative, which no "
                "Adam step makes; the checkpoint is damaged"
            )
        here = self._host_weights(subgroup)
        remainders, differ = torch.from_numpy(state.remainder), 0
        for block in _blocks(subgroup.numel):
            weight, remainders[block], arrays["exp_avg_sq"][block] = split(
                arrays["main_param"][block], arrays["exp_avg_sq"][block]
            )
            other = weight.view(torch.int16) != here[block].view(torch.int16)
            differ += int((other & ~(weight.isnan() & here[block].isnan())).sum())
        if differ:
            raise WeightsChangedError(
                f"subgroup {subgroup.index}: {differ} of {subgroup.numel} fp32 masters do not round to the model's bf16 weights. "
                "With master_weights=remainder both must belong together: load the model's weights before the "
                "optimizer's state, from the same checkpoint, or set master_weights to full"
            )
        torch.from_numpy(state.exp_avg_sq).copy_(arrays["exp_avg_sq"])
        self._sums()[subgroup.index] = sums

    def copy_weights(self, subgroup: Subgroup, out: torch.Tensor) -> None:
        """Copy the subgroup's bf16 weights, to which the remainders in its record belong, to ``out`` (host, bf16).

        Raises:
            WeightsChangedError: they are not those that were written, so their masters cannot be known.
        """
        changed = np.flatnonzero(self._sum(subgroup) != self._sums()[subgroup.index])
        if len(changed):
            self._refuse(subgroup, [subgroup.segments[i] for i in changed])
        for s in subgroup.segments:
            out[s.offset : s.offset + s.numel].copy_(self._weight(s))

    # ------------------------------------------------------------------------------------ helpers

    def _rows(self, subgroup: Subgroup, grads: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """For the kernel, one a segment; from addresses of gradients and weights."""
        shards = np.array([s.shard for s in subgroup.segments], np.int64)
        rows = np.empty((len(shards), 7), np.int64)
        rows[:, 0] = [s.offset for s in subgroup.segments]
        rows[:, 1] = [s.numel for s in subgroup.segments]
        rows[:, 2], rows[:, 3] = grads, weights
        rows[:, 4] = self._grad_codes[shards]
        rows[:, 5] = self._weight_codes[shards]
        rows[:, 6] = self._group_index[shards]
        return rows

    def _runs(self) -> np.ndarray:
        """The weights on the device that are watched in this step, as address and count."""
        runs = [self._on_device[index][stepped][:, [3, 1]] for index, (stepped, _) in self._watched.items()]
        return np.concatenate(runs)

    def _sums(self) -> "dict[int, np.ndarray]":
        """For each subgroup the sums of its segments' weights when they were written; waits for the GPU's."""
        if self._written:
            sums = self._sums_after.read()
            for index, (stepped, part) in self._written.items():
                self._known_sums[index][stepped] = sums[part]
            self._written = {}
        return self._known_sums

    def _allowed(self, subgroup: Subgroup, changed: np.ndarray) -> "list[Segment]":
        """The segments at the positions ``changed``; raises where their masters may not start again."""
        segments = [subgroup.segments[i] for i in changed]
        if segments and not self._adopt_changes:
            self._refuse(subgroup, segments)
        return segments

    @staticmethod
    def _refuse(subgroup: Subgroup, segments: Sequence[Segment]) -> NoReturn:
        shards = ", ".join(str(s.shard) for s in segments[:8]) + (", ..." if len(segments) > 8 else "")
        raise WeightsChangedError(
            f"subgroup {subgroup.index}: the weights of {len(segments)} of its {len(subgroup.segments)} parts (of shards "
            f"{shards}) were changed by other hands since the last step, and their fp32 masters with them: with "
            "master_weights=remainder nobody but the optimizer may do that. Call reload_model_params() of the "
            "optimizer after changing weights, or set master_weights to full, where the masters win"
        )

    def _restart(self, subgroup: Subgroup, state: StateView, segments: Collection[Segment]) -> None:
        """Let the weights be the masters of ``segments``."""
        for s in segments:
            part = slice(s.offset, s.offset + s.numel)
            state.remainder[part] = 0
            state.exp_avg_sq[part].view(np.uint32)[:] &= _SIGN_CLEARED

    def _joined(
        self, subgroup: Subgroup, state: StateView, restarted: Collection[Segment]
    ) -> "dict[str, torch.Tensor]":
        weight = self._host_weights(subgroup)
        main_param, exp_avg_sq = (_array(subgroup.numel, torch.float32) for _ in range(2))
        remainder, stored = torch.from_numpy(state.remainder), torch.from_numpy(state.exp_avg_sq)
        for block in _blocks(subgroup.numel):
            main_param[block], exp_avg_sq[block] = join(weight[block], remainder[block], stored[block])
        for s in restarted:
            main_param[s.offset : s.offset + s.numel] = weight[s.offset : s.offset + s.numel]
        return {"main_param": main_param, "exp_avg": torch.from_numpy(state.exp_avg), "exp_avg_sq": exp_avg_sq}

    def _refresh(
        self,
        subgroup: Subgroup,
        state: StateView,
        shards: Collection[int],
        weight_of: "Callable[[Segment], torch.Tensor]",
    ) -> None:
        """Make main_param of ``shards`` from the weights again, but keep it where it still rounds to the weight."""
        for s in subgroup.segments:
            if s.shard in shards or s.shard in self._own_masters:
                main_param = torch.from_numpy(state.main_param)[s.offset : s.offset + s.numel]
                weight = weight_of(s).cpu()
                main_param.copy_(torch.where(main_param.to(weight.dtype) == weight, main_param, weight.float()))

    def _weight(self, segment: Segment) -> torch.Tensor:
        start = segment.shard_offset
        return self._weights[segment.shard][start : start + segment.numel]

    def _host_weights(self, subgroup: Subgroup) -> torch.Tensor:
        weights = _array(subgroup.numel, self._weights[subgroup.segments[0].shard].dtype)
        for s in subgroup.segments:
            weights[s.offset : s.offset + s.numel].copy_(self._weight(s))
        return weights

    def _sum(self, subgroup: Subgroup) -> np.ndarray:
        """One sum a segment, of the weights as they are now."""
        weights = [self._weight(s).cpu() for s in subgroup.segments]
        addresses = np.array([w.data_ptr() for w in weights], np.int64)
        return self._kernel.sum_words(addresses, np.array([w.numel() for w in weights], np.int64))


def _arrays(state: StateView) -> "dict[str, torch.Tensor]":
    return {name: torch.from_numpy(getattr(state, name)) for name in ("main_param", "exp_avg", "exp_avg_sq")}


def _array(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Host memory of its own pages: malloc would keep freed arrays of this size, and hardly ever use them again."""
    return torch.frombuffer(mmap.mmap(-1, numel * dtype.itemsize), dtype=dtype)


def _blocks(numel: int) -> "Iterator[slice]":
    return (slice(start, start + _BLOCK_NUMEL) for start in range(0, numel, _BLOCK_NUMEL))
