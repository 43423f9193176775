"""What Megatron's training loop knows of a step, for the telemetry; and the step's summary for Megatron's log."""

from __future__ import annotations

import inspect
from argparse import Namespace
from collections.abc import Callable
from typing import Any

from .distributed_optimizer import MLPDistributedOptimizer

_LOSS, _GRAD_NORM = 0, 5  # of what train_step returns, in every version


def after_train_step(train_step: "Callable[..., Any]", get_args: "Callable[[], Namespace]") -> "Callable[..., None]":
    """A function to call with the result of ``train_step`` and its arguments.

    It completes the step's record (iteration, loss where this rank knows it, gradient norm) before it is written, and on
    rank 0 prints its summary every ``--log-interval``.
    """
    signature = inspect.signature(train_step)

    def report(result: "tuple[Any, ...]", *args: Any, **settings: Any) -> None:
        optimizer = signature.bind(*args, **settings).arguments["optimizer"]
        parts = [p for p in getattr(optimizer, "chained_optimizers", [optimizer]) if _is_offloaded(p)]
        if not parts:
            return
        options = get_args()
        iteration = options.curr_iteration + 1
        record = parts[0].pipeline.annotate(iteration, _loss(result[_LOSS]), _number(result[_GRAD_NORM]))
        if record is not None and options.rank == 0 and iteration % options.log_interval == 0:
            print(f" iteration {iteration:8d} | {record.summary()}", flush=True)

    return report


def _is_offloaded(part: Any) -> bool:
    return isinstance(part, MLPDistributedOptimizer) and part.pipeline is not None


def _loss(losses: "dict[str, Any]") -> "float | None":
    """The first loss that is reported; None on ranks that know none (not the last pipeline stage)."""
    return _number(next(iter(losses.values()), None))


def _number(value: Any) -> "float | None":
    return None if value is None else float(value)
