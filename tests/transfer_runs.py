"""A few steps of AdamW whose weights and gradients live somewhere: in host memory, on a GPU, on a stand-in for one."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from mlp_offload.adam.kernel import AdamKernel, adam_scalars
from mlp_offload.config import OffloadConfig
from mlp_offload.pipeline import StepPipeline
from mlp_offload.plan.subgroups import cut
from mlp_offload.storage.buffers import BufferPool
from mlp_offload.tiers import StateView
from mlp_offload.updates import AdamWork

SHARDS = [1000, 0, 1, 1345, 300]
SUBGROUP_NUMEL = 300
STEPS = 4


@dataclass
class Place:
    """Where a trainer works.

    Attributes:
        put: a tensor with these values there.
        trainer: a context: what is done in it the trainer does.
        delay: makes the trainer's stream late.
    """

    put: "Callable[[torch.Tensor], torch.Tensor]" = torch.clone
    trainer: "Callable[[], contextlib.AbstractContextManager]" = contextlib.nullcontext
    delay: "Callable[[], object]" = lambda: None

    def later(self, tensors: "Sequence[torch.Tensor | None]") -> "list[torch.Tensor | None]":
        """Copies of tensors that are there, made in the course of the trainer's stream; until then they are NaN."""
        copies = [t if t is None else self.put(torch.full(t.shape, torch.nan, dtype=t.dtype)) for t in tensors]
        self.delay()
        for copy, tensor in zip(copies, tensors):
            if copy is not None:
                copy.copy_(tensor, non_blocking=True)
        return copies


class Piped:
    """States on a path, through the pipeline."""

    def __init__(self, directory, itemsize: int):
        config = OffloadConfig(paths=[str(directory)], subgroup_size=SUBGROUP_NUMEL, host_memory=5 * 4096)
        self._pipeline = StepPipeline(config, {"params": SHARDS}, main_itemsize=itemsize)
        self.subgroups = self._pipeline.subgroups["params"]

    def initialize(self, work):
        self._pipeline.initialize(lambda space, subgroup, view: work.load_weights(subgroup, view))

    def step(self, work):
        self._pipeline.step("params", work)

    def read(self, subgroup):
        return self._pipeline.read("params", subgroup)

    def close(self):
        self._pipeline.close()


class Shuffled:
    """States in host memory; subgroups are prepared and updated in any order, some not prepared, some too early."""

    def __init__(self, seed: int, itemsize: int):
        self.subgroups = cut(SHARDS, SUBGROUP_NUMEL, itemsize)
        self._random = random.Random(seed)
        self._pool = BufferPool(len(self.subgroups), max(s.record_bytes for s in self.subgroups))
        self._leases = [self._pool.lease() for _ in self.subgroups]
        self._views = [StateView.of(s, lease) for s, lease in zip(self.subgroups, self._leases)]

    def initialize(self, work):
        for subgroup, lease, view in zip(self.subgroups, self._leases, self._views):
            lease.array(0, lease.nbytes // 4).fill(0)
            work.load_weights(subgroup, view)

    def step(self, work):
        waiting = self._random.sample(self.subgroups, len(self.subgroups))
        while waiting:
            for subgroup in self._random.sample(waiting, min(len(waiting), self._random.randrange(4))):
                work.prepare(subgroup)
            subgroup = waiting.pop(0)
            work.update(subgroup, self._views[subgroup.index])

    def read(self, subgroup):
        return contextlib.nullcontext(self._views[subgroup.index])

    def close(self):
        self._views.clear()
        for lease in self._leases:
            lease.release()
        self._pool.close()


def train(place: Place, kernel: AdamKernel, itemsize: int, states) -> "list[torch.Tensor]":
    """All weights after each step, then the whole state; then a step breaks off in the middle.

    The dtype of gradients changes, a parameter may have none, the trainer changes a weight, and weights move to other
    memory between two steps.

    Args:
        itemsize: 2 = all weights are bf16 and records hold remainders.
        states: a ``Piped`` or ``Shuffled``; closed in the end.
    """
    generator = torch.Generator().manual_seed(1)
    dtypes = [torch.bfloat16, torch.float32, torch.float16] if itemsize == 4 else [torch.bfloat16]
    seen = []
    with place.trainer():
        weights = [
            place.put(torch.randn(n, generator=generator).to(dtypes[i % len(dtypes)])) for i, n in enumerate(SHARDS)
        ]
    work = AdamWork(kernel, weights, SUBGROUP_NUMEL, itemsize, adopt_changes=True)
    try:
        with place.trainer():
            states.initialize(work)
        for step in range(1, STEPS + 1):
            dtype = torch.float32 if step == 2 else torch.bfloat16
            noise = [torch.randn(n, generator=generator).to(dtype) for n in SHARDS]
            with place.trainer():
                stale = [0, 3] if step == 4 else []  # the first of them has no gradient then
                for i in stale:
                    weights[i].copy_(place.put(noise[i].to(weights[i].dtype)))
                gradients = place.later([place.put(g) if (i + step) % 4 else None for i, g in enumerate(noise)])
            scalars = adam_scalars(lr=0.1, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1, step=step)
            work.begin(gradients, [scalars], [0] * len(SHARDS), stale)
            states.step(work)
            work.end()
            with place.trainer():
                seen += place.later(weights)
                if step == 2:
                    weights = place.later(weights)
                    work.bind(weights)
        with place.trainer():
            for subgroup in states.subgroups:
                with states.read(subgroup) as view:
                    seen += [array.clone() for array in work.read(subgroup, view).values()]
            work.begin(place.later([place.put(g) for g in noise]), [scalars], [0] * len(SHARDS))
        work.prepare(states.subgroups[0])
        del work
        with place.trainer():
            return [tensor.cpu() for tensor in seen]
    finally:
        states.close()
