"""An fp32 master in 16 bits beside its bf16 weight, exactly; in plain torch what the native kernel does in passing.

[Note: remainder] The weight is the master's upper half, rounded to nearest even. Given the weight, the master is known
from its lower half (the remainder) and one bit that says whether the weight was rounded up. That bit lives in the sign
of exp_avg_sq, which is never negative. So ten bytes a parameter hold what twelve did, and a step moves a sixth less.
It holds only as long as nobody else changes the weight; ``updates.AdamWork`` watches over that with a sum.
"""

from __future__ import annotations

import torch


def split(main_param: torch.Tensor, exp_avg_sq: torch.Tensor) -> "tuple[torch.Tensor, torch.Tensor, torch.Tensor]":
    """Of fp32 tensors of one shape: the bf16 weight, the remainder (int16) and the exp_avg_sq that is stored (fp32).

    ``exp_avg_sq`` loses its sign: a NaN, or a zero, may have had one.
    """
    bits = main_param.view(torch.int32)
    weight = main_param.to(torch.bfloat16)
    upper = weight.view(torch.int16).int() & 0xFFFF
    rounded_up = (upper != (bits >> 16 & 0xFFFF)) & ~main_param.isnan()
    stored = (exp_avg_sq.view(torch.int32) & 0x7FFFFFFF) | (rounded_up.int() << 31)
    return weight, (bits & 0xFFFF).to(torch.int16), stored.view(torch.float32)


def join(weight: torch.Tensor, remainder: torch.Tensor, stored: torch.Tensor) -> "tuple[torch.Tensor, torch.Tensor]":
    """What ``split`` took apart: (main_param, exp_avg_sq), fp32. A NaN comes back as a NaN."""
    stored_bits = stored.view(torch.int32)
    upper = (weight.view(torch.int16).int() & 0xFFFF) - (stored_bits >> 31 & 1)
    bits = (upper << 16) | (remainder.int() & 0xFFFF)
    return bits.view(torch.float32), (stored_bits & 0x7FFFFFFF).view(torch.float32)
