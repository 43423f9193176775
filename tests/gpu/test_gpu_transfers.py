"""Transfers on a real GPU, where the trainer's stream is late: the bits of tensors in host memory."""

import contextlib
from functools import partial

import pytest
import torch
from transfer_runs import Piped, Place, Shuffled, train

from mlp_offload import transfers
from mlp_offload.adam.kernel import AdamKernel
from mlp_offload.cuda import available
from mlp_offload.transfers import CudaTransfers, staging_bytes

USABLE, REASON = available()

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason="no CUDA device; tests/unit/test_transfers.py runs the same on a stand-in for the runtime",
)
DELAY_CYCLES = 20_000_000  # about 10 ms


@pytest.mark.parametrize("moved_by", ["copies", "kernels"])
@pytest.mark.parametrize("own_stream", [False, True])
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("kind", ["piped", "shuffled"])
def test_weights_on_a_gpu_get_the_bits_of_weights_in_host_memory(
    monkeypatch, tmp_path, kind, itemsize, own_stream, moved_by
):
    if moved_by == "kernels" and not USABLE:
        pytest.skip(REASON)
    monkeypatch.setattr(transfers, "_MOST_COPIES", 0 if moved_by == "kernels" else 10**9)
    states = partial(Piped, tmp_path) if kind == "piped" else partial(Shuffled, 0)
    there = Place(put=lambda values: values.cuda(), delay=lambda: torch.cuda._sleep(DELAY_CYCLES))
    stream = torch.cuda.stream(torch.cuda.Stream()) if own_stream else contextlib.nullcontext()
    with AdamKernel(2) as kernel:
        right = train(Place(), kernel, itemsize, states(itemsize=itemsize))
        with stream:
            seen = train(there, kernel, itemsize, states(itemsize=itemsize))
    assert len(seen) == len(right)
    assert all(map(torch.equal, seen, right))


def test_staging_is_pinned_and_given_back(caplog):
    weights = [torch.zeros(1024, device="cuda")]
    assert staging_bytes(weights, 1024) == 2 * 1024 * (4 + 4)
    mover = CudaTransfers(weights, 1024, reads_weights=True)
    memory = mover._stagings[0].weights
    assert memory.is_pinned() and not caplog.records
    del mover
    assert not memory.is_pinned()
