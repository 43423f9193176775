"""What kernel, limits and batch system allow on this node."""

from __future__ import annotations

import contextlib
import os
import resource
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import OffloadError
from ..units import format_bytes
from .findings import NOTE, OK, PROBLEM, Finding

_AREA = "machine"
_REGISTERED_BYTES = 64 * 2**20
_FEW_FILES = 1024
_LITTLE_MEMORY = 2**30

# Sites name their node-local scratch so.
_SCRATCH_VARIABLES = ("SLURM_TMPDIR", "LOCAL_SCRATCH", "LOCALSCRATCH", "NODE_SCRATCH", "PBS_JOBFS", "JOBFS", "TMPDIR")
_JOB_VARIABLES = {"SLURM_JOB_ID": "SLURM", "PBS_JOBID": "PBS", "LSB_JOBID": "LSF"}


def check_machine(native: Any) -> "Iterator[Finding]":
    """``native``: the native module, None where it does not load."""
    yield _uring(native)
    if native is not None:
        yield _registered_buffers()
    yield _file_size()
    yield _open_files()
    yield from _memory()
    yield _node_locks()
    yield _cores()
    yield from _batch_system()


def _uring(native: Any) -> Finding:
    switch = "/proc/sys/kernel/io_uring_disabled"
    try:
        value = Path(switch).read_text().strip()
    except OSError:
        value = "not there"
    told = f"kernel.io_uring_disabled is {value}"
    if native is None:
        return Finding(_AREA, "io_uring", NOTE, f"not tried, as the native module does not load; {told}")
    works, reason = native.io_uring_available()
    if works:
        return Finding(_AREA, "io_uring", OK, f"a ring was made; {told}")
    advice = "sysctl kernel.io_uring_disabled=0, where the site allows it" if value in ("1", "2") else ""
    return Finding(_AREA, "io_uring", NOTE, f"refused: {reason}; {told}; engine=auto takes threads", advice)


def _registered_buffers() -> Finding:
    from ..storage.buffers import BufferPool
    from ..storage.engine import open_engine

    limit = _limit(resource.RLIMIT_MEMLOCK)
    size = format_bytes(_REGISTERED_BYTES)
    try:
        with tempfile.NamedTemporaryFile() as file, contextlib.closing(BufferPool(1, _REGISTERED_BYTES)) as pool:
            settings = {"kind": "auto", "direct": False, "threads": 1, "iodepth": 1}
            with open_engine(file.name, **settings) as engine:
                taken, kind = engine.register_buffers(*pool.region, keepalive=pool), engine.kind
    except (OffloadError, OSError) as error:
        return Finding(_AREA, "locked memory", NOTE, f"registering {size} could not be tried: {error}")
    told = f"RLIMIT_MEMLOCK is {limit}"
    if kind != "io_uring":
        return Finding(_AREA, "locked memory", OK, f"{told}; not needed by the threads engine")
    if taken:
        return Finding(_AREA, "locked memory", OK, f"io_uring took {size} of registered buffers; {told}")
    found = f"io_uring does not take {size} of registered buffers, which costs some CPU time; {told}"
    return Finding(_AREA, "locked memory", NOTE, found, "ulimit -l unlimited")


def _file_size() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if soft == resource.RLIM_INFINITY:
        return Finding(_AREA, "file size", OK, "RLIMIT_FSIZE is unlimited")
    found = f"RLIMIT_FSIZE is {format_bytes(soft)}: what a rank keeps on one path must be smaller"
    return Finding(_AREA, "file size", NOTE, found, "ulimit -f unlimited")


def _open_files() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"RLIMIT_NOFILE is {_limit(resource.RLIMIT_NOFILE)}"
    if soft != resource.RLIM_INFINITY and soft < _FEW_FILES:
        return Finding(_AREA, "open files", NOTE, f"{found}, which data loaders may use up", f"ulimit -n {_FEW_FILES}")
    return Finding(_AREA, "open files", OK, found)


