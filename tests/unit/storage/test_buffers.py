"""Buffer pool: alignment, leases, what close() may unmap, forked children, memory that cannot be had."""

import ctypes
import faulthandler
import mmap
import os
import resource
import signal
import subprocess
import sys

import numpy as np
import pytest

from mlp_offload.errors import CapacityError
from mlp_offload.storage.buffers import BufferPool, available_memory_bytes

MIB = 2**20


def mapped_kib(address: int, field: str) -> "int | None":
    """The smaps field of the mapping that holds address, KiB; None when nothing is mapped there."""
    inside, total = False, None
    with open("/proc/self/smaps") as lines:
        for line in lines:
            first = line.split()[0]
            if not first.endswith(":"):
                start, end = (int(part, 16) for part in first.split("-"))
                inside = start <= address < end
                total = 0 if inside else total
            elif inside and first == field + ":":
                total = int(line.split()[1])
    return total


def exit_status(child_body) -> int:
    """Run child_body in a forked child; its wait status. The child leaves with 0 unless the body says otherwise."""
    pid = os.fork()
    if pid == 0:
        status = 99
        try:
            faulthandler.disable()
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            child_body()
            status = 0
        finally:
            os._exit(status)
    return os.waitpid(pid, 0)[1]


@pytest.mark.parametrize("asked, got", [(1, 4096), (4095, 4096), (4096, 4096), (4097, 8192), (MIB + 513, MIB + 4096)])
def test_buffers_are_rounded_up_to_pages_and_lie_in_one_aligned_region(asked, got):
    with BufferPool(3, asked) as pool:
        address, nbytes = pool.region
        assert (pool.buffer_bytes, nbytes, address % (2 * MIB)) == (got, 3 * got, 0)
        leases = [pool.lease() for _ in range(3)]
        assert sorted(lease.address - address for lease in leases) == [0, got, 2 * got]
        assert {lease.nbytes for lease in leases} == {got}
        for lease in leases:
            lease.release()


def test_larger_alignment_is_kept():
    with BufferPool(1, 4096, alignment=16 * MIB) as pool:
        assert pool.region[0] % (16 * MIB) == 0


def test_an_empty_pool_gives_none_and_a_released_buffer_comes_back():
    with BufferPool(2, 4096) as pool:
        first, second = pool.lease(), pool.lease()
        assert pool.lease() is None and pool.free_count == 0
        second.release()
        again = pool.lease()
        assert again.address == second.address
        first.release()
        again.release()
        assert pool.free_count == 2


def test_a_lease_is_released_by_with_even_after_an_error():
    with BufferPool(1, 4096) as pool:
        with pytest.raises(KeyError), pool.lease():
            raise KeyError
        with pool.lease() as lease:
            lease.release()
        assert pool.free_count == 1


def test_releasing_twice_is_an_error_and_does_not_free_the_next_owner():
    with BufferPool(1, 4096) as pool:
        lease = pool.lease()
        lease.release()
        owner = pool.lease()
        with pytest.raises(ValueError, match="twice"):
            lease.release()
        assert pool.lease() is None
        owner.release()


def test_views_are_the_memory_at_the_lease_address():
    with BufferPool(2, 4096) as pool, pool.lease(), pool.lease() as lease:
        lease.array(8, 3)[:] = [1.5, -2.0, 3.25]
        assert np.frombuffer(ctypes.string_at(lease.address + 8, 12), np.float32).tolist() == [1.5, -2.0, 3.25]
        assert lease.array(8, 2, np.uint16).dtype == np.uint16
        assert lease.array(4096, 0).size == 0
        assert lease.array(0, 1024).nbytes == 4096


@pytest.mark.parametrize(
    "offset_bytes, numel, dtype",
    [(0, 1025, "f4"), (4096, 1, "u1"), (4, 1024, "f4"), (-4, 1, "f4"), (0, -1, "f4"), (2, 1, "f4"), (4, 1, "f8")],
)
def test_views_that_leave_the_buffer_or_are_misaligned_are_refused(offset_bytes, numel, dtype):
    with BufferPool(2, 4096) as pool, pool.lease() as lease, pytest.raises(ValueError, match="offset_bytes"):
        lease.array(offset_bytes, numel, dtype)


