"""Where scratch files live: one private directory a job on each path, one file a rank, gone when the rank is gone.

[Note: life of a scratch file]
1. Take the node-local lock of the file's name. Held by a living process: PathInUseError.
2. Make the job directory, or find it private. Start the sweeper, which removes the file when this process dies,
   whatever ends it.
3. Remove a file of that name: its owner would hold the lock, so it is dead (the node went down, or everything
   of the job was killed at once, sweeper included). Then the same for files of other ranks and jobs of this host.
   Only a file whose lock is missing may have an owner that we cannot see (a job or container with a /dev/shm of its
   own): where it was touched a short while ago, it stays.
4. Create the file, mode 0600, and touch it each minute, which other nodes see.
5. ``close()``: remove the file, and the directory if empty; dismiss the sweeper; give the lock back.

Locks know only this node, and of it only what shares its /dev/shm: nodes that share a path must have different host names.
"""

from __future__ import annotations

import logging
import os
import pwd
import re
import socket
import stat
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import final

from ..errors import ConfigError, OffloadError, PathInUseError
from ..units import format_bytes
from .heartbeat import FRESH_SECONDS, Heartbeat
from .locks import ABSENT, NodeLock, boot_time, look, private_directory, read_holder
from .lustre import stripe
from .sweeper import Sweeper

log = logging.getLogger(__name__)

# A dying job lets go within moments; a dead one's sweeper may need longer to remove a large file.
_HELD_SECONDS = 2.0
_SWEEP_SECONDS = 30.0
_NAME_LIMIT = 100
JOB_PREFIX = "mlp-offload-"

# Environment variable -> how its value becomes a job name; the first that is set wins.
_JOB_VARIABLES = (
    ("SLURM_JOB_ID", "slurm-{}"),
    ("PBS_JOBID", "pbs-{}"),
    ("LSB_JOBID", "lsf-{}"),
    ("TORCHELASTIC_RUN_ID", "torchrun-{}"),
)
_OF_A_BATCH_SYSTEM = ("slurm-", "pbs-", "lsf-")


def job_name(explicit: str = "auto") -> str:
    """Name of this job, the same on all its ranks of a node: ``explicit`` unless "auto", else by batch system.

    "auto" reads SLURM_JOB_ID ("slurm-4711"), PBS_JOBID ("pbs-..."), LSB_JOBID ("lsf-...") and TORCHELASTIC_RUN_ID
    ("torchrun-...", unless it is torchrun's default "none"), and else gives "local-<user>-<host>". Characters
    outside A-Z a-z 0-9 . _ - become "_".

    Raises:
        ConfigError: the name is empty or longer than 100 characters.
    """
    if explicit != "auto":
        return _file_safe(explicit, "job")
    for variable, form in _JOB_VARIABLES:
        value = os.environ.get(variable, "")
        if value and value != "none":
            return _file_safe(form.format(value), f"job (from {variable})")
    try:
        user = pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:  # containers run as users without an entry
        user = str(os.geteuid())
    return _file_safe(f"local-{user}-{host_name()}", "job")


