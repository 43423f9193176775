"""A path is measured with real transfers, briefly, and nothing is left there."""

import ctypes
import os
import resource
import subprocess
import sys
import time
import zlib

import pytest

from mlp_offload.errors import PathTimeoutError
from mlp_offload.storage.engine import Engine, IoFuture
from mlp_offload.storage.mounts import device_key
from mlp_offload.storage.probe import probe


@pytest.fixture(params=["disk", "shm"])
def directory(request, tmp_path):
    if request.param == "disk":
        yield tmp_path
        return
    place = f"/dev/shm/mlp-offload-test-{os.getpid()}"
    os.mkdir(place)
    yield place
    os.rmdir(place)  # and nothing is left in it


@pytest.mark.parametrize("kind", ["auto", "threads"])
@pytest.mark.parametrize("direct", [True, False])
def test_both_directions_are_measured_and_nothing_is_left(directory, kind, direct):
    before, begin = time.time(), time.monotonic()
    found = probe(directory, kind=kind, direct=direct)
    wall = time.monotonic() - begin
    assert found.device == device_key(directory)
    assert found.read_bytes >= 2**21 and found.written_bytes >= 2**22
    assert 0 < found.seconds < wall
    assert before <= found.measured_at <= time.time()
    # What is counted was moved within the whole time.
    for rate, nbytes in (
        (found.read_bytes_per_second, found.read_bytes),
        (found.write_bytes_per_second, found.written_bytes),
    ):
        assert rate > nbytes / 4 / found.seconds
    assert os.listdir(directory) == []


@pytest.mark.parametrize(
    "block_size, max_bytes", [(4096, 4096), (2**20, 3 * 2**20 + 5), (2**23, 2**20), (2**21, 2**25)]
)
def test_no_more_room_is_taken_than_asked_whatever_the_block_size(tmp_path, monkeypatch, block_size, max_bytes):
    ends, sizes = set(), set()
    originals = {name: getattr(Engine, name) for name in ("read", "write")}

    def seen(name):
        def move(self, offset, address, nbytes, **settings):
            ends.add(offset + nbytes)
            sizes.add(nbytes)
            return originals[name](self, offset, address, nbytes, **settings)

        return move

    for name in originals:
        monkeypatch.setattr(Engine, name, seen(name))
    probe(tmp_path, block_size=block_size, max_bytes=max_bytes, max_seconds=0.05)
    (size,) = sizes
    assert max(ends) <= max_bytes // size * size and size % 512 == 0
    assert size == min(block_size, max_bytes) or (block_size < size <= 2**20 and size % block_size == 0)


def test_time_ends_it_before_the_bytes_do(tmp_path):
    begin = time.monotonic()
    found = probe(tmp_path, max_bytes=2**30, max_seconds=0.05)
    assert found.written_bytes < 2**30 and time.monotonic() - begin < 5


def test_reads_and_writes_are_under_way_together(tmp_path, monkeypatch):
    """As in a step; what fills the file before is not counted."""
    names, originals = [], {name: getattr(Engine, name) for name in ("read", "write")}

    def seen(name):
        return lambda *arguments, **settings: names.append(name) or originals[name](*arguments, **settings)

    for name in originals:
        monkeypatch.setattr(Engine, name, seen(name))
    probe(tmp_path, max_bytes=2**25, max_seconds=0.1)
    last_write = len(names) - 1 - names[::-1].index("write")
    assert "read" in names[:last_write]


def test_the_bytes_can_not_be_compressed(tmp_path, monkeypatch):
    seen = []

    def write(self, offset, address, nbytes, **settings):
        seen.append(ctypes.string_at(address, 4096))
        return original(self, offset, address, nbytes, **settings)

    original = Engine.write
    monkeypatch.setattr(Engine, "write", write)
    probe(tmp_path, max_bytes=2**24, max_seconds=0.05)
    assert len(set(seen[:8])) == 8
    assert all(len(zlib.compress(block)) >= 4096 for block in seen)


def test_a_full_path_is_an_os_error_and_gives_all_back(tmp_path):
    program = """
import os, sys
from mlp_offload.storage.probe import probe
try:
    probe(sys.argv[1])
except OSError as error:
    print(type(error).__name__, error.errno, os.listdir(sys.argv[1]), sep=";")
"""
    limit = 16 * 2**20
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )
    kind, number, left = done.stdout.strip().split(";")
    assert (kind, number, left) == ("OSError", "27", "[]"), done.stderr


def test_a_failure_while_measuring_gives_memory_and_file_back(tmp_path, monkeypatch):
    def fails(self, *arguments):
        raise PathTimeoutError("on purpose")

    def mapped():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[0]) * resource.getpagesize()

    probe(tmp_path)  # whatever is made once is made
    descriptors, before = len(os.listdir("/proc/self/fd")), mapped()
    monkeypatch.setattr(IoFuture, "result", fails)
    for _ in range(8):
        with pytest.raises(PathTimeoutError):
            probe(tmp_path)
    assert mapped() - before < 8 * 20 * 2**20 / 2
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert os.listdir(tmp_path) == []


def test_a_directory_that_is_gone_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        probe(tmp_path / "nowhere")