def _memory() -> "Iterator[Finding]":
    import psutil

    from ..storage.memory import available_memory_bytes, cgroup_available_bytes

    memory, group = psutil.virtual_memory(), cgroup_available_bytes()
    available = available_memory_bytes()
    unlimited = group is None or group > memory.total  # version 1 writes "no limit" as a very large number
    limit = "no cgroup limit" if unlimited else f"the cgroup leaves {format_bytes(group)}"
    found = f"{format_bytes(available)} can be taken; the machine has {format_bytes(memory.total)}, {limit}"
    if available < _LITTLE_MEMORY:
        yield Finding(
            _AREA, "host memory", NOTE, found, "Give the job more memory (sbatch --mem): state passes through it"
        )
    else:
        yield Finding(_AREA, "host memory", OK, found)


def _node_locks() -> Finding:
    from ..storage.locks import NodeLock, lock_room

    try:
        room = lock_room()
        lock = NodeLock.acquire(f"doctor {os.getpid()}", {"pid": os.getpid()})
        taken = lock is not None and NodeLock.acquire(f"doctor {os.getpid()}", {}) is None
        if lock is not None:
            lock.release()
    except (OffloadError, OSError) as error:
        return Finding(_AREA, "node-local locks", PROBLEM, str(error), "Make /dev/shm, or TMPDIR, writable and private")
    if not taken:
        return Finding(
            _AREA, "node-local locks", PROBLEM, f"{room}: locks do not exclude each other", "Mount a tmpfs on /dev/shm"
        )
    if Path("/dev/shm") not in room.parents:
        found = f"in {room}, since /dev/shm cannot be written to"
        return Finding(
            _AREA, "node-local locks", NOTE, found, "Make /dev/shm writable: a TMPDIR that nodes share will not do"
        )
    return Finding(_AREA, "node-local locks", OK, f"taken and given back in {room}")


def _cores() -> Finding:
    from ..storage.numa import format_cpus, nodes_of

    cpus, nodes = os.sched_getaffinity(0), nodes_of()
    found = (
        f"{len(cpus)} of {os.cpu_count()} cores ({format_cpus(cpus)}), NUMA nodes {format_cpus(nodes) or 'not told'}"
    )
    if len(nodes) > 1:
        advice = "Bind each rank to the node of its GPU (srun --cpu-bind, numactl --cpunodebind)"
        return Finding(_AREA, "cores", NOTE, f"{found}: not bound to one", advice)
    if len(cpus) == 1:
        found += ": storage threads, Adam and Python share it"
        return Finding(_AREA, "cores", NOTE, found, "Ask for more cores a rank (srun --cpus-per-task)")
    return Finding(_AREA, "cores", OK, found)


def _batch_system() -> "Iterator[Finding]":
    from ..storage.facts import facts_of
    from ..storage.jobdir import job_name

    names = [f"{system} job {os.environ[name]}" for name, system in _JOB_VARIABLES.items() if os.environ.get(name)]
    try:
        yield Finding(_AREA, "batch system", OK, f"{', '.join(names) or 'none seen'}; job name {job_name()}")
    except OffloadError as error:
        yield Finding(_AREA, "batch system", PROBLEM, str(error), "Set --mlp-offload-job")
    seen = []
    for name in _SCRATCH_VARIABLES:
        value = os.environ.get(name)
        if not value:
            continue
        seen.append(name)
        subject = f"${name}"
        try:
            facts = facts_of(value)
        except OSError as error:
            advice = "It may be set up on compute nodes only: look there (srun mlp-offload doctor)"
            yield Finding(_AREA, subject, NOTE, f"{value}: {error.strerror}", advice)
            continue
        found = f"{value}: {facts.kind} on {facts.source}, {format_bytes(facts.free_bytes)} free"
        if facts.in_memory:
            yield Finding(
                _AREA,
                subject,
                NOTE,
                f"{found}: this is host memory",
                "Do not use it as a path: raise host_memory instead",
            )
        elif facts.network:
            yield Finding(_AREA, subject, NOTE, f"{found}: a network file system, not a drive of this node")
        else:
            yield Finding(_AREA, subject, OK, found)
    if not seen:
        yield Finding(_AREA, "node-local scratch", OK, f"none of {', '.join(_SCRATCH_VARIABLES)} is set")


def _limit(which: int) -> str:
    soft, _ = resource.getrlimit(which)
    if soft == resource.RLIM_INFINITY:
        return "unlimited"
    return str(soft) if which == resource.RLIMIT_NOFILE else format_bytes(soft)
