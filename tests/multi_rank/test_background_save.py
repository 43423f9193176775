"""Checkpoints that Megatron's writer process writes while training goes on hold the state at the moment of the call."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from launch import run_scenarios
from scenarios import BACKGROUND


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return run_scenarios(2, BACKGROUND, tmp_path_factory.mktemp("background"))


@pytest.mark.parametrize("name", BACKGROUND)
def test_it_is_the_state_at_the_call(results, name):
    for rank in results[name]:
        assert rank["loaded"] == rank["saved"]
        assert rank["resumed"] == rank["uninterrupted"]


@pytest.mark.parametrize("name", [name for name in BACKGROUND if "slow" in name])
def test_three_steps_were_made_while_it_was_written(results, name):
    for rank in results[name]:
        assert rank["unfinished"] == 1 and rank["pinned"] > 0 and rank["pinned_after"] == 0


def test_without_room_training_waits(results):
    for rank in results["no room"]:
        assert rank["pinned"] == 0


# Its queue belongs to a third process, which must be able to read the error: else the writer itself would die.
WRITER = """
import errno
from mlp_offload.errors import ChecksumError, PathIOError
from mlp_offload.megatron import streaming

class Local(Exception):
    def __init__(self, what, why):  # as PathIOError: not what pickle calls it with
        super().__init__(f"{what} {why}")

def fails(error):
    raise error
    yield

if __name__ == "__main__":
    results = streaming._results_queue()
    for error in (PathIOError("/nvme/a", "read", 4096, 100, errno.EIO, "What now."), ChecksumError("other bytes"), Local("not", "sent")):
        streaming._write(".", (), {"file": fails(error)}, results)
        found = results.get(timeout=30)
        print(type(found).__name__, found, getattr(found, "errno", None))
"""


def test_an_error_of_the_writer_reaches_the_process_that_trains(tmp_path):
    (tmp_path / "writer.py").write_text(WRITER)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[2]), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, "writer.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.splitlines() == [
        "PathIOError read /nvme/a offset=4096 bytes=100: Input/output error (EIO). What now. 5",
        "ChecksumError other bytes None",
        "OffloadError Local: not sent None",
    ], done.stderr
