"""What Megatron's training loop knows of a step, for the telemetry; and our numbers for Megatron's log and its writers."""

from __future__ import annotations

import inspect
from argparse import Namespace
from collections.abc import Callable
from typing import Any

from ..report.numbers import StepNumbers
from ..report.scalars import scalars
from ..telemetry import StepRecord
from .distributed_optimizer import MLPDistributedOptimizer

_LOSS, _GRAD_NORM = 0, 5  # of what train_step returns, in every version


def after_train_step(
    train_step: "Callable[..., Any]", get_args: "Callable[[], Namespace]", get_writers: "Callable[[], tuple[Any, Any]]"
) -> "Callable[..., None]":
    """A function to call with the result of ``train_step`` and its arguments.

    It completes the step's record (iteration, loss where this rank knows it, gradient norm) before it is written. Every
    ``--log-interval`` it prints the step's summary on rank 0, and on the rank that has writers (Megatron makes them on the
    last one) adds means of the rank's steps since the last time. A step is counted when its flushes have landed: the
    newest one is in the next interval.

    Args:
        get_writers: gives Megatron's TensorBoard writer and its W&B module; either may be None.
    """
    signature = inspect.signature(train_step)
    complete: "list[StepNumbers]" = []

    def add(record: StepRecord) -> None:
        complete.append(StepNumbers.of(record))

    def report(result: "tuple[Any, ...]", *args: Any, **settings: Any) -> None:
        optimizer = signature.bind(*args, **settings).arguments["optimizer"]
        parts = [p for p in getattr(optimizer, "chained_optimizers", [optimizer]) if _is_offloaded(p)]
        if not parts:
            return
        options, pipeline = get_args(), parts[0].pipeline
        iteration = options.curr_iteration + 1
        record = pipeline.annotate(iteration, _loss(result[_LOSS]), _number(result[_GRAD_NORM]))
        due = iteration % options.log_interval == 0
        if record is not None and options.rank == 0 and due:
            going_on = len(pipeline.tiers.flushes)  # not yet in what was written
            more = f" | {going_on} flushes go on" if going_on else ""
            print(f" iteration {iteration:8d} | {record.summary()}{more}", flush=True)
        tensorboard, wandb = get_writers()
        if not tensorboard and not wandb:
            return
        pipeline.on_record = add
        if due and complete:
            values = scalars(complete, pipeline.tiers.directories)
            complete.clear()
            for name, value in values.items() if tensorboard else ():
                tensorboard.add_scalar(name, value, iteration)
            if wandb:
                wandb.log(values, iteration)

    return report


def _is_offloaded(part: Any) -> bool:
    return isinstance(part, MLPDistributedOptimizer) and part.pipeline is not None


def _loss(losses: "dict[str, Any]") -> "float | None":
    """The first loss that is reported; None on ranks that know none (not the last pipeline stage)."""
    return _number(next(iter(losses.values()), None))


def _number(value: Any) -> "float | None":
    return None if value is None else float(value)
