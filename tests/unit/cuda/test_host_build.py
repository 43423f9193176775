"""The CUDA kernels' arithmetic and index logic, compiled for the host, against the CPU kernel: bit for bit."""

from __future__ import annotations

import ctypes

import pytest
import torch
from cuda_checks import (
    DTYPES,
    any_values,
    check_adam,
    check_copy,
    check_found,
    check_norm,
    check_restart,
    check_round_trip,
    check_sums,
    norm_lists,
    norm_of,
    random_cases,
    size_list_cases,
    usual_values,
)

from mlp_offload.adam import Segment, adam_scalars
from mlp_offload.cuda import CudaKernels, NormTensor, Piece, WordRun
from mlp_offload.errors import ConfigError, CudaError

NORM_LISTS = norm_lists()


@pytest.mark.parametrize("main_itemsize", [4, 2])
def test_adam_matches_the_cpu_kernel_at_every_size_dtype_and_offset(machine, cpu_kernel, main_itemsize):
    check_adam(machine, cpu_kernel, size_list_cases(main_itemsize, 1), main_itemsize, 1, usual_values)


@pytest.mark.parametrize("main_itemsize", [4, 2])
def test_adam_matches_the_cpu_kernel_on_ten_thousand_random_cases(machine, cpu_kernel, main_itemsize):
    """Any bits in state, gradient and weight, and each segment with scalars of its own."""
    for seed in range(10):
        check_adam(machine, cpu_kernel, random_cases(500, main_itemsize, seed), main_itemsize, seed, any_values)


def test_sums_are_those_of_the_cpu_kernel(machine, cpu_kernel):
    check_sums(machine, cpu_kernel)


@pytest.mark.parametrize("main_itemsize", [4, 2])
def test_masters_start_again_from_their_weights(machine, main_itemsize):
    check_restart(machine, main_itemsize)


def test_pieces_arrive_rounded_and_whole(machine):
    for seed in range(4):
        check_copy(machine, 1500, seed)


def test_pieces_of_finite_numbers_raise_no_flag_and_one_bad_number_does(machine):
    for dtype in DTYPES:
        check_found(machine, dtype)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_gathered_and_scattered_weights_keep_every_bit(machine, dtype):
    check_round_trip(machine, dtype)


@pytest.mark.parametrize("what", NORM_LISTS)
@pytest.mark.parametrize("inverse_scale", [None, 1 / 1000])
def test_the_norm_has_the_bits_of_its_order(machine, what, inverse_scale):
    check_norm(machine, NORM_LISTS[what], inverse_scale)


def test_the_norm_is_near_the_exact_one(machine):
    tensors = NORM_LISTS[f"sizes {torch.bfloat16}"]
    exact = torch.cat(tensors).double().norm().item()
    assert norm_of(machine, tensors).item() == pytest.approx(exact, rel=1e-6)


def test_the_order_of_threads_changes_no_bits_of_the_norm(machine, host_library):
    """A barrier that is missing would show."""
    library = ctypes.CDLL(str(host_library))
    tensors = NORM_LISTS[f"sizes {torch.float32}"]
    ascending = norm_of(machine, tensors)
    library.mlp_cuda_set_descending(1)
    try:
        descending = norm_of(machine, tensors)
    finally:
        library.mlp_cuda_set_descending(0)
    assert torch.equal(ascending, descending)


def test_bad_arguments_are_refused_before_anything_is_written(machine):
    record = torch.ones(3, 16)
    grad, weight = torch.ones(16), torch.ones(16)
    before = record.clone()
    scalars = adam_scalars(1e-3, (0.9, 0.95), 1e-8, 0.1, step=1)
    good = Segment.of(0, 16, grad, weight)
    for bad, message in (
        (good._replace(offset_numel=1), "outside the subgroup record"),
        (good._replace(grad_dtype=3), "unknown dtype"),
        (good._replace(group=1), "no such group"),
        (good._replace(weight_address=good.weight_address + 1), "not aligned"),
    ):
        with pytest.raises(ValueError, match=message):
            machine.kernels.update(record.data_ptr(), 16, [good, bad], [scalars])
    with pytest.raises(ValueError, match="needs the bf16 weight"):
        machine.kernels.update(record.data_ptr(), 16, [good], [scalars], main_itemsize=2)
    with pytest.raises(ValueError, match="is not a record"):
        machine.kernels.update(0, 16, [good], [scalars])
    for bad, message in (
        (good._replace(numel=17), "outside the subgroup record"),
        (good._replace(weight_address=0), "no weight to start from"),
    ):
        with pytest.raises(ValueError, match=message):
            machine.kernels.restart(record.data_ptr(), 16, [good, bad])
    run = WordRun(weight.data_ptr(), 16)
    for runs, sums, message in (
        ([run, run._replace(numel=-1)], record.data_ptr(), "run 1 .*no memory"),
        ([run._replace(address=0)], record.data_ptr(), "no memory"),
        ([run._replace(address=run.address + 1)], record.data_ptr(), "not aligned to 16 bits"),
        ([run], 0, "sums have no memory"),
        ([run], record.data_ptr() + 2, "aligned to 32 bits"),
    ):
        with pytest.raises(ValueError, match=message):
            machine.kernels.sum_words(runs, sums)
    piece = Piece(grad.data_ptr(), record.data_ptr(), 16, 0, 0)
    for bad, message in (
        (piece._replace(from_dtype=-1), "piece 1 .*unknown dtype"),
        (piece._replace(to_address=piece.to_address + 2), "not aligned"),
        (piece._replace(from_address=0), "no memory"),
        (piece._replace(numel=-1), "no memory"),
    ):
        with pytest.raises(ValueError, match=message):
            machine.kernels.copy([piece, bad])
    with pytest.raises(ValueError, match="flag"):
        machine.kernels.copy([piece], found_address=grad.data_ptr() + 1)
    tensor = NormTensor(grad.data_ptr(), 16, 0)
    for bad, message in (
        (tensor._replace(numel=0), "norm tensor 0 .*no elements"),
        (tensor._replace(dtype=7), "unknown dtype"),
        (tensor._replace(address=tensor.address + 2), "not aligned"),
    ):
        with pytest.raises(ValueError, match=message):
            machine.kernels.norm([bad], weight.data_ptr(), record.data_ptr())
    with pytest.raises(ValueError, match="no memory for its result"):
        machine.kernels.norm([tensor], weight.data_ptr(), 0)
    with pytest.raises(ConfigError, match=r"Piece rows have shape \(1, 3\)"):
        machine.kernels.copy([(1, 2, 3)])
    assert torch.equal(record, before) and torch.equal(weight, torch.ones(16))


def test_a_device_that_is_not_there_is_named(host_library):
    with pytest.raises(CudaError, match="CUDA device 1 cannot be used: no CUDA device 1; there are 1"):
        CudaKernels(1, library=host_library)
