"""Rates and latencies of one file, with the engine and the settings of the run itself."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, final

import numpy as np

from .buffers import BufferPool, Lease
from .engine import DirectSupport, open_engine

OPERATIONS = {"read": ("read",), "write": ("write",), "mixed": ("read", "write")}
"""What can be measured, and the directions that are busy meanwhile."""

RAMP = 0.25
"""Share of a span that passes before it and is not counted: caches and rate limits let the first blocks pass at once."""

# Requests beyond those at the device, so that it never waits for this thread.
_QUEUED = 4
_REQUEST_BYTES = 2**20  # small blocks are asked for in groups, as they are in a run


class Moved(NamedTuple):
    """One direction of a measurement: sustained rate, and all bytes that were moved for it."""

    bytes_per_second: float
    nbytes: int


@final
class Meter:
    """Measures on one existing file that may be overwritten. Used from one thread.

    Args:
        file: opened here; it may be unlinked afterwards.
        size_bytes: of the file that is used, in whole requests, at least one.
        support: of the file's directory, from ``direct_supported``.
        direct: wanted; where it is not supported, through the page cache. Then writes count when they are synced, and
            what is in the page cache is dropped from it before it is read.
        settings: ``kind``, ``threads``, ``iodepth``, ``block_size``, and the engine's times.

    Attributes:
        kind, direct: of the engine that is used.
        request_bytes: of one request: a block, or as many small blocks as make a MiB.
        filled_count: requests' worth of bytes that are written; measuring stays within them.

    Raises:
        OSError, CapacityError, ConfigError: the file, the memory or the engine cannot be had.
    """

    def __init__(
        self, file: str | os.PathLike[str], size_bytes: int, *, support: DirectSupport, direct: bool, **settings: Any
    ):
        block = -(-min(settings["block_size"], size_bytes) // support.alignment) * support.alignment
        self._block_bytes = block
        self.request_bytes = block * max(1, min(_REQUEST_BYTES, size_bytes) // block)
        self.request_count = max(1, size_bytes // self.request_bytes)
        self.filled_count = 0
        self.direct = direct and support.supported
        self._descriptor = os.open(file, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            self._engine = open_engine(file, direct=self.direct, alignment=support.alignment, **settings)
        except BaseException:
            os.close(self._descriptor)
            raise
        self.kind = self._engine.kind
        try:
            depth = settings["threads"] if self.kind == "threads" else settings["iodepth"]
            count = -(-depth * block // self.request_bytes) + 2 * _QUEUED
            self._pool = BufferPool(count, self.request_bytes)
        except BaseException:
            self._engine.close()
            os.close(self._descriptor)
            raise
        self._leases = [self._pool.lease() for _ in range(count)]
        random = np.random.default_rng()
        for lease in self._leases:  # what can be compressed would be faster
            lease.array(0, lease.nbytes, np.uint8)[:] = np.frombuffer(random.bytes(lease.nbytes), np.uint8)
        self._engine.register_buffers(*self._pool.region, keepalive=self._pool)

    def fill(self, max_seconds: float) -> int:
        """Write the file once, or what of it can be written in about ``max_seconds``; bytes written."""
        until = time.monotonic() + max_seconds
        count = len(self._flow("write", self._leases, range(self.request_count), until, once=True))
        self.filled_count = max(count, self.filled_count)
        return count * self.request_bytes

    def measure(self, operation: str, seconds: float, begin: "float | None" = None) -> "dict[str, Moved]":
        """What each direction of ``operation`` gives over a span of ``seconds``, after a ramp of a quarter more.

        Directions that are busy together use halves of the file. On a path so slow that its first requests take longer,
        these are waited for.

        Args:
            begin: when to begin, on the clock of time.monotonic(): of several processes that measure together.

        Raises:
            ValueError: nothing was filled.
            OSError: a request failed (PathIOError, PathTimeoutError).
        """
        if self.filled_count < 1:
            raise ValueError("fill() comes first: there is nothing to read")
        directions = OPERATIONS[operation]
        if not self.direct:
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        begin = _sleep_until(begin)
        counted_from = begin + RAMP * seconds
        each, part = len(self._leases) // len(directions), self.filled_count // len(directions)
        with ThreadPoolExecutor(len(directions), "mlp-offload-meter") as threads:
            flows = {}
            for i, direction in enumerate(directions):
                indices = range(i * part, (i + 1) * part) or range(1)
                leases = self._leases[i * each : (i + 1) * each]
                flows[direction] = threads.submit(self._flow, direction, leases, indices, counted_from + seconds)
            moved = {}
            for direction, flow in flows.items():
                ends = [finished for _, finished in flow.result()]
                rate = _rate(ends, self.request_bytes, begin, counted_from, counted_from + seconds)
                moved[direction] = Moved(rate, len(ends) * self.request_bytes)
        return moved

    def latencies(self, direction: str, seconds: float, begin: "float | None" = None) -> "list[float]":
        """Seconds that single blocks took, one after the other, for about ``seconds``; at least one.

        Raises:
            As ``measure``.
        """
        if self.filled_count < 1:
            raise ValueError("fill() comes first: there is nothing to read")
        if not self.direct:
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        until = _sleep_until(begin) + seconds
        flow = self._flow(direction, self._leases[:1], range(self.filled_count), until, nbytes=self._block_bytes)
        return [finished - submitted for submitted, finished in flow]

    def close(self) -> None:
        """End the engine. Where a request is stuck, its memory stays as it is: the kernel may still write to it."""
        if self._engine.close(1.0):
            for lease in self._leases:
                lease.release()
            self._pool.close()
        os.close(self._descriptor)

    def _flow(
        self,
        direction: str,
        leases: Sequence[Lease],
        indices: Sequence[int],
        until: float,
        nbytes: int = 0,
        once: bool = False,
    ) -> "list[tuple[float, float]]":
        """(submitted, finished) of requests at ``indices``, over and over, that were started before ``until``."""
        start: Callable[..., Any] = getattr(self._engine, direction)
        nbytes = nbytes or self.request_bytes
        free, pending, spans = list(leases), deque(), []
        unsynced: "list[tuple[float, float]]" = []
        sent = 0
        while True:
            while free and not (once and sent == len(indices)) and (sent == 0 or time.monotonic() < until):
                offset, lease = indices[sent % len(indices)] * self.request_bytes, free.pop()
                pending.append((start(offset, lease.address, nbytes, checksum=False, keepalive=lease), lease))
                sent += 1
            if not pending:
                return spans
            future, lease = pending.popleft()
            future.result()
            free.append(lease)
            span = (future.submitted_seconds, future.finished_seconds)
            if self.direct:
                spans.append(span)
            elif direction == "read":
                spans.append(span)
                os.posix_fadvise(self._descriptor, future.offset, nbytes, os.POSIX_FADV_DONTNEED)
            else:
                unsynced.append(span)
                if len(unsynced) == len(leases) or not pending:
                    os.fdatasync(self._descriptor)
                    now = time.monotonic()
                    spans += [(submitted, now) for submitted, _ in unsynced]
                    unsynced.clear()


def _sleep_until(begin: "float | None") -> float:
    """``begin`` when it has come, or now."""
    if begin is not None:
        time.sleep(max(0.0, begin - time.monotonic()))
    return time.monotonic() if begin is None else begin


def _rate(ends: Sequence[float], nbytes: int, begin: float, counted_from: float, until: float) -> float:
    """Bytes/s of requests of ``nbytes`` that ended at ``ends``, between the last end before the span and the last in it.

    So whole bursts are counted, with the pauses that belong to them. Where too few ended within the span, all count.
    """
    before = max((end for end in ends if end <= counted_from), default=begin)
    inside = [end for end in ends if before < end <= until]
    if len(inside) < 2:
        before, inside = begin, list(ends)
    return len(inside) * nbytes / max(max(inside) - before, 1e-9)
