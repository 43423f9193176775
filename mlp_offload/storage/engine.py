"""Asynchronous reads and writes on one file of a path: a thin face of the native engines.

The engine moves bytes between memory addresses and file offsets in its own threads and completes futures; it keeps
no order between requests and knows nothing of slots or subgroups. `threads` is the reference, `io_uring` the same
behaviour through the kernel's ring, `null` moves nothing (tests and simulation).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import mmap
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from .. import _native
from ..errors import ConfigError, PathIOError, PathTimeoutError

if TYPE_CHECKING:
    from typing import Self  # Python 3.11; annotations are not evaluated

logger = logging.getLogger(__name__)

KINDS = ("auto", "io_uring", "threads", "null")
FALLBACK_ALIGNMENT = 4096  # bytes; what nearly every device accepts


class IoFuture:
    """One request under way. Dropping it does not stop the request, nor let go of its memory."""

    def __init__(self, engine: Engine, request: _native.IoRequest):
        self._engine, self._request = engine, request

    @property
    def operation(self) -> str:
        """ "read" or "write"."""
        return self._request.operation

    @property
    def offset(self) -> int:
        return self._request.offset

    @property
    def nbytes(self) -> int:
        return self._request.nbytes

    @property
    def submitted_seconds(self) -> float:
        """On the clock of time.monotonic()."""
        return self._request.submitted_seconds

    @property
    def started_seconds(self) -> float:
        """When the first block went to the device; 0.0 before."""
        return self._request.started_seconds

    @property
    def finished_seconds(self) -> float:
        """0.0 while under way."""
        return self._request.finished_seconds

    def done(self) -> bool:
        return self._request.done()

    def wait(self, timeout_seconds: float) -> bool:
        """True once done, within at most `timeout_seconds`; never raises for a failed request."""
        return self._request.wait(max(0.0, timeout_seconds))

    def result(
        self,
        warn_seconds: float | None = None,
        timeout_seconds: float | None = None,
        on_warn: Callable[[str], None] | None = None,
    ) -> int | None:
        """Wait, and give the request's crc32c (None without checksum).

        Both times count from this call and default to the engine's. After `warn_seconds` one warning is logged,
        with path, offset, bytes and age, and passed to `on_warn`.

        Raises:
            PathIOError: the request failed, or met the end of the file (errno 0).
            PathTimeoutError: it did not return within `timeout_seconds`. It is still under way, and its memory with it.
        """
        warn = self._engine.warn_seconds if warn_seconds is None else warn_seconds
        timeout = self._engine.timeout_seconds if timeout_seconds is None else timeout_seconds
        begin = time.monotonic()
        if not self.wait(min(warn, timeout)):
            if warn < timeout:
                message = self.describe(begin)
                logger.warning("%s Waiting up to %g s.", message, timeout)
                if on_warn is not None:
                    on_warn(message)
            if not self.wait(begin + timeout - time.monotonic()):
                raise self.given_up(begin, timeout)
        self._engine._release(self)
        if self._request.failed:
            raise PathIOError(self._engine.path, self.operation, self.offset, self.nbytes, self._request.error_number)
        return self._request.crc32c

    def given_up(self, begin: float, timeout_seconds: float) -> PathTimeoutError:
        """The error for a request that was waited for since `begin` and did not come back."""
        return PathTimeoutError(
            f"{self.describe(begin)} Giving up (timeout {timeout_seconds:g} s). Look at the device or file system "
            "behind the path (dmesg, its servers); raise the timeout if it is only slow."
        )

    def describe(self, begin: float) -> str:
        """What is waited for since `begin` (monotonic clock): operation, file, offset, bytes, ages."""
        now = time.monotonic()
        started = self.started_seconds
        state = f"started {now - started:.1f} s ago" if started else "not started"
        return (
            f"{self.operation} {self._engine.path} offset={self.offset} bytes={self.nbytes}: no answer after "
            f"{now - begin:.1f} s of waiting (submitted {now - self.submitted_seconds:.1f} s ago, {state})."
        )


class Engine:
    """Reads and writes on an existing file, by address, in the background.

    Args:
        path: the file; it must exist and not be a symbolic link.
        kind: "threads", "io_uring" or "null"; see `open_engine` for "auto".
        direct: O_DIRECT; offset, address and size of every request are then multiples of `alignment`.
        threads: blocks in flight of the threads engine.
        iodepth: blocks in flight of the io_uring engine.
        block_size: bytes a request is cut into, at most 1 GiB.
        alignment: bytes, a power of two; see `probe_alignment`.
        warn_seconds, timeout_seconds: defaults of `IoFuture.result`.

    Raises:
        ValueError: a setting out of range, named. OSError: the file cannot be opened or the ring not be made.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        kind: str = "threads",
        direct: bool = True,
        threads: int = 4,
        iodepth: int = 16,
        block_size: int = 1 << 20,
        alignment: int = FALLBACK_ALIGNMENT,
        warn_seconds: float = 30.0,
        timeout_seconds: float = 600.0,
    ):
        self.path = os.fspath(path)
        self.kind, self.direct, self.alignment = kind, direct, alignment
        self.warn_seconds, self.timeout_seconds = warn_seconds, timeout_seconds
        self._owner = os.getpid()
        self._held: dict[IoFuture, Any] = {}  # what keeps the memory of requests under way alive
        self._registered: list[Any] = []
        self._native = _native.IoEngine(kind, self.path, direct, threads, iodepth, block_size, alignment)

    def read(self, offset: int, address: int, nbytes: int, *, checksum: bool = True, keepalive: Any = None) -> IoFuture:
        """Start reading file bytes [offset, offset + nbytes) into memory at `address`; never waits for the device.

        `keepalive` (the tensor or buffer) is held until the request is done. With `checksum` the crc32c of the bytes
        is computed in the I/O threads.

        Raises:
            ValueError: not aligned for direct I/O; names offset, address, bytes and alignment.
            RuntimeError: the engine is closed, or belongs to the parent process.
        """
        return self._track(self._native.read(offset, address, nbytes, checksum), keepalive)

    def write(
        self, offset: int, address: int, nbytes: int, *, checksum: bool = True, keepalive: Any = None
    ) -> IoFuture:
        """Start writing memory to the file; as `read`. The memory must not change until the request is done."""
        return self._track(self._native.write(offset, address, nbytes, checksum), keepalive)

    def register_buffers(self, address: int, nbytes: int, keepalive: Any = None) -> bool:
        """Pin a region (the buffer pool) for io_uring; False, without harm, where that is not possible.

        The region must stay mapped until `close`; `keepalive` is held until then.
        """
        accepted = self._native.register_buffers(address, nbytes)
        if accepted:
            self._registered.append(keepalive)
        return accepted

    def inflight(self) -> list[tuple[str, int, int, float]]:
        """(operation, offset, nbytes, age_seconds) of every request that is not completed, oldest first."""
        return self._native.inflight()

    def close(self, timeout_seconds: float = 30.0) -> bool:
        """Drop what has not started (it fails with ECANCELED), wait for the rest, end the threads, close the file.

        False when a request is still stuck after `timeout_seconds`: its thread and its memory are then left alone
        for the life of the process, unless a later call succeeds. Closing twice is fine.
        """
        closed = self._native.close(timeout_seconds)
        if closed:
            self._held.clear()
            self._registered.clear()
        return closed

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        # Not constructed, or a child after fork: nothing here is ours.
        if getattr(self, "_native", None) is None or os.getpid() != self._owner:
            return
        if not self.close(2.0):
            # The device may still write to this memory: it is never given back.
            for holder in (self._held, self._registered):
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(holder))

    def _track(self, request: _native.IoRequest, keepalive: Any) -> IoFuture:
        future = IoFuture(self, request)
        for other in [f for f in list(self._held) if f.done()]:
            self._release(other)
        if keepalive is not None and not future.done():
            self._held[future] = keepalive
        return future

    def _release(self, future: IoFuture) -> None:
        self._held.pop(future, None)


