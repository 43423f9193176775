"""Shows other nodes that the owner of a file lives: its modification time is never older than a minute or two.

Locks (``locks``) tell only on the owner's own node. Training writes the file too, but not while it evaluates, saves or
waits.
"""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path
from typing import final

log = logging.getLogger(__name__)

BEAT_SECONDS = 60.0
FRESH_SECONDS = 600.0
"""A file that was touched within this time has an owner: ten beats, for clocks that differ and storage that hangs."""


@final
class Heartbeat:
    """A thread that sets ``path``'s modification time to now, every ``seconds``, until ``close()`` or the process's end."""

    def __init__(self, path: Path, seconds: float = BEAT_SECONDS):
        self._path, self._seconds = path, seconds
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="mlp-offload-heartbeat", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread; on storage that hangs it is not waited for."""
        self._ended.set()
        self._thread.join(1.0)

    def _beat(self) -> None:
        while not self._ended.wait(self._seconds):
            try:
                os.utime(self._path)
            except FileNotFoundError:
                return
            except OSError as error:
                log.warning(
                    "%s: cannot be touched, which shows other nodes that we live: %s", self._path, error.strerror
                )
