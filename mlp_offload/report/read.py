"""A telemetry directory, read as far as it is written; see [Note: telemetry lines] in ``telemetry``."""

from __future__ import annotations

import os
import re
import socket
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import OffloadError
from ..telemetry import StepRecord, read_line
from .numbers import StepNumbers

_FILE = re.compile(r"rank(\d+)\.jsonl")


class RankLog:
    """The newest start of one rank.

    Attributes:
        header: of the start that ``steps`` are of; empty in files without one.
        steps: of that start, oldest first.
        start_count: how often the rank was started, all in all.
        starting: the rank was started again and has not finished a step yet; ``steps`` are those before.
        ended: it closed its state in order.
        torn_count: lines that could not be read, or whose values are of a wrong type.
    """

    def __init__(self, file: Path, last: "int | None" = None):
        self.file, self.rank = file, int(_FILE.fullmatch(file.name)[1])
        self._last = last
        self._reset()

    def _reset(self) -> None:
        self.header: "dict[str, Any]" = {}
        self.steps: "deque[StepNumbers]" = deque(maxlen=self._last)
        self.start_count, self.torn_count, self.ended = 0, 0, False
        self._pending: "dict[str, Any] | None" = None
        self._offset = 0

    @property
    def starting(self) -> bool:
        return self._pending is not None

    @property
    def newest_header(self) -> "dict[str, Any]":
        """Of the newest start, whether it has made a step or not."""
        return self.header if self._pending is None else self._pending

    def poll(self, on_bytes: "Callable[[int], None] | None" = None) -> bool:
        """Read what was written since the last call, up to the last whole line; whether there was anything.

        Args:
            on_bytes: called with the bytes of each line that was passed.
        """
        begin = self._offset
        with open(self.file, "rb") as stream:
            if os.fstat(stream.fileno()).st_size < begin:  # another file of the same name
                self._reset()
            stream.seek(self._offset)
            waiting: "deque[tuple[int, bytes]]" = deque(maxlen=self._last)
            for line in stream:
                if not line.endswith(b"\n"):
                    break
                # With `last` only that many lines of steps are parsed: they may be long.
                if self._last is None or not line.startswith(b'{"step"'):
                    self._take_all(waiting)
                    self._take(self._offset, line)
                else:
                    waiting.append((self._offset, line))
                self._offset += len(line)
                if on_bytes is not None:
                    on_bytes(len(line))
            self._take_all(waiting)
        return self._offset != begin

    def record(self, step: StepNumbers) -> StepRecord:
        """The whole record of one of ``steps``, with its events."""
        with open(self.file, "rb") as stream:
            stream.seek(step.offset)
            found = read_line(stream.readline())
        if not isinstance(found, StepRecord) or found.step != step.step:
            raise OffloadError(
                f"{self.file}: step {step.step} is no longer at byte {step.offset}; was the file replaced?"
            )
        return found

    def _take_all(self, waiting: "deque[tuple[int, bytes]]") -> None:
        while waiting:
            self._take(*waiting.popleft())

    def _take(self, offset: int, line: bytes) -> None:
        if not line.strip():
            return
        found = read_line(line)
        if found is None:
            self.torn_count += 1
        elif isinstance(found, StepRecord):
            self._add(StepNumbers.of(found, offset))
        elif "header" in found:
            self._pending, self.ended = found["header"], False
            self.start_count += 1
        else:
            self.ended = True

    def _add(self, step: StepNumbers) -> None:
        if self._pending is not None:
            self.header, self._pending = self._pending, None
            self.steps.clear()
        elif self.steps and step.step <= self.steps[-1].step:  # a restart that wrote no header
            self.steps.clear()
            self.start_count += 1
        self.start_count = max(1, self.start_count)
        self.steps.append(step)


class Run:
    """A telemetry directory.

    Args:
        directory: with ``rank0000.jsonl`` and so on; for ``poll`` it need not exist yet.
        last: only this many steps a rank are kept and looked at; None = all.
    """

    def __init__(self, directory: "str | os.PathLike[str]", last: "int | None" = None):
        self.directory = Path(directory)
        self.logs: "dict[int, RankLog]" = {}
        self._last = last

    def files(self) -> "list[Path]":
        """The ranks' files that are there now."""
        if not self.directory.is_dir():
            return []
        return sorted(f for f in self.directory.iterdir() if _FILE.fullmatch(f.name) and f.is_file())

    def poll(self, on_bytes: "Callable[[int], None] | None" = None) -> bool:
        """Read what is new; whether there was anything.

        Raises:
            OffloadError: a file cannot be read.
        """
        try:
            for file in self.files():
                log = RankLog(file, self._last)
                self.logs.setdefault(log.rank, log)
            news = [log.poll(on_bytes) for log in self.logs.values()]
        except OSError as error:
            raise OffloadError(f"telemetry {error.filename}: {error.strerror}") from error
        return any(news)

    def current(self) -> "dict[int, RankLog]":
        """The ranks that took part in the newest start, with steps; after a restart with fewer ranks, files of others stay.

        A rank whose newest step is older than the newest start of another is none of them. (Nodes' clocks agree to a second
        or two, which is less than a start takes.)
        """
        logs = {rank: log for rank, log in sorted(self.logs.items()) if log.steps}
        newest = max((log.header.get("time", 0.0) for log in logs.values()), default=0.0)
        return {rank: log for rank, log in logs.items() if not log.header or log.steps[-1].started >= newest}

    def paths(self) -> "list[str]":
        """The paths that the ranks of ``current()`` have, or moved bytes on."""
        logs = self.current().values()
        configured = [path["directory"] for log in logs for path in log.header.get("paths", ())]
        return list(dict.fromkeys([*configured, *(path for log in logs for s in log.steps for path, _ in s.traffic)]))

    def require_steps(self) -> "dict[int, RankLog]":
        """``current()``.

        Raises:
            OffloadError: there is nothing to report on; says what is there and what to do.
        """
        write = "write it with --mlp-offload-telemetry DIR (or OffloadedAdamW(..., telemetry=DIR))"
        if not self.directory.exists():
            raise OffloadError(f"{self.directory}: no such directory; it is the telemetry of a run: {write}")
        if not self.directory.is_dir():
            raise OffloadError(f"{self.directory} is not a directory; give the one that holds rank0000.jsonl")
        if not self.logs:
            raise OffloadError(f"{self.directory} holds no rank0000.jsonl, so no telemetry: {write}")
        logs = self.current()
        if not logs:
            state = (
                "has ended without one" if all(log.ended for log in self.logs.values()) else "is starting, or stopped"
            )
            raise OffloadError(
                f"{self.directory}: {len(self.logs)} ranks, no complete step yet: the run {state}. A step's line is written "
                "when the next step begins; --follow waits for it"
            )
        return logs

    def over(self) -> "str | None":
        """Why no more steps will come, or None as long as some may: the ranks said so, or their processes here are gone."""
        if not self.logs:
            return None
        current = self.current()
        open_logs = [
            log
            for log in self.logs.values()
            if not log.ended and (log.rank in current or log.starting or not log.steps)
        ]
        if not open_logs:
            return "the run has ended"
        for log in open_logs:
            header = log.newest_header
            here = header.get("host") == socket.gethostname() and header.get("pid_namespace") == os.readlink(
                "/proc/self/ns/pid"
            )
            if here and not Path(f"/proc/{header['pid']}").exists():
                return f"rank {log.rank} did not end in order: its process {header['pid']} is gone"
        return None
