"""Boxes of stored tensors against torch's own reading of the same files."""

import itertools

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from mlp_offload.checkpoint import stored
from mlp_offload.checkpoint.stored import StoredTensors
from mlp_offload.errors import ConfigError

SHAPES = {"flat": (37,), "matrix": (9, 11), "cube": (4, 5, 6), "scalar": (), "four": (2, 3, 4, 5)}


def tensor(name):
    return torch.arange(torch.Size(SHAPES[name]).numel(), dtype=torch.float32).view(SHAPES[name]) + 0.5


@pytest.fixture(params=["blocks", "small blocks", "direct"])
def checkpoint(tmp_path, monkeypatch, request):
    """Tensors saved by torch itself, and each way of reading them."""
    monkeypatch.setattr(stored, "_BLOCK_BYTES", {"blocks": 4 << 20, "small blocks": 28, "direct": 20}[request.param])
    monkeypatch.setattr(stored, "_DIRECT_BYTES", 0 if request.param == "direct" else 1 << 20)
    dcp.save({name: tensor(name) for name in SHAPES} | {"bf16": tensor("matrix").bfloat16()}, checkpoint_id=tmp_path)
    opened = StoredTensors(tmp_path)
    yield opened
    opened.close()


@pytest.mark.parametrize("name", SHAPES)
def test_every_box(checkpoint, name):
    whole = tensor(name).numpy()
    assert checkpoint.shape(name) == SHAPES[name]
    for low, high in itertools.product(itertools.product(*(range(0, n, 2) for n in SHAPES[name])), repeat=2):
        if any(a > b for a, b in zip(low, high)):
            continue
        box = tuple(slice(a, b + 1) for a, b in zip(low, high))
        target = np.full(whole[box].shape, np.nan, np.float32)
        assert checkpoint.read(name, low, target) == target.size
        assert np.array_equal(target, whole[box])


def test_what_is_beyond_the_tensor_stays(checkpoint):
    target = np.full((3, 4), -1, np.float32)
    assert checkpoint.read("matrix", (8, 9), target) == 2
    assert target[0, :2].tolist() == tensor("matrix")[8, 9:].tolist()
    assert (target.reshape(-1)[2:4] == -1).all() and (target[1:] == -1).all()


def test_other_precisions_are_read_whole_and_widened(checkpoint):
    target = np.empty((2, 3), np.float32)
    assert checkpoint.read("bf16", (7, 8), target) == 6
    assert np.array_equal(target, tensor("matrix").bfloat16().float().numpy()[7:, 8:])


def test_a_tensor_that_is_not_there_is_named(checkpoint, tmp_path):
    with pytest.raises(ConfigError, match=r"no tensor other.*--no-load-optim"):
        checkpoint.read("other", (0,), np.empty(1, np.float32))
    with pytest.raises(ConfigError, match="is not a directory"):
        StoredTensors(tmp_path / "nowhere")


def test_a_file_that_was_cut_is_told(checkpoint, tmp_path):
    checkpoint.read("flat", (0,), np.empty(1, np.float32))
    for file in tmp_path.glob("*.distcp"):
        with open(file, "r+b") as cut:
            cut.truncate(10)
    with pytest.raises(ConfigError, match="damaged"):
        checkpoint.read("flat", (0,), np.empty(37, np.float32))
