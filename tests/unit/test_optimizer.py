"""``pin_memory`` where the CUDA runtime refuses: its answers are played here, the real ones need a GPU."""

from types import SimpleNamespace

import torch

from mlp_offload.optimizer import pin_memory


def runtime(answer, calls):
    return SimpleNamespace(
        cudaError=SimpleNamespace(success=0),
        cudaHostRegister=lambda *arguments: calls.append(("register", *arguments)) or answer,
        cudaHostUnregister=lambda *arguments: calls.append(("unregister", *arguments)) or 0,
        cudaGetErrorString=lambda error: f"error {error}",
    )


def test_refused_pinning_costs_one_clear_warning(monkeypatch, caplog):
    calls = []
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime(2, calls))
    assert pin_memory(2**21, 3 * 2**30) is None
    assert calls == [("register", 2**21, 3 * 2**30, 0)]
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "3.0 GiB" in record.getMessage() and "error 2" in record.getMessage()
    assert "copies" in record.getMessage()


def test_pinned_memory_can_be_unpinned(monkeypatch, caplog):
    calls = []
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime(0, calls))
    unpin = pin_memory(2**21, 4096)
    unpin()
    assert calls == [("register", 2**21, 4096, 0), ("unregister", 2**21)]
    assert not caplog.records
