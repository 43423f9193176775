"""A few steps of AdamW some of whose subgroups are updated on a GPU, or on a stand-in for one, or all on the CPU."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Any

import torch
from transfer_runs import Place

from mlp_offload.adam.kernel import AdamKernel, adam_scalars
from mlp_offload.config import OffloadConfig
from mlp_offload.device_updates import gpu_for_updates
from mlp_offload.pipeline import StepPipeline
from mlp_offload.telemetry import StepRecord
from mlp_offload.tiers import Where
from mlp_offload.transfers import pin_memory
from mlp_offload.updates import AdamWork

SHARDS = [1000, 0, 1, 1345, 300, 1450, 7]
SUBGROUP_NUMEL = 300
BUFFER_BYTES = 4096
STEPS = 5


@dataclass
class Run:
    """A run, and what it saw.

    Attributes:
        itemsize: 2 = all weights are bf16 and records hold remainders.
        options: of the config; ``gpu_memory`` and ``host_memory`` in buffers.
        seen: weights and gradients after each step, what was read between steps, the whole state in the end.
        wheres: where the subgroups were after the last step.
    """

    itemsize: int
    fp32_masters: bool = False
    options: "dict[str, Any]" = field(default_factory=dict)
    steps: int = STEPS
    seen: "list[torch.Tensor]" = field(default_factory=list)
    records: "list[StepRecord]" = field(default_factory=list)
    wheres: "list[Where]" = field(default_factory=list)

    def config(self, directory) -> OffloadConfig:
        options = {"host_memory": 8, "gpu_memory": 0, "update_device": "cpu"} | self.options
        for name in ("host_memory", "gpu_memory"):
            options[name] *= BUFFER_BYTES
        return OffloadConfig(paths=[str(directory)], subgroup_size=SUBGROUP_NUMEL, **options)


def train(run: Run, place: Place, kernel: AdamKernel, directory) -> Run:
    """Fill ``run`` with what it saw. Between the steps the state is read and changed, weights change with and without
    notice, move to other memory, and some have no gradient; in the end a step breaks off in the middle."""
    generator = torch.Generator().manual_seed(1)
    dtypes = [torch.bfloat16, torch.float32, torch.float16] if run.itemsize == 4 else [torch.bfloat16]
    config = run.config(directory)
    with place.trainer():
        weights = [
            place.put(torch.randn(n, generator=generator).to(dtypes[i % len(dtypes)])) for i, n in enumerate(SHARDS)
        ]
    gpu, _ = gpu_for_updates(config, weights, kernel)
    pin = pin_memory if weights[0].is_cuda else None
    pipeline = StepPipeline(config, {"params": SHARDS}, main_itemsize=run.itemsize, pin=pin, gpu=gpu)
    try:
        work = AdamWork(
            kernel,
            weights,
            SUBGROUP_NUMEL,
            run.itemsize,
            adopt_changes=True,
            fp32_masters=run.fp32_masters,
            gpu=pipeline.tiers.device,
        )
        with place.trainer():
            pipeline.initialize(lambda space, subgroup, view: work.load_weights(subgroup, view))
        for step in range(1, run.steps + 1):
            dtype = torch.float32 if step == 2 else torch.bfloat16
            noise = [torch.randn(n, generator=generator).to(dtype) for n in SHARDS]
            with place.trainer():
                stale = [0, 3] if step == 4 else []
                changed = {3: [4], 4: stale}.get(step, [])  # in step 3 nobody says so
                for i in changed:
                    weights[i].copy_(place.put(noise[i].to(weights[i].dtype)))
                gradients = place.later([place.put(g) if (i + step) % 4 else None for i, g in enumerate(noise)])
            work.begin(gradients, [_scalars(step)], [0] * len(SHARDS), stale)
            run.records.append(pipeline.step("params", work))
            work.end()
            with place.trainer():
                run.seen += place.later(weights)
                for gradient in gradients:
                    if gradient is not None:
                        gradient.zero_()
                if step == 2:
                    weights = place.later(weights)
                    work.bind(weights)
            if step in (1, 3):
                _change_state(run, place, pipeline, work)
        run.wheres = [entry.where for entry in pipeline.tiers.table]
        for subgroup in pipeline.subgroups["params"]:
            with pipeline.read("params", subgroup) as view, place.trainer():
                run.seen += [array.clone() for array in work.read(subgroup, view).values()]
        _break_off(place, pipeline, work, noise)
        work = None  # gives back its staging
        with place.trainer():
            run.seen = [tensor.cpu() for tensor in run.seen]
    finally:
        pipeline.close()
    return run


def _scalars(step):
    return adam_scalars(lr=0.1, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1, step=step)


def _change_state(run: Run, place: Place, pipeline: StepPipeline, work: AdamWork) -> None:
    for subgroup in pipeline.subgroups["params"][::2]:
        with contextlib.ExitStack() as stack:
            view = stack.enter_context(pipeline.modify("params", subgroup))
            with place.trainer(), work.edit(subgroup, view) as arrays:
                run.seen += [array.clone() for array in arrays.values()]
                arrays["exp_avg"] *= 0.5
                arrays["exp_avg_sq"] += 0.25


def _break_off(place: Place, pipeline: StepPipeline, work: AdamWork, noise) -> None:
    """A step that fails when the GPU was asked for a few updates, or before the first on the CPU."""
    with place.trainer():
        gradients = place.later([place.put(g) for g in noise])
    work.begin(gradients, [_scalars(STEPS + 1)], [0] * len(SHARDS))
    here, there, asked = work.update, work.update_on_device, []

    def on_device(subgroup, record):
        if len(asked) == 4:
            raise ZeroDivisionError
        asked.append(there(subgroup, record))
        return asked[-1]

    def on_host(subgroup, view):
        here(subgroup, view)
        raise ZeroDivisionError

    work.update, work.update_on_device = on_host, on_device
    with contextlib.suppress(ZeroDivisionError):
        pipeline.step("params", work)
        raise AssertionError("nothing was updated")
    del work.update, work.update_on_device
