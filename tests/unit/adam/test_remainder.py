"""Masters in 16 bits beside their bf16 weights: nothing is lost, in the reference and in every variant of the kernel."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from mlp_offload.adam import AdamKernel, Segment, adam_scalars, adamw_step
from mlp_offload.adam.remainder import join, split

VARIANTS = AdamKernel.variants()
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SCALARS = adam_scalars(1e-3, (0.9, 0.95), 1e-8, 0.1, step=3, inverse_scale=1 / 1000, clip_coefficient=0.37)


@pytest.fixture(scope="module")
def kernels():
    made = {(variant, threads): AdamKernel(threads, variant) for variant in VARIANTS for threads in (1, 3)}
    yield made
    for kernel in made.values():
        kernel.close()


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int32 if x.element_size() == 4 else torch.int16)


def assert_same(got: torch.Tensor, expected: torch.Tensor, what: str = "") -> None:
    differ = (bits(got) != bits(expected)) & ~(got.isnan() & expected.isnan())
    assert not differ.any(), f"{what}: {int(differ.sum())} of {differ.numel()} differ, first at {differ.nonzero()[0]}"


def every_upper_half(lower: int) -> torch.Tensor:
    """All 65536 upper halves of an fp32 number, with one lower half: shape (65536,)."""
    upper = torch.arange(65536, dtype=torch.int64) << 16 | lower
    return torch.where(upper >= 2**31, upper - 2**32, upper).int().view(torch.float32)


@pytest.mark.parametrize("lower", [0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
def test_every_master_comes_back(lower):
    """Below, at and above the tie that decides the rounding; all signs, exponents, infinities and NaNs."""
    masters = every_upper_half(lower)
    weight, remainder, stored = split(masters, torch.full_like(masters, 0.25))
    assert_same(weight, masters.bfloat16())
    main_param, exp_avg_sq = join(weight, remainder, stored)
    assert_same(main_param, masters)
    assert bool((exp_avg_sq == 0.25).all())


class Record:
    """Remainders, moments, weight and gradient of one segment at ``offset``; the expected result beside them."""

    def __init__(self, masters: torch.Tensor, grad: torch.Tensor, offset: int, shift: int):
        numel = masters.numel()
        self.numel, self.offset = numel, offset
        self.stride = -(-(offset + numel) // 32) * 32
        generator = torch.Generator().manual_seed(4)
        m = torch.randn(numel, generator=generator) * 1e-2
        v = torch.randn(numel, generator=generator).square() * 1e-4
        self.memory = torch.full((10 * self.stride + 64,), 77, dtype=torch.uint8)
        begin = -self.memory.data_ptr() % 64
        self.record = self.memory[begin : begin + 10 * self.stride]
        self.remainder = self._part(0, 2, torch.int16)
        self.exp_avg = self._part(2 * self.stride, 4, torch.float32)
        self.exp_avg_sq = self._part(6 * self.stride, 4, torch.float32)
        self.weights = torch.full((numel + shift + 8,), 7.0, dtype=torch.bfloat16)
        self.weight = self.weights[shift : shift + numel]
        weight, remainder, stored = split(masters, v)
        self.weight.copy_(weight)
        self.remainder.copy_(remainder)
        self.exp_avg.copy_(m)
        self.exp_avg_sq.copy_(stored)
        self.grad = grad
        self.expected = [masters.clone(), m.clone(), v.clone(), weight.clone()]
        adamw_step(*self.expected[:3], grad, self.expected[3], SCALARS)

    def _part(self, start: int, itemsize: int, dtype: torch.dtype) -> torch.Tensor:
        begin = start + self.offset * itemsize
        return self.record[begin : begin + self.numel * itemsize].view(dtype)

    def update(self, kernel: AdamKernel) -> None:
        segment = Segment.of(self.offset, self.numel, self.grad, self.weight)
        kernel.update(self.record.data_ptr(), self.stride, [segment], [SCALARS], main_itemsize=2)

    def check(self, what: str) -> None:
        main_param, exp_avg_sq = join(self.weight, self.remainder, self.exp_avg_sq)
        for got, expected in zip((main_param, self.exp_avg, exp_avg_sq, self.weight), self.expected):
            assert_same(got, expected, what)


@pytest.mark.parametrize("grad_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numel", (1, 15, 16, 17, 127, 4097, 100003))
def test_every_variant_matches_the_reference_on_full_masters(kernels, numel, grad_dtype):
    generator = torch.Generator().manual_seed(numel)
    masters = torch.randn(numel, generator=generator)
    grad = torch.randn(numel, generator=generator).to(grad_dtype)
    for (variant, threads), (offset, shift) in itertools.product(kernels, ((0, 0), (5, 3), (16, 7))):
        record = Record(masters, grad, offset, shift)
        outside = record.weights.clone()
        record.update(kernels[variant, threads])
        what = f"{variant}, {threads} threads, offset {offset}"
        record.check(what)
        outside[shift : shift + numel] = record.weight
        assert_same(record.weights, outside, what + ", weights beside the segment")
        used = torch.zeros(record.stride, dtype=torch.bool)
        used[offset : offset + numel] = True
        spare = record.record[: 2 * record.stride].view(torch.int16)[~used]
        assert bool((spare.view(torch.uint8) == 77).all()), what + ", remainders beside the segment"


@pytest.mark.parametrize("variant", VARIANTS)
def test_ties_infinities_and_nan_go_through_a_step(kernels, variant):
    masters = torch.cat([every_upper_half(lower) for lower in (0, 0x7FFF, 0x8000, 0x8001)])
    record = Record(masters, torch.zeros(masters.numel()), 0, 0)  # most masters keep their value but for the decay
    record.update(kernels[variant, 3])
    record.check(variant)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_negative_nan_second_moment_leaves_no_mark(kernels, variant):
    """The processor's own NaN has its sign set: kept, it would pull the master down by a unit of the weight."""
    masters = torch.full((33,), 1.5)
    record = Record(masters, torch.full((33,), float("inf")), 0, 0)
    record.update(kernels[variant, 1])
    stored = bits(record.exp_avg_sq)
    assert bool((stored >= 0).all() and record.weight.isnan().all())


