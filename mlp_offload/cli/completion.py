"""``mlp-offload --print-completion SHELL``: a script that completes the command line, made from the parsers themselves."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from ..errors import OffloadError

SHELLS = ("bash", "zsh")
_DIRECTORIES, _FILES = ("DIR", "PATH", "DIRECTORY"), ("FILE", "SCRIPT")
"""What the metavariables of our parsers stand for."""


class PrintCompletion(argparse.Action):
    """Prints the script of the shell that is named and ends the program."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option: Any = None) -> None:
        try:
            print(script(parser, values))
        except OffloadError as error:
            parser.exit(1, f"{parser.prog}: {error}\n")
        parser.exit(0)


def add_option(parser: argparse.ArgumentParser) -> None:
    """Add ``--print-completion``."""
    parser.add_argument(
        "--print-completion",
        action=PrintCompletion,
        choices=SHELLS,
        help='print a script that completes this command line: eval "$(mlp-offload --print-completion bash)"',
    )


def script(parser: argparse.ArgumentParser, shell: str) -> str:
    """The script for ``shell``, which completes commands, options, their choices, files and directories.

    Raises:
        OffloadError: the package shtab, which writes it, is not installed.
    """
    try:
        import shtab
    except ImportError as error:
        raise OffloadError("the package shtab makes completions and is not installed: pip install shtab") from error
    for action in _actions(parser):
        if action.metavar in _DIRECTORIES:
            action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
        elif action.metavar in _FILES:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
    return shtab.complete(parser, shell=shell)


def _actions(parser: argparse.ArgumentParser) -> "Iterator[argparse.Action]":
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _actions(command)
