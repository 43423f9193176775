"""Host buffers for state in flight: one aligned region, handed out as leases."""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
from typing import final

import numpy as np

from ..errors import CapacityError
from ..units import format_bytes
from .memory import available_memory_bytes

__all__ = ["BufferPool", "Lease", "available_memory_bytes"]

log = logging.getLogger(__name__)

PAGE_BYTES = 4096


@final
class Lease:
    """One buffer of a pool, ours until ``release()``. Also a context manager.

    Attributes:
        pool: the pool it came from.
        address: first byte, int, a multiple of 4096.
        nbytes: size of the buffer.
    """

    __slots__ = ("_index", "_released", "address", "nbytes", "pool")

    def __init__(self, pool: BufferPool, index: int):
        self.pool = pool
        self.nbytes = pool.buffer_bytes
        self.address = pool.region[0] + index * pool.buffer_bytes
        self._index = index
        self._released = False

    def array(self, offset_bytes: int, numel: int, dtype: np.typing.DTypeLike = np.float32) -> np.ndarray:
        """View of ``numel`` elements that start ``offset_bytes`` into the buffer, shape (numel,); no copy.

        Raises:
            ValueError: the view would leave the buffer, is misaligned for dtype, or the lease is released.
        """
        dtype = np.dtype(dtype)
        if self._released:
            raise ValueError(f"buffer {self._index}: the lease was released")
        if offset_bytes < 0 or numel < 0 or offset_bytes % dtype.alignment:
            raise ValueError(f"buffer {self._index}: no {dtype} view at offset_bytes={offset_bytes}, numel={numel}")
        if offset_bytes + numel * dtype.itemsize > self.nbytes:
            raise ValueError(
                f"buffer {self._index}: offset_bytes={offset_bytes} + {numel} x {dtype.itemsize} bytes of {dtype} "
                f"is past its {self.nbytes} bytes"
            )
        return self.pool._view(self._index, offset_bytes, numel, dtype)

    def release(self) -> None:
        """Give the buffer back. Only when no transfer uses it any more: the next lease may get it at once.

        Raises:
            ValueError: it was released before; somebody else may own the buffer by now.
        """
        if self._released:
            raise ValueError(f"buffer {self._index}: the lease was released twice")
        self._released = True
        self.pool._give_back(self._index)

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if not self._released:
            self.release()

    def __repr__(self) -> str:
        state = "released" if self._released else f"{self.nbytes} bytes at {self.address:#x}"
        return f"<Lease of buffer {self._index}: {state}>"


