"""The CUDA kernels on a GPU: the checks of their host build, and what only a GPU can show."""

from __future__ import annotations

import pytest
import torch
from cuda_checks import (
    DTYPES,
    Machine,
    any_values,
    check_adam,
    check_copy,
    check_found,
    check_norm,
    check_round_trip,
    norm_lists,
    norm_of,
    random_cases,
    size_list_cases,
    usual_values,
)

from mlp_offload.adam import AdamKernel, Segment, adam_scalars
from mlp_offload.cuda import CudaKernels, Piece, available
from mlp_offload.errors import CudaError

USABLE, REASON = available()
pytestmark = pytest.mark.skipif(
    not (USABLE and torch.cuda.is_available()),
    reason=f"needs a GPU that the CUDA kernels and torch can use ({REASON or 'torch sees none'})",
)
NORM_LISTS = norm_lists()


@pytest.fixture(scope="module")
def machine():
    return Machine(CudaKernels(), "cuda")


@pytest.fixture(scope="module")
def cpu_kernel():
    with AdamKernel(4) as kernel:
        yield kernel


@pytest.mark.parametrize("main_itemsize", [4, 2])
def test_adam_has_the_bits_of_the_cpu_kernel(machine, cpu_kernel, main_itemsize):
    check_adam(machine, cpu_kernel, size_list_cases(main_itemsize, 1), main_itemsize, 1, usual_values)
    for seed in range(10):
        check_adam(machine, cpu_kernel, random_cases(500, main_itemsize, seed), main_itemsize, seed, any_values)


def test_adam_has_the_bits_of_the_cpu_kernel_on_a_large_record(machine, cpu_kernel):
    numel = 50_000_003
    record = torch.rand(3, numel) * 1e-3
    grad, weight = torch.randn(numel).bfloat16(), torch.zeros(numel, dtype=torch.bfloat16)
    on_device = [x.cuda() for x in (record, grad, weight)]
    scalars = [adam_scalars(1e-3, (0.9, 0.95), 1e-8, 0.1, step=3, clip_coefficient=0.37)]
    row = Segment.of(0, numel, grad, weight)
    cpu_kernel.update(record.data_ptr(), numel, [row], scalars)
    row = row._replace(grad_address=on_device[1].data_ptr(), weight_address=on_device[2].data_ptr())
    machine.kernels.update(on_device[0].data_ptr(), numel, [row], scalars, stream=machine.stream)
    assert torch.equal(on_device[0].cpu(), record) and torch.equal(on_device[2].cpu(), weight)


def test_pieces_arrive_rounded_and_whole(machine):
    for seed in range(4):
        check_copy(machine, 1500, seed)
    for dtype in DTYPES:
        check_found(machine, dtype)
    for dtype in DTYPES[1:]:
        check_round_trip(machine, dtype)


def test_pieces_go_straight_to_pinned_memory_and_back(machine):
    numel = 1_000_003
    source = torch.randn(numel, device="cuda").bfloat16()
    pinned = torch.zeros(numel, dtype=torch.bfloat16, pin_memory=True)
    back = torch.zeros_like(source)
    machine.kernels.copy([Piece(source.data_ptr(), pinned.data_ptr(), numel, 1, 1)], 0, machine.stream)
    machine.kernels.copy([Piece(pinned.data_ptr(), back.data_ptr(), numel, 1, 1)], 0, machine.stream)
    torch.cuda.synchronize()
    assert torch.equal(pinned, source.cpu()) and torch.equal(back, source)


@pytest.mark.parametrize("what", NORM_LISTS)
@pytest.mark.parametrize("inverse_scale", [None, 1 / 1000])
def test_the_norm_has_the_bits_of_its_order(machine, what, inverse_scale):
    check_norm(machine, NORM_LISTS[what], inverse_scale)


@pytest.mark.parametrize("what", [name for name in NORM_LISTS if name not in ("none", "denormal")])
def test_the_norm_is_transformer_engines_but_for_its_square_root(machine, what):
    """Over fp32 copies, as the stock optimizer makes them; its square root is approximate."""
    optimizers = pytest.importorskip("transformer_engine.pytorch.optimizers", reason="needs Transformer Engine")
    tensors = [t.cuda() for t in NORM_LISTS[what]]
    copies = [t.float() for t in tensors]
    overflow = torch.zeros(1, dtype=torch.int, device="cuda")
    stock, _ = optimizers.multi_tensor_applier(optimizers.multi_tensor_l2norm, overflow, [copies], False)
    torch.testing.assert_close(norm_of(machine, tensors), stock.cpu().view(1), rtol=2**-22, atol=0, equal_nan=True)


def test_work_is_ordered_on_the_callers_stream_and_the_current_device_stays(machine):
    numel = 10_000_000
    source, target = torch.zeros(numel, device="cuda"), torch.zeros(numel, device="cuda")
    device, side = torch.cuda.current_device(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        source.fill_(3.0)
        machine.kernels.copy([Piece(source.data_ptr(), target.data_ptr(), numel, 0, 0)], 0, machine.stream)
    torch.cuda.current_stream().wait_stream(side)
    assert bool((target == 3.0).all())
    assert torch.cuda.current_device() == device


def test_a_device_that_is_not_there_is_named():
    count = torch.cuda.device_count()
    with pytest.raises(CudaError, match=f"no CUDA device {count}; there are {count}"):
        CudaKernels(count)