def host_name() -> str:
    """This host's name as it stands in file names."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", socket.gethostname())


def check_directories(directories: Sequence[str | os.PathLike[str]]) -> list[Path]:
    """The real paths of ``directories``, in order, after a look at each.

    Raises:
        ConfigError: one is missing, no directory or not writable, or two are the same place (also through symbolic
            links, and through bind mounts as far as device and inode numbers tell).
    """
    seen: dict[tuple[int, int], str] = {}
    real_paths = []
    for directory in directories:
        name = os.fspath(directory)
        try:
            real = Path(name).resolve(strict=True)
            found = real.stat()
        except (OSError, RuntimeError) as error:  # RuntimeError: Python 3.10 to 3.12 on a loop of links
            reason = getattr(error, "strerror", None) or str(error)
            raise ConfigError(f"path '{name}': {reason}. Create it on every node, or name another one.") from error
        if not real.is_dir():
            raise ConfigError(f"path '{name}' is not a directory. Name a directory on the device to use.")
        if os.statvfs(real).f_flag & os.ST_RDONLY:
            raise ConfigError(f"path '{name}' is on a file system that is mounted read-only. Name another directory.")
        if not os.access(real, os.W_OK | os.X_OK, effective_ids=True):
            raise ConfigError(f"path '{name}' is not writable for user id {os.geteuid()}. Change its permissions.")
        key = (found.st_dev, found.st_ino)
        if key in seen:
            raise ConfigError(f"path '{name}' is the same directory as '{seen[key]}' ({real}). Name each path once.")
        seen[key] = name
        real_paths.append(real)
    return real_paths


@final
class ScratchFile:
    """A rank's own file on one path, empty at first, removed by ``close()`` or by the end of this process.

    Attributes:
        path: the file (its real path).
        reclaimed_bytes: size of what dead processes had left and this one removed.
        sweeper_pid: process that removes the file if we cannot.
    """

    def __init__(self, path: Path, reclaimed_bytes: int, sweeper_pid: int, cleanup: ExitStack):
        self.path = path
        self.reclaimed_bytes = reclaimed_bytes
        self.sweeper_pid = sweeper_pid
        self._cleanup = cleanup
        self._owner_pid = os.getpid()

    @classmethod
    def create(
        cls, directory: str | os.PathLike[str], *, job: str, rank: int, name: str, reclaim: bool = True
    ) -> ScratchFile:
        """``directory/mlp-offload-<job>/<host>-rank<rank>-<name>.state``, locked, guarded and empty.

        Args:
            job: from ``job_name()``.
            name: tells apart several optimizers of one process.
            reclaim: whether to remove what dead processes left on the path.

        Raises:
            ConfigError: the directory or the job directory in it cannot be used, or ``name`` cannot be part of one.
            PathInUseError: another living process holds this very file.
        """
        (parent,) = check_directories([directory])
        job_directory = parent / f"{JOB_PREFIX}{_file_safe(job, 'job')}"
        path = job_directory / f"{host_name()}-rank{rank:04d}-{_file_safe(name, 'name')}.state"
        # Undone in reverse, here and in close(): while the lock is held, no successor's file can be taken for ours.
        with ExitStack() as undo:
            used_elsewhere = _may_be_used_elsewhere(path)
            lock = _lock_or_raise(path, job)
            undo.callback(lock.release)
            _make_job_directory(job_directory)  # nothing in it is touched before it is known to be ours
            # A batch system runs a job once at a time, so what lies under its own name is of an earlier start.
            if used_elsewhere and not job.startswith(_OF_A_BATCH_SYSTEM):
                raise PathInUseError(
                    f"path '{parent}': {path} was touched less than {FRESH_SECONDS / 60:.0f} minutes ago, by a process that "
                    "cannot be seen here (in a container with a /dev/shm of its own?). If it has ended, remove the file, "
                    "or wait; else give this job another path, or another `job` in the configuration."
                )
            sweeper = Sweeper(job_directory, [path], lock.path, lock.fileno())
            undo.callback(sweeper.dismiss)
            undo.callback(_remove, path)
            stripe(job_directory, may_advise=rank == 0)  # a file's layout is fixed when it is made
            reclaimed_bytes = _reclaim_stale(path, job) if reclaim else 0
            _create_file(path)
            undo.callback(Heartbeat(path).close)
            return cls(path, reclaimed_bytes, sweeper.pid, undo.pop_all())

    def neighbour_bytes(self) -> int:
        """Disk space that files of the same job and name of this host's other ranks take now."""
        rest = self.path.name.removeprefix(f"{host_name()}-rank").lstrip("0123456789")
        pattern = re.compile(re.escape(host_name()) + r"-rank\d+" + re.escape(rest))
        total = 0
        with os.scandir(self.path.parent) as entries:
            for entry in entries:
                if pattern.fullmatch(entry.name) and entry.name != self.path.name:
                    with suppress(FileNotFoundError):  # that rank just ended
                        total += entry.stat(follow_symlinks=False).st_blocks * 512
        return total

    def close(self) -> None:
        """Remove the file and the job directory if that leaves it empty. Twice, or in a forked child, does nothing."""
        if os.getpid() == self._owner_pid:
            self._cleanup.close()

    def __enter__(self) -> ScratchFile:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _file_safe(text: str, what: str) -> str:
    if not text or len(text) > _NAME_LIMIT:
        raise ConfigError(f"{what}: {text!r} has {len(text)} characters; use 1 to {_NAME_LIMIT}")
    return re.sub(r"[^A-Za-z0-9._-]", "_", text)


