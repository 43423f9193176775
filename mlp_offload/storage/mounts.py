"""On which file system a directory is, and a name for it that stays the same from one start to the next."""

from __future__ import annotations

import contextlib
import os
import socket
from typing import NamedTuple


class Mount(NamedTuple):
    """What the kernel says of a mounted file system.

    Attributes:
        kind: "ext4", "lustre", "nfs4"...
        source: "/dev/nvme0n1p1", "server:/export", "tmpfs"...
    """

    kind: str
    source: str


def mount_of(directory: str | os.PathLike[str]) -> Mount:
    """The mount that ``directory`` is on, also below bind mounts and subvolumes, whose device numbers tell nothing.

    Raises:
        OSError: the directory is not there.
    """
    descriptor = os.open(directory, os.O_PATH | os.O_CLOEXEC)
    try:
        number = os.fstat(descriptor).st_dev
        with contextlib.suppress(OSError):  # no /proc here
            mount_id = _field(f"/proc/self/fdinfo/{descriptor}", "mnt_id:")
            kind, source = _field("/proc/self/mountinfo", mount_id).partition(" - ")[2].split(" ")[:2]
            return Mount(kind, source)
    finally:
        os.close(descriptor)
    return Mount("unknown", f"{os.major(number)}:{os.minor(number)}")  # a mount that lies outside a chroot


def device_key(directory: str | os.PathLike[str]) -> str:
    """One line that names the file system of ``directory``: the same for every directory on it, and after a reboot.

    Where the source names a server, all nodes share the key; else it holds the host's name.

    Raises:
        OSError: the directory is not there.
    """
    mount = mount_of(directory)
    # btrfs gives each subvolume an id of its own, and they share the device.
    number = 0 if mount.kind == "btrfs" else os.statvfs(directory).f_fsid
    where = "" if is_remote(mount) else f" on {socket.gethostname()}"
    return f"{mount.kind} {mount.source} {number:x}{where}"


def is_remote(mount: Mount) -> bool:
    """Whether the source names a server, so that all nodes see the same files."""
    return mount.kind != "unknown" and (":" in mount.source or mount.source.startswith("//"))


def _field(file: str, first: str) -> str:
    """The rest of the line that begins with the word ``first``. Raises OSError when there is none."""
    with open(file, errors="replace") as lines:  # names of mounts may hold any byte
        for line in lines:
            word, *rest = line.split(maxsplit=1)
            if word == first:
                return rest[0].strip()
    raise OSError(f"{file} has no line {first}")
