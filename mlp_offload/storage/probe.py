"""How fast a path is: a short measurement with the engine and the settings of the run itself."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .buffers import BufferPool, Lease
from .engine import IoFuture, direct_supported, open_engine
from .mounts import device_key
from .statefile import allocate

MAX_BYTES = 128 * 2**20
MAX_SECONDS = 0.4

# Requests beyond those at the device, so that it never waits for this thread.
_QUEUED = 4


@dataclass(frozen=True)
class Bandwidth:
    """What one path gave, one direction at a time.

    Attributes:
        device: from ``device_key``.
        read_bytes_per_second, write_bytes_per_second: sustained rates.
        read_bytes, written_bytes: what was moved.
        seconds: both directions together.
        measured_at: Unix time.
    """

    device: str
    read_bytes_per_second: float
    write_bytes_per_second: float
    read_bytes: int
    written_bytes: int
    seconds: float
    measured_at: float


def probe(
    directory: str | os.PathLike[str],
    *,
    kind: str = "auto",
    direct: bool = True,
    threads: int = 4,
    iodepth: int = 8,
    block_size: int = 2**21,
    max_bytes: int = MAX_BYTES,
    max_seconds: float = MAX_SECONDS,
    timeout_seconds: float = 10.0,
) -> Bandwidth:
    """Write, then read random bytes in an unlinked scratch file, one request a block, as many as the engine takes at once.

    Ends a direction after ``max_bytes`` or about ``max_seconds``, whichever comes first; on a path so slow that the
    first requests take longer, these are waited for. Without direct I/O, writes count when they are synced, and are
    dropped from the page cache before they are read.

    Args:
        kind, threads, iodepth, block_size: of the engine, as in ``open_engine``.
        direct: wanted; where the file system refuses it, through the page cache.
        timeout_seconds: how long one request may take.

    Raises:
        OSError: the directory takes no file, no ``max_bytes`` (disk full, quota) or fails while it is measured;
            PathIOError and PathTimeoutError are such.
        CapacityError: there is no memory for the requests.
        ConfigError: the engine cannot be had here.
    """
    support = direct_supported(directory)
    direct = direct and support.supported
    nbytes = -(-min(block_size, max_bytes) // support.alignment) * support.alignment
    count = max(1, max_bytes // nbytes)
    descriptor, name = tempfile.mkstemp(prefix=".mlp-offload-probe-", dir=directory)
    with contextlib.ExitStack() as undo:
        undo.callback(os.close, descriptor)
        try:
            allocate(Path(name), count * nbytes)  # as state files are: extending a file as it is written is slower
            engine = open_engine(
                name,
                kind=kind,
                direct=direct,
                threads=threads,
                iodepth=iodepth,
                block_size=block_size,
                alignment=support.alignment,
                warn_seconds=timeout_seconds,
                timeout_seconds=timeout_seconds,
            )
        finally:
            os.unlink(name)
        depth = threads if engine.kind == "threads" else iodepth
        try:
            pool = BufferPool(min(count, depth + _QUEUED), nbytes)
        except BaseException:
            engine.close()
            raise
        leases = [pool.lease() for _ in range(pool.buffer_count)]
        try:
            random = np.random.default_rng()
            for lease in leases:
                lease.array(0, nbytes, np.uint8)[:] = np.frombuffer(random.bytes(nbytes), np.uint8)
            sync = None if direct else lambda: os.fdatasync(descriptor)
            begin = time.monotonic()
            written, write_rate = _move(engine.write, leases, count, max_seconds, sync)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            received, read_rate = _move(engine.read, leases, written, max_seconds)
            seconds = time.monotonic() - begin
        finally:
            if engine.close(1.0):  # else the kernel may still write to this memory, and it stays
                for lease in leases:
                    lease.release()
                pool.close()
    return Bandwidth(
        device=device_key(directory),
        read_bytes_per_second=read_rate,
        write_bytes_per_second=write_rate,
        read_bytes=received * nbytes,
        written_bytes=written * nbytes,
        seconds=seconds,
        measured_at=time.time(),
    )


def _move(
    start: Callable[..., IoFuture],
    leases: Sequence[Lease],
    count: int,
    max_seconds: float,
    sync: Callable[[], None] | None = None,
) -> tuple[int, float]:
    """(requests done, bytes/s) of up to ``count``, one a lease at a time; ``sync`` after each round of leases.

    The first round is not counted where enough others follow it: caches and rate limits let it pass at once.
    """
    pending: deque[IoFuture] = deque()
    sent = done = skipped = 0
    begin = counted_from = time.monotonic()

    def in_time() -> bool:
        """Whether what is under way will be done in time, going by what has been done so far."""
        return done == 0 or (time.monotonic() - begin) * sent / done < max_seconds

    while True:
        while sent < count and len(pending) < len(leases) and in_time():
            lease = leases[sent % len(leases)]  # the one whose request was popped last
            pending.append(start(sent * lease.nbytes, lease.address, lease.nbytes, checksum=False, keepalive=lease))
            sent += 1
        if not pending:
            break
        pending.popleft().result()
        done += 1
        if sync is not None and (done % len(leases) == 0 or not pending):
            sync()
        if done == len(leases):
            skipped, counted_from = done, time.monotonic()
    if done < 2 * skipped:
        skipped, counted_from = 0, begin
    return done, (done - skipped) * leases[0].nbytes / (time.monotonic() - counted_from)
