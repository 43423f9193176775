"""The optimizer that ours is compared with: stock Megatron, its inner Adam being torch's fused AdamW on the CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import megatron.core.optimizer as factory_module
import torch
from megatron.core.optimizer import distrib_optimizer
from torch.optim.adamw import adamw


class FusedAdam(torch.optim.Optimizer):
    """Looks like the FusedAdam of Transformer Engine and Apex (``step`` is in the group); computes
    ``torch.optim.AdamW(fused=True)``, for parameters of a multiple of 16 elements, where its vector body does all."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, adam_w_mode=True, **_):
        if not adam_w_mode:
            raise ValueError("AdamW only")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                if p.numel() % 16:
                    raise ValueError(f"a shard of {p.numel()} elements: the oracle needs multiples of 16")
                state = self.state[p]
                if not state:
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
                adamw(
                    [p],
                    [p.grad],
                    [state["exp_avg"]],
                    [state["exp_avg_sq"]],
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


@contextlib.contextmanager
def stock_with_fused_adam() -> Iterator[None]:
    """Megatron as on a machine with Apex, with ``FusedAdam`` above."""
    patches = [
        (factory_module, "Adam", FusedAdam),
        (factory_module, "USING_PYTORCH_OPTIMIZER", False),
        (distrib_optimizer, "Adam", FusedAdam),
        (distrib_optimizer, "HAVE_APEX_OR_TE", True),
        (distrib_optimizer, "USING_APEX_OPTIMIZER", True),
    ]
    before = [(module, name, getattr(module, name)) for module, name, _ in patches]
    for module, name, value in patches:
        setattr(module, name, value)
    try:
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)
