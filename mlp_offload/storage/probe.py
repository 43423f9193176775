"""How fast a path is: a short measurement with the engine and the settings of the run itself.

[Note: both directions at once] A step fetches and flushes at the same time, so what counts is what a path reads while it
is written to. Many devices give each direction less then than alone, others do not: rates of one direction at a time
would give the former too much of the state.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from .engine import direct_supported
from .meter import Meter
from .mounts import device_key
from .statefile import allocate

MAX_BYTES = 128 * 2**20
MAX_SECONDS = 0.4


@dataclass(frozen=True)
class Bandwidth:
    """What one path gave, see [Note: both directions at once].

    Attributes:
        device: from ``device_key``.
        read_bytes_per_second, write_bytes_per_second: sustained rates, in bytes/s, while both directions are busy.
        read_bytes, written_bytes: what was moved, filling the file included.
        seconds: that all of it took.
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
    """Write random bytes to an unlinked scratch file, then read it and write to it at the same time.

    Without direct I/O, writes count when they are synced, and are dropped from the page cache before they are read.

    Args:
        kind, threads, iodepth, block_size: of the engine, as in ``open_engine``.
        direct: wanted; where the file system refuses it, through the page cache.
        max_bytes: of the file.
        max_seconds: about as long each of the two parts takes; on a path so slow that the first requests take longer,
            these are waited for.
        timeout_seconds: how long one request may take.

    Raises:
        OSError: the directory takes no file, no ``max_bytes`` (disk full, quota) or fails while it is measured;
            PathIOError and PathTimeoutError are such.
        CapacityError: there is no memory for the requests.
        ConfigError: the engine cannot be had here.
    """
    support = direct_supported(directory)
    descriptor, name = tempfile.mkstemp(prefix=".mlp-offload-probe-", dir=directory)
    os.close(descriptor)
    try:
        allocate(Path(name), max_bytes)  # as state files are: extending a file as it is written is slower
        meter = Meter(
            name,
            max_bytes,
            support=support,
            direct=direct,
            kind=kind,
            threads=threads,
            iodepth=iodepth,
            block_size=block_size,
            warn_seconds=timeout_seconds,
            timeout_seconds=timeout_seconds,
        )
    finally:
        os.unlink(name)
    with contextlib.closing(meter):
        begin = time.monotonic()
        filled_bytes = meter.fill(max_seconds)
        moved = meter.measure("mixed", max_seconds)
        seconds = time.monotonic() - begin
    return Bandwidth(
        device=device_key(directory),
        read_bytes_per_second=moved["read"].bytes_per_second,
        write_bytes_per_second=moved["write"].bytes_per_second,
        read_bytes=moved["read"].nbytes,
        written_bytes=filled_bytes + moved["write"].nbytes,
        seconds=seconds,
        measured_at=time.time(),
    )
