"""The native kernel against the reference and torch's fused AdamW: bit for bit, whatever the variant, threads and cuts."""

from __future__ import annotations

import itertools

import pytest
import torch

from mlp_offload.adam import AdamKernel, AdamScalars, Segment, adam_scalars, adamw_step

VARIANTS = AdamKernel.variants()
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZES = (0, 1, 15, 16, 17, 127, 4095, 4096, 4097, 100003)
SCALARS = adam_scalars(1e-3, (0.9, 0.95), 1e-8, 0.1, step=3, inverse_scale=1 / 1000, clip_coefficient=0.37)
PLAIN = adam_scalars(1e-3, (0.9, 0.999), 1e-8, 0.0, step=1)


@pytest.fixture(autouse=True)
def one_torch_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def kernels():
    made = {(variant, threads): AdamKernel(threads, variant) for variant in VARIANTS for threads in (1, 2, 3)}
    yield made
    for kernel in made.values():
        kernel.close()


def make_record(stride: int, seed: int = 0) -> torch.Tensor:
    """(3, stride) fp32: main_param, exp_avg, exp_avg_sq as a few steps leave them."""
    generator = torch.Generator().manual_seed(seed)
    record = torch.randn(3, stride, generator=generator)
    record[1] *= 1e-2
    record[2] = record[2].square() * 1e-4
    return record


def make_grad(numel: int, dtype: torch.dtype, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(numel, generator=generator) * 2.0 ** torch.randint(-8, 8, (numel,), generator=generator)).to(
        dtype
    )


def assert_same_bits(got: torch.Tensor, expected: torch.Tensor, what: str = "") -> None:
    """Same dtype, shape and bits; any NaN equals any NaN."""
    assert got.dtype == expected.dtype and got.shape == expected.shape
    integer = torch.int32 if got.dtype == torch.float32 else torch.int16
    differ = (got.view(integer) != expected.view(integer)) & ~(got.isnan() & expected.isnan())
    if differ.any():
        i = differ.flatten().nonzero()[0].item()
        pair = got.flatten()[i].item(), expected.flatten()[i].item()
        raise AssertionError(f"{what}: {int(differ.sum())} of {differ.numel()} differ, first at {i}: {pair}")


def reference(record: torch.Tensor, segments: list[tuple], groups: list[AdamScalars]) -> None:
    for offset, numel, grad, weight, group in segments:
        adamw_step(*(row[offset : offset + numel] for row in record), grad, weight, groups[group])


def native(kernel: AdamKernel, record: torch.Tensor, segments: list[tuple], groups: list[AdamScalars]) -> None:
    kernel.update(record.data_ptr(), record.shape[1], [Segment.of(*s) for s in segments], groups)


@pytest.mark.parametrize("grad_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numel", SIZES)
def test_every_variant_thread_count_and_alignment_matches_the_reference(kernels, numel, grad_dtype):
    # (in the record, in the gradient's memory, in the weight's memory): from register boundaries, and off them.
    for (offset, grad_shift, weight_shift), weight_dtype in itertools.product(
        ((0, 0, 0), (5, 1, 3), (16, 7, 0)), (*DTYPES, None)
    ):
        stride = offset + numel + 3
        before = make_record(stride)
        grad = make_grad(numel + grad_shift, grad_dtype)[grad_shift:]
        expected = before.clone()
        expected_weights = None if weight_dtype is None else torch.full((numel + 8,), 7.0, dtype=weight_dtype)
        inner = None if weight_dtype is None else expected_weights[weight_shift : weight_shift + numel]
        reference(expected, [(offset, numel, grad, inner, 0)], [SCALARS])
        for (variant, threads), kernel in kernels.items():
            what = f"{variant} {threads} threads, offset {offset}, weight {weight_dtype}"
            record, weights, inner = before.clone(), None, None
            if weight_dtype is not None:
                weights = torch.full((numel + 8,), 7.0, dtype=weight_dtype)
                inner = weights[weight_shift : weight_shift + numel]
            native(kernel, record, [(offset, numel, grad, inner, 0)], [SCALARS])
            assert_same_bits(record, expected, what)
            if weights is not None:
                assert_same_bits(weights, expected_weights, what + ", weights")


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.9, 0.95), (0.5, 0.9), (0.2, 0.99)])
@pytest.mark.parametrize(("lr", "weight_decay"), [(1e-3, 0.1), (3e-4, 0.0), (0.7, 0.01)])
@pytest.mark.parametrize("variant", VARIANTS)
def test_five_steps_equal_torch_fused_adamw(kernels, variant, lr, weight_decay, betas):
    """Oracle: the vector body of torch.optim.AdamW(fused=True) on the CPU: a multiple of 16 elements, one thread."""
    numel = 16 * 625
    record = make_record(numel)
    record[1:] = 0
    param = torch.nn.Parameter(record[0].clone())
    optimizer = torch.optim.AdamW([param], lr=lr, betas=betas, eps=1e-8, weight_decay=weight_decay, fused=True)
    for step in range(1, 6):
        param.grad = make_grad(numel, torch.float32, seed=step)
        segments = [(0, numel, param.grad, None, 0)]
        native(kernels[variant, 2], record, segments, [adam_scalars(lr, betas, 1e-8, weight_decay, step)])
        optimizer.step()
        state = optimizer.state[param]
        assert_same_bits(record, torch.stack([param.detach(), state["exp_avg"], state["exp_avg_sq"]]), f"step {step}")


