"""``mlp-offload run`` on two ranks, killed with everything of it, resumed from Megatron's own checkpoint."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

if importlib.util.find_spec("megatron.training") is None:
    pytest.skip("this wheel of megatron-core has no megatron.training", allow_module_level=True)

REPOSITORY = Path(__file__).resolve().parents[2]
SAVE_INTERVAL = 4
LIMIT_SECONDS = 200  # to start, and for a few iterations, on a busy machine
ITERATION_LIMIT_SECONDS = 2
PHASES = ("training", "flush", "save")
# No dropout: on the CPU it draws from the generator that a new data loader also draws from, so that a resumed run has
# other masks, with stock Megatron too.
ARGUMENTS = """
    --num-layers 2 --hidden-size 64 --num-attention-heads 2 --seq-length 32 --max-position-embeddings 32 --bf16
    --mock-data --tokenizer-type NullTokenizer --vocab-size 128 --micro-batch-size 2 --global-batch-size 8 --split 1,0,0
    --use-distributed-optimizer --lr 1e-3 --eval-iters 0 --eval-interval 1000 --use-cpu-initialization --num-workers 0
    --hidden-dropout 0 --attention-dropout 0
    --ckpt-format torch_dist --optimizer-offload mlp --mlp-offload-host-memory 300KiB --mlp-offload-subgroup-size 4099
