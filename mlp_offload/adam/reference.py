"""The AdamW step of this project in plain torch: slow, readable, and bit for bit what the native kernel computes.

Every operation is rounded once to fp32. Two of them need care in torch:

* fma(a, b, c), a * b + c with one rounding, has no torch function. The product of two fp32 numbers is exact in
  float64; their sum with c is not, and rounding it twice (to 53 bits, then to 24) can be off by one ulp. Rounding
  the first time *to odd* (cut off, and set the last bit when anything was cut) keeps the knowledge that the sum was not
  exact, and the second rounding is then right (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums").
* torch's fp32 square root may come from a vector library that is not correctly rounded. A float64 square root, even
  with an error of a few of its own ulp, rounds to the right fp32 number: the root of a 24-bit number is never closer
  than 2**-50 (relative) to the middle of two fp32 numbers.
"""

from __future__ import annotations

import torch

from .kernel import AdamScalars


def fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """a * b + c in fp32 with one rounding; fp32 tensors of any broadcastable shapes."""
    product, addend = a.double() * b.double(), c.double()
    total = product + addend
    addend_seen = total - product
    error = (product - (total - addend_seen)) + (addend - addend_seen)  # total + error is exact (Knuth's TwoSum)
    inexact = (error != 0) & total.isfinite()
    too_far = (inexact & ((error < 0) != (total < 0))).long()  # rounded away from zero: step back one ulp
    bits = total.view(torch.int64)
    return torch.where(inexact, (bits - too_far) | 1, bits).view(torch.float64).float()


def adamw_step(
    main_param: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    grad: torch.Tensor | None,
    weight: torch.Tensor | None,
    scalars: AdamScalars,
) -> None:
    """One step in place on fp32 state; `weight` (any float dtype) receives main_param, rounded to nearest even.

    All tensors have one shape. `grad` may be fp32, bf16 or fp16 and is not changed; None leaves everything as it is.
    """
    if grad is None:
        return
    s = AdamScalars(*(torch.tensor(x, dtype=torch.float32) for x in scalars))
    g = grad.float() * s.inverse_scale * s.clip_coefficient
    p = main_param * s.decay
    # Starts from the nearer end, like torch.lerp.
    if s.one_minus_beta1 < 0.5:
        m = fma(s.one_minus_beta1, g - exp_avg, exp_avg)
    else:
        m = fma(s.one_minus_beta1 - 1, g - exp_avg, g)
    v = fma(s.one_minus_beta2 * g, g, exp_avg_sq * s.beta2)
    d = v.double().sqrt().float() / s.bias_correction2_sqrt + s.eps
    main_param.copy_(p - (s.step_size * m) / d)
    exp_avg.copy_(m)
    exp_avg_sq.copy_(v)
    if weight is not None:
        weight.copy_(main_param)
