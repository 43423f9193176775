"""Two paths of known speed: file systems on loop devices whose reads and writes the kernel caps separately.

    with capped([(400e6, 400e6), (200e6, 200e6)], size_bytes=8 * 2**30) as paths:
        ...                                 # paths[0].directory, paths[0].device
        paths[0].set_caps(200e6, 200e6)     # while running

A process of its own makes all of it and waits for its input to end. Then it takes everything away again: so it does
not matter whether the block ends well, with an exception, or because somebody killed the process that runs it.

    python benchmarks/capped.py 400:400 200:200     # by hand: shows the directories; ends with Ctrl-D
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

SETUP_SECONDS = 120.0
UMOUNT_SECONDS = 15.0  # until the last process that uses the mount is really gone


class CapError(Exception):
    """Capped paths cannot be had here; says why and what to do."""


@dataclass
class CappedPath:
    """One mounted file system; caps in bytes/s.

    Attributes:
        device: "MAJOR:MINOR" of the loop device.
        read, write: the caps now in force.
    """

    directory: str
    device: str
    read: int
    write: int

    def set_caps(self, read: float, write: float) -> None:
        """Other caps, at once."""
        _write_caps(self.device, int(read), int(write))
        self.read, self.write = int(read), int(write)


@contextlib.contextmanager
def capped(
    caps: "Sequence[tuple[float, float]]", size_bytes: int, where: "str | None" = None
) -> "Iterator[list[CappedPath]]":
    """Mount one ext4 file system for each (read, write) cap, bytes/s; gone when the block ends, however it ends.

    Args:
        size_bytes: of each, taken from ``where`` (default: /var/tmp), which must be on a disk.

    Raises:
        CapError: not root, no loop devices, no blkio throttling, or not enough room.
    """
    _check(where := where or "/var/tmp", size_bytes * len(caps))
    plan = json.dumps({"where": where, "size_bytes": int(size_bytes), "caps": [[int(r), int(w)] for r, w in caps]})
    keeper = subprocess.Popen(
        [sys.executable, os.path.abspath(__file__), "--keep", plan],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C is for us
    )
    try:
        answer = json.loads(keeper.stdout.readline() or '{"error": "the helper process died"}')
        if "error" in answer:
            raise CapError(answer["error"])
        yield [CappedPath(**path) for path in answer["paths"]]
    finally:
        keeper.stdin.close()
        if keeper.wait(SETUP_SECONDS) != 0:
            raise CapError(f"capped paths were not taken away cleanly: {keeper.stdout.read().strip()}")


def parse_cap(text: str) -> "tuple[int, int]":
    """(read, write) in bytes/s from "400:200", in MB/s (10**6).

    Raises:
        argparse.ArgumentTypeError: something else.
    """
    try:
        read, write = (round(float(part) * 1e6) for part in text.split(":"))
    except ValueError:
        read = write = 0
    if read <= 0 or write <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not READ:WRITE in MB/s, as in 400:200")
    return read, write


# ------------------------------------------------------------------------------------- the kernel's side


def _check(where: str, total_bytes: int) -> None:
    if os.geteuid() != 0:
        raise CapError("capped paths need root (loop devices, mounts, blkio): run as root, or give --paths instead")
    for program in ("losetup", "mkfs.ext4", "mount", "umount"):
        if shutil.which(program) is None:
            raise CapError(f"capped paths need {program} (Debian: util-linux, mount, e2fsprogs)")
    if not os.path.exists("/dev/loop-control"):
        raise CapError("capped paths need loop devices (/dev/loop-control): run on the host, or give --paths instead")
    _throttle_file("read")
    free = shutil.disk_usage(where).free
    if free < total_bytes * 1.05:
        raise CapError(f"{where}: {total_bytes / 1e9:.1f} GB needed for capped paths, {free / 1e9:.1f} GB free")


def _throttle_file(direction: str) -> Path:
    """The file of our own blkio cgroup that caps a direction: direct I/O counts for the cgroup of whoever submits it."""
    groups = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    ours = next((path for _, controllers, path in groups if "blkio" in controllers.split(",")), None)
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        if ours is not None and kind == "cgroup" and "blkio" in options.split(","):
            top, mount_point = before.split(" ")[3:5]
            group = Path(mount_point, ours.removeprefix(top.rstrip("/")).lstrip("/"))
            file = group / f"blkio.throttle.{direction}_bps_device"
            if file.exists():
                return file
    raise CapError(
        "capped paths need the blkio controller of cgroup version 1 with throttling, which is not mounted here; "
        "give --paths on real devices instead"
    )


def _write_caps(device: str, read: int, write: int) -> None:
    """0 takes a cap away."""
    for direction, rate in (("read", read), ("write", write)):
        _throttle_file(direction).write_text(f"{device} {rate}\n")


# ---------------------------------------------------------------------------------- the keeper's process


def _keep(plan: "dict[str, object]") -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with contextlib.ExitStack() as undo:
        try:
            base = tempfile.mkdtemp(prefix="mlp-offload-capped-", dir=plan["where"])
            undo.callback(shutil.rmtree, base)
            paths = [
                _make_path(undo, Path(base, f"path{i}"), plan["size_bytes"], read, write)
                for i, (read, write) in enumerate(plan["caps"])
            ]
            answer = {"paths": [vars(path) for path in paths]}
        except (OSError, subprocess.CalledProcessError) as error:
            detail = getattr(error, "stderr", None)
            answer = {"error": f"capped paths: {error}" + (f": {detail.strip()}" if detail else "")}
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(answer), flush=True)
        sys.stdin.read()


def _make_path(undo: contextlib.ExitStack, directory: Path, size_bytes: int, read: int, write: int) -> CappedPath:
    image = directory.with_suffix(".img")
    with open(image, "wb") as file:
        os.posix_fallocate(file.fileno(), 0, size_bytes)
    loop = _command("losetup", "--direct-io=on", "--sector-size", "512", "-f", "--show", str(image))
    undo.callback(_command, "losetup", "-d", loop)
    number = os.stat(loop).st_rdev
    device = f"{os.major(number)}:{os.minor(number)}"
    undo.callback(_write_caps, device, 0, 0)
    _write_caps(device, 0, 0)  # whoever had this device before may have left some
    _command("mkfs.ext4", "-q", "-E", "lazy_itable_init=0,lazy_journal_init=0,nodiscard", loop)
    directory.mkdir()
    _command("mount", loop, str(directory))
    undo.callback(_umount, str(directory))
    _write_caps(device, read, write)
    return CappedPath(str(directory), device, read, write)


def _command(*arguments: str) -> str:
    return subprocess.run(arguments, check=True, capture_output=True, text=True).stdout.strip()


def _umount(directory: str) -> None:
    deadline = time.monotonic() + UMOUNT_SECONDS
    while subprocess.run(["umount", directory], capture_output=True).returncode != 0:
        if time.monotonic() > deadline:  # somebody still has a file open: the mount goes when they do
            _command("umount", "-l", directory)
            return
        time.sleep(0.1)


def main() -> None:
    if sys.argv[1:2] == ["--keep"]:
        _keep(json.loads(sys.argv[2]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("caps", nargs="+", type=parse_cap, metavar="READ:WRITE", help="MB/s")
    parser.add_argument("--size", type=float, default=2, help="GiB of each (default: 2)")
    parser.add_argument("--where", help="directory that holds the images (default: /var/tmp)")
    options = parser.parse_args()
    try:
        with capped(options.caps, int(options.size * 2**30), options.where) as paths:
            for path in paths:
                print(
                    f"{path.directory}  device {path.device}  {path.read / 1e6:g}:{path.write / 1e6:g} MB/s", flush=True
                )
            sys.stdin.read()
    except CapError as error:
        parser.exit(1, f"{error}\n")


if __name__ == "__main__":
    main()
