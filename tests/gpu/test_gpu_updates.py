"""Updates on a real GPU, of records that stay there and of those that pass through: the CPU's bits."""

import pytest
import torch
from device_runs import SHARDS, Run, train
from transfer_runs import Place

from mlp_offload import OffloadedAdamW
from mlp_offload.adam.kernel import AdamKernel
from mlp_offload.cuda import available
from mlp_offload.device_updates import GpuMemory
from mlp_offload.plan.devices import Rates
from mlp_offload.telemetry import GPU

USABLE, REASON = available()
pytestmark = pytest.mark.skipif(
    not (USABLE and torch.cuda.is_available()),
    reason=f"needs a GPU that the CUDA kernels and torch can use ({REASON or 'torch sees none'}); "
    "tests/unit/test_device_updates.py runs the same on a stand-in",
)
DELAY_CYCLES = 20_000_000  # about 10 ms


@pytest.mark.parametrize("layout", [(2, False), (4, False), (4, True)], ids=["remainder", "full", "own masters"])
@pytest.mark.parametrize(
    "options",
    [
        {"update_device": "cuda"},
        {"update_device": "auto", "gpu_memory": 5},
        {"update_device": "auto", "gpu_memory": 3},
        {"update_device": "auto", "gpu_memory": 100},
    ],
    ids=str,
)
def test_the_bits_are_the_cpus_whatever_is_updated_where(tmp_path, monkeypatch, options, layout):
    measure = GpuMemory.measure
    about_half = Rates(1e6, 1e12, 1.5e7, 1.5e7)
    monkeypatch.setattr(GpuMemory, "measure", lambda *arguments: measure(*arguments) and about_half)
    there = Place(put=lambda values: values.cuda(), delay=lambda: torch.cuda._sleep(DELAY_CYCLES))
    with AdamKernel(2) as kernel:
        right = train(Run(*layout), Place(), kernel, tmp_path)
        run = train(Run(*layout, options), there, kernel, tmp_path)
    assert any(e.path == GPU for record in run.records for e in record.events)
    assert len(run.seen) == len(right.seen) and all(map(torch.equal, run.seen, right.seen))


def test_memory_is_taken_as_said_and_given_back(tmp_path, caplog):
    caplog.set_level("INFO", "mlp_offload")
    params = [torch.nn.Parameter(torch.randn(2**20 * max(1, n // 100), device="cuda").bfloat16()) for n in SHARDS if n]
    before = torch.cuda.memory_allocated()
    options = {"subgroup_size": 2**20, "host_memory": "96MiB", "gpu_memory": "64MiB"}
    optimizer = OffloadedAdamW(params, paths=[str(tmp_path)], **options)
    assert 48 * 2**20 < torch.cuda.memory_allocated() - before <= 64 * 2**20
    assert "pass through on the GPU" in caplog.text
    for _ in range(3):
        for p in params:
            p.grad = torch.randn_like(p)
        optimizer.step()
    for p in params:
        p.grad = None
    optimizer.close()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() - before <= 2**20
