"""What the engines do when the kernel, the file system or the device does not: the same for every kind and mode."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_tools import (
    REAL_KINDS,
    Memory,
    ext4_mount,
    frozen,
    loop_device,
    make,
    new_file,
    run,
    run_child,
    settles_to,
    strace,
    tasks,
    unmount,
)

from mlp_offload.errors import PathIOError, PathTimeoutError
from mlp_offload.storage.engine import direct_supported, probe_alignment

BLOCK = 65536

every_kind = pytest.mark.parametrize("kind", REAL_KINDS)
every_mode = pytest.mark.parametrize("direct", [False, True], ids=["buffered", "direct"])

# Child programs get: path, kind, direct (0 or 1).
PREAMBLE = """
import errno, os, resource, sys, time
from engine_tools import Memory, make, settles_to, tasks
from mlp_offload.errors import ConfigError, PathIOError
from pathlib import Path
BLOCK = 65536
path, kind, direct = Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "1"
def errno_of(future):
    try:
        future.result()
    except PathIOError as error:
        assert (error.path, error.offset, error.nbytes) == (str(path), future.offset, future.nbytes)
        return error.errno
memory = Memory(16 * BLOCK)
memory[: 16 * BLOCK] = os.urandom(16 * BLOCK)
"""


@every_kind
@every_mode
def test_a_file_size_limit_shortens_a_write_and_fails_only_that_request(
    tmp_path: Path, kind: str, direct: bool
) -> None:
    program = """
limit = 10 * BLOCK + 8192
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
with make(path, kind, direct) as engine:
    good = engine.write(0, memory.address, 4 * BLOCK)
    over = engine.write(8 * BLOCK, memory.address, 8 * BLOCK)
    also = engine.write(4 * BLOCK, memory.address, 4 * BLOCK)
    assert [errno_of(f) for f in (good, over, also)] == [None, errno.EFBIG, None]
    data = path.read_bytes()
    assert data[: 4 * BLOCK] == data[4 * BLOCK : 8 * BLOCK] == memory[: 4 * BLOCK]
    assert len(data) <= limit
    short = engine.write(10 * BLOCK, memory.address, BLOCK)  # its first 8192 bytes fit
    assert errno_of(short) == errno.EFBIG
    assert path.read_bytes()[10 * BLOCK :] == memory[:8192]
"""
    run_child(PREAMBLE + program, new_file(tmp_path), kind, int(direct))


@every_mode
@pytest.mark.parametrize(
    "call, error",
    [("pwrite64", errno.EIO), ("pwrite64", errno.ENOSPC), ("pwrite64", errno.EDQUOT), ("pread64", errno.EIO)],
)
def test_an_injected_error_fails_its_request_and_drops_its_later_blocks(
    tmp_path: Path, direct: bool, call: str, error: int
) -> None:
    program = """
operation, expected = sys.argv[4], int(sys.argv[5])
with make(path, kind, direct, threads=1) as engine:
    start = engine.write if operation == "write" else engine.read
    source, before = memory[: 16 * BLOCK], path.read_bytes()
    futures = [start(i * 4 * BLOCK, memory.address + i * 4 * BLOCK, 4 * BLOCK) for i in range(4)]
    assert [errno_of(f) for f in futures] == [None, expected, None, None]
moved = path.read_bytes() if operation == "write" else memory[: 16 * BLOCK]
new, old = (source, before) if operation == "write" else (before, source)
for block in range(16):  # the second block of the second request fails, so blocks 5 to 7 stay as they were
    where = slice(block * BLOCK, (block + 1) * BLOCK)
    assert moved[where] == (old if block in (5, 6, 7) else new)[where], block
"""
    path = new_file(tmp_path, 16 * BLOCK)
    inject = strace(path, f"{call}:error={errno.errorcode[error]}:when=6")
    operation = "write" if call == "pwrite64" else "read"
    run_child(PREAMBLE + program, path, "threads", int(direct), operation, error, wrapper=inject)


@every_mode
@pytest.mark.parametrize("error", ["EINTR", "EAGAIN"])
def test_interrupted_calls_are_repeated_by_threads(tmp_path: Path, direct: bool, error: str) -> None:
    path = new_file(tmp_path, 16 * BLOCK)
    inject = strace(path, f"pread64:error={error}:when=1+2", f"pwrite64:error={error}:when=1+2")
    run_child(PREAMBLE + ROUND_TRIP, path, "threads", int(direct), wrapper=inject)


@pytest.mark.skipif("io_uring" not in REAL_KINDS, reason="io_uring is not available here")
@every_mode
@pytest.mark.parametrize("error", ["EINTR", "EAGAIN", "EBUSY"])
def test_interrupted_calls_are_repeated_by_io_uring(tmp_path: Path, direct: bool, error: str) -> None:
    path = new_file(tmp_path, 16 * BLOCK)
    inject = strace(None, f"io_uring_enter:error={error}:when=1+2")
    run_child(PREAMBLE + ROUND_TRIP, path, "io_uring", int(direct), wrapper=inject)


ROUND_TRIP = """
with make(path, kind, direct) as engine:
    data, before = memory[: 8 * BLOCK], path.read_bytes()
    write = engine.write(0, memory.address, 8 * BLOCK)
    read = engine.read(8 * BLOCK, memory.address + 8 * BLOCK, 8 * BLOCK)
    assert write.result() is not None and read.result() is not None
    assert memory[8 * BLOCK : 16 * BLOCK] == before[8 * BLOCK :]
    assert path.read_bytes() == data + before[8 * BLOCK :]