def test_a_released_lease_gives_no_views():
    with BufferPool(1, 4096) as pool:
        lease = pool.lease()
        lease.release()
        with pytest.raises(ValueError, match="released"):
            lease.array(0, 1)


def test_close_leaves_memory_mapped_while_a_lease_is_out(caplog):
    pool = BufferPool(2, 4096)
    lease = pool.lease()
    assert pool.close() is False
    assert "1 of 2 buffers are still on lease" in caplog.text
    ctypes.memset(lease.address, 7, lease.nbytes)
    assert lease.array(0, 1, np.uint8)[0] == 7
    lease.release()
    assert pool.close() is True and pool.close() is True
    with pytest.raises(ValueError, match="closed"):
        pool.lease()


def test_close_unmaps_and_a_view_keeps_its_memory_until_it_goes():
    pool = BufferPool(1, 4 * MIB)
    address = pool.region[0]
    with pool.lease() as lease:
        view = lease.array(0, MIB)
        view[-1] = 42.0
    assert pool.close() is True
    assert view[-1] == 42.0
    assert mapped_kib(address, "Rss") is not None
    del view
    assert mapped_kib(address, "Rss") is None


def test_a_pool_that_is_dropped_while_a_lease_is_in_flight_stays_mapped():
    pool = BufferPool(1, 4 * MIB)
    address = pool.region[0]
    pool.lease()
    del pool
    assert mapped_kib(address, "Rss") >= 4 * 1024
    ctypes.memset(address, 1, 4 * MIB)


def test_every_page_is_there_after_construction():
    with BufferPool(3, 3 * MIB) as pool:
        assert mapped_kib(pool.region[0], "Rss") >= 9 * 1024
        assert pool.huge_pages == (mapped_kib(pool.region[0], "AnonHugePages") > 0)


def test_huge_pages_are_not_reported_where_the_process_may_not_have_them():
    pr_set_thp_disable = 41
    code = (
        "import ctypes; from mlp_offload.storage.buffers import BufferPool\n"
        f"assert ctypes.CDLL(None).prctl({pr_set_thp_disable}, 1, 0, 0, 0) == 0\n"
        "print(BufferPool(4, 2**21).huge_pages)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False).stdout == "False\n"


def test_forked_children_do_not_have_the_region():
    with BufferPool(1, MIB) as pool, pool.lease() as lease:
        lease.array(0, 1)[0] = 3.0
        status = exit_status(lambda: ctypes.string_at(lease.address, 1))
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGSEGV
        assert lease.array(0, 1)[0] == 3.0


def test_a_forked_child_never_unmaps_what_it_has_at_those_addresses():
    pool = BufferPool(1, MIB)
    address, nbytes = pool.region
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]

    def child():
        nonlocal pool
        map_fixed = 0x10
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | map_fixed
        assert libc.mmap(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0) == address
        ctypes.memset(address, 9, nbytes)
        assert pool.close() is True
        pool = None
        assert ctypes.string_at(address, 1) == b"\x09"

    assert exit_status(child) == 0
    assert pool.close() is True


@pytest.mark.parametrize(
    "buffer_count, buffer_bytes, alignment", [(0, 1, 4096), (1, 0, 4096), (1, 1, 512), (1, 1, 5000)]
)
def test_senseless_sizes_are_refused(buffer_count, buffer_bytes, alignment):
    with pytest.raises(ValueError):
        BufferPool(buffer_count, buffer_bytes, alignment)


def test_more_than_the_machine_has_is_a_capacity_error_with_both_numbers():
    with pytest.raises(CapacityError) as caught:
        BufferPool(4, 2**48)
    text = str(caught.value)
    assert str(2**50) in text and "1024.0 TiB" in text
    available = int(text.split("; ")[1].split(" bytes")[0])
    assert abs(available - available_memory_bytes()) < 2**30


def test_a_refused_mapping_is_a_capacity_error():
    code = (
        "import resource; from mlp_offload.storage.buffers import BufferPool\n"
        "resource.setrlimit(resource.RLIMIT_AS, (3 * 2**30, 3 * 2**30))\n"
        "BufferPool(3, 2**30)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "CapacityError: host memory: 3 buffers of 1.0 GiB need 3221225472 bytes" in done.stderr
