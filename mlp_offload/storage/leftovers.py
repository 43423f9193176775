"""Scratch files on a path, and which of them have no owner any more.

[Note: who is dead] The first line that applies decides; what none decides is unknown, and is kept.
1. This host, and the file's lock is held, or a process has the file open: live.
2. This host, and the lock is there but free: dead. A lock file outlives only an owner that was killed.
3. This host has started since the last sign of life: dead. Locks are lost then.
4. Touched within ten minutes, which a living owner does each minute on any host (``heartbeat``): live.
5. The scheduler has the job: live. It knows no such job, or says that it ended: dead.
A process id alone is no sign of life: another process may have it by now, or it may be another node's.
"""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ..errors import OffloadError
from . import scheduler
from .heartbeat import FRESH_SECONDS
from .jobdir import JOB_PREFIX, host_name
from .locks import FREE, HELD, NodeLock, boot_time, look, read_holder

LIVE, DEAD, UNKNOWN, FOREIGN = "live", "dead", "unknown", "foreign"

_STATE_FILE = re.compile(r"(?P<host>[A-Za-z0-9._-]+)-rank\d{4,}-[A-Za-z0-9._-]+\.state")
_PROBE_FILE = re.compile(r"\.mlp-offload-probe-\w+")


@dataclass(frozen=True)
class Leftover:
    """A file in a job directory, or a job directory that is empty or not ours.

    Attributes:
        path: its real path.
        job: the job directory's name without prefix.
        host: that its owner ran on; None where the name does not tell.
        nbytes: that it takes on the file system.
        age_seconds: since the last sign of life.
        verdict: LIVE, DEAD, UNKNOWN or FOREIGN (not made by us, or not a plain file of this user).
        reason: of the verdict, for a person.
        identity: (device, inode, mtime in ns) when it was judged.
    """

    path: Path
    job: str
    host: "str | None"
    nbytes: int
    age_seconds: float
    verdict: str
    reason: str
    identity: "tuple[int, int, int]"


def find(parents: "Sequence[Path]", job: "str | None" = None) -> "list[Leftover]":
    """All that lies in the job directories of ``parents``, which are real paths, sorted; links are not followed.

    Args:
        job: only of this job: the directory's name without prefix, or the scheduler's id.
    """
    found = []
    seen = _Seen()
    for parent in parents:
        for directory in sorted(parent.glob(f"{JOB_PREFIX}*")):
            name = directory.name.removeprefix(JOB_PREFIX)
            if job is None or name == job or re.fullmatch(rf"(slurm|pbs|lsf|torchrun)-{re.escape(job)}", name):
                with suppress(FileNotFoundError):  # its job ends at this moment
                    found += _in_directory(directory, name, seen)
    return found


def remove(leftover: Leftover) -> int:
    """Remove what ``find`` called dead, and its directory if that leaves it empty; bytes that this gave back.

    Raises:
        OffloadError: it is no longer what was judged, or cannot be removed; names it. It is left alone.
    """
    path = leftover.path
    if path.name.startswith(JOB_PREFIX):
        with suppress(OSError):  # somebody has put a file into it
            path.rmdir()
        return 0
    lock = NodeLock.acquire(str(path), {"pid": os.getpid(), "job": leftover.job, "state_file": str(path)})
    if lock is None:
        raise OffloadError(f"{path}: a process has taken it meanwhile")
    try:
        directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            if _identity(os.stat(path.name, dir_fd=directory, follow_symlinks=False)) != leftover.identity:
                raise OffloadError(f"{path}: somebody has written to it meanwhile")
            # Gives the space back even where an orphan of the owner still has the file open.
            flags = os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
            os.close(os.open(path.name, flags, dir_fd=directory))
            os.unlink(path.name, dir_fd=directory)
        finally:
            os.close(directory)
    except OSError as error:
        raise OffloadError(f"{path}: cannot be removed: {error.strerror}") from error
    finally:
        lock.release()
    with suppress(OSError):  # other files are in it
        path.parent.rmdir()
    return leftover.nbytes


# ------------------------------------------------------------------------------------------ helpers


