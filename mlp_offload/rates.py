"""What each path is expected to give before the run has seen it: what the user wrote, else a short measurement."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from .config import AUTO, OffloadConfig, PathConfig
from .errors import CapacityError, OffloadError
from .storage.mounts import device_key
from .storage.probe import MAX_BYTES, Bandwidth
from .storage.probe_cache import measure_once
from .units import format_bytes, format_rate

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PathRates:
    """One path with the rates that the first placement goes by.

    Attributes:
        path: as configured, with ``read`` and ``write`` filled in where they were measured.
        origin: where they come from, or why there are none; for people.
    """

    path: PathConfig
    origin: str

    def __str__(self) -> str:
        known = [
            f"{k} {format_rate(v)}" for k, v in (("read", self.path.read), ("write", self.path.write)) if v is not None
        ]
        return ", ".join([*known, self.origin])


def first_rates(config: OffloadConfig, job_directories: "Sequence[Path]", local_rank: int) -> "list[PathRates]":
    """Rates for each path of ``config``; measures those that are not configured where shares depend on them.

    Paths on one device share what was measured there. Different devices are measured at once, as the run uses them.
    Nothing here stops a start: where a path cannot be measured, a warning says so, and paths share equally.

    Args:
        job_directories: of the paths, in their order; files made there show the striping that state files will have.
        local_rank: 0 is the one that warns of paths on one device.
    """
    paths = config.paths
    known = [path.bytes_per_second is not None for path in paths]
    if len(paths) == 1:
        return [PathRates(paths[0], "as configured" if known[0] else "not measured: it is the only path")]
    devices = [device_key(directory) for directory in job_directories]
    if local_rank == 0:
        _warn_of_shared_devices(devices, [str(directory.parent) for directory in job_directories])
    if len(set(devices)) == 1 and not any(known):
        return [PathRates(path, "not measured: all paths are on one device and share equally") for path in paths]
    todo = {devices[i]: i for i in reversed(range(len(paths))) if not known[i] and config.probe}
    with ThreadPoolExecutor(max(1, len(todo)), "mlp-offload-probe") as threads:
        found = {d: threads.submit(_measure, config, paths[i], job_directories[i]) for d, i in todo.items()}
    rates = []
    for path, device, configured in zip(paths, devices, known):
        if configured:
            rates.append(PathRates(path, "as configured"))
        elif device not in found:
            rates.append(PathRates(path, "not measured: the option probe is off"))
        else:
            rates.append(_share(path, *found[device].result(), devices.count(device)))
    if any(r.path.bytes_per_second is None for r in rates):
        rates = [replace(r, origin=f"{r.origin}; shares are equal, as not all rates are known") for r in rates]
    return rates


def _measure(config: OffloadConfig, path: PathConfig, directory: Path) -> "tuple[Bandwidth | None, str]":
    """(what was measured, when), or (None, why not)."""
    try:
        if path.capacity is not None and path.capacity < MAX_BYTES:
            raise CapacityError(f"its capacity is below the {format_bytes(MAX_BYTES)} that measuring may take")
        bandwidth, cached = measure_once(
            directory,
            kind=config.engine if path.engine == AUTO else path.engine,
            direct=config.direct,
            threads=config.threads,
            iodepth=config.iodepth,
            block_size=config.block_size,
        )
    except (OffloadError, OSError) as error:
        log.warning(
            "path '%s': its bandwidth cannot be measured: %s. Paths share the state equally at first; give read= and "
            "write= with each path to set the shares",
            directory.parent,
            error,
        )
        return None, "could not be measured"
    age = max(0.0, time.time() - bandwidth.measured_at)
    shown = f"{age:.0f} s" if age < 120 else f"{age / 60:.0f} min" if age < 7200 else f"{age / 3600:.0f} h"
    return bandwidth, f"from the cache, measured {shown} ago" if cached else "measured now"


def _share(path: PathConfig, bandwidth: "Bandwidth | None", origin: str, path_count: int) -> PathRates:
    """One of ``path_count`` paths on a device that was measured."""
    if bandwidth is None:
        return PathRates(path, origin)
    each = [round(rate / path_count) for rate in (bandwidth.read_bytes_per_second, bandwidth.write_bytes_per_second)]
    if path_count > 1:
        origin += f", 1/{path_count} of its device"
    return PathRates(replace(path, read=max(1, each[0]), write=max(1, each[1])), origin)


def _warn_of_shared_devices(devices: "Sequence[str]", directories: "Sequence[str]") -> None:
    for device in sorted({device for device in devices if devices.count(device) > 1}):
        on_it = [directory for directory, other in zip(directories, devices) if other == device]
        log.warning(
            "paths %s are on one device or file system (%s): together they give what one of them gives. Name one "
            "directory on each device",
            " and ".join(map(repr, on_it)),
            device,
        )
