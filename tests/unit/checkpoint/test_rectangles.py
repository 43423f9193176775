"""Every run of a flattened tensor is cut into boxes that are the run."""

import itertools

import pytest
import torch

from mlp_offload.checkpoint.rectangles import rectangles


@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 4), (1, 5), (5, 1), (2, 3, 4), (3, 1, 2), (2, 2, 3, 2)])
def test_boxes_are_the_run_in_order(shape):
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    numel = whole.numel()
    for start, stop in itertools.combinations_with_replacement(range(numel + 1), 2):
        boxes = list(rectangles(shape, start, stop))
        assert len(boxes) <= max(1, 2 * len(shape) - 1)
        elements = []
        for box in boxes:
            part = whole[tuple(slice(a, a + n) for a, n in zip(box.offset, box.shape))].reshape(-1)
            assert part.tolist() == list(range(box.start, box.start + box.numel))
            elements += part.tolist()
        assert elements == list(range(start, stop))