def open_engine(path: str | os.PathLike[str], *, kind: str = "auto", **settings: Any) -> Engine:
    """An `Engine` of the asked kind; "auto" is io_uring where it is compiled in and allowed, else threads.

    Raises:
        ConfigError: unknown kind, or "io_uring" where it cannot be had (with the reason).
    """
    if kind not in KINDS:
        raise ConfigError(f"engine is {kind!r}; use one of {', '.join(KINDS)}")
    if kind in ("threads", "null"):
        return Engine(path, kind=kind, **settings)
    available, reason = _native.io_uring_available()
    if kind == "io_uring" and not available:
        raise ConfigError(f"engine io_uring cannot be had here: {reason}. Use engine=threads or engine=auto")
    if available:
        try:
            return Engine(path, kind="io_uring", **settings)
        except OSError as error:  # a ring of this depth may be refused where a small one is not
            if kind == "io_uring":
                raise
            reason = str(error)
    logger.info("engine threads for %s: %s", path, reason)
    return Engine(path, kind="threads", **settings)


class DirectSupport(NamedTuple):
    """Whether a file system takes O_DIRECT.

    Attributes:
        supported: False means that engines must be opened with direct=False.
        alignment: bytes, for offsets, addresses and sizes; 4096 where nothing is known.
        reason: how this was found out, or why direct I/O is refused.
    """

    supported: bool
    alignment: int
    reason: str


