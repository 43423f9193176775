"""One rank's state on one path: a file in slots of equal size.

A flush goes to a free slot and never over the only good copy, so a file has a few more slots than records. Which
slot holds what, and from which step, is the caller's table; this file only knows which slots are in use.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, final

import numpy as np

from ..errors import CapacityError, PathIOError
from ..units import format_bytes
from .buffers import BufferPool, Lease
from .engine import Engine, IoFuture, direct_supported, open_engine
from .jobdir import ScratchFile

log = logging.getLogger(__name__)

# What a full disk, a full quota and a file-size limit say.
FULL_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_NO_FALLOCATE_ERRNOS = frozenset({errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS})
_FILL_BLOCK_BYTES = 2 * 2**20
_RANDOM_BYTES = 2**16  # made at once
_FILL_DEPTH = 8


@final
class StateFile:
    """``slot_count`` slots of ``slot_bytes`` in a rank's scratch file. Used from one thread; owns file and engine.

    Attributes:
        path: the file.
        slot_count, slot_bytes: slot_bytes is a multiple of ``alignment``.
        nbytes: of all slots.
        direct: whether transfers bypass the page cache.
        alignment: of slots; with ``direct`` also of the addresses and sizes of transfers, bytes.
        engine: moves the bytes.
    """

    def __init__(
        self, scratch: ScratchFile, engine: Engine, slot_count: int, slot_bytes: int, limit_bytes: int | None = None
    ):
        self.path = scratch.path
        self.slot_count = slot_count
        self.slot_bytes = slot_bytes
        self.nbytes = slot_count * slot_bytes
        self.direct = engine.direct
        self.alignment = engine.alignment
        self.engine = engine
        self._scratch = scratch
        self._limit_bytes = limit_bytes
        self._free = list(reversed(range(slot_count)))  # low slots first
        self._in_use: set[int] = set()

    @classmethod
    def create(
        cls,
        scratch: ScratchFile,
        *,
        slot_count: int,
        slot_bytes: int,
        kind: str = "auto",
        direct: bool = True,
        capacity_bytes: int | None = None,
        local_rank_count: int = 1,
        **engine_settings: Any,
    ) -> StateFile:
        """Reserve the slots in ``scratch`` and open an engine on it. ``scratch`` is ours from here, and closed on errors.

        Args:
            slot_bytes: rounded up to the alignment that the file system asks for.
            kind, engine_settings: of the engine, as in ``open_engine``.
            direct: wanted; where the file system refuses it, one warning, and buffered transfers.
            capacity_bytes: what the ranks of this node may use of this path together; None: what is free.
            local_rank_count: ranks of this node that put a file of this size on this path.

        Raises:
            CapacityError: the slots do not fit; names needed and free bytes.
            PathIOError: the file cannot be enlarged for another reason.
            ConfigError: the engine cannot be had here.
        """
        try:
            if slot_count < 1 or slot_bytes < 1 or local_rank_count < 1:
                raise ValueError(f"{scratch.path}: {slot_count=}, {slot_bytes=}, {local_rank_count=} must be positive")
            direct, alignment = _choose_direct(scratch.path, direct)
            slot_bytes = -(-slot_bytes // alignment) * alignment
            need = _Need(scratch, slot_count, slot_bytes, local_rank_count)
            need.check(capacity_bytes)
            try:
                allocate(scratch.path, need.file_bytes)
            except OSError as error:
                raise need.failed(error.errno) from error
            engine = open_engine(scratch.path, kind=kind, direct=direct, alignment=alignment, **engine_settings)
            limit_bytes = None if capacity_bytes is None else capacity_bytes // local_rank_count
            return cls(scratch, engine, slot_count, slot_bytes, limit_bytes)
        except BaseException:
            scratch.close()
            raise

    @property
    def free_count(self) -> int:
        """Slots not in use."""
        return len(self._free)

    def allocate(self) -> int:
        """A free slot, ours until ``free(slot)``; its contents are undefined.

        Raises:
            CapacityError: all are in use.
        """
        if not self._free:
            raise CapacityError(
                f"{self.path}: all {self.slot_count} slots are in use; plan more spare slots on this path"
            )
        slot = self._free.pop()
        self._in_use.add(slot)
        return slot

    def free(self, slot: int) -> None:
        """Give a slot back. Only when no transfer uses it any more.

        Raises:
            ValueError: it is not in use.
        """
        self._check_slot(slot)
        self._in_use.remove(slot)
        self._free.append(slot)

    def grow(self, slot_count: int) -> bool:
        """Add free slots where file system and capacity have room; False, and nothing is changed, where not."""
        nbytes = self.nbytes + slot_count * self.slot_bytes
        if self._limit_bytes is not None and nbytes > self._limit_bytes:
            return False
        more = nbytes - self.nbytes
        free = free_bytes(self.path.parent)
        if more > free:
            log.info("%s cannot grow by %s: %s are free", self.path, format_bytes(more), format_bytes(free))
            return False
        try:
            allocate(self.path, nbytes)
        except OSError as error:
            log.info("%s cannot grow by %s: %s", self.path, format_bytes(more), error.strerror)
            with suppress(OSError):  # ext4 keeps what it could still give, to the last block
                os.truncate(self.path, self.nbytes)
            return False
        self._free[:0] = reversed(range(self.slot_count, self.slot_count + slot_count))  # used last
        self.slot_count, self.nbytes = self.slot_count + slot_count, nbytes
        return True

    def offset(self, slot: int) -> int:
        """Where a slot begins in the file, bytes."""
        if not 0 <= slot < self.slot_count:
            raise ValueError(f"{self.path}: no slot {slot}; there are {self.slot_count}")
        return slot * self.slot_bytes

    def read(self, slot: int, lease: Lease, nbytes: int, checksum: bool = True) -> IoFuture:
        """Start filling the first ``nbytes`` of ``lease`` from a slot; the future gives their crc32c.

        Raises:
            ValueError: the slot is not in use, nbytes exceeds slot or lease, or is misaligned with ``direct``.
        """
        self._check_transfer(slot, lease, nbytes)
        return self.engine.read(self.offset(slot), lease.address, nbytes, checksum=checksum, keepalive=lease)

    def write(self, slot: int, lease: Lease, nbytes: int, checksum: bool = True) -> IoFuture:
        """Start writing the first ``nbytes`` of ``lease`` to a slot; as ``read``. The bytes may not change meanwhile."""
        self._check_transfer(slot, lease, nbytes)
        return self.engine.write(self.offset(slot), lease.address, nbytes, checksum=checksum, keepalive=lease)

    def write_all_slots(self, progress: Callable[[int], None] | None = None) -> None:
        """Write to every byte of every slot, so that a full disk or quota shows now and not in step 1000.

        Where fallocate promises nothing (NFS, some Lustre and copy-on-write file systems) this is the guarantee.
        The bytes are random, because zeros take no room on a file system that compresses. ``progress`` gets the
        number of bytes that were written since its last call.

        Raises:
            CapacityError: the path is full; names needed and free bytes. The file is closed and removed then, as
                after any other error here.
            ValueError: a slot is in use, and would be lost.
        """
        if self._in_use:
            raise ValueError(
                f"{self.path}: {len(self._in_use)} slots are in use; fill the file before the first allocate()"
            )
        with BufferPool(1, min(_FILL_BLOCK_BYTES, self.nbytes)) as pool:
            lease = pool.lease()
            try:
                block = lease.array(0, lease.nbytes, np.uint8)
                for start in range(0, lease.nbytes, _RANDOM_BYTES):  # in parts: all of it would be held twice
                    part = block[start : start + _RANDOM_BYTES]
                    part[:] = np.frombuffer(os.urandom(len(part)), np.uint8)
                self._fill_from(lease, progress)
            except PathIOError as error:
                self.close()
                if error.errno in FULL_ERRNOS:
                    need = _Need(self._scratch, self.slot_count, self.slot_bytes, 1)
                    raise need.failed(error.errno, error.offset) from error
                raise
            except BaseException:
                self.close()
                raise
            finally:
                if not self.engine.inflight():
                    lease.release()

    def close(self, timeout_seconds: float = 30.0) -> bool:
        """End the engine and remove the file. Twice does nothing.

        False when a transfer is still stuck after ``timeout_seconds``: its buffer must stay as it is. The file stays,
        too, because removing it may hang just as well; it goes when this process ends.
        """
        if not self.engine.close(timeout_seconds):
            return False
        self._scratch.close()
        return True

    def __enter__(self) -> StateFile:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _fill_from(self, lease: Lease, progress: Callable[[int], None] | None) -> None:
        pending: deque[IoFuture] = deque()
        offset = 0
        while pending or offset < self.nbytes:
            if offset < self.nbytes and len(pending) < _FILL_DEPTH:
                nbytes = min(lease.nbytes, self.nbytes - offset)
                pending.append(self.engine.write(offset, lease.address, nbytes, checksum=False, keepalive=lease))
                offset += nbytes
                continue
            written = pending.popleft()
            written.result()
            if progress is not None:
                progress(written.nbytes)

    def _check_slot(self, slot: int) -> None:
        if slot not in self._in_use:
            raise ValueError(f"{self.path}: slot {slot} is not in use ({len(self._in_use)} of {self.slot_count} are)")

    def _check_transfer(self, slot: int, lease: Lease, nbytes: int) -> None:
        self._check_slot(slot)
        if not 0 <= nbytes <= min(self.slot_bytes, lease.nbytes):
            raise ValueError(
                f"{self.path}: {nbytes} bytes do not fit a slot of {self.slot_bytes} and a buffer of {lease.nbytes} bytes"
            )


class _Need:
    """The bytes a file takes, and what to say when they are not there."""

    def __init__(self, scratch: ScratchFile, slot_count: int, slot_bytes: int, local_rank_count: int):
        self.file_bytes = slot_count * slot_bytes
        self.local_rank_count = local_rank_count
        self._scratch = scratch
        self._directory = scratch.path.parent.parent
        self._what = f"{slot_count} slots of {format_bytes(slot_bytes)}"

    def check(self, capacity_bytes: int | None) -> None:
        """Raises CapacityError unless all local ranks' files fit, whether or not the others allocated theirs before."""
        needed = self.file_bytes * self.local_rank_count
        text = f"path '{self._directory}': {self._what}"
        if self.local_rank_count > 1:
            text += f" for each of {self.local_rank_count} ranks on this node"
        text += f" need {_sized(needed)};"
        if capacity_bytes is not None and needed > capacity_bytes:
            raise CapacityError(f"{text} its capacity is set to {_sized(capacity_bytes)}. Raise it or add a path.")
        # Neighbours may have allocated theirs before. In this order: one that does so between the two calls makes the
        # check milder, not wrong.
        free = free_bytes(self._directory)
        free += min(self._scratch.neighbour_bytes(), needed - self.file_bytes)
        if needed > free:
            raise CapacityError(f"{text} {_sized(free)} are free. Free {format_bytes(needed - free)} or add a path.")

    def failed(self, error_number: int, offset: int = 0) -> CapacityError | PathIOError:
        """The error to raise when enlarging the file to its full size failed at ``offset``."""
        if error_number not in FULL_ERRNOS:
            return PathIOError(str(self._scratch.path), "allocate", offset, self.file_bytes, error_number)
        reason = f"{os.strerror(error_number)} ({errno.errorcode[error_number]})"
        step = {
            errno.ENOSPC: "Free space there or add a path.",
            errno.EDQUOT: "Ask for a larger quota (see the quota or lfs quota command) or add a path.",
            errno.EFBIG: "Raise the file size limit (ulimit -f), or add a path so that less is placed here.",
        }[error_number]
        return CapacityError(
            f"path '{self._directory}': {self._what} need {_sized(self.file_bytes)}; the file system stopped at offset "
            f"{offset} of {self._scratch.path}: {reason}. It reports {_sized(free_bytes(self._directory))} free. {step}"
        )


