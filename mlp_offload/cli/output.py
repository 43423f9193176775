"""What all commands print alike: one JSON object with ``--json``, and one line for what went wrong.

[Note: errors of standard output] What cannot be written to standard output is an OSError like any other, and may come long
after the call that printed it, from a buffer. So commands run under ``watch_stdout``, which makes it an OutputError where it
happens: what else raises OSError is not taken for it, and no ``except OSError`` around work takes it for its own.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..units import finite

INTERRUPTED = 130
"""Exit status after Ctrl-C: that of a shell for SIGINT."""
BROKEN_PIPE = 128 + 13
"""Exit status where the reader of a pipe has gone, as `head` does: that of a shell for SIGPIPE."""


class OutputError(Exception):
    """Standard output cannot be written; see the note above."""

    def __init__(self, error: OSError):
        super().__init__(f"standard output: {error.strerror}")
        self.errno = error.errno


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add ``--json``."""
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def print_json(items: "Mapping[str, Any]") -> None:
    """One JSON object on standard output, with ``ok`` first; what is no number (NaN, infinity) is null."""
    print(json.dumps(finite({"ok": True} | dict(items)), allow_nan=False))


def check_file(option: str, file: Path) -> None:
    """Refuse a file to write, before any work.

    Raises:
        ConfigError: it is a directory, or is to lie in one that is not there.
    """
    if file.is_dir():
        raise ConfigError(f"{option} {file}: Is a directory; name a file in it")
    if not file.absolute().parent.is_dir():
        raise ConfigError(f"{option} {file}: there is no directory {file.absolute().parent}; make it first")


def tell_failure(options: argparse.Namespace, error: Exception) -> None:
    """The error on standard error, or as JSON on standard output where that was asked for."""
    if getattr(options, "json", False):
        print(json.dumps({"ok": False, "error": str(error)}))
    else:
        print(f"mlp-offload {options.command}: {error}", file=sys.stderr)


@contextlib.contextmanager
def watch_stdout() -> "Iterator[None]":
    """Within it, and when it ends and buffers are emptied, errors of standard output are OutputErrors."""
    stream = sys.stdout
    if stream is None:  # closed; Python prints nothing then
        yield
        return
    watched = _Watched(stream)
    sys.stdout = watched  # type: ignore[assignment]
    try:
        yield
    finally:
        sys.stdout = stream
        watched.flush()


def tell_output_failure(error: OutputError) -> int:
    """Nothing where a reader has gone, else one line; returns the exit status. Call it last: nothing more is written."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # not a file, or none
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())  # what is left in the buffer would be tried again when Python ends
        os.close(nowhere)
    if error.errno == errno.EPIPE:
        return BROKEN_PIPE
    print(f"mlp-offload: {error}", file=sys.stderr)
    return 1


# ------------------------------------------------------------------------------------------ helpers


class _Watched:
    """A stream whose OSErrors are OutputErrors; all else is the stream's own."""

    def __init__(self, stream: Any):
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            raise OutputError(error) from error

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            raise OutputError(error) from error
