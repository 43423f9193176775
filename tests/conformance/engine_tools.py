"""What the engine suites share: aligned memory, a slow checksum, child programs under strace, a loop-mounted ext4."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import mlp_offload
from mlp_offload import _native
from mlp_offload.storage.engine import Engine

ROOT = Path(next(iter(mlp_offload.__path__))).parent
REAL_KINDS = ["threads", "io_uring"] if _native.io_uring_available()[0] else ["threads"]


class Memory:
    """`nbytes` of page-aligned private memory, hidden from forked children, for the life of the process."""

    def __init__(self, nbytes: int):
        self.pages = mmap.mmap(-1, max(nbytes, mmap.PAGESIZE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.pages.madvise(mmap.MADV_DONTFORK)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.pages))

    def __getitem__(self, where: slice) -> bytes:
        return self.pages[where]

    def __setitem__(self, where: slice, data: bytes) -> None:
        self.pages[where] = data


def slow_crc32c(data: bytes) -> int:
    """Castagnoli's CRC bit by bit, from its definition."""
    state = 0xFFFFFFFF
    for byte in data:
        state ^= byte
        for _ in range(8):
            state = (state >> 1) ^ (0x82F63B78 if state & 1 else 0)
    return state ^ 0xFFFFFFFF


def new_file(directory: Path, nbytes: int = 0) -> Path:
    path = directory / "state"
    with open(path, "wb") as file:
        file.write(os.urandom(nbytes))
    return path


def make(path: Path, kind: str, direct: bool, **settings: int) -> Engine:
    defaults = {"threads": 4, "iodepth": 8, "block_size": 65536, "alignment": 4096}
    return Engine(path, kind=kind, direct=direct, warn_seconds=20.0, timeout_seconds=40.0, **(defaults | settings))


def tasks() -> int:
    return len(os.listdir("/proc/self/task"))


def settles_to(count: int, seconds: float = 5.0) -> bool:
    """Whether the number of this process's threads comes down to `count`: a joined thread, and the kernel's workers of
    a closed ring, leave /proc a moment later."""
    deadline = time.monotonic() + seconds
    while tasks() > count:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def run_child(program: str, *arguments: object, wrapper: tuple[str, ...] = (), **environment: str) -> str:
    """Run a Python program in a fresh process; its output. Fails the test when the program fails."""
    paths = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])
    done = subprocess.run(
        [*wrapper, sys.executable, "-c", program, *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": paths} | environment,
        capture_output=True,
        check=False,
        text=True,
        timeout=50,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def strace(path: Path | None, *injections: str) -> tuple[str, ...]:
    """Command prefix that makes the kernel answer as told, on system calls that touch `path` (None: on all)."""
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed: errors cannot be injected into system calls")
    calls = ",".join(text.split(":")[0] for text in injections)
    where = ["-P", str(path)] if path else []
    inject = [f"--inject={text}" for text in injections]
    return ("strace", "-f", "-qq", "-o", "/dev/null", *where, f"--trace={calls}", *inject)


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=30)


@contextlib.contextmanager
def loop_device(image: Path, *options: str) -> Iterator[str]:
    """A block device over a file; skips where there is none to be had."""
    attached = run("losetup", "--find", "--show", *options, str(image))
    if attached.returncode != 0:
        pytest.skip(f"no loop device to be had: {attached.stderr.strip()}")
    device = attached.stdout.strip()
    try:
        yield device
    finally:
        subprocess.run(["losetup", "--detach", device], check=True, timeout=20)


@contextlib.contextmanager
def ext4_mount(directory: Path, sector_bytes: int) -> Iterator[Path]:
    """ext4 on a loop device with the given sector size, mounted; everything is taken down afterwards."""
    if shutil.which("losetup") is None or shutil.which("mkfs.ext4") is None:
        pytest.skip("losetup or mkfs.ext4 is not installed")
    image, point = directory / "image", directory / "mounted"
    with open(image, "wb") as file:
        file.truncate(64 << 20)
    point.mkdir()
    with loop_device(image, "--sector-size", str(sector_bytes)) as device:
        subprocess.run(["mkfs.ext4", "-q", device], check=True, timeout=20, capture_output=True)
        mounted = run("mount", device, str(point))
        if mounted.returncode != 0:
            pytest.skip(f"cannot mount a loop device: {mounted.stderr.strip()}")
        try:
            yield point
        finally:
            unmount(point)


def unmount(point: Path, seconds: float = 5.0) -> None:
    """The kernel gives a closed ring's file back a moment later, so a busy file system is tried again."""
    deadline = time.monotonic() + seconds
    while run("umount", str(point)).returncode != 0:
        if time.monotonic() > deadline:
            subprocess.run(["umount", "--lazy", str(point)], check=True, timeout=30)
            raise RuntimeError(f"{point} was still in use {seconds:g} s after the last test")
        time.sleep(0.05)


@contextlib.contextmanager
def frozen(point: Path) -> Iterator[None]:
    """Writes below `point` do not return until this ends. A process of its own thaws after 20 s in any case: one that
    waits for a frozen file system cannot even be killed."""
    if shutil.which("fsfreeze") is None:
        pytest.skip("fsfreeze is not installed")
    hold = 'fsfreeze --freeze "$0" && echo frozen && timeout 20 cat; fsfreeze --unfreeze "$0"'
    with subprocess.Popen(["sh", "-c", hold, point], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == b"frozen\n"
        try:
            yield
        finally:
            holder.communicate(timeout=30)
