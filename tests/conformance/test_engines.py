"""One suite for every real engine, direct and buffered: what a caller of storage.engine may rely on."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import mmap
import os
import random
import signal
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_tools import REAL_KINDS, Memory, make, new_file, settles_to, slow_crc32c, tasks

from mlp_offload import _native
from mlp_offload.errors import PathIOError

BLOCK = 65536
EDGES = [0, 1, 511, 512, 513, 4095, 4096, 4097, BLOCK - 1, BLOCK, BLOCK + 4096, 3 * BLOCK, 3 * BLOCK + 513]

every_kind = pytest.mark.parametrize("kind", REAL_KINDS)
every_mode = pytest.mark.parametrize("direct", [False, True], ids=["buffered", "direct"])


@every_kind
@every_mode
@pytest.mark.parametrize("nbytes", EDGES)
def test_sizes_and_offsets_around_every_edge(tmp_path: Path, kind: str, direct: bool, nbytes: int) -> None:
    shadow = bytearray(os.urandom(8 * BLOCK))
    path = tmp_path / "state"
    path.write_bytes(shadow)
    source, target = Memory(8 * BLOCK), Memory(8 * BLOCK)
    source[: 8 * BLOCK] = os.urandom(8 * BLOCK)
    with make(path, kind, direct) as engine:
        for offset in (0, 1, 4095, 4096, BLOCK - 4096, BLOCK, BLOCK + 513):
            for shift in (0, 1, 4096):  # of the memory
                arguments = (offset, source.address + shift, nbytes)
                if direct and (offset % 4096 or nbytes % 4096 or shift % 4096):
                    with pytest.raises(ValueError, match=f"offset={offset} .* bytes={nbytes}.*alignment 4096"):
                        engine.write(*arguments)
                    with pytest.raises(ValueError, match="alignment 4096"):
                        engine.read(*arguments)
                    continue
                data = source[shift : shift + nbytes]
                assert engine.write(*arguments).result() == _native.crc32c(source.address + shift, nbytes)
                shadow[offset : offset + nbytes] = data
                assert engine.read(offset, target.address + shift, nbytes, checksum=False).result() is None
                assert target[shift : shift + nbytes] == data
        assert engine.inflight() == []
    assert path.read_bytes() == shadow


@every_kind
@every_mode
def test_many_requests_at_once_match_a_shadow_copy(tmp_path: Path, kind: str, direct: bool) -> None:
    rng, unit, units = random.Random(7), 4096 if direct else 1000, 800
    shadow = bytearray(os.urandom(unit * units))
    path = tmp_path / "state"
    path.write_bytes(shadow)
    outgoing, incoming = Memory(unit * units), Memory(unit * units)
    with make(path, kind, direct, block_size=16384) as engine:
        for _ in range(6):
            outgoing[: unit * units] = os.urandom(unit * units)
            cuts = [0, *sorted(rng.sample(range(1, units), 99)), units]
            pieces = [(a * unit, (b - a) * unit) for a, b in itertools.pairwise(cuts)]
            rng.shuffle(pieces)
            futures = []
            for offset, nbytes in pieces:
                memory, start = (outgoing, engine.write) if rng.random() < 0.5 else (incoming, engine.read)
                futures.append(start(offset, memory.address + offset, nbytes))
            for future in futures:
                memory = outgoing if future.operation == "write" else incoming
                where = slice(future.offset, future.offset + future.nbytes)
                if future.operation == "write":
                    shadow[where] = outgoing[where]
                assert future.result() == _native.crc32c(memory.address + future.offset, future.nbytes)
                assert memory[where] == shadow[where]
    assert path.read_bytes() == shadow


@every_kind
@pytest.mark.parametrize("late", ["read", "write"])
def test_a_queue_of_one_direction_does_not_starve_the_other(tmp_path: Path, kind: str, late: str) -> None:
    path, memory = new_file(tmp_path, 64 * BLOCK), Memory(64 * BLOCK)
    with make(path, kind, True, threads=1, iodepth=1, block_size=4096) as engine:
        many, one = (engine.write, engine.read) if late == "read" else (engine.read, engine.write)

        def overtakes() -> bool:
            queue = [many(i * BLOCK, memory.address, BLOCK) for i in range(63)]
            last = one(63 * BLOCK, memory.address + BLOCK, 4096)
            for future in (last, *queue):
                future.result()
            before_it = [f for f in queue if last.submitted_seconds < f.started_seconds < last.started_seconds]
            return len(before_it) <= 2 and queue[-1].started_seconds > last.started_seconds

        # several tries: on a busy machine the queue may be worked off before the last request is even made
        assert any(overtakes() for _ in range(10))


@every_kind
@pytest.mark.parametrize("nbytes", [0, 1, 8191, 12288, 12289, 40000])
def test_checksums_equal_a_slow_reference(tmp_path: Path, kind: str, nbytes: int) -> None:
    path, memory = new_file(tmp_path, 50000), Memory(50000)
    with make(path, kind, False, block_size=8192) as engine:
        read = engine.read(77, memory.address, nbytes).result()
        assert read == slow_crc32c(path.read_bytes()[77 : 77 + nbytes])
        memory[:nbytes] = os.urandom(nbytes)
        assert engine.write(99, memory.address, nbytes).result() == slow_crc32c(memory[:nbytes])


@every_kind
@every_mode
@pytest.mark.parametrize("file_nbytes", [0, 100, 4096, BLOCK + 100, 3 * BLOCK])
def test_reading_past_the_end_fails_only_that_request(
    tmp_path: Path, kind: str, direct: bool, file_nbytes: int
) -> None:
    path, memory = new_file(tmp_path, file_nbytes), Memory(16 * BLOCK)
    with make(path, kind, direct) as engine:
        whole = file_nbytes // 4096 * 4096
        past = engine.read(0, memory.address, 4 * BLOCK)
        good = engine.read(0, memory.address + 8 * BLOCK, whole)
        with pytest.raises(PathIOError) as caught:
            past.result()
        error = caught.value
        assert (error.path, error.operation, error.offset, error.nbytes, error.errno) == (
            *(str(path), "read", 0, 4 * BLOCK),
            0,
        )
        assert "ended early" in str(error)
        good.result()
        assert memory[8 * BLOCK : 8 * BLOCK + whole] == path.read_bytes()[:whole]


@every_kind
def test_a_request_past_4_gib_in_blocks_of_1_gib(tmp_path: Path, kind: str) -> None:
    big, tail = 4 << 30, 8 << 20
    path = tmp_path / "state"
    marker = os.urandom(tail)
    with open(path, "wb") as file:
        file.seek(big)
        file.write(marker)
        file.truncate(big + tail + (1 << 30))
    with repeated_memory(big, tail) as address, make(path, kind, True, block_size=1 << 30, threads=2) as engine:
        engine.read(0, address, big + tail, checksum=False).result()
        assert ctypes.string_at(address + big, tail) == marker
        far = big + tail + 4096
        engine.write(far, address + big, tail).result()
        with open(path, "rb") as file:
            file.seek(far)
            assert file.read(tail) == marker


@contextlib.contextmanager
def repeated_memory(big: int, tail: int) -> Iterator[int]:
    """Address of big + tail bytes: one 16 MiB page range shown again and again, then `tail` bytes of their own."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    piece, access, fixed, noreserve = 16 << 20, mmap.PROT_READ | mmap.PROT_WRITE, 0x10, 0x4000
    shared = os.memfd_create("pieces")
    os.ftruncate(shared, piece)
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | noreserve
    address = libc.mmap(None, big + tail, access, private, -1, 0)
    assert address != ctypes.c_void_p(-1).value
    try:
        for at in range(0, big, piece):
            assert libc.mmap(address + at, piece, access, mmap.MAP_SHARED | fixed, shared, 0) == address + at
        yield address
    finally:
        libc.munmap(address, big + tail)
        os.close(shared)


