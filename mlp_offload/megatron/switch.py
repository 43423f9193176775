"""Switch offload on in ``megatron.training``: the two calls that the launcher and the patched Megatron source make."""

from __future__ import annotations

import functools
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from typing import Any

from ..config import add_arguments, from_arguments
from ..errors import ConfigError


def add_flags(parser: ArgumentParser) -> ArgumentParser:
    """Add the flags of ``config.py`` to Megatron's parser, unless they are there already."""
    if "--optimizer-offload" not in parser._option_string_actions:  # no public way to ask
        add_arguments(parser)
    return parser


def check(args: Namespace) -> None:
    """Refuse what offload does not work with, when it was asked for.

    Raises:
        ConfigError: one sentence that says what to change.
    """
    if getattr(args, "optimizer_offload", "none") == "mlp":
        from .validate import validate

        validate(args)


def switch_on(args: Namespace) -> None:
    """With ``--optimizer-offload mlp`` in the final arguments, from now on Megatron builds offloaded optimizers.

    Also tells each step's loss to the telemetry, and prints a summary every ``--log-interval``. Calling it again
    replaces the options and nothing else.

    Raises:
        ConfigError, SelfCheckError: before anything is built.
    """
    if not hasattr(args, "optimizer_offload") and any(a.startswith("--optimizer-offload") for a in sys.argv):
        raise ConfigError(
            "--yaml-cfg makes Megatron ignore all flags, --optimizer-offload too: "
            "put 'optimizer_offload: mlp' and 'mlp_offload_path: [DIR, ...]' into the YAML file"
        )
    check(args)
    if getattr(args, "optimizer_offload", "none") != "mlp":
        return
    from megatron.training import get_args, training

    from .install import install
    from .step_report import after_train_step

    install(from_arguments(args))
    if not hasattr(training.train_step, "offload_report"):
        report = after_train_step(training.train_step, get_args)
        wrapped = wrap(training.train_step, after=report)
        wrapped.offload_report = report


def wrap(function: "Callable[..., Any]", before: Any = None, after: Any = None) -> "Callable[..., Any]":
    """Let ``before(*args)`` run first, and ``after(result, *args)`` last, in every module that holds ``function``."""

    @functools.wraps(function)
    def wrapped(*args: Any, **settings: Any) -> Any:
        if before is not None:
            before(*args, **settings)
        result = function(*args, **settings)
        if after is not None:
            after(result, *args, **settings)
        return result

    rebind(function, wrapped)
    return wrapped


def rebind(function: "Callable[..., Any]", replacement: "Callable[..., Any]") -> None:
    """Megatron's modules import functions by name: replace the name in each that did so already."""
    name = function.__name__
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith("megatron.") and getattr(module, name, None) is function:
            setattr(module, name, replacement)
