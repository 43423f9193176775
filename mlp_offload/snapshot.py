"""The state at one moment, kept on the paths while training goes on: what an asynchronous checkpoint is written from.

    take_snapshot(...)      slots are pinned, what is only in memory is copied to free slots, weights beside it
    training goes on        a flush goes to another slot, as always; a pinned one is not given back
    Snapshot.source()       where every record lies: small, may be pickled, read by any process of the node
    Snapshot.release()      the slots are free again

It costs host memory for nothing but the buffers that are there, and room on the paths: the state a second time.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from . import _native
from .adam.remainder import join
from .errors import CapacityError, ChecksumError, PathIOError
from .pipeline import StepPipeline
from .plan.placement import snapshot_slots, weights_a_slot
from .plan.subgroups import Subgroup
from .storage.buffers import Lease
from .tiers import Tiers, Where
from .units import format_bytes
from .updates import AdamWork

_BF16_BYTES = 2


@dataclass(frozen=True)
class StoredBytes:
    """Bytes in a state file that stay as they are while a snapshot is held."""

    file: str
    offset: int
    nbytes: int
    checksum: "int | None"

    def read(self) -> bytearray:
        """The bytes, checked; they do not stay in the page cache.

        Raises:
            PathIOError, ChecksumError
        """
        data = bytearray(self.nbytes)
        fd = os.open(self.file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            done = 0
            while done < self.nbytes:
                count = os.preadv(fd, [memoryview(data)[done:]], self.offset + done)
                if count == 0:
                    raise PathIOError(self.file, "read", self.offset, self.nbytes, 0)
                done += count
            os.posix_fadvise(fd, self.offset, self.nbytes, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            if isinstance(error, PathIOError):
                raise
            raise PathIOError(self.file, "read", self.offset, self.nbytes, error.errno or 0) from error
        finally:
            os.close(fd)
        address = np.frombuffer(data, np.uint8).ctypes.data
        if self.checksum is not None and _native.crc32c(address, self.nbytes) != self.checksum:
            raise ChecksumError(
                f"{self.file} offset={self.offset} bytes={self.nbytes}: not the bytes that were written there for a snapshot; "
                "this checkpoint is not usable, the one before it is. Stop using the path if it happens again"
            )
        return data


@dataclass(frozen=True)
class _Stored:
    """One subgroup: its record, and where its weights begin in the bytes that hold them."""

    subgroup: Subgroup
    record: StoredBytes
    weights: "StoredBytes | None"
    weights_start: int  # bytes


@dataclass(frozen=True)
class SnapshotSource:
    """Where the records of a snapshot lie, by space and subgroup. Valid until the snapshot is released."""

    stored: "Mapping[tuple[str, int], _Stored]"

    def read(self, space: str, index: int) -> "dict[str, torch.Tensor]":
        """``main_param``, ``exp_avg`` and ``exp_avg_sq`` of one subgroup at the moment of the snapshot, fp32.

        Raises:
            PathIOError, ChecksumError
        """
        item = self.stored[space, index]
        numel, stride, itemsize = item.subgroup.numel, item.subgroup.stride_numel, item.subgroup.main_itemsize
        data = torch.frombuffer(item.record.read(), dtype=torch.uint8)

        def array(start: int, dtype: torch.dtype) -> torch.Tensor:
            return data[start : start + numel * dtype.itemsize].view(dtype)

        exp_avg = array(stride * itemsize, torch.float32)
        exp_avg_sq = array(stride * (itemsize + 4), torch.float32)
        if item.weights is None:
            return {"main_param": array(0, torch.float32), "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
        weights = torch.frombuffer(item.weights.read(), dtype=torch.uint8)
        weight = weights[item.weights_start : item.weights_start + numel * _BF16_BYTES].view(torch.bfloat16)
        main_param, exp_avg_sq = join(weight, array(0, torch.int16), exp_avg_sq)
        return {"main_param": main_param, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}


class Snapshot:
    """Holds the slots of one moment's state; ``release`` it when nobody reads them any more.

    Made by ``take_snapshot``. Only the trainer's thread takes and releases snapshots.
    """

    def __init__(self, tiers: Tiers):
        self._tiers = tiers
        self._held: "list[tuple[int, int]]" = []
        self._stored: "dict[tuple[str, int], _Stored]" = {}

    def source(self) -> SnapshotSource:
        return SnapshotSource(dict(self._stored))

    def release(self) -> None:
        """Give the slots back. Safe to call twice, and after the optimizer was closed."""
        held, self._held = self._held, []
        for path, slot in held:
            self._tiers.unpin(path, slot)

    def _hold(self, path: int, slot: int) -> None:
        self._held.append((path, slot))

    def _write(self, lease: Lease, nbytes: int) -> StoredBytes:
        """A copy of a buffer in a slot of its own; waits until it is there."""
        path, slot, nbytes, checksum = self._tiers.write_copy(lease, nbytes)
        self._hold(path, slot)
        return self._bytes(path, slot, nbytes, checksum)

    def _bytes(self, path: int, slot: int, nbytes: int, checksum: "int | None") -> StoredBytes:
        file = self._tiers.files[path]
        return StoredBytes(str(file.path), file.offset(slot), nbytes, checksum)


def take_snapshot(pipeline: StepPipeline, works: "Mapping[str, AdamWork]") -> Snapshot:
    """Keep the state as it is now, of every space, until the snapshot is released. Several may be held at once.

    Waits for flushes under way, and for copies of what is only in host or GPU memory and of bf16 weights whose records hold
    remainders (with the weights they are 10 + 2 bytes a parameter).

    Raises:
        CapacityError: the paths have no room for the copies and for the steps until the release; nothing is held.
        WeightsChangedError: a weight was changed by other hands.
        PathIOError: a copy cannot be written; nothing is held.
    """
    tiers = pipeline.tiers
    pipeline.settle()
    spaces = {name: list(zip(pipeline.indices(name), subgroups)) for name, subgroups in pipeline.subgroups.items()}
    copied = [i for i, entry in enumerate(tiers.table) if entry.where in (Where.HOST, Where.DEVICE)]
    weights = {name: w for name, w in works.items() if any(s.main_itemsize == _BF16_BYTES for _, s in spaces[name])}
    longest = max(subgroup.numel for subgroup in tiers.subgroups)
    per_slot = weights_a_slot(min((file.slot_bytes for file in tiers.files), default=0), longest)
    groups = {n: [spaces[n][i : i + per_slot] for i in range(0, len(spaces[n]), per_slot)] for n in weights}
    _make_room(tiers, len(copied) + sum(map(len, groups.values())))
    snapshot = Snapshot(tiers)
    try:
        located: "dict[tuple[str, int], tuple[StoredBytes, int]]" = {}
        for name, parts in groups.items():
            for part in parts:
                with tiers.pool.lease() as lease:
                    start, places = 0, []
                    for _, subgroup in part:
                        out = lease.array(start, subgroup.numel, np.int16)
                        weights[name].copy_weights(subgroup, torch.from_numpy(out).view(torch.bfloat16))
                        places.append((subgroup.index, start))
                        start += subgroup.numel * _BF16_BYTES
                    stored = snapshot._write(lease, start)
                located |= {(name, index): (stored, begin) for index, begin in places}
        for name, members in spaces.items():
            for index, subgroup in members:
                entry = tiers.table[index]
                if entry.where is Where.HOST:
                    record = snapshot._write(entry.lease, subgroup.record_bytes)
                elif entry.where is Where.DEVICE:
                    with tiers.pool.lease() as lease:
                        tiers.read_from_device(index, lease)
                        record = snapshot._write(lease, subgroup.record_bytes)
                else:
                    tiers.pin(entry.path, entry.slot)
                    snapshot._hold(entry.path, entry.slot)
                    nbytes = tiers.transfer_bytes(index, entry.path)
                    record = snapshot._bytes(entry.path, entry.slot, nbytes, entry.checksum)
                beside = located.get((name, subgroup.index), (None, 0))
                snapshot._stored[name, subgroup.index] = _Stored(subgroup, record, *beside)
    except BaseException:
        snapshot.release()
        raise
    return snapshot


def _make_room(tiers: Tiers, copy_count: int) -> None:
    """Slots for ``copy_count`` copies, and for every stored subgroup once more, whose next flush needs another slot.

    Raises:
        CapacityError: names the path, and what is missing there.
    """
    if not tiers.files:
        raise CapacityError(
            "everything is in memory, so there is no path that a snapshot could be kept on; the checkpoint is "
            "written at once. Lower host_memory (or gpu_memory) to let part of the state stream"
        )
    needed = snapshot_slots([tiers.homes_on(i) for i in range(len(tiers.files))], copy_count)
    for file, more in zip(tiers.files, needed):
        missing = more + tiers.residency.staging_count - file.free_count
        if missing > 0 and not file.grow(missing):
            raise CapacityError(
                f"path {str(file.path)!r}: a snapshot for an asynchronous checkpoint needs {missing} more slots, "
                f"{format_bytes(missing * file.slot_bytes)}, which are not there; free them, or save without --async-save"
            )
