"""Measure a device once a week, by one process at a time, and remember what came out.

[Note: bandwidth cache] One file for each device and engine setting, written beside and renamed into place: ranks, jobs
and nodes that share a home directory may store at once, and none loses what another one found. What cannot be read is
measured again. What is kept are the rates of one process, both directions at once, other devices measured at the same
time: `mlp-offload probe` stores what a start would measure, only over a longer span.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import math
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from ..errors import OffloadError
from .locks import NodeLock, lock_room
from .mounts import device_key
from .probe import Bandwidth, probe

log = logging.getLogger(__name__)

MAX_AGE_SECONDS = 7 * 24 * 3600.0

# A probe takes a second or two, and gives up on a path that hangs after some more.
_LOCK_SECONDS = 30.0
_PREFIX = "bandwidth-"


def measure_once(
    directory: str | os.PathLike[str], *, kind: str, direct: bool, threads: int, iodepth: int, block_size: int
) -> tuple[Bandwidth, bool]:
    """(bandwidth, whether it was measured before): from the cache, else measured now and stored.

    Processes of this node wait for each other, lest they spoil each other's numbers; whoever waited finds the result.

    Args: as in ``probe``, with the same settings for all paths on one device.

    Raises:
        OffloadError: another process still measures the device after half a minute.
        OSError, CapacityError, ConfigError: as ``probe``.
    """
    settings = {"kind": kind, "direct": direct, "threads": threads, "iodepth": iodepth, "block_size": block_size}
    device = device_key(directory)
    if found := load(device, settings):
        return found, True
    with measuring(device):
        if found := load(device, settings):
            return found, True
        measured = probe(directory, **settings)
        store(measured, settings)
        return measured, False


@contextlib.contextmanager
def measuring(device: str) -> Iterator[None]:
    """While the block runs, no other process of this node measures ``device``.

    Raises:
        OffloadError: another one still does after half a minute.
    """
    lock = NodeLock.acquire(f"bandwidth of {device}", {"pid": os.getpid(), "device": device}, _LOCK_SECONDS)
    if lock is None:
        raise OffloadError(f"another process has been measuring {device} for {_LOCK_SECONDS:g} s")
    try:
        yield
    finally:
        lock.release()


def load(device: str, settings: dict[str, object]) -> Bandwidth | None:
    """What was stored for a device and engine settings; None when there is nothing, or nothing usable and fresh."""
    for room in _rooms():
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            content = json.loads((room / _file_name(device, settings)).read_text())
            found = Bandwidth(**content["bandwidth"])
            rates = (found.read_bytes_per_second, found.write_bytes_per_second)
            usable = found.device == device and all(math.isfinite(rate) and rate > 0 for rate in rates)
            if usable and abs(time.time() - found.measured_at) < MAX_AGE_SECONDS:
                return found
    return None


def store(measured: Bandwidth, settings: dict[str, object]) -> None:
    """Keep a result for ``load``; where no place can be written to, only a line in the log at level debug."""
    content = json.dumps({"settings": settings, "bandwidth": dataclasses.asdict(measured)}, indent=1)
    for room in _rooms():
        try:
            room.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor, name = tempfile.mkstemp(prefix=_PREFIX, suffix=".new", dir=room)
            try:
                with open(descriptor, "w") as file:
                    file.write(content)
                os.replace(name, room / _file_name(measured.device, settings))
            except BaseException:
                os.unlink(name)
                raise
        except OSError as error:
            log.debug("bandwidth cache: %s cannot be written to: %s", room, error)
            continue
        _remove_old(room)
        return


def _rooms() -> Iterator[Path]:
    """Where results lie: the user's cache, then, as compute nodes may have no home to write to, this node's memory."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(cache):  # as the XDG base directory specification says
        cache = os.path.expanduser("~/.cache")
    if os.path.isabs(cache):
        yield Path(cache, "mlp-offload")
    yield lock_room()


def _file_name(device: str, settings: dict[str, object]) -> str:
    text = json.dumps([device, settings], sort_keys=True)
    return f"{_PREFIX}{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"


def _remove_old(room: Path) -> None:
    for file in room.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # another process removed it
            if time.time() - file.stat().st_mtime > MAX_AGE_SECONDS:
                file.unlink()