"""


@pytest.mark.skipif("io_uring" not in REAL_KINDS, reason="io_uring is not available here")
@every_mode
def test_a_ring_that_stops_working_fails_every_request_and_closes(tmp_path: Path, direct: bool) -> None:
    program = """
before = tasks()
engine = make(path, kind, direct, iodepth=2)
engine.read(0, memory.address, BLOCK).result()
results = [errno_of(engine.write(i * BLOCK, memory.address, BLOCK)) for i in range(40)]
first = results.index(errno.EPERM)
assert set(results[first:]) == {errno.EPERM} and set(results[:first]) <= {None}, results
queued = [engine.read(0, memory.address, 16 * BLOCK) for i in range(40)]
assert {errno_of(f) for f in queued} == {errno.EPERM}
assert engine.close(5.0) and settles_to(before)
"""
    path = new_file(tmp_path, 16 * BLOCK)
    inject = strace(None, "io_uring_enter:error=EPERM:when=8+")
    run_child(PREAMBLE + program, path, "io_uring", int(direct), wrapper=inject)


def test_where_io_uring_is_refused_auto_takes_threads(tmp_path: Path) -> None:
    program = """
from mlp_offload import _native
from mlp_offload.storage.engine import open_engine
available, reason = _native.io_uring_available()
assert not available and reason, reason
assert "Operation not permitted" in reason or not _native.io_uring_compiled
try:
    open_engine(path, kind="io_uring")
except ConfigError as error:
    assert reason in str(error) and "engine=threads" in str(error)
else:
    raise SystemExit("io_uring was given")
with open_engine(path) as engine:
    assert engine.kind == "threads"
    engine.read(0, memory.address, 16 * BLOCK).result()
    assert memory[: 16 * BLOCK] == path.read_bytes()
"""
    path = new_file(tmp_path, 16 * BLOCK)
    run_child(PREAMBLE + program, path, "auto", 1, wrapper=strace(None, "io_uring_setup:error=EPERM"))


SHORT_TRANSFERS = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <unistd.h>
#include <sys/types.h>
/* Every transfer above 512 bytes is cut: sometimes it really moves less, sometimes it moves all and claims less. */
static unsigned calls;
static ssize_t less(ssize_t moved) { return moved > 512 ? moved - 1 - moved / 3 : moved; }
#define CUT(name, pointer)                                                            \
  ssize_t name(int fd, pointer data, size_t n, off_t offset) {                        \
    ssize_t (*real)(int, pointer, size_t, off_t) = dlsym(RTLD_NEXT, #name);           \
    unsigned call = __atomic_fetch_add(&calls, 1, __ATOMIC_RELAXED);                  \
    if (n <= 512) return real(fd, data, n, offset);                                   \
    if (call % 2) return real(fd, data, n / 2 / 512 * 512 + (n < 1024) * 512, offset); \
    return less(real(fd, data, n, offset));                                           \
  }
CUT(pread, void *)
CUT(pwrite, const void *)
CUT(pread64, void *)
CUT(pwrite64, const void *)
"""


@every_mode
def test_short_transfers_are_continued(tmp_path: Path, direct: bool) -> None:
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        pytest.skip("no C compiler: short transfers cannot be interposed")
    source, library, path = tmp_path / "short.c", tmp_path / "short.so", new_file(tmp_path, 16 * BLOCK)
    source.write_text(SHORT_TRANSFERS)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True, timeout=30)
    program = ROUND_TRIP.replace("direct)", "direct, alignment=512)")
    run_child(PREAMBLE + program, path, "threads", int(direct), LD_PRELOAD=str(library))


@every_kind
@every_mode
def test_a_device_that_reports_eio(tmp_path: Path, kind: str, direct: bool) -> None:
    if shutil.which("losetup") is None:
        pytest.skip("losetup is not installed")
    image, memory = new_file(tmp_path, 64 * BLOCK), Memory(8 * BLOCK)
    with loop_device(image, "--direct-io=off") as device, make(Path(device), kind, direct) as engine:
        os.truncate(image, 32 * BLOCK)  # the device has lost its second half
        bad, good = (engine.read(i * BLOCK, memory.address, 4 * BLOCK, checksum=False) for i in (48, 0))
        with pytest.raises(PathIOError, match=rf"read {device} offset={48 * BLOCK} bytes={4 * BLOCK}.*EIO") as caught:
            bad.result()
        assert caught.value.errno == errno.EIO
        good.result()
        assert engine.close(5.0)


