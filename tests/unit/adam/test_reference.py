"""The reference's building blocks against exact rational arithmetic, and the options of the kernel."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from mlp_offload.adam import adam_scalars, check_adam_options
from mlp_offload.adam.reference import fma
from mlp_offload.errors import ConfigError


def nearest_fp32(exact: Fraction) -> np.float32:
    """Nearest fp32, ties to even, for a value within the finite range."""
    guess = np.float32(float(exact))
    near = [np.nextafter(guess, np.float32(-np.inf)), guess, np.nextafter(guess, np.float32(np.inf))]
    return min(near, key=lambda x: (abs(Fraction(float(x)) - exact), int(x.view(np.uint32)) & 1))


def test_fma_is_rounded_once():
    rng = np.random.default_rng(0)
    a, b, c = (np.ldexp(rng.uniform(-2, 2, 3000), rng.integers(-20, 20, 3000)).astype(np.float32) for _ in range(3))
    c[:1000] = -(a[:1000] * b[:1000])  # cancels to the rounding error of the product
    c[1000:1200] = np.float32(2) ** rng.integers(-149, -120, 200)  # denormal results
    a[1000:1200] = np.float32(1e-30)
    b[1000:1200] = rng.uniform(1e-15, 1e-10, 200).astype(np.float32)
    # The product is just below, or above, half an ulp of c: a sum rounded to float64 first looks like a tie.
    tie_a, tie_b = np.float32((1 + 2**-23) * 2**-12), np.float32((1 - 2**-23) * 2**-12)
    traps = [(tie_a, tie_b, np.float32(1 + 2**-23)), (-tie_a, -tie_b, np.float32(1 + 2**-23))]
    traps += [(tie_a, tie_a, np.float32(1)), (-tie_a, tie_b, np.float32(-1 - 2**-23))]
    a, b, c = (np.concatenate([x, np.array(t, np.float32)]) for x, t in zip((a, b, c), zip(*traps)))
    got = fma(*(torch.from_numpy(x) for x in (a, b, c))).numpy()
    for i in range(len(a)):
        exact = Fraction(float(a[i])) * Fraction(float(b[i])) + Fraction(float(c[i]))
        assert got[i] == nearest_fp32(exact), f"fma({a[i]!r}, {b[i]!r}, {c[i]!r})"


def test_fma_keeps_infinities_and_nan():
    inf, nan = math.inf, math.nan
    a, b, c = torch.tensor(
        [[inf, 1.0, 1.0], [inf, 0.0, 1.0], [1e38, 1e38, -1.0], [1.0, 1.0, nan], [1.0, inf, -inf]]
    ).t()
    assert torch.equal(fma(a, b, c).nan_to_num(nan=-7.0, posinf=7.0), torch.tensor([7.0, -7.0, 7.0, -7.0, -7.0]))


def test_scalars_are_rounded_once_from_float64():
    lr, beta1, beta2, weight_decay, step = 3e-4, 0.9, 0.999, 0.1, 1000
    s = adam_scalars(lr, (beta1, beta2), 1e-8, weight_decay, step, 1 / 1000, 0.37)
    assert s.decay == np.float32(1 - lr * weight_decay)
    assert s.one_minus_beta1 == np.float32(1 - beta1) != np.float32(1) - np.float32(beta1)
    assert s.one_minus_beta2 == np.float32(1 - beta2)
    assert s.step_size == np.float32(lr / (1 - beta1**step))
    assert s.bias_correction2_sqrt == np.float32(math.sqrt(1 - beta2**step))
    assert (s.inverse_scale, s.clip_coefficient) == (np.float32(1 / 1000), np.float32(0.37))
    assert all(float(np.float32(x)) == x for x in s)


def test_scalars_accept_tensors_and_refuse_step_zero():
    def tensor(x: float) -> torch.Tensor:
        return torch.tensor(x, dtype=torch.float64)

    plain = adam_scalars(1e-3, (0.9, 0.95), 1e-8, 0.1, 7, 0.5, 0.25)
    assert plain == adam_scalars(
        tensor(1e-3),
        (tensor(0.9), tensor(0.95)),
        tensor(1e-8),
        tensor(0.1),
        torch.tensor(7.0),
        tensor(0.5),
        tensor(0.25),
    )
    with pytest.raises(ConfigError, match="step is 0"):
        adam_scalars(1e-3, (0.9, 0.95), 1e-8, 0.1, 0)


@pytest.mark.parametrize(
    "option",
    [
        {"amsgrad": True},
        {"bias_correction": False},
        {"maximize": True},
        {"differentiable": True},
        {"decoupled_weight_decay": False},
        {"adam_w_mode": 0},
        {"lr": -1e-3},
        {"eps": math.nan},
        {"weight_decay": math.inf},
        {"betas": (0.9, 1.0)},
    ],
    ids=str,
)
def test_options_that_are_not_computed_are_refused_by_name(option):
    with pytest.raises(ConfigError, match=next(iter(option))):
        check_adam_options(**option)


def test_a_step_without_a_learning_rate_is_refused():
    with pytest.raises(ConfigError, match="learning rate"):
        adam_scalars(lr=None, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, step=1)


def test_options_of_torch_adamw_pass():
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=torch.tensor(0.0), fused=True)
    check_adam_options(**optimizer.param_groups[0])
