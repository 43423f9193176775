"""A test run leaves nothing behind: no processes, mounts, loop devices, locks or temporary files."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from mlp_offload.storage.locks import lock_room

MARK = "MLP_OFFLOAD_TEST_RUN"
PATIENCE_SECONDS = 15.0


def pytest_configure() -> None:
    """A shell script's background job ignores SIGINT, and so would the programs that tests start and interrupt."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def leaves_nothing_behind(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[None]":
    """All children are marked, and put their temporary files where pytest removes them (torchrun leaves its own)."""
    place = tmp_path_factory.getbasetemp()
    before = {name: os.environ.get(name) for name in ("TMPDIR", "XDG_CACHE_HOME", MARK)}
    os.environ |= {"TMPDIR": str(tmp_path_factory.mktemp("tmp")), MARK: str(place)}
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))  # a device is measured once in all tests
    tempfile.tempdir = None
    yield
    for name, value in before.items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value
    tempfile.tempdir = None
    deadline = time.monotonic() + PATIENCE_SECONDS
    while (left := left_behind(str(place))) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not left, f"this test run leaves behind: {left}"


def left_behind(place: str) -> "list[str]":
    """What is still there and has to do with the directory ``place``."""
    left = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            ours = process.environ().get(MARK) == place or any(place in part for part in process.cmdline())
            if ours and process.pid != os.getpid():
                left.append(f"process {process.pid}: {' '.join(process.cmdline())[:200]}")
    with open("/proc/self/mounts") as mounts:
        left += [f"mount: {line.strip()}" for line in mounts if place in line]
    for device in Path("/sys/block").glob("loop*/loop/backing_file"):
        with suppress(OSError):
            if place in device.read_text():
                left.append(f"loop device: {device}")
    for lock in lock_room().glob("*.lock"):
        with suppress(OSError, ValueError):
            if place in str(json.loads(lock.read_text()).get("state_file")):
                left.append(f"lock: {lock}")
    return left