@pytest.fixture(scope="module")
def four_k_mount(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with ext4_mount(tmp_path_factory.mktemp("loop"), 4096) as mounted:
        yield mounted


@every_kind
def test_a_device_with_4096_byte_sectors(four_k_mount: Path, kind: str) -> None:
    support = direct_supported(four_k_mount)
    assert support.supported and probe_alignment(four_k_mount) == support.alignment == 4096
    assert list(four_k_mount.glob(".mlp-offload-probe*")) == []
    path, memory = new_file(four_k_mount, BLOCK), Memory(BLOCK)
    with make(path, kind, True, alignment=512) as engine:  # a wrong setting is the kernel's to refuse
        with pytest.raises(PathIOError) as caught:
            engine.write(512, memory.address, 512).result()
        assert caught.value.errno == errno.EINVAL
    with make(path, kind, True, alignment=support.alignment) as engine:
        with pytest.raises(ValueError, match="offset=512 .* bytes=512.*alignment 4096"):
            engine.write(512, memory.address, 512)
        engine.write(4096, memory.address, 4096).result()


def test_a_file_system_that_refuses_direct_io(tmp_path: Path) -> None:
    if run("mount", "-t", "ramfs", "none", str(tmp_path)).returncode != 0:
        pytest.skip("cannot mount a ramfs, which takes no direct I/O")
    try:
        support = direct_supported(tmp_path)
        assert not support.supported and support.alignment == 4096 and "O_DIRECT is refused" in support.reason
        assert list(tmp_path.iterdir()) == []
    finally:
        unmount(tmp_path)


@every_kind
@every_mode
def test_storage_that_hangs_is_warned_of_given_up_and_outlived(
    four_k_mount: Path, kind: str, direct: bool, caplog: pytest.LogCaptureFixture
) -> None:
    before = tasks()
    path, memory = new_file(four_k_mount, BLOCK), Memory(4 * BLOCK)
    memory[: 4 * BLOCK] = os.urandom(4 * BLOCK)
    warnings: list[str] = []
    engine = make(path, kind, direct, threads=2, iodepth=2)
    with frozen(four_k_mount):
        future = engine.write(BLOCK, memory.address, 4 * BLOCK)
        with pytest.raises(PathTimeoutError, match=rf"write {path} offset={BLOCK} bytes={4 * BLOCK}: no answer"):
            future.result(warn_seconds=0.1, timeout_seconds=0.4, on_warn=warnings.append)
        assert len(warnings) == len(caplog.records) == 1 and str(path) in warnings[0]
        operation, offset, nbytes, age_seconds = engine.inflight()[0]
        assert (operation, offset, nbytes) == ("write", BLOCK, 4 * BLOCK) and 0.4 <= age_seconds < 20
        begin = time.monotonic()
        assert engine.close(0.3) is False
        assert time.monotonic() - begin < 5
        assert not future.done()
    assert future.wait(10.0)
    with pytest.raises(PathIOError) as caught:  # its later blocks were dropped by close
        future.result()
    assert caught.value.errno == errno.ECANCELED
    assert engine.close(10.0) and settles_to(before)


def test_a_call_that_does_not_return_is_given_up(tmp_path: Path) -> None:
    program = """
import gc
from mlp_offload.errors import PathTimeoutError
engine = make(path, kind, direct, threads=1)
future = engine.read(0, memory.address, BLOCK, keepalive=memory)
begin = time.monotonic()
try:
    future.result(warn_seconds=0.1, timeout_seconds=0.3)
except PathTimeoutError:
    assert time.monotonic() - begin < 2
else:
    raise SystemExit("the read returned")
data = path.read_bytes()[:BLOCK]
del future, engine  # waits two seconds for the read, then leaves it its memory
gc.collect()
assert memory[:BLOCK] != data
while memory[:BLOCK] != data and time.monotonic() - begin < 30:
    time.sleep(0.1)
assert memory[:BLOCK] == data  # it came back after all, into memory that is still there
assert settles_to(1)
"""
    path = new_file(tmp_path, 16 * BLOCK)
    run_child(PREAMBLE + program, path, "threads", 1, wrapper=strace(path, "pread64:delay_enter=4000000"))


def test_opening_what_cannot_be_opened(tmp_path: Path) -> None:
    path = new_file(tmp_path, BLOCK)
    link = tmp_path / "link"
    link.symlink_to(path)
    for kind in REAL_KINDS:
        for name, number in ((tmp_path / "none", errno.ENOENT), (tmp_path, errno.EISDIR), (link, errno.ELOOP)):
            with pytest.raises(OSError, match=str(name)) as caught:
                make(name, kind, False)
            assert caught.value.errno == number