def probe_alignment(directory: str | os.PathLike[str]) -> int:
    """Alignment of direct I/O in `directory`, bytes; see `direct_supported`."""
    return direct_supported(directory).alignment


def direct_supported(directory: str | os.PathLike[str]) -> DirectSupport:
    """Ask the kernel (statx) for the alignment of direct I/O in a directory and prove it, else try 512 to 65536 bytes.

    Works on a scratch file, which is unlinked before anything is written to it.

    Raises:
        OSError: the directory does not take a new file, or no bytes.
    """
    descriptor, name = tempfile.mkstemp(prefix=".mlp-offload-probe-", dir=directory)
    os.close(descriptor)
    return file_takes_direct(name, unlink=True)


def file_takes_direct(name: str | os.PathLike[str], unlink: bool = False) -> DirectSupport:
    """The same for an existing file, whose first bytes are overwritten; `unlink` removes it before.

    Raises:
        OSError: the file is not there, or takes no bytes.
    """
    try:
        told = _native.direct_alignment(os.fspath(name))
        try:
            descriptor = os.open(name, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
        except OSError as error:
            return DirectSupport(False, FALLBACK_ALIGNMENT, f"O_DIRECT is refused: {error.strerror}")
    finally:
        if unlink:
            os.unlink(name)
    try:
        if told == (0, 0):
            return DirectSupport(False, FALLBACK_ALIGNMENT, "the kernel says that this file system has no direct I/O")
        if told is not None:
            alignment = max(512, *told)
            if _direct_works(descriptor, alignment):
                return DirectSupport(True, alignment, "told by the kernel (statx)")
        for alignment in (512 << k for k in range(8)):
            if _direct_works(descriptor, alignment):
                return DirectSupport(True, alignment, "found by trying")
    finally:
        os.close(descriptor)
    return DirectSupport(False, FALLBACK_ALIGNMENT, "direct writes and reads of 512 to 65536 aligned bytes all failed")


def _direct_works(descriptor: int, alignment: int) -> bool:
    """Write and read back at an offset, address and size that are multiples of `alignment` and of nothing larger."""
    written = os.urandom(alignment)
    try:
        with _aligned_memory(alignment) as memory:
            memory[:] = written
            if os.pwritev(descriptor, [memory], alignment) != alignment:
                return False
            memory[:] = bytes(alignment)
            return os.preadv(descriptor, [memory], alignment) == alignment and memory == written
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):  # says nothing about alignment
            raise
        return False


@contextlib.contextmanager
def _aligned_memory(alignment: int) -> Iterator[memoryview]:
    """`alignment` bytes whose address is an odd multiple of `alignment`."""
    with mmap.mmap(-1, max(mmap.PAGESIZE, 4 * alignment)) as pages:
        base = ctypes.addressof(anchor := ctypes.c_char.from_buffer(pages))
        del anchor
        start = -base % (2 * alignment) + alignment
        with memoryview(pages) as whole, whole[start : start + alignment] as memory:
            yield memory
