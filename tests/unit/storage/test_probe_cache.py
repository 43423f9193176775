"""A device is measured once, by one process at a time, and what is stored is used while it is fresh and whole."""

import dataclasses
import json
import os
import subprocess
import sys
import time

import pytest

from mlp_offload.errors import OffloadError
from mlp_offload.storage import probe_cache
from mlp_offload.storage.locks import NodeLock
from mlp_offload.storage.mounts import device_key
from mlp_offload.storage.probe import Bandwidth
from mlp_offload.storage.probe_cache import MAX_AGE_SECONDS, load, measure_once, store

SETTINGS = {"kind": "threads", "direct": True, "threads": 2, "iodepth": 2, "block_size": 2**20}
KNOWN = Bandwidth("ext4 /dev/a 1 on here", 2e9, 1e9, 2**27, 2**26, 0.5, 0.0)

MEASURE = """
import sys, time
from mlp_offload.storage import probe_cache
real = probe_cache.probe
def probe(directory, **settings):
    begin = time.monotonic()
    found = real(directory, **settings)
    print("measured", begin, time.monotonic(), flush=True)
    return found
probe_cache.probe = probe
sys.stdin.readline()
found, cached = probe_cache.measure_once(sys.argv[1], **eval(sys.argv[2]))
print("result", cached, found.measured_at, found.read_bytes_per_second, flush=True)
"""


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The cache directory, empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    # The second place is the node's memory, which other tests use.
    monkeypatch.setattr(probe_cache, "lock_room", lambda: tmp_path / "node")
    return tmp_path / "cache" / "mlp-offload"


def at_once(directory, settings):
    """What processes say that measure together, one for each of ``settings``: the lines of all, in words."""
    command = [sys.executable, "-c", MEASURE, str(directory)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen([*command, repr(s)], **pipes) for s in settings]
    time.sleep(0.5)
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    said = [process.communicate(timeout=60)[0] for process in processes]
    assert all(process.returncode == 0 for process in processes)
    return [line.split() for text in said for line in text.splitlines()]


def test_what_is_stored_comes_back(cache):
    fresh = dataclasses.replace(KNOWN, measured_at=time.time())
    assert load(fresh.device, SETTINGS) is None
    store(fresh, SETTINGS)
    assert load(fresh.device, SETTINGS) == fresh
    assert load(fresh.device, SETTINGS | {"iodepth": 3}) is None
    assert load("ext4 /dev/b 1 on here", SETTINGS) is None
    (file,) = cache.iterdir()
    assert json.loads(file.read_text())["settings"] == SETTINGS


def test_the_second_call_measures_nothing(cache, tmp_path, monkeypatch):
    first, cached = measure_once(tmp_path, **SETTINGS)
    assert not cached and first.device == device_key(tmp_path)
    monkeypatch.setattr(probe_cache, "probe", None)
    (tmp_path / "other").mkdir()
    assert measure_once(tmp_path / "other", **SETTINGS) == (first, True)


@pytest.mark.parametrize("age, usable", [(MAX_AGE_SECONDS - 60, True), (MAX_AGE_SECONDS + 1, False)])
def test_a_week_later_it_is_measured_again(cache, age, usable):
    old = dataclasses.replace(KNOWN, measured_at=time.time() - age)
    store(old, SETTINGS)
    assert load(old.device, SETTINGS) == (old if usable else None)


def test_a_clock_that_was_far_ahead_does_not_make_an_entry_last(cache):
    store(dataclasses.replace(KNOWN, measured_at=time.time() + 2 * MAX_AGE_SECONDS), SETTINGS)
    assert load(KNOWN.device, SETTINGS) is None


