"""Whether a path takes state files: each thing that a run does there is done once, small, and taken away again."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError, OffloadError
from ..units import format_bytes
from .findings import NOTE, OK, PROBLEM, Finding

if TYPE_CHECKING:
    from ..storage.facts import PathFacts

_TRIED_BYTES = 4 * 2**20
_FEW_INODES = 100


def check_paths(specs: Sequence[str], native: Any) -> "Iterator[Finding]":
    """``specs`` as in ``--mlp-offload-path``; ``native``: the native module, None where it does not load."""
    from ..config import PathConfig
    from ..storage.facts import facts_of, shared_devices
    from ..storage.jobdir import check_directories

    usable: "list[PathFacts]" = []
    for spec in specs:
        try:
            path = PathConfig.parse(spec)
            (directory,) = check_directories([path.resolved_directory()])
            facts = facts_of(directory)
        except (ConfigError, OSError) as error:
            found, _, advice = str(error).partition(". ")
            yield Finding(spec, "directory", PROBLEM, found, advice.rstrip("."))
            continue
        usable.append(facts)
        yield from _file_system(facts)
        yield from _room(facts)
        yield from _left_over(directory)
        if native is None:
            yield Finding(facts.directory, "state file", NOTE, "not tried, as the native module does not load")
        else:
            yield from _state_file(directory, path.engine)
    for device, directories in shared_devices(usable):
        found = f"{' and '.join(directories)} are on {device}: together they give what one of them gives"
        yield Finding(directories[0], "shared device", NOTE, found, "Name one directory on each device")


def _file_system(facts: "PathFacts") -> "Iterator[Finding]":
    found, subject = f"{facts.kind} on {facts.source}", "file system"
    if facts.in_memory:
        advice = "Name a directory on a drive, or name no path for it and raise host_memory"
        yield Finding(facts.directory, subject, NOTE, f"{found}: this is host memory", advice)
    elif facts.network:
        found += ": a network file system; the nodes of a job share what it gives"
        yield Finding(facts.directory, subject, NOTE, found, "Measure it from as many nodes as the job has")
    elif facts.kind == "overlay":
        advice = "Name a directory that is mounted into the container"
        yield Finding(facts.directory, subject, NOTE, f"{found}: the container's own layer", advice)
    else:
        yield Finding(facts.directory, subject, OK, found)
    if facts.striping.startswith("not known"):
        yield Finding(
            facts.directory, "striping", NOTE, facts.striping, "lfs setstripe -c 4 -S 4M on the directory, once"
        )
    elif facts.striping:
        yield Finding(facts.directory, "striping", OK, f"{facts.striping}; a run puts files of one target on four")


def _room(facts: "PathFacts") -> "Iterator[Finding]":
    inodes = "" if facts.free_inodes is None else f", {facts.free_inodes} inodes"
    found = f"{format_bytes(facts.free_bytes)} of {format_bytes(facts.total_bytes)}{inodes} free; quota {facts.quota}"
    full = facts.free_bytes < _TRIED_BYTES or any(quota.exhausted for quota in facts.quotas)
    full |= facts.free_inodes is not None and facts.free_inodes < _FEW_INODES
    advice = "Free space or files there, or name another path" if full else ""
    yield Finding(facts.directory, "room", PROBLEM if full else OK, found, advice)


def _left_over(directory: Path) -> "Iterator[Finding]":
    from ..storage.leftovers import DEAD, find

    dead = [leftover for leftover in find([directory.resolve()]) if leftover.verdict == DEAD]
    if dead:
        jobs = ", ".join(sorted({leftover.job for leftover in dead}))
        found = f"{format_bytes(sum(leftover.nbytes for leftover in dead))} of dead jobs: {jobs}"
        yield Finding(str(directory), "left over", NOTE, found, f"mlp-offload clean {directory}")


def _state_file(directory: Path, engine: str) -> "Iterator[Finding]":
    from ..storage.engine import file_takes_direct
    from ..storage.jobdir import ScratchFile
    from ..storage.statefile import allocate

    where = str(directory)
    try:
        with ScratchFile.create(
            directory, job=f"doctor-{os.getpid()}", rank=0, name="doctor", reclaim=False
        ) as scratch:
            yield Finding(where, "state file", OK, "made in a private directory, locked on this node, and guarded")
            support = file_takes_direct(scratch.path)
            if support.supported:
                found = f"taken with {support.alignment} bytes alignment, {support.reason}"
                yield Finding(where, "O_DIRECT", OK, found)
            else:
                found = f"{support.reason}; state goes through the page cache, which takes memory and a copy"
                yield Finding(
                    where, "O_DIRECT", NOTE, found, "Name a directory on another file system, if there is one"
                )
            os.truncate(scratch.path, 0)
            allocate(scratch.path, _TRIED_BYTES)
            yield _reserved(where, scratch.path)
            yield _transfer(where, scratch.path, support, engine)
    except (OffloadError, OSError) as error:
        yield Finding(where, "state file", PROBLEM, str(error), "Make the directory usable for files of this user")


def _reserved(where: str, file: Path) -> Finding:
    if os.stat(file).st_blocks * 512 >= _TRIED_BYTES:
        return Finding(where, "fallocate", OK, f"{format_bytes(_TRIED_BYTES)} were reserved")
    found = "reserves nothing here: a full disk shows only as the state is first written, at start-up"
    return Finding(where, "fallocate", NOTE, found)


def _transfer(where: str, file: Path, support: Any, kind: str) -> Finding:
    """Random bytes there and back through the engine of a run."""
    import numpy as np

    from ..storage.buffers import BufferPool
    from ..storage.engine import open_engine

    settings = {"kind": kind, "direct": support.supported, "alignment": support.alignment}
    with (
        open_engine(file, **settings) as engine,
        BufferPool(2, _TRIED_BYTES) as pool,
        pool.lease() as out,
        pool.lease() as back,
    ):
        written = out.array(0, _TRIED_BYTES, np.uint8)
        written[:] = np.frombuffer(os.urandom(_TRIED_BYTES), np.uint8)
        engine.write(0, out.address, out.nbytes).result()
        engine.read(0, back.address, back.nbytes).result()
        same = bool((back.array(0, _TRIED_BYTES, np.uint8) == written).all())
        del written
    if not same:
        found = f"{format_bytes(_TRIED_BYTES)} did not come back as they were written"
        return Finding(where, f"engine {engine.kind}", PROBLEM, found, "Do not use this device; look at dmesg")
    return Finding(
        where, f"engine {engine.kind}", OK, f"{format_bytes(_TRIED_BYTES)} written and read back, the same bytes"
    )
