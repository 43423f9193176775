"""Boxes of the tensors in a torch_dist checkpoint, read straight from its files into memory that the caller has.

torch's own loader reads every stored tensor whole, and once for each part that is wanted of it.
"""

from __future__ import annotations

import bisect
import io
import itertools
import math
import os
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from ..errors import ConfigError, PathIOError

_OPEN_FILES = 16
_BLOCK_BYTES = 4 << 20  # what is read at once through a buffer of ours
_DIRECT_BYTES = 256 << 10  # runs from this size on are read by themselves
_ITEMSIZE = 4
_ZIP_LENGTHS, _ZIP_HEADER = (
    26,
    30,
)  # of a record's header: where the lengths of its name and extra field are, and its size


@dataclass(frozen=True)
class _Chunk:
    offset: "tuple[int, ...]"
    shape: "tuple[int, ...]"
    info: Any  # torch's: relative_path, offset and length of what torch.save wrote


class StoredTensors:
    """The tensors of the torch_dist checkpoint in ``directory``; one process reads them for itself.

    Raises:
        ConfigError: it is not a directory.
    """

    def __init__(self, directory: "str | os.PathLike[str]"):
        self._directory = Path(directory)
        if not self._directory.is_dir():
            raise ConfigError(
                f"checkpoint {directory}: is not a directory; offloaded state is loaded from file systems only: copy it to one"
            )
        metadata = FileSystemReader(self._directory).read_metadata()
        self._metadata, self._infos = metadata.state_dict_metadata, metadata.storage_data
        self._chunks: "dict[str, tuple[list[_Chunk], list[int], int]]" = {}
        self._files: "OrderedDict[str, BinaryIO]" = OrderedDict()
        self._starts: "dict[tuple[str, int], int | None]" = {}

    def shape(self, key: str) -> "tuple[int, ...]":
        """Shape of a stored tensor.

        Raises:
            ConfigError: there is no tensor of that name.
        """
        if not isinstance(self._metadata.get(key), TensorStorageMetadata):
            raise ConfigError(
                f"checkpoint {self._directory}: holds no tensor {key}; it was saved by another optimizer, model or "
                "layout: load it with --no-load-optim, or save it in the fully_reshardable format"
            )
        return tuple(self._metadata[key].size)

    def read(self, key: str, offset: Sequence[int], target: np.ndarray) -> int:
        """Read the box at ``offset`` of a stored tensor into ``target`` (fp32, contiguous, of the box's shape).

        Returns:
            How many elements of it are in the checkpoint; the others of ``target`` stay as they are.
        Raises:
            ConfigError: there is no tensor of that name.
            PathIOError: a file ends too early, or reading it fails.
        """
        found = 0
        for chunk in self._overlapping(key, offset, target.shape):
            low = [max(a, b) for a, b in zip(chunk.offset, offset)]
            high = [min(a + n, b + m) for a, n, b, m in zip(chunk.offset, chunk.shape, offset, target.shape)]
            if any(a >= b for a, b in zip(low, high)):
                continue
            part = target[(*(slice(a - o, b - o) for a, b, o in zip(low, high, offset)), ...)]
            self._read_part(chunk, [a - o for a, o in zip(low, chunk.offset)], part)
            found += part.size
        return found

    def close(self) -> None:
        while self._files:
            self._files.popitem()[1].close()

    # ------------------------------------------------------------------------------------ helpers

    def _overlapping(self, key: str, offset: Sequence[int], shape: Sequence[int]) -> "list[_Chunk]":
        """Chunks that may overlap a box: those that do on the first axis."""
        if key not in self._chunks:
            self.shape(key)
            chunks = [
                _Chunk(tuple(c.offsets), tuple(c.sizes), self._infos[MetadataIndex(key, c.offsets)])
                for c in self._metadata[key].chunks
            ]
            chunks.sort(key=lambda chunk: chunk.offset)
            longest = max((c.shape[0] for c in chunks if c.shape), default=1)
            self._chunks[key] = chunks, [c.offset[0] if c.offset else 0 for c in chunks], longest
        chunks, firsts, longest = self._chunks[key]
        if not offset:
            return chunks
        begin = bisect.bisect_right(firsts, offset[0] - longest)
        return chunks[begin : bisect.bisect_left(firsts, offset[0] + shape[0])]

    def _file(self, name: str) -> BinaryIO:
        if name not in self._files:
            if len(self._files) >= _OPEN_FILES:
                self._files.popitem(last=False)[1].close()
            self._files[name] = open(self._directory / name, "rb", buffering=0)  # noqa: SIM115  closed above and in close()
        self._files.move_to_end(name)
        return self._files[name]

    def _read_part(self, chunk: _Chunk, low: "list[int]", part: np.ndarray) -> None:
        name, place = chunk.info.relative_path, chunk.info.offset
        file = self._file(name)
        if (name, place) not in self._starts:
            self._starts[name, place] = _start(file, chunk)
        start = self._starts[name, place]
        if start is None:  # stored in another way than Megatron stores fp32 state: read it whole, as torch does
            box = tuple(slice(a, a + n) for a, n in zip(low, part.shape))
            part[...] = torch.load(_Window(file, place, chunk.info.length), weights_only=True)[box].float()
            return
        if not part.shape:
            low, part, shape = [0], part.reshape(1), (1,)
        else:
            shape = chunk.shape
        for begin, row_numel, run, target in _runs(shape, low, part):
            self._read_rows(name, file, start + begin * _ITEMSIZE, row_numel, run, target)

    def _read_rows(self, name: str, file: BinaryIO, begin: int, row_numel: int, run: int, target: np.ndarray) -> None:
        """Fill ``target``, whose first axis counts rows, from ``run`` of every ``row_numel`` elements after ``begin``."""
        rows, row_bytes = len(target), row_numel * _ITEMSIZE
        if target.flags.c_contiguous and run == row_numel:
            self._fill(name, file, begin, target.reshape(-1))
            return
        if target[0].flags.c_contiguous and (rows == 1 or run * _ITEMSIZE >= _DIRECT_BYTES):
            for i in range(rows):
                self._fill(name, file, begin + i * row_bytes, target[i].reshape(-1))
            return
        step = max(1, _BLOCK_BYTES // row_bytes)
        block = np.empty(min(step, rows) * row_numel, np.float32)
        for row in range(0, rows, step):
            count = min(step, rows - row)
            self._fill(name, file, begin + row * row_bytes, block[: count * row_numel - (row_numel - run)])
            wanted = block[: count * row_numel].reshape(count, row_numel)[:, :run]
            target[row : row + count] = wanted.reshape(count, *target.shape[1:])

    def _fill(self, name: str, file: BinaryIO, begin: int, line: np.ndarray) -> None:
        """Fill a contiguous array from the bytes at ``begin``."""
        left = memoryview(line).cast("B")
        while left:
            try:
                count = os.preadv(file.fileno(), [left[:_BLOCK_BYTES]], begin)
            except OSError as error:
                raise PathIOError(
                    str(self._directory / name), "read", begin, len(left), error.errno, "Load an older checkpoint."
                ) from error
            if not count:
                raise ConfigError(
                    f"checkpoint {self._directory}: {name} ends at byte {begin}, where {len(left)} more bytes should "
                    "be; it is damaged: load an older one"
                )
            left, begin = left[count:], begin + count


class _Window(io.RawIOBase):
    """A part of a file, as a file of its own: what torch.save has written for one tensor."""

    def __init__(self, file: BinaryIO, begin: int, nbytes: int):
        self._file, self._begin, self._nbytes, self._position = file, begin, nbytes, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._position = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._nbytes}[whence] + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        wanted = memoryview(buffer)[: max(0, self._nbytes - self._position)]
        count = os.preadv(self._file.fileno(), [wanted], self._begin + self._position) if wanted else 0
        self._position += count
        return count