@pytest.mark.parametrize("variant", VARIANTS)
def test_scale_and_clip_are_two_roundings_in_fp32(kernels, variant):
    numel = 4097
    grad = make_grad(numel, torch.float16)
    scaled = grad.float() * torch.tensor(1 / 1000) * torch.tensor(0.37)
    assert not torch.equal(scaled, grad.float() * torch.tensor(0.37 / 1000))  # the order of roundings is visible
    folded, plain = make_record(numel), make_record(numel)
    unit = SCALARS._replace(inverse_scale=1.0, clip_coefficient=1.0)
    native(kernels[variant, 1], folded, [(0, numel, grad, None, 0)], [SCALARS])
    native(kernels[variant, 1], plain, [(0, numel, scaled, None, 0)], [unit])
    assert_same_bits(folded, plain)


def special_values() -> torch.Tensor:
    positive = [0.0, 1e-45, 1e-40, 1.17549435e-38, 1e-20, 1e-8, 1.0, 65504.0, 65520.0, 1e20, 3.4028235e38]
    positive += [float("inf"), float("nan")]
    return torch.tensor(positive + [-x for x in positive])


@pytest.mark.parametrize("variant", VARIANTS)
def test_nan_infinity_denormal_and_huge_values(kernels, variant):
    values = special_values()
    grid = torch.cartesian_prod(values, values, values[:13], values)  # main_param, exp_avg, exp_avg_sq, grad
    before, numel = grid[:, :3].t().contiguous(), grid.shape[0]
    for grad_dtype, weight_dtype in ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.float16)):
        grad = grid[:, 3].to(grad_dtype).contiguous()
        expected, record = before.clone(), before.clone()
        expected_weight, weight = (torch.zeros(numel, dtype=weight_dtype) for _ in range(2))
        reference(expected, [(0, numel, grad, expected_weight, 0)], [SCALARS])
        native(kernels[variant, 2], record, [(0, numel, grad, weight, 0)], [SCALARS])
        assert_same_bits(record, expected, "state")
        assert_same_bits(weight, expected_weight, "weight")


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_every_16_bit_gradient_is_widened_exactly(kernels, variant, dtype):
    grad = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    record = torch.zeros(3, grad.numel())
    quarter = PLAIN._replace(one_minus_beta1=0.25)  # exp_avg becomes a quarter of the gradient, exactly
    native(kernels[variant, 1], record, [(0, grad.numel(), grad, None, 0)], [quarter])
    assert_same_bits(record[1], grad.float() * 0.25 + 0.0)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_weights_are_rounded_to_nearest_even_at_every_midpoint(kernels, variant, dtype):
    exact = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).float()
    dropped_bits = 16 if dtype == torch.bfloat16 else 13
    middle = exact.view(torch.int32) + (1 << (dropped_bits - 1))
    denormal_middle = (exact.double() + 2.0**-25).float()  # of fp16
    params = torch.cat([exact, denormal_middle, *((middle + i).view(torch.float32) for i in (-1, 0, 1))])
    record = torch.stack([params, torch.zeros_like(params), torch.zeros_like(params)])
    weight, grad = torch.zeros(params.numel(), dtype=dtype), torch.zeros(params.numel())
    still = PLAIN._replace(step_size=0.0)
    native(kernels[variant, 1], record, [(0, params.numel(), grad, weight, 0)], [still])
    assert_same_bits(weight, params.to(dtype))
    assert params.isnan().any() and weight[~params.isnan()].isinf().any()
    quiet = 0x40 if dtype == torch.bfloat16 else 0x200
    assert (weight[weight.isnan()].view(torch.int16) & quiet).all()


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_thread_that_flushes_denormals_changes_no_bits(variant, threads):
    numel = 40000
    before = make_record(numel) * 1e-37
    grad = make_grad(numel, torch.float32) * 1e-38
    expected, record = before.clone(), before.clone()
    reference(expected, [(0, numel, grad, None, 0)], [PLAIN])
    if not torch.set_flush_denormal(True):
        raise AssertionError("this processor cannot flush denormals, so the test would show nothing")
    try:
        with AdamKernel(threads, variant) as kernel:
            native(kernel, record, [(0, numel, grad, None, 0)], [PLAIN])
        still_flushes = (torch.tensor([1e-40]) * 1.0).item() == 0.0
    finally:
        torch.set_flush_denormal(False)
    assert_same_bits(record, expected)
    assert still_flushes  # the caller's own setting is given back


