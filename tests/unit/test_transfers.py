"""Staging memory: really refused on a machine without a GPU."""

import torch

from mlp_offload.transfers import pinned_memory


def test_staging_that_cannot_be_pinned_costs_one_clear_warning(caplog):
    memory = pinned_memory(4096)
    if torch.cuda.is_available():
        assert memory.is_pinned() and memory.numel() == 4096 and not caplog.records
        return
    assert memory is None
    (record,) = caplog.records
    assert record.levelname == "WARNING" and "4.0 KiB" in record.getMessage() and "slower" in record.getMessage()
