"""Switch offload on in ``megatron.training``: the two calls that the launcher and the patched Megatron source make."""

from __future__ import annotations

import difflib
import functools
import re
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from typing import Any

from ..config import MODES, OffloadConfig
from ..errors import ConfigError
from ..flags import add_arguments, from_arguments
from ..storage.jobdir import check_directories

_OUR_FLAG = re.compile(r"--(no-)?mlp-offload")


def add_flags(parser: ArgumentParser) -> ArgumentParser:
    """Add the flags of ``config.py`` to Megatron's parser, unless they are there already.

    Raises:
        ConfigError: the command line has a misspelt one, or any beside ``--yaml-cfg``. Told here in one sentence: the
            parser would print all of Megatron's flags first, on every rank, and a script may let it skip what it does
            not know.
    """
    if "--optimizer-offload" not in parser._option_string_actions:  # no public way to ask
        add_arguments(parser)
    known = [name for name in parser._option_string_actions if _OUR_FLAG.match(name)]
    flags = [argument.partition("=")[0] for argument in sys.argv[1:]]
    ours = [flag for flag in flags if flag == "--optimizer-offload" or _OUR_FLAG.match(flag)]
    for flag in ours:
        if flag not in known and flag != "--optimizer-offload":
            close = difflib.get_close_matches(flag, known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"known flags: {', '.join(known)}"
            raise ConfigError(f"unknown flag {flag}: {hint}")
    if ours and "--yaml-cfg" in flags:
        raise ConfigError(
            f"--yaml-cfg makes Megatron ignore all flags, {ours[0]} too: "
            "put 'optimizer_offload: mlp' and 'mlp_offload_path: [DIR, ...]' into the YAML file"
        )
    return parser


def check(args: Namespace) -> "OffloadConfig | None":
    """Refuse what cannot work, before a large model is built; None when offload was not asked for.

    Raises:
        ConfigError: an option of Megatron's that offload does not go together with, a bad option of ours, or a path
            that cannot be used on this rank; one sentence that says what to change.
    """
    if not _wanted(args):
        return None
    from ..plan.refusals import validate

    validate(args)
    config = from_arguments(args)
    if getattr(args, "async_save", False):
        if getattr(args, "async_strategy", "mcore") != "mcore":
            raise ConfigError(
                f"--async-save with --async-strategy {args.async_strategy} has a writer of its own, which cannot read state "
                "that is on storage: add --async-strategy mcore"
            )
        config = config.replace(snapshots=True)  # a disk that is too small is an error now and not at the first save
    check_directories([path.resolved_directory() for path in config.paths])
    return config


def switch_on(args: Namespace) -> None:
    """With ``--optimizer-offload mlp`` in the final arguments, from now on Megatron builds offloaded optimizers.

    Also tells each step's loss to the telemetry, and every ``--log-interval`` prints a summary and gives our numbers to
    Megatron's TensorBoard and W&B writers. Calling it again replaces the options and nothing else.

    Raises:
        ConfigError, SelfCheckError: before anything is built.
    """
    config = check(args)
    if config is None:
        return
    from megatron.training import get_args, training
    from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer

    from .install import install
    from .step_report import after_train_step

    install(config)
    if not hasattr(training.train_step, "offload_report"):
        report = after_train_step(training.train_step, get_args, lambda: (get_tensorboard_writer(), get_wandb_writer()))
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


def _wanted(args: Namespace) -> bool:
    mode = getattr(args, "optimizer_offload", "none")
    if mode not in MODES:
        raise ConfigError(f"--optimizer-offload {mode!r}: must be one of {', '.join(MODES)}")
    return mode == "mlp"