"""


class Run:
    """A place with two paths and a checkpoint directory, where a training is started again and again.

    Args:
        options: more flags of Megatron's, for every life.
    """

    def __init__(self, directory: Path, iterations: int, options: "Sequence[str]" = ()):
        self.options, self.directory, self.paths = options, directory, [directory / "a", directory / "b"]
        self.saved, self.iterations, self.life = directory / "saved", iterations, 0
        for path in self.paths:
            path.mkdir(parents=True)

    def start(self, *options: str) -> "subprocess.Popen[bytes]":
        self.life, self.started = self.life + 1, time.time()
        self.log, self.record = self.directory / f"log{self.life}", self.directory / f"record{self.life}"
        script = str(REPOSITORY / "scripts" / "recorded_gpt.py")
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
            *("-m", "mlp_offload", "run", script, "--record", str(self.record), "--hash-at", str(self.iterations)),
            *(*ARGUMENTS.split(), "--train-iters", str(self.iterations), "--lr-decay-iters", str(self.iterations)),
            *("--save", str(self.saved), "--load", str(self.saved), "--save-interval", str(SAVE_INTERVAL)),
            *("--data-cache-path", str(self.directory / "cache")),
            *(word for path in self.paths for word in ("--mlp-offload-path", str(path))),
            *("--mlp-offload-job", "kills", *self.options, *options),
        ]
        environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        with open(self.log, "wb") as log:
            return subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)

    def lines(self, rank: int) -> "list[dict]":
        """What a rank of this life has recorded of its iterations so far; first, the iteration it began after."""
        file = self.record / f"rank{rank:04d}.jsonl"
        whole = file.read_text().rpartition("\n")[0].splitlines() if file.exists() else []
        return [json.loads(line) for line in whole]

    def last_complete(self) -> int:
        """Iteration of the checkpoint that the next life will load; 0 when there is none."""
        tracker = self.saved / "latest_checkpointed_iteration.txt"
        text = tracker.read_text() if tracker.exists() else ""
        return int(text or 0)

    def begun(self) -> int:
        """Iteration of the newest checkpoint that holds any data; 0 when there is none."""
        return max(
            (int(file.parent.name.removeprefix("iter_")) for file in self.saved.glob("iter_*/*.distcp")), default=0
        )

    def finish(self, *options: str) -> "list[list[dict]]":
        """Let a life go on to the end, or to where ``options`` end it; what it recorded on each rank."""
        process = self.start(*options)
        try:
            status = process.wait(limit_seconds(1, self.iterations))
        finally:
            kill_all_of(process, [])
        assert status == 0, self.log.read_text()[-6000:]
        return [self.lines(rank) for rank in range(2)]

    def kill_in(self, phase: str, chance: random.Random) -> bool:
        """Start a life and kill everything of it in ``phase``; whether a checkpoint was begun and not completed."""
        expected, begun = self.last_complete(), self.begun()
        iteration_count = chance.randint(2, SAVE_INTERVAL + 2)
        process = self.start()
        family: "list[psutil.Process]" = []
        deadline = time.monotonic() + LIMIT_SECONDS
        try:
            while not self._reached(phase, iteration_count, begun):
                assert process.poll() is None and time.monotonic() < deadline, self.log.read_text()[-6000:]
                if len(self.lines(0)) > 1 and not family:
                    family = psutil.Process(process.pid).children(recursive=True)
                time.sleep(0.001)
            # A step of this model takes some 50 ms and flushes go on after it; a save takes some 100 ms.
            time.sleep({"training": chance.uniform(0, 0.3), "flush": chance.uniform(0, 0.02), "save": 0.0}[phase])
            assert process.poll() is None, "it ended before it could be killed"
        finally:
            kill_all_of(process, family)
        for rank in range(2):
            if lines := self.lines(rank):
                assert lines[0]["iteration"] == expected, "it did not go on from the last complete checkpoint"
        return self.begun() > self.last_complete()

    def _reached(self, phase: str, iteration_count: int, begun: int) -> bool:
        if phase == "save":
            return self.begun() > max(begun, self.last_complete()) or self._overwrites(begun)
        return len(self.lines(0)) > iteration_count

    def _overwrites(self, begun: int) -> bool:
        """A checkpoint that an earlier life left incomplete is being written again."""
        files = self.saved.glob(f"iter_{begun:07d}/*.distcp")
        return begun > self.last_complete() and any(file.stat().st_mtime > self.started for file in files)

    def files(self) -> "set[str]":
        """All files below the checkpoint directory."""
        return {str(file.relative_to(self.saved)) for file in self.saved.rglob("*") if file.is_file()}


def limit_seconds(lives: int, iterations: int) -> int:
    """For ``lives`` that make ``iterations`` together."""
    return lives * LIMIT_SECONDS + iterations * ITERATION_LIMIT_SECONDS


def exact(lines: "list[dict]") -> "list[list]":
    """What must be equal bit for bit."""
    return [[line.get(key) for key in ("iteration", "loss", "grad_norm")] for line in lines]


def kill_all_of(process: "subprocess.Popen[bytes]", family: "list[psutil.Process]") -> None:
    """SIGKILL for torchrun and its ranks, which have groups of their own; first at once for those that are known."""
    for member in family:
        end(member)
    try:
        others = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        others = []
    for member in others:
        end(member)
    process.wait(10)


def end(member: psutil.Process) -> None:
    try:
        if "mlp-offload-sweeper" not in member.cmdline():
            member.send_signal(signal.SIGKILL)
    except psutil.Error:
        pass


def check_kills(directory: Path, iterations: int, phases: "list[str]") -> int:
    """Kill a run in each of ``phases``, let it end, and compare it with one that never stopped.

    Returns:
        How many kills left a checkpoint behind that was not complete.
    """
    whole = Run(directory / "whole", iterations)
    uninterrupted = whole.finish()
    assert [line["iteration"] for line in uninterrupted[0]] == list(range(iterations + 1))
    killed, chance, incomplete = Run(directory / "killed", iterations), random.Random(1), 0
    for phase in phases:
        incomplete += killed.kill_in(phase, chance)
        for rank in range(2):
            lines = killed.lines(rank)[1:]
            first = lines[0]["iteration"] if lines else 0
            assert exact(lines) == exact(uninterrupted[rank][first : first + len(lines)])
    first = killed.last_complete()
    assert 0 < first < iterations and first % SAVE_INTERVAL == 0
    ended = killed.finish()
    for rank in range(2):
        assert ended[rank][0]["iteration"] == first, "it should have gone on from the last complete checkpoint"
        assert exact(ended[rank][1:]) == exact(uninterrupted[rank][first + 1 :])
        assert ended[rank][-1]["parameters_sha256"] == uninterrupted[rank][-1]["parameters_sha256"]
    assert not any(file.is_file() for path in killed.paths for file in path.rglob("*"))
    assert killed.files() == whole.files()
    return incomplete


@pytest.mark.timeout(limit_seconds(5, 2 * 20))
def test_a_run_killed_in_each_phase_goes_on_with_the_bits_of_an_uninterrupted_one(tmp_path):
    assert check_kills(tmp_path, 20, ["save", "training", "flush"]) > 0


@pytest.mark.full
@pytest.mark.timeout(limit_seconds(22, 2 * 200))
def test_a_run_killed_twenty_times_goes_on_with_the_bits_of_an_uninterrupted_one(tmp_path):
    chance = random.Random(2)
    phases = [*PHASES, *(chance.choice(PHASES) for _ in range(17))]
    assert check_kills(tmp_path, 200, phases) >= 3


@pytest.mark.full
@pytest.mark.timeout(limit_seconds(3, 2 * 20))
def test_a_run_that_saves_in_the_background_goes_on_with_the_bits_of_an_uninterrupted_one(tmp_path):
    uninterrupted = Run(tmp_path / "whole", 20).finish()
    background = ["--async-save", "--use-persistent-ckpt-worker", "--async-strategy", "mcore"]
    run = Run(tmp_path / "background", 20, background)
    first = run.finish("--exit-interval", "10")
    log = run.log.read_text()
    assert "not written in the background" not in log, log[-6000:]
    assert [log.count(f"async checkpoint save at iteration {iteration:7d}") for iteration in (4, 8, 10)] == [1, 1, 1]
    assert run.last_complete() == 10
    second = run.finish()
    for rank in range(2):
        assert second[rank][0]["iteration"] == 10
        assert exact(first[rank][1:] + second[rank][1:]) == exact(uninterrupted[rank][1:])
        assert second[rank][-1]["parameters_sha256"] == uninterrupted[rank][-1]["parameters_sha256"]
    assert run.last_complete() == 20
    assert not any(file.is_file() for path in run.paths for file in path.rglob("*"))