@final
class BufferPool:
    """``buffer_count`` buffers of ``buffer_bytes`` each (rounded up to 4096) in one private anonymous region.

    The pages are written once in the constructor, so that the memory is really there before step 1 instead
    of ending the run in the middle of it, and lies near the cores of the thread that constructs the pool.

    The region is MADV_DONTFORK: a child process would share its pages copy-on-write, and direct I/O
    into a page that is being copied can land in the wrong copy (open(2)). A child that touches it gets SIGSEGV.

    Only ``close()`` unmaps, and only when every lease is back: a transfer in flight writes to raw addresses,
    and whatever the allocator put there next would be overwritten.

    Attributes:
        region: (address, nbytes) of all buffers; the address is a multiple of ``alignment``.
        huge_pages: True when the kernel backed (part of) the region with huge pages.

    Raises:
        CapacityError: the memory cannot be had; names asked and available bytes.
    """

    def __init__(self, buffer_count: int, buffer_bytes: int, alignment: int = 2 * 2**20):
        if buffer_count < 1 or buffer_bytes < 1:
            raise ValueError(f"a pool needs buffers: buffer_count={buffer_count}, buffer_bytes={buffer_bytes}")
        if alignment < PAGE_BYTES or alignment & (alignment - 1):
            raise ValueError(f"alignment={alignment} is not a power of two of at least {PAGE_BYTES}")
        self.buffer_count = buffer_count
        self.buffer_bytes = -(-buffer_bytes // PAGE_BYTES) * PAGE_BYTES
        region_bytes = self.buffer_count * self.buffer_bytes
        available = available_memory_bytes()
        if region_bytes > available:
            raise self._no_memory(region_bytes, available)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        try:
            # mmap aligns to pages only; the surplus is never touched and costs no memory.
            self._map = mmap.mmap(-1, region_bytes + alignment, flags=flags)
        except OSError as error:
            raise self._no_memory(region_bytes, available) from error
        # Held until close(): neither a dropped pool nor a forked child may unmap by garbage collection.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._map))
        self._owner_pid = os.getpid()
        self._closed = False

        base = np.frombuffer(self._map, np.uint8).ctypes.data
        self._start = -base % alignment
        self.region = (base + self._start, region_bytes)
        self._map.madvise(mmap.MADV_DONTFORK)
        asked = self._ask_for_huge_pages()
        np.frombuffer(self._map, np.uint8, region_bytes, self._start)[::PAGE_BYTES] = 0
        self.huge_pages = asked and _huge_page_bytes(*self.region) > 0
        # Last in, first out: the buffer released last is the one still in the caches.
        self._free = list(reversed(range(buffer_count)))

    @property
    def free_count(self) -> int:
        """Buffers not on lease."""
        return len(self._free)

    def lease(self) -> Lease | None:
        """A free buffer with undefined contents; None when all are on lease."""
        if self._closed:
            raise ValueError("the buffer pool is closed")
        return Lease(self, self._free.pop()) if self._free else None

    def close(self) -> bool:
        """Unmap the region; the second call does nothing.

        Returns False, logs and leaks the memory on purpose when leases are still out. Views that are
        still alive keep their memory until they go. A forked child, which does not have the region, does nothing.
        """
        if self._closed or os.getpid() != self._owner_pid:
            return True
        if self.free_count < self.buffer_count:
            log.error(
                "buffer pool: %d of %d buffers are still on lease; %s stay mapped, because a transfer may be in flight",
                self.buffer_count - self.free_count,
                self.buffer_count,
                format_bytes(self.region[1]),
            )
            return False
        self._closed = True
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(self._map))
        self._map = None  # unmapped here, or with the last view
        return True

    def __enter__(self) -> BufferPool:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _view(self, index: int, offset_bytes: int, numel: int, dtype: np.dtype) -> np.ndarray:
        return np.frombuffer(self._map, dtype, numel, self._start + index * self.buffer_bytes + offset_bytes)

    def _give_back(self, index: int) -> None:
        self._free.append(index)

    def _ask_for_huge_pages(self) -> bool:
        try:
            self._map.madvise(mmap.MADV_HUGEPAGE)
        except OSError:  # a kernel without them
            return False
        return True

    def _no_memory(self, asked_bytes: int, available_bytes: int) -> CapacityError:
        return CapacityError(
            f"host memory: {self.buffer_count} buffers of {format_bytes(self.buffer_bytes)} need {asked_bytes} bytes "
            f"({format_bytes(asked_bytes)}); {available_bytes} bytes ({format_bytes(available_bytes)}) are available "
            f"within the machine's memory and the cgroup's limit. Lower host_memory or subgroup_size, run fewer "
            f"ranks on this node, or give the job more memory."
        )


def _huge_page_bytes(address: int, nbytes: int) -> int:
    """Bytes of [address, address + nbytes) that lie in transparent huge pages now, as the kernel counts them."""
    total, inside = 0, False
    try:
        with open("/proc/self/smaps") as lines:
            for line in lines:
                first, _, rest = line.partition(" ")
                if not first.endswith(":"):  # "start-end perms ...": a new mapping begins
                    start, end = (int(part, 16) for part in first.split("-"))
                    inside = start < address + nbytes and address < end
                elif inside and first == "AnonHugePages:":
                    total += int(rest.split()[0]) * 1024
    except OSError:
        return 0
    return total
