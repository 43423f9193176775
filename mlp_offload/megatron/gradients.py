"""Gradients as the stock optimizer sees them: in fp32, unscaled and clipped; computed without changing the gradients.

Stock copies every gradient to fp32, then multiplies it in place by the inverse loss scale and by the clip coefficient.
Here a gradient stays as DDP left it and the Adam kernel does both multiplications. What stock derives from the copies
(overflow, norm) is derived here from the gradients, or from one short-lived copy at a time, with the same roundings.
Zeros are counted in the gradients as they are: a factor leaves zeros zero, and makes one only below 1e-45.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from megatron.core.optimizer import clip_grads

try:  # The reduction that Megatron-Core uses when neither Transformer Engine nor Apex is installed.
    from megatron.core.utils import local_multi_tensor_l2_norm
except ImportError:
    local_multi_tensor_l2_norm = None


def any_non_finite(gradients: Iterable[torch.Tensor], found: torch.Tensor) -> None:
    """Set ``found`` (fp32, one element) to 1 if a gradient holds inf or nan; no copy of a gradient is made."""
    for gradient in gradients:
        least, most = torch.aminmax(gradient)  # both propagate nan
        found.copy_(torch.maximum(found, (~(torch.isfinite(least) & torch.isfinite(most))).to(found)))


def unscaled(gradient: torch.Tensor, inverse_scale: "torch.Tensor | None") -> torch.Tensor:
    """``gradient`` in fp32 times ``inverse_scale`` (fp32); the gradient itself when nothing has to be done."""
    wide = gradient.float()
    return wide if inverse_scale is None else wide * inverse_scale


def norm_inputs(gradients: Sequence[torch.Tensor], inverse_scale: "torch.Tensor | None") -> "Sequence[torch.Tensor]":
    """Tensors whose L2 norm, as ``clip_grads.get_grad_norm_fp32`` takes it, has the bits of stock's.

    [Note: norm of norms] Megatron-Core's own reduction is the norm of the list of the tensors' norms, and the norm of
    one element is that element. So one fp32 copy at a time is reduced here, and its norm stands in for it. The kernels
    of Transformer Engine and Apex reduce all tensors in one tree of chunks; for them all fp32 copies are made (4 bytes
    an element of the rank's shards, only for 16-bit gradients or with a loss scale), as stock does for the whole step.
    ``CudaKernels.norm`` needs no copies but does not have stock's bits in either case: theirs are built with approximate
    square roots, and Megatron-Core's own takes ``torch.norm`` of each tensor, which adds up in another order.
    """
    if inverse_scale is None and all(g.dtype == torch.float32 for g in gradients):
        return gradients
    if clip_grads.l2_norm_impl is local_multi_tensor_l2_norm:
        return [torch.norm(unscaled(g, inverse_scale)) for g in gradients]
    return [unscaled(g, inverse_scale) for g in gradients]


def clip_coefficient(max_norm: float, total_norm: "float | torch.Tensor") -> float:
    """The factor that stock applies to the fp32 gradients; 1.0 when the norm is within ``max_norm`` (or nan)."""
    coefficient = max_norm / (total_norm + 1.0e-6)
    if isinstance(coefficient, torch.Tensor):  # stock clamps a tensor, and then nan stays
        return coefficient.clamp_max(1.0).item()
    return coefficient if coefficient < 1.0 else 1.0
