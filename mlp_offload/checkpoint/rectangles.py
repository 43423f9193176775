"""A run of a flattened tensor as boxes of the tensor: what a checkpoint in the tensor's own shape can hold."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple


class Rectangle(NamedTuple):
    """A box of a row-major tensor whose elements lie one behind the other.

    Attributes:
        start: position of its first element in the flattened tensor.
        offset, shape: where it lies and its size, one entry an axis.
    """

    start: int
    offset: "tuple[int, ...]"
    shape: "tuple[int, ...]"

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def rectangles(shape: Sequence[int], start: int, stop: int) -> "Iterator[Rectangle]":
    """Cut elements ``start`` to ``stop`` of a flattened tensor of ``shape`` into boxes, in order.

    Of n axes come at most 2 n - 1 boxes: the rest of a row, whole rows, the beginning of a row, and so on inward.
    Elements 3 to 11 of (4, 4): the last of row 0, the whole row 1, the first three of row 2.
    """
    if start >= stop:
        return
    if not shape:
        yield Rectangle(0, (), ())
        return
    inner_shape = tuple(shape[1:])
    row_numel = math.prod(inner_shape)
    (first, begin), (last, end) = divmod(start, row_numel), divmod(stop, row_numel)
    if first == last:
        yield from _of_row(inner_shape, row_numel, first, begin, end)
        return
    if begin:
        yield from _of_row(inner_shape, row_numel, first, begin, row_numel)
        first += 1
    if first < last:
        yield Rectangle(first * row_numel, (first, *(0 for _ in inner_shape)), (last - first, *inner_shape))
    yield from _of_row(inner_shape, row_numel, last, 0, end)


def _of_row(inner_shape: "tuple[int, ...]", row_numel: int, row: int, begin: int, end: int) -> "Iterator[Rectangle]":
    for inner in rectangles(inner_shape, begin, end):
        yield Rectangle(row * row_numel + inner.start, (row, *inner.offset), (1, *inner.shape))
