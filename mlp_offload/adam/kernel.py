"""The native AdamW kernel: which options it has, how its scalars are rounded, and how tensors become its segments."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from mlp_offload import _native
from mlp_offload.errors import ConfigError

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class AdamScalars(NamedTuple):
    """What one parameter group contributes to a step: one row of the kernel's groups array.

    Every value is exactly an fp32 number. A factor that does not apply is 1.0, which changes no bits.
    """

    decay: float  # 1 - lr * weight_decay
    one_minus_beta1: float
    beta2: float
    one_minus_beta2: float
    eps: float
    step_size: float  # lr / (1 - beta1**step)
    bias_correction2_sqrt: float  # sqrt(1 - beta2**step)
    inverse_scale: float  # 1 / loss scale
    clip_coefficient: float


def adam_scalars(
    lr: float | torch.Tensor | None,
    betas: tuple[float | torch.Tensor, float | torch.Tensor],
    eps: float | torch.Tensor,
    weight_decay: float | torch.Tensor,
    step: int | torch.Tensor,
    inverse_scale: float | torch.Tensor = 1.0,
    clip_coefficient: float | torch.Tensor = 1.0,
) -> AdamScalars:
    """Scalars of step number `step` (the first is 1), computed in float64 and rounded to fp32 once, as torch does.

    The gradient is widened to fp32, multiplied by `inverse_scale`, then by `clip_coefficient`: two roundings.

    Raises:
        ConfigError: step is below 1, or there is no learning rate.
    """
    if lr is None:
        raise ConfigError(
            "Adam has no learning rate (lr=None); set lr, or let a scheduler set it before the first step"
        )
    lr, beta1, beta2, step = float(lr), float(betas[0]), float(betas[1]), int(step)
    if step < 1:
        raise ConfigError(f"Adam step is {step}; steps count from 1")
    values = (
        1 - lr * float(weight_decay),
        1 - beta1,
        beta2,
        1 - beta2,
        float(eps),
        lr / (1 - beta1**step),
        math.sqrt(1 - beta2**step),
        float(inverse_scale),
        float(clip_coefficient),
    )
    return AdamScalars(*(float(np.float32(x)) for x in values))


def check_adam_options(**group: Any) -> None:
    """Refuse what the kernel does not compute. Takes a parameter group, or defaults, of any Adam; other keys pass.

    Raises:
        ConfigError: names the option, its value and what to set instead.
    """
    for name in ("amsgrad", "maximize", "differentiable"):
        if group.get(name):
            raise ConfigError(f"Adam option {name}={group[name]} is not supported with offload; set {name}=False")
    if not group.get("bias_correction", True):
        raise ConfigError(
            f"Adam option bias_correction={group['bias_correction']} is not supported with offload; set bias_correction=True"
        )
    for name in ("decoupled_weight_decay", "adam_w_mode"):
        if not group.get(name, True):
            raise ConfigError(
                f"Adam option {name}={group[name]} (L2 regularisation added to the gradient) is not supported with "
                f"offload; set {name}=True (AdamW)"
            )
    for name in ("lr", "eps", "weight_decay"):
        if name in group and not 0 <= float(group[name]) < math.inf:
            raise ConfigError(f"Adam option {name}={float(group[name])} is out of range; use a finite number >= 0")
    for i, beta in enumerate(group.get("betas", ())):
        if not 0 <= float(beta) < 1:
            raise ConfigError(f"Adam option betas[{i}]={float(beta)} is out of range; use 0 <= beta < 1")


class Segment(NamedTuple):
    """Consecutive elements of a subgroup with one gradient, one weight and one group: one row for the kernel.

    Addresses are bytes in host memory of the segment's first element. `grad_address` 0: no gradient, the kernel leaves
    state and weight as they are. `weight_address` 0: no weight is written.
    """

    offset_numel: int  # of the first element within the subgroup
    numel: int
    grad_address: int
    weight_address: int
    grad_dtype: int  # a value of DTYPE_CODES, as weight_dtype
    weight_dtype: int
    group: int  # index into the scalars of the call

    @classmethod
    def of(cls, offset_numel: int, numel: int, grad: torch.Tensor | None, weight: torch.Tensor | None, group: int = 0):
        """Segment over 1-d host tensors. It borrows them: they must live until the update returns.

        Raises:
            ConfigError: a tensor is not a contiguous host tensor of `numel` fp32, bf16 or fp16 elements.
        """
        grad_address, grad_dtype = _address_and_code("gradient", grad, numel)
        weight_address, weight_dtype = _address_and_code("weight", weight, numel)
        return cls(offset_numel, numel, grad_address, weight_address, grad_dtype, weight_dtype, group)


def _address_and_code(what: str, tensor: torch.Tensor | None, numel: int) -> tuple[int, int]:
    if tensor is None:
        return 0, 0
    if tensor.dtype not in DTYPE_CODES:
        known = ", ".join(str(d) for d in DTYPE_CODES)
        raise ConfigError(f"{what} dtype {tensor.dtype} is not supported by the Adam kernel; use one of {known}")
    if tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.numel() != numel:
        raise ConfigError(
            f"{what} on {tensor.device} with shape {tuple(tensor.shape)} and strides {tensor.stride()} cannot be used by "
            f"the Adam kernel; pass a contiguous host tensor of {numel} elements"
        )
    return tensor.data_ptr(), DTYPE_CODES[tensor.dtype]


def default_threads(local_ranks: int = 1) -> int:
    """Cores this process may use, shared among the ranks of its node; at least 1."""
    return max(1, len(os.sched_getaffinity(0)) // local_ranks)


class AdamKernel:
    """AdamW over subgroup records in host memory, by a team of `threads` threads (the caller is one of them).

    All variants and thread counts give the same bits. Usable in a forked child, where the caller works alone.
    Calls from several threads take turns.

    Args:
        threads: at least 1; the team sleeps between calls and is joined by close().
        variant: "auto", or one of `AdamKernel.variants()`.

    Raises:
        ConfigError: threads or variant is not possible on this machine.
    """

    def __init__(self, threads: int, variant: str = "auto"):
        usable = self.variants()
        if variant != "auto" and variant not in usable:
            raise ConfigError(f"Adam variant {variant!r} does not run here; use one of auto, {', '.join(usable)}")
        if threads < 1:
            raise ConfigError(f"Adam threads is {threads}; use 1 or more")
        self._native = _native.AdamKernel(threads, usable[0] if variant == "auto" else variant)

    @staticmethod
    def variants() -> list[str]:
        """Variants that this processor runs, fastest first; "scalar" is always there."""
        return _native.adam_variants()

    @property
    def variant(self) -> str:
        return self._native.variant

    @property
    def threads(self) -> int:
        return self._native.threads

    def update(
        self,
        state_address: int,
        stride_numel: int,
        segments: Sequence[Segment],
        groups: Sequence[AdamScalars],
        main_itemsize: int = 4,
    ) -> None:
        """One step, in place, over the record at `state_address` (bytes): main_param, exp_avg and exp_avg_sq, fp32,
        `stride_numel` elements each. Elements in no segment are left as they are.

        With `main_itemsize` 2 the record holds remainders in place of main_param (see `remainder`), and the bf16
        weights are read as well as written. Segments must not overlap. The GIL is released meanwhile.

        Raises:
            ValueError: a segment lies outside the record, names an unknown group or dtype, or has no bf16 weight where
                it needs one; nothing was written.
            RuntimeError: the kernel is closed.
        """
        self._native.update(
            state_address,
            stride_numel,
            main_itemsize,
            np.array(segments, dtype=np.int64).reshape(-1, len(Segment._fields)),
            np.array(groups, dtype=np.float32).reshape(-1, len(AdamScalars._fields)),
        )

    def sum_words(self, addresses: np.ndarray, numels: np.ndarray) -> np.ndarray:
        """For each run of `numels[i]` 16-bit words at `addresses[i]` the sum of word k times 2 k + 1, modulo 2**32.

        The factors are odd, so a single word that changed always shows. All arrays have shape (runs,), int64; the
        result is uint32.
        """
        return self._native.sum_words(addresses, numels)

    def close(self) -> None:
        """Join the threads. Safe to call twice."""
        self._native.close()

    def __enter__(self) -> AdamKernel:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