@pytest.mark.parametrize("variant", VARIANTS)
def test_segments_with_their_own_group_dtype_and_missing_gradient(kernels, variant):
    groups = [
        SCALARS,
        adam_scalars(0.01, (0.8, 0.9), 1e-6, 0.0, step=1),
        adam_scalars(2.0, (0.0, 0.5), 0.1, 0.2, step=9),
    ]
    stride = 60000

    def segments(weights: dict[int, torch.Tensor]) -> list[tuple]:
        return [
            (0, 17, make_grad(17, torch.bfloat16), weights[0], 0),
            (17, 40000, make_grad(40000, torch.float32), weights[1], 1),
            (40017, 1000, None, weights[2], 2),  # skipped: neither state nor weight changes
            (41017, 0, make_grad(0, torch.float32), None, 0),
            (41100, 18900, make_grad(18900, torch.float16), None, 2),
        ]

    def make_weights() -> dict[int, torch.Tensor]:
        return {0: torch.ones(17, dtype=torch.float16), 1: torch.ones(40000, dtype=torch.bfloat16), 2: torch.ones(1000)}

    expected, expected_weights = make_record(stride), make_weights()
    reference(expected, segments(expected_weights), groups)
    for threads in (1, 2, 3):
        record, weights = make_record(stride), make_weights()
        native(kernels[variant, threads], record, segments(weights), groups)
        assert_same_bits(record, expected)
        for i, weight in weights.items():
            assert_same_bits(weight, expected_weights[i], f"weight {i}")
    assert torch.equal(expected[:, 40017:41100], make_record(stride)[:, 40017:41100])
    assert torch.equal(expected_weights[2], torch.ones(1000))


@pytest.mark.parametrize("variant", VARIANTS)
def test_where_segments_and_subgroups_are_cut_changes_no_bits(kernels, variant):
    numel = 70001
    grad = make_grad(numel, torch.bfloat16)
    whole, whole_weight = make_record(numel), torch.zeros(numel, dtype=torch.bfloat16)
    native(kernels[variant, 1], whole, [(0, numel, grad, whole_weight, 0)], [SCALARS])
    for cuts in ([0, 1, 2, 18, 33, 4096, 16384, 16385, 50000, numel], [0, 16383, 32769, numel]):
        record, weight = make_record(numel), torch.zeros(numel, dtype=torch.bfloat16)
        native(
            kernels[variant, 3],
            record,
            [(a, b - a, grad[a:b], weight[a:b], 0) for a, b in itertools.pairwise(cuts)],
            [SCALARS],
        )
        assert_same_bits(record, whole)
        assert_same_bits(weight, whole_weight)
        for a, b in itertools.pairwise(cuts):  # each piece as a subgroup of its own
            part = make_record(numel)[:, a:b].contiguous()
            native(kernels[variant, 2], part, [(0, b - a, grad[a:b], None, 0)], [SCALARS])
            assert_same_bits(part, whole[:, a:b].contiguous())


def test_long_chunks_and_many_threads_update_every_element_once():
    numel = 5_000_003
    grad = make_grad(numel, torch.bfloat16)
    one, many = make_record(numel), make_record(numel)
    with AdamKernel(1) as kernel:
        native(kernel, one, [(0, numel, grad, None, 0)], [SCALARS])
    with AdamKernel(5) as kernel:
        native(kernel, many, [(0, numel, grad, None, 0)], [SCALARS])
    assert_same_bits(many, one)
