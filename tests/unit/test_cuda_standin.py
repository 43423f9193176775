"""The stand-in for CUDA runs kernels as a GPU does: on their stream, later, with the arguments of the launch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cuda_standin import Runtime

from mlp_offload import cuda
from mlp_offload.adam.kernel import AdamKernel, Segment, adam_scalars
from mlp_offload.cuda import NORM_SUMS_NUMEL, NormTensor, Piece

NUMEL = 1003


@pytest.fixture
def runtime(monkeypatch, host_library):
    with Runtime(late=True, library=host_library).installed(monkeypatch) as runtime:
        yield runtime


def on_device(runtime, *shape, dtype=torch.float32):
    return runtime.on_device(torch.rand(*shape).to(dtype))


def test_an_update_comes_when_it_is_waited_for_and_has_the_cpu_kernels_bits(runtime):
    record, grad = on_device(runtime, 3, NUMEL), on_device(runtime, NUMEL, dtype=torch.bfloat16)
    weight = on_device(runtime, NUMEL, dtype=torch.bfloat16)
    scalars = [adam_scalars(1e-2, (0.9, 0.95), 1e-8, 0.1, step=3)]
    expected, expected_weight, before = record.clone(), weight.clone(), record.clone()
    row = Segment(0, NUMEL, grad.data_ptr(), expected_weight.data_ptr(), 1, 1, 0)
    with AdamKernel(1) as kernel:
        kernel.update(expected.data_ptr(), NUMEL, [row], scalars)
    rows = np.array([row._replace(weight_address=weight.data_ptr())])
    stream = torch.cuda.Stream()
    cuda.CudaKernels().update(record.data_ptr(), NUMEL, rows, scalars, stream=stream.cuda_stream)
    rows[:] = 0  # the launch has its own
    assert torch.equal(record, before)
    stream.synchronize()
    assert torch.equal(record, expected) and torch.equal(weight, expected_weight)
    assert not runtime.races and not runtime.faults and runtime.launches == ["update"]


def test_memory_of_an_update_that_nobody_waited_for_is_a_race(runtime):
    record, grad = on_device(runtime, 3, NUMEL), on_device(runtime, NUMEL)
    scalars = [adam_scalars(1e-2, (0.9, 0.95), 1e-8, 0.1, step=3)]
    row = Segment(0, NUMEL, grad.data_ptr(), 0, 0, 0, 0)
    stream, other = torch.cuda.Stream(), torch.cuda.Stream()
    cuda.CudaKernels().update(record.data_ptr(), NUMEL, [row], scalars, stream=stream.cuda_stream)
    with torch.cuda.stream(other):
        record[2, 5:].cpu()
    assert runtime.races == ["update 0 of stream 1 and copy 0 of stream 2"]


def test_pieces_and_a_norm_follow_what_the_stream_did_before(runtime):
    source, target = on_device(runtime, NUMEL), on_device(runtime, NUMEL, dtype=torch.bfloat16)
    kernels = cuda.CudaKernels()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        sums, norm = (torch.empty(n, device=source.device) for n in (NORM_SUMS_NUMEL, 1))
        source.fill_(2.0)
        found = torch.zeros(1, device=source.device)
    kernels.copy(
        [Piece(source.data_ptr(), target.data_ptr(), NUMEL, 0, 1)], found.data_ptr(), stream=stream.cuda_stream
    )
    tensors = [NormTensor(target.data_ptr(), NUMEL, 1)]
    kernels.norm(tensors, norm.data_ptr(), sums.data_ptr(), stream=stream.cuda_stream)
    assert source.is_cuda and sums.device.type == "cuda" and not torch.zeros(1).is_cuda
    assert not bool((source == 2.0).any()) and not bool((target == 2.0).any())
    stream.synchronize()
    assert bool((target == 2.0).all()) and float(found) == 0.0
    assert float(norm) == pytest.approx(2.0 * NUMEL**0.5)
    assert not runtime.races and not runtime.faults and runtime.launches == ["gather", "norm"]


def test_a_kernel_reaches_neither_plain_host_memory_nor_a_stream_that_is_none(runtime):
    source, target = on_device(runtime, NUMEL), torch.zeros(NUMEL)
    piece = Piece(source.data_ptr(), target.data_ptr(), NUMEL, 0, 0)
    kernels = cuda.CudaKernels()
    kernels.copy([piece])
    assert runtime.faults.pop() == "a gather on stream 0, which is none"
    stream = torch.cuda.Stream()
    kernels.copy([piece], stream=stream.cuda_stream)
    assert "uses memory at" in runtime.faults.pop()
    stream.synchronize()
    assert ", late, uses memory at" in runtime.faults.pop() and not target.any()
    runtime.cudart().cudaHostRegister(target.data_ptr(), target.nbytes, 0)
    kernels.copy([piece, piece._replace(from_address=source.data_ptr() + 1, numel=1)], stream=stream.cuda_stream)
    stream.synchronize()
    assert "not aligned" in runtime.faults.pop() and not runtime.faults
    kernels.copy([piece], stream=stream.cuda_stream)
    stream.synchronize()
    assert torch.equal(source, target) and not runtime.faults


def test_a_device_without_kernels_says_so(monkeypatch):
    with Runtime(late=True).installed(monkeypatch):
        assert cuda.available() == (False, "this device has no kernels")
