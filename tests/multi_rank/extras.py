"""What else Megatron's training loop does in a step, around the forward and backward pass: one ``Extra`` each."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import rerun_state_machine

if TYPE_CHECKING:
    from tiny_gpt import Training


@dataclass(frozen=True)
class Extra:
    """``before`` and ``after`` a step: what they return is compared. ``forward_backward`` yields once a pass."""

    before: "Callable[[Training], dict[str, float]] | None" = None
    forward_backward: "Callable[[Any], Iterator[None]] | None" = None
    after: "Callable[[Training], dict[str, float]] | None" = None


def once(batches: Any) -> "Iterator[None]":
    """A forward and backward pass as usual."""
    yield


def _twice(batches: Any) -> "Iterator[None]":
    """Every pass runs again, as with ``--rerun-mode report_stats``; the machine says so itself."""
    mode = rerun_state_machine.RerunMode.REPORT_DETERMINISM_STATS
    rerun_state_machine.destroy_rerun_state_machine()
    rerun_state_machine.initialize_rerun_state_machine(mode=mode)
    machine = rerun_state_machine.get_rerun_state_machine()
    machine.current_iteration = 0  # the first would report statistics, which fails in 0.16.1
    passes = 0
    while machine.should_run_forward_backward(batches):
        passes += 1
        yield
    machine.should_checkpoint_and_exit()
    rerun_state_machine.destroy_rerun_state_machine()
    if passes != 2:
        raise AssertionError(f"{passes} passes, not 2")


def validated(loss: torch.Tensor) -> torch.Tensor:
    """The loss, which a rerun state machine, where there is one, compares with that of the other pass."""
    machine = rerun_state_machine._GLOBAL_RERUN_STATE_MACHINE
    if machine is not None:
        machine.validate_result(loss.detach(), torch.isnan, message="loss", tolerance=0.0, fatal=True)
    return loss


def _offload_and_restore(run: "Training") -> "dict[str, float]":
    """As between rollouts of reinforcement learning: all that is not needed for inference leaves, and comes back."""
    buffers = [buffer for chunk in run.chunks for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]]
    run.optimizer.offload_to_cpu()
    for chunk in run.chunks:
        chunk.offload_grad_buffers()
    for buffer in buffers:
        buffer.param_data_cpu = torch.empty_like(
            buffer.param_data
        )  # without a GPU, Megatron would take param_data itself
        buffer.offload_to_cpu(move_params=True, move_grads=False)
    left = sum(buffer.param_data.untyped_storage().nbytes() for buffer in buffers)
    for buffer in buffers:
        buffer.reload_from_cpu(move_params=True, move_grads=False)
    for chunk in run.chunks:
        chunk.restore_grad_buffers()
    run.optimizer.restore_from_cpu()
    return {"left": float(left)}


def _params_norm(run: "Training") -> "dict[str, float]":
    """``--log-params-norm``, by the function that Megatron's training loop calls."""
    from megatron.training import global_vars, utils

    global_vars.set_args(Namespace(bf16=run.layout.dtype == "bf16"))
    return {"params norm": utils.calc_params_l2_norm(run.chunks)}


EXTRAS: "dict[str, Extra]" = {
    "evaluate": Extra(after=lambda run: {"evaluated": run.evaluate()}),
    "rerun": Extra(forward_backward=_twice),
    "offload and restore": Extra(before=_offload_and_restore),
    "params norm": Extra(after=_params_norm),
}
