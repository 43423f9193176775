"""A flush that hangs when nobody needs it any more: close() gives up on it in bounded time."""

import time
from pathlib import Path

import pytest
import torch
from engine_tools import ext4_mount, frozen

from mlp_offload import OffloadedAdamW, tiers


def test_close_does_not_wait_for_ever_for_a_flush_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers, "CLOSE_SECONDS", 1.0)
    with ext4_mount(tmp_path, 512) as point:
        p = torch.nn.Parameter(torch.randn(40960))
        optimizer = OffloadedAdamW([p], paths=[str(point)], host_memory="200KiB", subgroup_size=4096)
        p.grad = torch.randn(40960)
        optimizer.step()
        state = optimizer._pipeline.tiers
        state.settle()
        kept, entry = next((i, e) for i, e in enumerate(state.table) if e.where is tiers.Where.HOST)
        with frozen(point):
            flight = state.start_flush(kept, entry.lease, 0, 1)
            begin = time.monotonic()
            optimizer.close()
            assert 0.9 < time.monotonic() - begin < 10
            assert not flight.future.done()
            flight.lease.array(0, 4)[:] = 1.0  # still ours: the kernel may yet read it
        assert flight.future.wait(10.0)
        state.close()  # now it can be finished
        assert not list(point.rglob("*.state"))