def _sized(nbytes: int) -> str:
    return f"{nbytes} bytes ({format_bytes(nbytes)})"


def free_bytes(directory: Path) -> int:
    """What an ordinary user may still write on the file system of ``directory``; knows of no quota."""
    found = os.statvfs(directory)
    return found.f_bavail * found.f_frsize


def _choose_direct(path: Path, wanted: bool) -> tuple[bool, int]:
    """(direct, alignment in bytes) for the state file ``path``; warns when direct I/O is wanted and refused."""
    try:
        support = direct_supported(path.parent)
    except OSError as error:
        if error.errno in FULL_ERRNOS:
            raise CapacityError(
                f"path '{path.parent.parent}': no room for a probe of some KiB: {error.strerror}. "
                f"It reports {_sized(free_bytes(path.parent.parent))} free. Free space there or name another path."
            ) from error
        raise PathIOError(str(path.parent), "probe", 0, 0, error.errno) from error
    if wanted and not support.supported:
        log.warning(
            "path '%s': direct I/O is refused (%s); going on through the page cache, which takes memory and a copy",
            path.parent.parent,
            support.reason,
        )
    return wanted and support.supported, support.alignment


def allocate(path: Path, nbytes: int) -> None:
    """Reserve ``nbytes`` where the file system can, else only set the size. Raises OSError.

    fallocate(2) itself: the C library's posix_fallocate writes to every block of the file where the system call is
    not supported, which takes minutes, shows no progress, and is done better by ``write_all_slots``.
    """
    fallocate = ctypes.CDLL(None, use_errno=True).fallocate
    fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        while fallocate(fd, 0, 0, nbytes) != 0:
            number = ctypes.get_errno()
            if number in _NO_FALLOCATE_ERRNOS:
                os.ftruncate(fd, nbytes)
                break
            if number != errno.EINTR:
                raise OSError(number, os.strerror(number), str(path))
    finally:
        os.close(fd)