def test_old_files_go_when_a_new_one_is_stored(cache):
    cache.mkdir(parents=True)
    old, young, other = (cache / name for name in ("bandwidth-1.json", "bandwidth-2.new", "notes.json"))
    for file, age in ((old, MAX_AGE_SECONDS + 60), (young, 60), (other, MAX_AGE_SECONDS + 60)):
        file.write_text("{}")
        os.utime(file, (time.time() - age,) * 2)
    store(KNOWN, SETTINGS)
    assert not old.exists() and young.exists() and other.exists()


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: "[1, 2]",
        lambda text: "\0" * 100,
        lambda text: text.replace("2000000000.0", "0"),
        lambda text: text.replace("2000000000.0", "NaN"),
        lambda text: text.replace("2000000000.0", '"fast"'),
        lambda text: text.replace("read_bytes_per_second", "unknown_field"),
        lambda text: text.replace("/dev/a", "/dev/b"),
    ],
)
def test_a_damaged_entry_counts_as_none_and_is_replaced(cache, damage):
    fresh = dataclasses.replace(KNOWN, measured_at=time.time())
    store(fresh, SETTINGS)
    (file,) = cache.iterdir()
    assert damage(file.read_text()) != file.read_text()
    file.write_text(damage(file.read_text()))
    assert load(fresh.device, SETTINGS) is None
    store(fresh, SETTINGS)
    assert load(fresh.device, SETTINGS) == fresh


def test_where_the_users_cache_cannot_be_written_the_nodes_memory_serves(cache, tmp_path):
    cache.parent.write_text("a file where a directory should be")
    first, cached = measure_once(tmp_path, **SETTINGS)
    assert not cached
    assert measure_once(tmp_path, **SETTINGS) == (first, True)
    assert len(list((tmp_path / "node").iterdir())) == 1


def test_where_nothing_can_be_written_it_is_measured_each_time(cache, tmp_path):
    cache.parent.write_text("")
    (tmp_path / "node").write_text("")
    assert [measure_once(tmp_path, **SETTINGS)[1] for _ in range(2)] == [False, False]


def test_of_many_processes_one_measures_and_all_have_its_result(cache, tmp_path):
    lines = at_once(tmp_path, [SETTINGS] * 6)
    assert len([line for line in lines if line[0] == "measured"]) == 1
    results = [line[1:] for line in lines if line[0] == "result"]
    assert len(results) == 6 and len({tuple(result[1:]) for result in results}) == 1
    assert sorted(result[0] for result in results) == ["False"] + ["True"] * 5


def test_processes_that_cannot_share_a_result_still_take_turns(cache, tmp_path):
    lines = at_once(tmp_path, [SETTINGS | {"block_size": 2**20 + 4096 * i} for i in range(3)])
    spans = sorted((float(line[1]), float(line[2])) for line in lines if line[0] == "measured")
    assert len(spans) == 3
    assert all(end <= begin for (_, end), (begin, _) in zip(spans, spans[1:])), spans


def test_who_waits_too_long_is_told(cache, tmp_path, monkeypatch):
    monkeypatch.setattr(probe_cache, "_LOCK_SECONDS", 0.1)
    lock = NodeLock.acquire(f"bandwidth of {device_key(tmp_path)}", {})
    try:
        with pytest.raises(OffloadError, match=r"another process has been measuring .* for 0\.1 s"):
            measure_once(tmp_path, **SETTINGS)
    finally:
        lock.release()


def test_the_lock_is_free_again_after_a_failure(cache, tmp_path, monkeypatch):
    def fails(directory, **settings):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(probe_cache, "probe", fails)
    with pytest.raises(OSError):
        measure_once(tmp_path, **SETTINGS)
    monkeypatch.undo()
    lock = NodeLock.acquire(f"bandwidth of {device_key(tmp_path)}", {})
    assert lock is not None
    lock.release()


def test_many_processes_may_store_at_once(cache, tmp_path):
    """Writers and a reader: the reader never sees half an entry."""
    program = """
import dataclasses, sys, time
from mlp_offload.storage.probe_cache import store
from mlp_offload.storage.probe import Bandwidth
for i in range(100):
    store(Bandwidth("d", 1.0 + int(sys.argv[1]), 1.0 + i, 1, 1, 1.0, time.time()), {})
"""
    writers = [subprocess.Popen([sys.executable, "-c", program, str(i)]) for i in range(3)]
    seen = misses = 0
    while any(writer.poll() is None for writer in writers):
        found = load("d", {})
        seen += found is not None
        misses += found is None and seen > 0
    assert all(writer.returncode == 0 for writer in writers)
    assert seen > 0 and misses == 0
    assert len(list(cache.iterdir())) == 1