class _Description(pickle.Unpickler):
    """What torch.save says of a single tensor, without the tensor: (storage, offset, shape, strides)."""

    def find_class(self, module: str, name: str) -> Any:
        if name == "_rebuild_tensor_v2":
            return lambda storage, offset, shape, strides, *rest: (storage, offset, tuple(shape), tuple(strides))
        return dict if name == "OrderedDict" else f"{module}.{name}"

    def persistent_load(self, storage: Any) -> Any:
        return storage


def _start(file: BinaryIO, chunk: _Chunk) -> "int | None":
    """Where in the file a stored tensor's fp32 elements begin, in row-major order; None if they are not there like that."""
    if getattr(chunk.info, "transform_descriptors", None):
        return None
    view = _Window(file, chunk.info.offset, chunk.info.length)
    with zipfile.ZipFile(view) as archive:
        records = {record.filename.partition("/")[2]: record for record in archive.infolist()}
        try:
            storage, offset, shape, strides = _Description(io.BytesIO(archive.read(records["data.pkl"]))).load()
            record = records[f"data/{storage[2]}"]
        except (KeyError, TypeError, ValueError, pickle.UnpicklingError):
            return None
        plain = storage[1] == "torch.FloatStorage" and record.compress_type == zipfile.ZIP_STORED
        if not plain or shape != chunk.shape or not _row_major(shape, strides):
            return None
    view.seek(record.header_offset + _ZIP_LENGTHS)
    name_and_extra = sum(struct.unpack("<HH", view.read(4)))
    begin = record.header_offset + _ZIP_HEADER + name_and_extra
    return chunk.info.offset + begin + offset * _ITEMSIZE


def _row_major(shape: Sequence[int], strides: Sequence[int]) -> bool:
    expected = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    return all(n == 1 or a == b for n, a, b in zip(shape, strides, expected))


def _runs(shape: Sequence[int], low: Sequence[int], part: np.ndarray) -> "Iterator[tuple[int, int, int, np.ndarray]]":
    """(first element, elements from row to row, elements wanted of each, target by rows) of a box of a stored tensor."""
    axis = len(shape) - 1
    while axis and part.shape[axis] == shape[axis]:  # from here on whole: one run
        axis -= 1
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    begin = sum(a * s for a, s in zip(low, strides))
    row_numel, run = shape[axis] * strides[axis], part.shape[axis] * strides[axis]
    if axis == 0:
        part, row_numel = part[np.newaxis], run
    for index in itertools.product(*(range(n) for n in part.shape[: max(axis - 1, 0)])):
        yield begin + sum(i * s for i, s in zip(index, strides)), row_numel, run, part[index]