class _Seen:
    """What is asked once for all files: the scheduler about each job, and /proc about open files."""

    def __init__(self) -> None:
        self._words: "dict[str, scheduler.Word]" = {}
        self._open_files: "list[tuple[str, os.stat_result]] | None" = None

    def word(self, job: str) -> scheduler.Word:
        if job not in self._words:
            self._words[job] = scheduler.ask(job)
        return self._words[job]

    def opener(self, info: os.stat_result) -> "str | None":
        """A process of this host that has the file open, under whatever path; None where none is seen."""
        if self._open_files is None:
            self._open_files = list(_open_state_files())
        return next((process for process, other in self._open_files if os.path.samestat(other, info)), None)


def _open_state_files() -> "Iterator[tuple[str, os.stat_result]]":
    for process in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(OSError):  # ended, or not ours
            for entry in os.scandir(f"/proc/{process}/fd"):
                with suppress(OSError):
                    # A stat of any other file may hang with its file system.
                    if _STATE_FILE.fullmatch(os.path.basename(os.readlink(entry.path))):
                        yield process, entry.stat()


def _in_directory(directory: Path, job: str, seen: _Seen) -> "Iterator[Leftover]":
    info = directory.lstat()
    problem = None
    if stat.S_ISLNK(info.st_mode):
        problem = "a symbolic link"
    elif not stat.S_ISDIR(info.st_mode):
        problem = "not a directory"
    elif info.st_uid != os.geteuid():
        problem = f"belongs to user id {info.st_uid}"
    elif info.st_mode & 0o077:
        problem = f"open to others (mode {stat.S_IMODE(info.st_mode):04o}), so not made by us"
    if problem:
        yield _leftover(directory, job, None, info, FOREIGN, problem)
        return
    entries = sorted(os.listdir(directory))
    if not entries:
        old = _age(info) >= FRESH_SECONDS
        yield _leftover(
            directory, job, None, info, DEAD if old else LIVE, "empty" if old else "empty, but made just now"
        )
    for name in entries:
        with suppress(FileNotFoundError):
            path = directory / name
            info = path.lstat()
            match = _STATE_FILE.fullmatch(name)
            if match is None and _PROBE_FILE.fullmatch(name) is None:
                verdict, reason = FOREIGN, "not a file of ours"
            elif not stat.S_ISREG(info.st_mode):
                verdict, reason = FOREIGN, "not a plain file"
            elif info.st_uid != os.geteuid():
                verdict, reason = FOREIGN, f"belongs to user id {info.st_uid}"
            elif match is None:
                verdict = DEAD if _age(info) >= FRESH_SECONDS else LIVE
                reason = "of a measurement, which takes seconds"
            else:
                verdict, reason = _judge(path, match["host"], job, info, seen)
            yield _leftover(path, job, match["host"] if match else None, info, verdict, reason)


def _judge(path: Path, host: str, job: str, info: os.stat_result, seen: _Seen) -> "tuple[str, str]":
    """The note above."""
    here = host == host_name()
    if here:
        lock = look(str(path))
        pid = read_holder(str(path)).get("pid", "?")
        if lock == HELD:
            return LIVE, f"process {pid} holds its lock"
        if opener := seen.opener(info):
            return LIVE, f"process {opener} has it open"
        if lock == FREE:
            return DEAD, f"its process ({pid}) was killed"
        if info.st_mtime < boot_time() and _age(info) >= FRESH_SECONDS:
            return DEAD, "this host has started since"
    if _age(info) < FRESH_SECONDS:
        return LIVE, f"touched {_age(info):.0f} s ago"
    word = seen.word(job)
    if word.known is not None:
        return LIVE if word.known else DEAD, word.reason
    advice = "its lock is not visible here (another container?)" if here else f"run this command on {host}"
    return UNKNOWN, f"{word.reason}; {advice}, or remove it by hand when you know that it is dead"


def _leftover(path: Path, job: str, host: "str | None", info: os.stat_result, verdict: str, reason: str) -> Leftover:
    return Leftover(path, job, host, info.st_blocks * 512, _age(info), verdict, reason, _identity(info))


def _identity(info: os.stat_result) -> "tuple[int, int, int]":
    return info.st_dev, info.st_ino, info.st_mtime_ns


def _age(info: os.stat_result) -> float:
    return max(0.0, time.time() - info.st_mtime)  # the file's clock may be ahead of ours
