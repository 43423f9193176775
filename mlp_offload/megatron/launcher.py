"""``mlp-offload run SCRIPT ARGS...``: an unmodified Megatron script with the offload flags and the offloaded optimizer.

[Note: what the launcher adds to Megatron]
1. ``add_megatron_arguments`` (called by every version's argument parser) also adds the flags of ``config.py``.
2. ``validate_args`` first refuses what offload does not work with, in one sentence each.
3. ``set_global_variables`` (called when the arguments are final) installs the optimizer if it was asked for.
4. ``train_step`` afterwards tells the step's loss to the telemetry, and prints a summary every ``--log-interval``.
5. Without a GPU, ``initialize_megatron`` is told that this is allowed.
Then the script runs as ``__main__``. With ``--optimizer-offload none`` nothing but the flags differs from a run without
the launcher.
"""

from __future__ import annotations

import functools
import importlib.util
import multiprocessing
import os
import runpy
import sys
import traceback
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from ..config import add_arguments, from_arguments
from ..errors import ConfigError, OffloadError
from . import ranks

OWN_SCRIPT = "pretrain_gpt"
FAILED, INTERRUPTED = 1, 130


def run(script: str, arguments: "Sequence[str]") -> None:
    """Run a Megatron script as this process's rank; call it last.

    Returns when the script ends well. Otherwise the process ends here (see ``_leave``): an OffloadError is told in one
    message without a traceback, anything else with one.

    Args:
        script: a file, or ``pretrain_gpt`` for the package's own entry point.
        arguments: the script's command line.
    """
    try:
        _run(script, arguments)
    except SystemExit as stop:
        if stop.code in (None, 0):
            raise
        _leave(
            stop.code if isinstance(stop.code, int) else FAILED, "" if isinstance(stop.code, int) else str(stop.code)
        )
    except OffloadError as error:
        _leave(FAILED, f"{type(error).__name__}: {error}")
    except KeyboardInterrupt:
        _leave(INTERRUPTED, "interrupted")
    except BaseException:
        _leave(FAILED, traceback.format_exc())


def _run(script: str, arguments: "Sequence[str]") -> None:
    file = _find_script(script)
    ranks.settle(os.environ)
    sys.argv = [str(file or script), *arguments]
    if file is not None:
        sys.path.insert(0, str(file.resolve().parent))  # as Python does for a script; may hold Megatron's source
    from . import cpu_device, wheel_gaps  # import torch only now that the rank is known

    on_cpu = cpu_device.activate()
    if on_cpu:
        cpu_device.activate_in_children(os.environ)
    prepare_megatron(allow_no_cuda=on_cpu)
    wheel_gaps.fill()
    if file is None:
        runpy.run_module(f"{__package__}.{OWN_SCRIPT}", run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(str(file), run_name="__main__")


def prepare_megatron(allow_no_cuda: bool = False) -> None:
    """Add flags, validation and the optimizer to ``megatron.training`` in this process (the note above).

    Raises:
        ConfigError: ``megatron.training`` is not installed.
    """
    if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.training") is None:
        raise ConfigError(
            "megatron.training is not installed (wheels of megatron-core below 0.18 hold megatron.core only): "
            "install megatron-core >= 0.19.2, or run a script that lies in Megatron-LM's source tree"
        )
    import megatron.training.arguments as megatron_arguments
    from megatron.training.global_vars import set_global_variables
    from megatron.training.initialize import initialize_megatron

    _wrap(megatron_arguments.add_megatron_arguments, after=lambda parser, *a, **k: add_arguments(parser))
    _wrap(megatron_arguments.validate_args, before=lambda args, *a, **k: _validate(args))
    _wrap(set_global_variables, before=lambda args, *a, **k: _install(args))
    if allow_no_cuda:
        _rebind(initialize_megatron, functools.partial(initialize_megatron, allow_no_cuda=True))


def _validate(args: Namespace) -> None:
    if getattr(args, "optimizer_offload", "none") == "mlp":
        from .validate import validate

        validate(args)


def _install(args: Namespace) -> None:
    """Called with the final arguments, on every rank, before anything is built from them."""
    if not hasattr(args, "optimizer_offload") and any(a.startswith("--optimizer-offload") for a in sys.argv):
        raise ConfigError(
            "--yaml-cfg makes Megatron ignore all flags, --optimizer-offload too: "
            "put 'optimizer_offload: mlp' and 'mlp_offload_path: [DIR, ...]' into the YAML file"
        )
    _validate(args)
    if getattr(args, "optimizer_offload", "none") == "mlp":
        from megatron.training import get_args
        from megatron.training.training import train_step

        from .install import install
        from .step_report import after_train_step

        install(from_arguments(args))
        _wrap(train_step, after=after_train_step(train_step, get_args))


# ------------------------------------------------------------------------------------------ helpers


def _find_script(script: str) -> "Path | None":
    """The script's file; None for the package's own entry point."""
    file = Path(script)
    if file.is_file():
        return file
    if script == OWN_SCRIPT:
        return None
    raise ConfigError(f"script {script!r}: no such file; give a Megatron script, or {OWN_SCRIPT} for the built-in one")


def _wrap(function: "Callable[..., Any]", before: Any = None, after: Any = None) -> None:
    """Let ``before(*args)`` run first, and ``after(result, *args)`` last, in every module that holds ``function``."""

    @functools.wraps(function)
    def wrapped(*args: Any, **settings: Any) -> Any:
        if before is not None:
            before(*args, **settings)
        result = function(*args, **settings)
        if after is not None:
            after(result, *args, **settings)
        return result

    _rebind(function, wrapped)


def _rebind(function: "Callable[..., Any]", replacement: "Callable[..., Any]") -> None:
    """Megatron's modules import functions by name: replace the name in each that did so already."""
    name = function.__name__
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith("megatron.") and getattr(module, name, None) is function:
            setattr(module, name, replacement)


def _leave(code: int, message: str) -> "NoReturn":
    """Print and end this process at once, so that no other rank waits for it in a collective.

    No exit handlers run: they could wait for other ranks, or for storage that no longer answers. The kernel drops
    memory and locks, and scratch files go with their owner. torchrun ends the other ranks when one fails;
    srun does so with ``--kill-on-bad-exit=1``.
    """
    for child in multiprocessing.active_children():
        child.terminate()
    if message:
        rank = os.environ.get("RANK", "0")
        print(f"mlp-offload: rank {rank}: {message.rstrip()}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