def test_a_segment_without_its_bf16_weight_is_refused(kernels):
    record = Record(torch.ones(16), torch.ones(16), 0, 0)
    before = record.record.clone()
    for weight in (None, torch.ones(16), torch.ones(16, dtype=torch.float16)):
        with pytest.raises(ValueError, match="needs the bf16 weight"):
            kernels[VARIANTS[0], 1].update(
                record.record.data_ptr(),
                record.stride,
                [Segment.of(0, 16, record.grad, weight)],
                [SCALARS],
                main_itemsize=2,
            )
    with pytest.raises(ValueError, match="is not a record"):
        kernels[VARIANTS[0], 1].update(record.record.data_ptr(), record.stride, [], [SCALARS], main_itemsize=3)
    assert torch.equal(record.record, before)


def test_sums_of_words_are_the_same_everywhere_and_see_every_word(kernels):
    generator = np.random.default_rng(0)
    words = generator.integers(0, 65536, 600_007, dtype=np.uint16)
    factors = 2 * np.arange(len(words), dtype=np.uint32) + 1
    runs = [(0, 0), (1, 1), (3, 17), (0, 262_144), (5, 600_002)]
    addresses = np.array([words.ctypes.data + 2 * start for start, _ in runs], np.int64)
    numels = np.array([numel for _, numel in runs], np.int64)
    with np.errstate(over="ignore"):
        expected = [
            int((words[start : start + numel].astype(np.uint32) * factors[:numel]).sum(dtype=np.uint32))
            for start, numel in runs
        ]
    for kernel in kernels.values():
        assert kernel.sum_words(addresses, numels).tolist() == expected
    words[5 + 300_000] ^= 1
    assert kernels[VARIANTS[0], 3].sum_words(addresses, numels).tolist()[-1] != expected[-1]