def _may_be_used_elsewhere(path: Path) -> bool:
    """Whether a file has an owner whose lock cannot be seen here, as far as one can tell; see the note above."""
    if look(str(path)) != ABSENT:
        return False
    try:
        touched = path.lstat().st_mtime
    except FileNotFoundError:
        return False
    return time.time() - touched < FRESH_SECONDS and touched >= boot_time()


def _lock_or_raise(path: Path, job: str) -> NodeLock:
    holder = {
        "pid": os.getpid(),
        "host": host_name(),
        "job": job,
        "state_file": str(path),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
    lock = NodeLock.acquire(str(path), holder, _HELD_SECONDS)
    found = read_holder(str(path)) if lock is None else {}
    ending = lock is None and "pid" in found and not os.path.exists(f"/proc/{found['pid']}")
    if ending:
        lock = NodeLock.acquire(str(path), holder, _SWEEP_SECONDS)
    if lock is not None:
        return lock
    state = "has ended, but its files are still being removed" if ending else "is running"
    raise PathInUseError(
        f"path '{path.parent.parent}': {path} belongs to process {found.get('pid', '?')} of job "
        f"'{found.get('job', '?')}' (since {found.get('started', '?')}), which {state}. End that process, or give "
        f"this job another path, or another `job` or `name` in the configuration."
    )


def _make_job_directory(job_directory: Path) -> None:
    try:
        private_directory(job_directory)
    except ConfigError:
        raise
    except OSError as error:
        raise ConfigError(
            f"path '{job_directory.parent}': cannot make {job_directory.name}: {error.strerror}"
        ) from error


def _create_file(path: Path) -> None:
    """Create ``path`` empty; the job directory may be removed between two attempts by another rank that ends."""
    for _ in range(100):
        try:
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
            return
        except FileNotFoundError:
            _make_job_directory(path.parent)
        except OSError as error:
            raise ConfigError(f"path '{path.parent.parent}': cannot create {path}: {error.strerror}") from error
    raise OffloadError(
        f"{path.parent} was removed again and again by other processes; give this job another `job` name"
    )


def _reclaim_stale(path: Path, job: str) -> int:
    """Remove what dead processes of this user and host left on the path; bytes removed. ``path``'s lock is ours.

    Other jobs' directories count too: a job that starts again under a new name would never find its own leftovers.
    """
    pattern = re.compile(re.escape(host_name()) + r"-rank\d+-[A-Za-z0-9._-]+\.state")
    reclaimed_bytes = _unlink_size(path)
    jobs = {job} if reclaimed_bytes else set()
    for directory in _private_job_directories(path.parent.parent):
        with suppress(OSError):  # another process removes it at this moment
            for other in [file for file in directory.iterdir() if pattern.fullmatch(file.name) and file != path]:
                if _may_be_used_elsewhere(other):
                    continue
                lock = NodeLock.acquire(str(other), {"pid": os.getpid(), "job": job, "state_file": str(other)})
                if lock is not None:
                    nbytes = _unlink_size(other)
                    lock.release()
                    reclaimed_bytes += nbytes
                    jobs |= {directory.name.removeprefix(JOB_PREFIX)} if nbytes else set()
        if directory != path.parent:
            with suppress(OSError):  # not empty, or gone
                directory.rmdir()
    if reclaimed_bytes:
        log.warning(
            "path '%s': removed %s left by dead processes (job %s)",
            path.parent.parent,
            format_bytes(reclaimed_bytes),
            ", ".join(sorted(jobs)),
        )
    return reclaimed_bytes


def _private_job_directories(parent: Path) -> "list[Path]":
    """Job directories on a path that are ours alone, sorted."""
    ours = []
    for directory in sorted(parent.glob(f"{JOB_PREFIX}*")):
        with suppress(FileNotFoundError):
            found = directory.lstat()
            if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077:
                ours.append(directory)
    return ours


def _unlink_size(path: Path) -> int:
    try:
        nbytes = path.lstat().st_blocks * 512
        with suppress(OSError):  # gives the space back even when an orphan of the owner still has the file open
            os.close(os.open(path, os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC))
        path.unlink()
    except FileNotFoundError:
        return 0
    return nbytes


def _remove(path: Path) -> None:
    """Remove a file and its directory if that leaves it empty. Never raises: it runs while other errors are on their way."""
    try:
        _unlink_size(path)
    except OSError as error:
        log.warning("path '%s': cannot remove %s: %s", path.parent.parent, path, error.strerror)
    with suppress(OSError):  # other ranks' files are in it, or it is gone
        path.parent.rmdir()
