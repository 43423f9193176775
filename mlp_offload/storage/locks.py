"""Exclusive locks between processes of one node and user.

[Note: node-local locks] The lock files lie in node-local memory, not beside what they protect: on a parallel
file system a lock is cluster-wide, slow or missing. A flock dies with its holder, however it dies, but it belongs
to the open file, and every process that inherits the descriptor keeps it alive. So descriptors are closed
on exec and, through an at-fork handler, in forked children.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import stat
import tempfile
import time
import weakref
from collections.abc import Mapping
from pathlib import Path

from ..errors import ConfigError

_RETRY_SECONDS = 0.05

HELD, FREE, ABSENT = "held", "free", "absent"


def private_directory(path: Path) -> None:
    """Make ``path`` a directory that only we can enter (mode 0700), or find it so.

    Raises:
        ConfigError: it is a symlink, not a directory, belongs to somebody else, or others can enter it.
        OSError: it cannot be made.
    """
    found = None
    while found is None:
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
        try:
            found = os.lstat(path)
        except FileNotFoundError:  # another process of ours found it empty and removed it: make it again
            continue
    mode = stat.S_IMODE(found.st_mode)
    if stat.S_ISLNK(found.st_mode):
        problem = f"is a symbolic link to {os.readlink(path)}"
    elif not stat.S_ISDIR(found.st_mode):
        problem = "is not a directory"
    elif found.st_uid != os.geteuid():
        problem = f"belongs to user id {found.st_uid}, not to us ({os.geteuid()})"
    elif mode & 0o077:
        problem = f"is open to others (mode {mode:04o}, wanted 0700)"
    else:
        return
    raise ConfigError(
        f"{path} {problem}; state is kept only in a private directory. Remove it or choose another place."
    )


def lock_room() -> Path:
    """Directory of our lock files: ``/dev/shm/mlp-offload-<uid>``, or the same in the temporary directory."""
    name = f"mlp-offload-{os.geteuid()}"
    shm = Path("/dev/shm")
    room = (shm if os.access(shm, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())) / name
    private_directory(room)
    return room


class NodeLock:
    """An exclusive lock on this node, held until ``release()`` or until the process ends, however it ends.

    Attributes:
        path: the lock file; its content is the holder's JSON.
    """

    def __init__(self, path: Path, fd: int):
        self.path = path
        self._fd = fd
        this = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: this() is not None and this()._close())

    @classmethod
    def acquire(cls, key: str, holder: Mapping[str, object], timeout_seconds: float = 0.0) -> NodeLock | None:
        """The lock named ``key`` (any text), or None when it is still held after ``timeout_seconds``.

        holder: what to tell those who find it held (JSON values).
        """
        path = lock_path(key)
        deadline = time.monotonic() + timeout_seconds
        while True:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_file_at(fd, path):
                    content = json.dumps(holder).encode()
                    os.pwrite(fd, content, 0)
                    os.ftruncate(fd, len(content))
                    return cls(path, fd)
                # The last holder removed the file after we opened it: what we locked is no longer the lock.
                os.close(fd)
                continue
            except BlockingIOError:
                os.close(fd)
            except BaseException:
                os.close(fd)
                raise
            if time.monotonic() >= deadline:
                return None
            time.sleep(_RETRY_SECONDS)

    def fileno(self) -> int:
        """The descriptor that carries the lock: a child that is to keep the lock inherits it."""
        return self._fd

    def release(self) -> None:
        """Remove the lock file, then let go. Twice, or in a forked child, does nothing."""
        if self._fd >= 0:
            # While we hold it nobody else may use this file, so the name can go without a race.
            self.path.unlink(missing_ok=True)
            self._close()

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def lock_path(key: str) -> Path:
    """File of the lock named ``key``."""
    return lock_room() / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.lock"


def look(key: str) -> str:
    """HELD by a process; FREE: its file is there, so its holder was killed; ABSENT: released, never held on this node,
    or held before this node started. Makes no file.
    """
    try:
        fd = os.open(lock_path(key), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return ABSENT
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return FREE if _is_file_at(fd, lock_path(key)) else ABSENT
    except BlockingIOError:
        return HELD
    finally:
        os.close(fd)


def read_holder(key: str) -> dict[str, object]:
    """What the holder of ``key`` says about itself; empty when it cannot be read (it may be writing it now)."""
    try:
        content = json.loads(lock_path(key).read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def boot_time() -> float:
    """When this host started, which loses all locks; seconds since the epoch."""
    with open("/proc/stat") as lines:
        return next(float(line.split()[1]) for line in lines if line.startswith("btime "))


def _is_file_at(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.lstat(path))
    except FileNotFoundError:
        return False
