"""What is known of a path before anything is measured: file system, room, limits."""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from .lustre import layout_of
from .mounts import device_key, is_remote, mount_of
from .quota import Quota, quotas_of

_MEMORY_KINDS = ("tmpfs", "ramfs", "devtmpfs")
_NETWORK_KINDS = ("nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb3", "9p", "wekafs", "fuse.glusterfs")


@dataclass(frozen=True)
class PathFacts:
    """One directory.

    Attributes:
        device: from ``device_key``: equal for paths that share what their device gives.
        kind, source: of the file system, as the kernel names them.
        in_memory: what is written there takes host memory.
        network: other nodes see it, too.
        free_bytes, total_bytes: for an ordinary user.
        free_inodes: None where the file system counts none.
        quotas, quota: limits of this user and group, and what there is to say of them.
        striping: on Lustre, how new files there are laid out; else empty.
    """

    directory: str
    device: str
    kind: str
    source: str
    in_memory: bool
    network: bool
    free_bytes: int
    total_bytes: int
    free_inodes: "int | None"
    quotas: "tuple[Quota, ...]"
    quota: str
    striping: str


def facts_of(directory: str | os.PathLike[str]) -> PathFacts:
    """Raises OSError: the directory is not there, or its file system does not answer."""
    mount, room = mount_of(directory), os.statvfs(directory)
    quotas, quota = quotas_of(directory, mount.kind)
    return PathFacts(
        directory=os.fspath(directory),
        device=device_key(directory),
        kind=mount.kind,
        source=mount.source,
        in_memory=mount.kind in _MEMORY_KINDS,
        network=mount.kind in _NETWORK_KINDS or is_remote(mount),
        free_bytes=room.f_bavail * room.f_frsize,
        total_bytes=room.f_blocks * room.f_frsize,
        free_inodes=room.f_favail if room.f_files else None,
        quotas=tuple(quotas),
        quota=quota,
        striping=striping(Path(directory)) if mount.kind == "lustre" else "",
    )


def striping(directory: Path) -> str:
    """One line on the Lustre layout of new files in ``directory``, or why it is not known."""
    try:
        layout = layout_of(directory)
    except (OSError, subprocess.SubprocessError) as error:
        return f"not known: {(getattr(error, 'stderr', None) or str(error)).strip()}"
    counts, sizes = (re.findall(rf"stripe_{what}:\s*(-?\d+)", layout) for what in ("count", "size"))
    if not counts:
        return " ".join(layout.split())
    return f"stripe count {', '.join(counts)}; stripe size {', '.join(sizes)} bytes"


def shared_devices(facts: "list[PathFacts]") -> "list[tuple[str, list[str]]]":
    """(device, directories) of each device that holds several of the paths."""
    devices = [fact.device for fact in facts]
    return [
        (device, [fact.directory for fact in facts if fact.device == device])
        for device in dict.fromkeys(devices)
        if devices.count(device) > 1
    ]
