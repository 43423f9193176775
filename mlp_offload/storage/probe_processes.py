"""Several processes that measure the same paths at the same time, as the ranks of a node use them.

The parent writes one JSON object a line to each worker and reads one from each; a worker ends when its input does, so
however the parent dies. The scratch files have a name only while they are opened, and are guarded that long.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, final

from ..errors import OffloadError
from .engine import DirectSupport, file_takes_direct
from .jobdir import ScratchFile
from .meter import OPERATIONS, Meter, Moved
from .statefile import allocate

REQUEST_SECONDS = 30.0
"""How long one request to a path may take."""

FILL_SECONDS = 5.0
"""How long the scratch files are filled; on a path so slow that it takes more, measuring uses what was written."""

# Beside the time that an answer takes anyway.
_PATIENCE_SECONDS = REQUEST_SECONDS + 30.0
_START_SECONDS = 0.02  # until the last worker has read what to do


class ProbeFailed(OffloadError):
    """A path, or a worker, failed while it was measured."""


@final
class ProbeProcesses:
    """``count`` worker processes, each with one scratch file on each path; a context manager.

    Args:
        directories: one a path.
        size_bytes: of each worker's file on each path.
        settings: one a path and block size, ``settings[path][block size]``: of ``Meter``, without support.

    Attributes:
        engines: (kind, whether direct) that each path got.
        supports: what each path says to direct I/O.

    Raises:
        ProbeFailed: a worker cannot make its files; names the path and the reason. Nothing is left then.
    """

    def __init__(
        self,
        count: int,
        directories: Sequence[str],
        size_bytes: int,
        settings: "Sequence[Sequence[Mapping[str, Any]]]",
    ):
        self._workers: "list[subprocess.Popen[str]]" = []
        package = str(Path(__file__).resolve().parents[2])
        paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
        try:
            for _ in range(count):
                command = [sys.executable, "-m", __name__]
                options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": environment}
                options["start_new_session"] = True  # Ctrl-C is for us; they end when we do
                self._workers.append(subprocess.Popen(command, **options))
            common = {"job": f"probe-{os.getpid()}", "size_bytes": size_bytes}
            common |= {"directories": list(directories), "settings": settings}
            answers = self._ask([common | {"rank": rank} for rank in range(count)], 0.0)
        except BaseException:
            self.close()
            raise
        self.engines: "list[tuple[str, bool]]" = [tuple(engine) for engine in answers[0]["engines"]]
        self.supports = [DirectSupport(*support) for support in answers[0]["supports"]]

    def fill(self, path: int) -> int:
        """All workers write their files on one path; bytes written."""
        answers = self._ask([{"do": "fill", "path": path}] * len(self._workers), FILL_SECONDS)
        return sum(answer["nbytes"] for answer in answers)

    def measure(
        self, count: int, paths: Sequence[int], block: int, operation: str, seconds: float
    ) -> "dict[int, dict[str, Moved]]":
        """What was moved, by path and direction, by the first ``count`` workers together, all of ``paths`` at once.

        Args:
            block: index of the block size.
            operation: a key of ``meter.OPERATIONS``.
        """
        answers = self._together(count, "measure", paths, block, operation, seconds)
        return {
            path: {d: Moved(*map(sum, zip(*(a["found"][i][d] for a in answers)))) for d in OPERATIONS[operation]}
            for i, path in enumerate(paths)
        }

    def latencies(
        self, count: int, paths: Sequence[int], block: int, direction: str, seconds: float
    ) -> "dict[int, list[float]]":
        """Seconds of single blocks, by path; each of the first ``count`` workers has one under way on each of ``paths``."""
        answers = self._together(count, "latencies", paths, block, direction, seconds)
        return {path: [x for answer in answers for x in answer["found"][i]] for i, path in enumerate(paths)}

    def close(self) -> None:
        """End the workers; one that hangs in the kernel is left to it."""
        for worker in self._workers:
            with contextlib.suppress(OSError):
                worker.stdin.close()
        deadline = time.monotonic() + 10.0
        for worker in self._workers:
            try:
                worker.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                worker.kill()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    worker.wait(1.0)
            worker.stdout.close()

    def __enter__(self) -> ProbeProcesses:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _together(self, count: int, do: str, paths: Sequence[int], block: int, what: str, seconds: float) -> Any:
        todo = {"do": do, "paths": list(paths), "block": block, "what": what, "seconds": seconds}
        todo["begin"] = time.monotonic() + _START_SECONDS  # one clock for all processes of a machine
        return self._ask([todo] * count, 2 * seconds)

    def _ask(self, todo: "Sequence[Mapping[str, Any]]", seconds: float) -> "list[dict[str, Any]]":
        """What the first ``len(todo)`` workers answer.

        Raises:
            ProbeFailed: one failed, died, or does not answer within ``seconds`` and the time one request may take.
        """
        workers = self._workers[: len(todo)]
        deadline = time.monotonic() + seconds + _PATIENCE_SECONDS
        for worker, message in zip(workers, todo):
            with contextlib.suppress(BrokenPipeError):  # it is dead: its answer will be missing
                print(json.dumps(message), file=worker.stdin, flush=True)
        answers = []
        for worker in workers:
            ready, _, _ = select.select([worker.stdout], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise ProbeFailed(
                    f"measuring process {worker.pid} does not answer: a path seems to hang. Look at the device or file "
                    "system behind each path (dmesg, its servers)"
                )
            line = worker.stdout.readline()
            answers.append(json.loads(line) if line else {"error": f"measuring process {worker.pid} died"})
        for answer in answers:
            if "error" in answer:
                raise ProbeFailed(answer["error"])
        return answers


# ------------------------------------------------------------------------------------------ the worker


def main() -> None:
    """Answer each line of standard input with one of standard output. The first line makes the files.

    The end of the input ends the process at once, whatever it measures, or when the files it is making have no name
    any more.
    """
    lines: "queue.SimpleQueue[str]" = queue.SimpleQueue()
    making = threading.Lock()

    def listen() -> None:
        for line in sys.stdin:
            lines.put(line)
        with making:
            os._exit(0)

    threading.Thread(target=listen, daemon=True).start()
    worker: "_Worker | None" = None
    while True:
        todo = json.loads(lines.get())
        answer: "dict[str, Any]"
        try:
            if worker is None:
                with making:
                    worker = _Worker(**todo)
                answer = {"engines": worker.engines, "supports": worker.supports}
            else:
                answer = getattr(worker, todo.pop("do"))(**todo)
        except (OffloadError, OSError) as error:
            answer = {"error": str(error)}
        os.write(1, json.dumps(answer).encode() + b"\n")


class _Worker:
    """The files and meters of one process."""

    def __init__(
        self,
        job: str,
        rank: int,
        directories: "list[str]",
        size_bytes: int,
        settings: "list[list[dict[str, Any]]]",
    ):
        self._meters: "list[list[Meter]]" = []
        self.supports: "list[DirectSupport]" = []
        for directory, of_blocks in zip(directories, settings):
            # It is guarded until it has no name any more, and lies where state files lie, with their striping.
            with ScratchFile.create(directory, job=job, rank=rank, name="probe", reclaim=False) as scratch:
                try:
                    support = file_takes_direct(scratch.path)
                    allocate(scratch.path, size_bytes)
                except OSError as error:
                    raise ProbeFailed(
                        f"path '{directory}': {size_bytes} bytes for measuring cannot be had: {error.strerror}. Free space "
                        "there (see the quota command, too), or give a smaller --size"
                    ) from error
                self.supports.append(support)
                times = {"warn_seconds": REQUEST_SECONDS, "timeout_seconds": REQUEST_SECONDS}
                self._meters.append([])
                for options in of_blocks:
                    self._meters[-1].append(Meter(scratch.path, size_bytes, support=support, **options, **times))
        self.engines = [(meters[0].kind, meters[0].direct) for meters in self._meters]

    def fill(self, path: int) -> "dict[str, int]":
        first, *others = self._meters[path]
        nbytes = first.fill(FILL_SECONDS)
        for meter in others:
            meter.filled_count = max(1, nbytes // meter.request_bytes)
        return {"nbytes": nbytes}

    def measure(self, paths: "list[int]", block: int, what: str, seconds: float, begin: float) -> "dict[str, Any]":
        return {"found": self._at_once(paths, lambda path: self._meters[path][block].measure(what, seconds, begin))}

    def latencies(self, paths: "list[int]", block: int, what: str, seconds: float, begin: float) -> "dict[str, Any]":
        return {"found": self._at_once(paths, lambda path: self._meters[path][block].latencies(what, seconds, begin))}

    def _at_once(self, paths: "list[int]", measure: "Callable[[int], Any]") -> "list[Any]":
        with ThreadPoolExecutor(len(paths), "mlp-offload-probe") as threads:
            return list(threads.map(measure, paths))


if __name__ == "__main__":
    main()