@every_kind
@every_mode
def test_children_that_fork_while_io_runs_change_nothing(tmp_path: Path, kind: str, direct: bool) -> None:
    count, nbytes = 24, 8 * BLOCK
    path, memory = new_file(tmp_path, count * nbytes), Memory(count * nbytes)
    old, new = path.read_bytes(), os.urandom(count * nbytes)
    engine = make(path, kind, direct, threads=2, iodepth=4, block_size=4096)
    for data, start in ((old, engine.read), (new, engine.write), (new, engine.read)):
        memory[: count * nbytes] = new if start == engine.write else bytes(count * nbytes)
        futures = [start(i * nbytes, memory.address + i * nbytes, nbytes) for i in range(count)]
        for k in range(6):
            assert exit_code_of_child(engine, futures[-1], closes=k % 2 == 0) == 0
        for future in futures:
            future.result()
        assert memory[: count * nbytes] == data
    assert engine.close(5.0)
    assert path.read_bytes() == new


def child_leaves_the_engine_alone(engine: object, future: object, closes: bool) -> None:
    if closes:
        assert engine.close(5.0)
    with pytest.raises(RuntimeError, match="parent"):
        engine.read(0, 0, 0)
    if not future.done():
        with pytest.raises(RuntimeError, match="child"):
            future.wait(1.0)
    assert engine.inflight() == []
    native, engine._native = engine._native, None
    del native  # the destructor joins nothing here


