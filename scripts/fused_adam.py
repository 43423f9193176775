"""The stock optimizer's Adam for the comparison: looks like FusedAdam, computes what torch's fused AdamW computes.

Megatron takes its inner Adam from Transformer Engine or Apex, or falls back to ``torch.optim.AdamW()``, whose
unfused CPU arithmetic takes square roots from a vector library that is not correctly rounded. The comparison needs a
known arithmetic: ``torch.optim.AdamW(fused=True)`` on the CPU, one thread, which is IEEE-exact. On a GPU the tensors go
to the host for the update and back, so the arithmetic is the same everywhere.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.optim.adamw import adamw

VECTOR_NUMEL = 16
"""torch's vector body and its scalar tail round differently; only tensors without a tail can be compared."""


class FusedAdam(torch.optim.Optimizer):
    """As in Transformer Engine's and Apex's FusedAdam, a parameter group has ``step`` and must have ``bias_correction``.

    Raises:
        ValueError: a parameter's size is no multiple of 16 elements, or plain Adam is asked for.
    """

    def __init__(
        self,
        params: "Iterable[Any]",
        lr: float = 1e-3,
        betas: "tuple[float, float]" = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
        **unused: Any,
    ):
        if not adam_w_mode:
            raise ValueError("this FusedAdam computes AdamW; set decoupled_weight_decay")
        defaults = {"lr": lr, "bias_correction": True, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: "Callable[[], Any] | None" = None) -> None:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # each thread's part has a tail of its own
        for group in self.param_groups:
            if not group["bias_correction"]:
                raise ValueError("this FusedAdam corrects the bias of both moments")
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        torch.set_num_threads(threads)

    def _update(self, parameter: torch.Tensor, group: "dict[str, Any]") -> None:
        if parameter.numel() % VECTOR_NUMEL:
            raise ValueError(f"a shard of {parameter.numel()} elements is no multiple of {VECTOR_NUMEL}")
        state = self.state[parameter]
        if not state:
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        tensors = (parameter, state["exp_avg"], state["exp_avg_sq"])
        on_host = [t.cpu() for t in tensors]
        adamw(
            [on_host[0]],
            [parameter.grad.cpu()],
            [on_host[1]],
            [on_host[2]],
            [],
            [torch.tensor(float(group["step"] - 1))],
            fused=True,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        for tensor, updated in zip(tensors, on_host):
            if tensor is not updated:  # .cpu() copied
                tensor.copy_(updated)


@contextlib.contextmanager
def megatron_with_fused_adam() -> "Iterator[None]":
    """Megatron builds its distributed optimizer on ``FusedAdam``, as it does where Apex is installed."""
    import megatron.core.optimizer as factory
    from megatron.core.optimizer import distrib_optimizer

    replacements = [
        (factory, "Adam", FusedAdam),
        (factory, "USING_PYTORCH_OPTIMIZER", False),
        (distrib_optimizer, "Adam", FusedAdam),
        (distrib_optimizer, "HAVE_APEX_OR_TE", True),
        (distrib_optimizer, "USING_APEX_OPTIMIZER", True),
    ]
    before = [(module, name, getattr(module, name)) for module, name, _ in replacements]
    for module, name, value in replacements:
        setattr(module, name, value)
    try:
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)
