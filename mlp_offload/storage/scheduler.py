"""What the batch system says of a job, asked by name of the job directory."""

from __future__ import annotations

import re
import shutil
import subprocess
from typing import NamedTuple

_SECONDS = 30.0
_SLURM_ENDED = ("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL")
_SLURM_ENDED += ("OUT_OF_MEMORY", "PREEMPTED", "REVOKED", "TIMEOUT")
_PBS_UNKNOWN, _PBS_FINISHED = 153, 35


class Word(NamedTuple):
    """``known``: the job is there (True), it has ended (False), or nobody can tell (None); and why, for a person."""

    known: "bool | None"
    reason: str


def ask(job: str) -> Word:
    """About the job of directory name ``job``, as ``jobdir.job_name`` makes it: "slurm-4711", "pbs-17.server"."""
    system, _, number = job.partition("-")
    if system == "slurm" and number.isdecimal():
        return _ask_slurm(number)
    if system == "pbs" and number:
        return _ask_pbs(re.sub(r"^(\d+)_(\d*)_", r"\1[\2]", number))  # brackets cannot stand in file names
    return Word(None, f"job '{job}' has no number that squeue or qstat knows")


def _ask_slurm(number: str) -> Word:
    done = _run("squeue", "--noheader", "--states=all", f"--jobs={number}", "--format=%T")
    if isinstance(done, str):
        return Word(None, done)
    if done.returncode != 0:
        if "Invalid job id" in done.stderr:
            return Word(False, f"squeue knows no job {number}")
        return Word(None, f"squeue failed: {_first_line(done.stderr)}")
    states = sorted(set(done.stdout.split()))
    if all(state in _SLURM_ENDED for state in states):
        return Word(False, f"squeue: job {number} is {', '.join(states).lower() or 'gone'}")
    return Word(True, f"squeue: job {number} is {', '.join(states).lower()}")


def _ask_pbs(number: str) -> Word:
    done = _run("qstat", number)
    if isinstance(done, str):
        return Word(None, done)
    if done.returncode == 0:
        return Word(True, f"qstat: job {number} is there")
    if done.returncode in (_PBS_UNKNOWN, _PBS_FINISHED):
        return Word(False, f"qstat: {_first_line(done.stderr)}")
    return Word(None, f"qstat failed: {_first_line(done.stderr)}")


def _run(*command: str) -> "subprocess.CompletedProcess[str] | str":
    """What the command did, or why it could not."""
    if shutil.which(command[0]) is None:
        return f"there is no {command[0]} here to ask"
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{command[0]} did not answer: {error}"


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0] or "without a word"
