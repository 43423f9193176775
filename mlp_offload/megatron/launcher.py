"""``mlp-offload run SCRIPT ARGS...``: an unmodified Megatron script with the offload flags and the offloaded optimizer.

[Note: what the launcher adds to Megatron]
1. ``add_megatron_arguments`` (called by every version's argument parser) also adds the flags of ``config.py``.
2. ``validate_args`` first refuses what cannot work, in one sentence each.
3. ``set_global_variables`` (called when the arguments are final) installs the optimizer if it was asked for.
4. ``train_step`` afterwards tells the step's loss to the telemetry; every ``--log-interval`` it prints a summary and adds
   our numbers to TensorBoard and W&B.
5. Without a GPU, ``initialize_megatron`` is told that this is allowed.
Then the script runs as ``__main__``. With ``--optimizer-offload none`` nothing but the flags differs from a run without
the launcher.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import json
import multiprocessing
import os
import runpy
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from .. import ranks
from ..errors import ConfigError, OffloadError
from . import switch

OWN_SCRIPT = "pretrain_gpt"
FAILED, INTERRUPTED = 1, 130
FINISHED = "MLP_OFFLOAD_FINISHED"
"""Environment variable: a file to make when the script has come to its end."""
_SILENT_SECONDS = 3.0


def run(script: str, arguments: "Sequence[str]") -> None:
    """Run a Megatron script as this process's rank; call it last.

    Returns when the script ends well. Otherwise the process ends here (see ``_leave``): an OffloadError is told in one
    message without a traceback, anything else with one.

    Args:
        script: a file, or ``pretrain_gpt`` for the package's own entry point.
        arguments: the script's command line.
    """
    # A batch script may ask a job again and again to save and end, and starts it with that signal ignored. When Python
    # ends, it gives signals that the script has handled back to the kernel, which would kill the rank after its work.
    ignored = [
        number
        for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)
        if signal.getsignal(number) == signal.SIG_IGN
    ]
    try:
        _run(script, arguments)
        _ignore(ignored)
        _note_the_end()
    except SystemExit as stop:
        if stop.code in (None, 0):
            _ignore(ignored)
            raise
        _leave(
            stop.code if isinstance(stop.code, int) else FAILED, "" if isinstance(stop.code, int) else str(stop.code)
        )
    except OffloadError as error:
        _leave(FAILED, f"{type(error).__name__}: {error}", known_cause=True)
    except KeyboardInterrupt:
        _leave(INTERRUPTED, "interrupted")
    except BaseException as error:
        in_collective = "torch/distributed/" in traceback.extract_tb(error.__traceback__)[-1].filename
        _leave(FAILED, traceback.format_exc(), after_others=in_collective)


def _note_the_end() -> None:
    """Tell the batch script that there is nothing more to train: where a script stops early, it leaves by SystemExit."""
    file = os.environ.get(FINISHED)
    if file and os.environ["RANK"] == "0":
        try:
            Path(file).touch()
        except OSError as error:
            print(f"mlp-offload: the training has come to its end, but {error}", file=sys.stderr)


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
            "megatron.training is not installed (the wheel of megatron-core 0.16.1 holds megatron.core only): "
            "install megatron-core >= 0.19.2, or run a script that lies in Megatron-LM's source tree"
        )
    import megatron.training.arguments as megatron_arguments
    from megatron.training.global_vars import set_global_variables
    from megatron.training.initialize import initialize_megatron

    from . import wheel_gaps

    def complete(parser: argparse.ArgumentParser, *args: Any, **settings: Any) -> None:
        wheel_gaps.escape_percent_signs(switch.add_flags(parser))

    switch.wrap(megatron_arguments.add_megatron_arguments, after=complete)
    switch.wrap(megatron_arguments.validate_args, before=lambda args, *a, **k: switch.check(args))
    switch.wrap(set_global_variables, before=lambda args, *a, **k: switch.switch_on(args))
    if allow_no_cuda:
        switch.rebind(initialize_megatron, functools.partial(initialize_megatron, allow_no_cuda=True))


# ------------------------------------------------------------------------------------------ helpers


def _find_script(script: str) -> "Path | None":
    """The script's file; None for the package's own entry point."""
    file = Path(script)
    if file.is_file():
        return file
    if script == OWN_SCRIPT:
        return None
    raise ConfigError(f"script {script!r}: no such file; give a Megatron script, or {OWN_SCRIPT} for the built-in one")


def _ignore(signals: "Sequence[signal.Signals]") -> None:
    for number in signals:
        signal.signal(number, signal.SIG_IGN)


def _leave(code: int, message: str, known_cause: bool = False, after_others: bool = False) -> "NoReturn":
    """Print and end this process at once, so that no other rank waits for it in a collective.

    No exit handlers run: they could wait for other ranks, or for storage that no longer answers. The kernel drops
    memory and locks, and scratch files go with their owner. torchrun ends the other ranks when one fails;
    srun does so with ``--kill-on-bad-exit=1``.

    [Note: one rank speaks] Bad input fails on all ranks of a node alike, and a collective fails because another rank died.
    So the node's first rank speaks at once, the others and those that failed in a collective a moment later, in which
    the launcher ends them: the message is told once, by the rank that has it.

    Args:
        known_cause: the message explains the end of the whole job.
        after_others: this rank failed most likely because another did.
    """
    for child in multiprocessing.active_children():
        child.terminate()
    rank = os.environ.get("RANK", "0")
    if message:
        if after_others or os.environ.get("LOCAL_RANK", "0") != "0":
            time.sleep(_SILENT_SECONDS)
        message = f"mlp-offload: rank {rank}: {message.rstrip()}"
        print(message, file=sys.stderr)
        if known_cause:
            _tell_torchrun(message)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _tell_torchrun(message: str) -> None:
    """Leave the message where torchrun looks for the root cause, which it prints last; srun names no such file."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file:
        # Its format for an exception: what it calls the call stack is what it prints.
        cause = {"message": message, "extraInfo": {"py_callstack": message, "timestamp": str(int(time.time()))}}
        with contextlib.suppress(OSError):
            Path(file).write_text(json.dumps({"message": cause}))