def exit_code_of_child(engine: object, future: object, closes: bool) -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # that is the point of the test
        child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.alarm(20)
            child_leaves_the_engine_alone(engine, future, closes)
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@every_kind
@every_mode
def test_close_drops_what_has_not_started_and_finishes_the_rest(tmp_path: Path, kind: str, direct: bool) -> None:
    before = tasks()
    count, nbytes = 200, 16 * BLOCK
    path, memory = new_file(tmp_path), Memory(nbytes)
    memory[:nbytes] = os.urandom(nbytes)
    engine = make(path, kind, direct, threads=1, iodepth=1, block_size=4096)  # 51200 blocks, one by one
    futures = [engine.write(i * nbytes, memory.address, nbytes) for i in range(count)]
    futures[0].result()
    assert len(engine.inflight()) > 0
    assert engine.close(20.0)
    assert settles_to(before)
    assert all(future.done() for future in futures)
    results = [error_of(future) for future in futures]
    assert set(results) == {None, errno.ECANCELED}
    with open(path, "rb") as file:
        for future, result in zip(futures, results):
            if result is None:
                file.seek(future.offset)
                assert file.read(nbytes) == memory[:nbytes]
    assert engine.close(0.0)
    with pytest.raises(RuntimeError, match="closed"):
        engine.read(0, memory.address, 4096)


def error_of(future: object) -> int | None:
    try:
        future.result()
    except PathIOError as error:
        return error.errno
    return None


@every_kind
def test_a_dropped_engine_and_dropped_futures_leave_no_threads(tmp_path: Path, kind: str) -> None:
    before = tasks()
    path, memory = new_file(tmp_path, 64 * BLOCK), Memory(64 * BLOCK)
    engine = make(path, kind, True)
    assert tasks() > before
    for i in range(64):
        engine.read(i * BLOCK, memory.address + i * BLOCK, BLOCK)
    del engine
    assert settles_to(before)


@every_kind
def test_a_closed_engine_holds_no_file_and_no_ring(tmp_path: Path, kind: str) -> None:
    path, memory = new_file(tmp_path, BLOCK), Memory(BLOCK)
    before = sorted(os.listdir("/proc/self/fd"))
    engine = make(path, kind, True)
    engine.register_buffers(memory.address, BLOCK)
    engine.read(0, memory.address, BLOCK).result()
    assert len(os.listdir("/proc/self/fd")) > len(before)
    assert engine.close(5.0)
    assert sorted(os.listdir("/proc/self/fd")) == before
    assert engine.register_buffers(memory.address, BLOCK) is False


@pytest.mark.skipif("io_uring" not in REAL_KINDS, reason="io_uring is not available here")
@every_mode
def test_registered_buffers_move_the_same_bytes(tmp_path: Path, direct: bool) -> None:
    gib, tail = 1 << 30, 16 << 20
    path = new_file(tmp_path, 8 << 20)
    with repeated_memory(gib, tail) as address, make(path, "io_uring", direct, block_size=1 << 20) as engine:
        accepted = engine.register_buffers(address, gib + tail)
        assert accepted or os.geteuid() != 0
        start = address + gib - (4 << 20) - 8192  # some block lies across the border of two registered pieces
        engine.read(0, start, 8 << 20).result()
        data = path.read_bytes()
        assert ctypes.string_at(start, 8 << 20) == data
        engine.write(8 << 20, start, 8 << 20).result()
        assert path.read_bytes() == data + data
        assert engine.close(5.0)


@every_kind
def test_registration_that_is_refused_does_no_harm(tmp_path: Path, kind: str) -> None:
    path, memory = new_file(tmp_path, BLOCK), Memory(BLOCK)
    with make(path, kind, True) as engine:
        begin = time.monotonic()
        assert engine.register_buffers(1 << 46, 1 << 20) is False  # nothing is mapped there
        assert time.monotonic() - begin < 5
        engine.read(0, memory.address, BLOCK).result()
        assert memory[:BLOCK] == path.read_bytes()
