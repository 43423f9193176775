"""kill -9 at random moments: every restart starts in the same paths at once, and the numbers are those of no kill."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

TRAINER = Path(__file__).with_name("killed_trainer.py")
MOST_STEPS_HEARD = 8
MOST_STEPS_A_LIFE = MOST_STEPS_HEARD + 16  # a few more pass until the kill


class Life:
    """One process of the trainer."""

    def __init__(self, process: "subprocess.Popen[str]", log: Path):
        self.process, self.log = process, log

    def hears(self, word: str) -> str:
        """Wait for a line that begins with ``word``; the rest of it."""
        for line in self.process.stdout:
            if line.split()[0] == word:
                return line.removeprefix(word).strip()
        raise AssertionError(f"the trainer ended ({self.process.wait(10)}) before {word!r}:\n{self.log.read_text()}")

    def kill(self, sweepers_too: bool) -> None:
        """SIGKILL, as from the kernel's memory killer; with ``sweepers_too`` as when everything of a job is killed."""
        if sweepers_too:
            for child in psutil.Process(self.process.pid).children():
                if "mlp-offload-sweeper" in child.cmdline():
                    child.kill()
        self.process.kill()
        assert self.process.wait(10) == -signal.SIGKILL


@contextlib.contextmanager
def life(directory: Path, steps: int) -> "Iterator[Life]":
    log = directory / "stderr"
    with open(log, "w") as stderr:
        process = subprocess.Popen(
            [sys.executable, str(TRAINER), str(directory), str(steps)],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
    with process:
        try:
            yield Life(process, log)
        finally:
            process.kill()


def place(directory: Path) -> Path:
    for name in ("a", "b"):
        (directory / name).mkdir(parents=True)
    return directory


def disk_usage(directory: Path) -> "dict[str, int]":
    """Bytes on disk of each state file below ``directory``."""
    return {str(f.relative_to(directory)): f.stat().st_blocks * 512 for f in directory.rglob("*.state")}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kill_count", [3, pytest.param(20, marks=pytest.mark.full)])
def test_killed_again_and_again_it_ends_with_the_bits_of_an_uninterrupted_run(tmp_path, kill_count):
    chance = random.Random(kill_count)
    steps = kill_count * MOST_STEPS_A_LIFE  # so that no life but the last can end well
    with life(place(tmp_path / "uninterrupted"), steps) as whole:
        expected = whole.hears("finished")
    killed, usage, resumed_at = place(tmp_path / "killed"), None, 0
    for _ in range(kill_count):
        with life(killed, steps) as victim:
            victim.hears("starting")
            step_count = chance.randint(-1, MOST_STEPS_HEARD)  # -1: in the middle of the start
            if step_count >= 0:
                resumed_at = int(victim.hears("started"))
                usage = usage or disk_usage(killed)
                assert len(usage) == 2 and disk_usage(killed) == usage, "a dead process's files are in the way"
            for _ in range(step_count):
                victim.hears("step")
            time.sleep(chance.uniform(0, 0.02 if step_count >= 0 else 0.2))
            victim.kill(sweepers_too=chance.random() < 0.5)
    with life(killed, steps) as last:
        assert int(last.hears("started")) >= max(resumed_at, 1)
        assert last.hears("finished") == expected
        assert last.process.wait(10) == 0
    assert disk_usage(killed) == {} and not any((killed / "a").iterdir()) and not any((killed / "b").iterdir())
