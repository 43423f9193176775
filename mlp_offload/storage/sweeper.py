"""Removes scratch files when their owner dies without doing so itself."""

from __future__ import annotations

import logging
import os
import subprocess
import weakref
from collections.abc import Sequence
from pathlib import Path

from ..errors import OffloadError

log = logging.getLogger(__name__)

# The shell blocks in read until a line comes (the owner cleaned up: leave everything alone) or the pipe ends
# (the owner is gone: remove its files). Signals that a batch system sends to the whole job must not end it early.
# Names are arguments and never part of the program. Truncating first gives the space back even when an orphan of
# the owner still has the file open.
_PROGRAM = """
trap '' HUP INT QUIT TERM USR1 USR2 ALRM
echo ready
exec >/dev/null 2>&1
read -r line && exit 0
directory=$1 lock=$2
shift 2
truncate -c -s 0 -- "$@"
rm -f -- "$@"
rmdir -- "$directory"
rm -f -- "$lock"
"""
_END_SECONDS = 10.0


class Sweeper:
    """A small ``/bin/sh`` that waits for the end of this process, whatever ends it (SIGKILL too), and then removes
    ``files``, ``directory`` if that leaves it empty, and ``lock_file``.

    It also inherits ``lock_fd``, so the lock is not free before the files are gone and nobody's new file
    can be taken for ours.

    Raises:
        OffloadError: the shell did not start.
    """

    def __init__(self, directory: Path, files: Sequence[Path], lock_file: Path, lock_fd: int):
        read_end, self._write_end = os.pipe()  # both close on exec
        this = weakref.ref(self)
        # A forked child that kept the write end would keep the shell waiting after our death.
        os.register_at_fork(after_in_child=lambda: this() is not None and this()._hang_up())
        command = ["/bin/sh", "-c", _PROGRAM, "mlp-offload-sweeper", *map(str, (directory, lock_file, *files))]
        try:
            self._shell = subprocess.Popen(
                command,
                stdin=read_end,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                cwd="/",
                env={"PATH": "/usr/bin:/bin"},
                start_new_session=True,
                pass_fds=(lock_fd,),
            )
        except OSError as error:
            self._hang_up()
            raise OffloadError(f"cannot start /bin/sh, which removes scratch files after a crash: {error}") from error
        finally:
            os.close(read_end)
        with self._shell.stdout as output:
            ready = output.readline()
        if ready != b"ready\n":
            self._hang_up()
            raise OffloadError(
                f"/bin/sh, which removes scratch files after a crash, ended at once (status {self._shell.wait()})"
            )

    @property
    def pid(self) -> int:
        """Process id of the shell."""
        return self._shell.pid

    def dismiss(self) -> None:
        """End the shell without sweeping and wait for it. Twice, or in a forked child, does nothing."""
        if self._write_end < 0:
            return
        try:
            os.write(self._write_end, b"done\n")
        except BrokenPipeError:
            log.warning("the process that removes scratch files after a crash had ended early (pid %d)", self.pid)
        self._hang_up()
        try:
            self._shell.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._shell.kill()
            self._shell.wait()

    def _hang_up(self) -> None:
        if self._write_end >= 0:
            os.close(self._write_end)
            self._write_end = -1
