"""How much host memory this process may still take: the machine's own limit and its cgroup's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil

# Per hierarchy: limit file, usage file, and the key in memory.stat of page cache the kernel gives up first.
_CGROUP_FILES = {
    "cgroup": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    "cgroup2": ("memory.max", "memory.current", "inactive_file"),
}


def available_memory_bytes() -> int:
    """Bytes that can be taken now without swapping or being killed: min(MemAvailable, cgroup limit - usage)."""
    available = psutil.virtual_memory().available
    limit = cgroup_available_bytes()
    return available if limit is None else min(available, limit)


def cgroup_available_bytes(root: Path = Path("/")) -> int | None:
    """Smallest (limit - usage) over our memory cgroup and its ancestors (version 1 and 2), bytes, never negative.

    Page cache on the inactive list is not counted as usage: it is reclaimed before anything is killed,
    and after a while of buffered I/O it fills any limit. None when no limit applies. ``root`` is where /proc and
    the cgroup file systems are looked for.
    """
    rooms = []
    for kind, mount_point, group in _memory_cgroups(root):
        limit_file, usage_file, cache_key = _CGROUP_FILES[kind]
        # A limit anywhere above binds as well. Inside a container the upper levels are not visible.
        while group == mount_point or mount_point in group.parents:
            limit, usage = _read_bytes(group / limit_file), _read_bytes(group / usage_file)
            if limit is not None and usage is not None:
                rooms.append(max(0, limit - usage + _read_stat(group / "memory.stat", cache_key)))
            group = group.parent
    return min(rooms, default=None)


def _memory_cgroups(root: Path) -> Iterator[tuple[str, Path, Path]]:
    """(kind, mount point, our group's directory) of every memory hierarchy that is mounted here."""
    try:
        mounts = Path(root, "proc/self/mountinfo").read_text().splitlines()
        memberships = Path(root, "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    ours = {}  # kind -> path of our group inside its hierarchy
    for line in memberships:
        hierarchy, controllers, group = line.split(":", 2)
        if hierarchy == "0":
            ours["cgroup2"] = group
        elif "memory" in controllers.split(","):
            ours["cgroup"] = group
    for line in mounts:
        before, _, after = line.partition(" - ")
        top, mount_point = before.split(" ")[3:5]
        kind, _, options = after.split(" ", 2)
        if kind in ours and (kind == "cgroup2" or "memory" in options.split(",")):
            # A container mounts its own group as the top: cut that part off.
            inside = ours[kind].removeprefix(top.rstrip("/"))
            mounted = Path(root, mount_point.lstrip("/"))
            yield kind, mounted, Path(mounted, inside.lstrip("/"))


def _read_bytes(file: Path) -> int | None:
    """The number in a cgroup file; None when the file is missing or says "max"."""
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _read_stat(file: Path, key: str) -> int:
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return 0
    return next((int(value) for name, value in map(str.split, lines) if name == key), 0)
