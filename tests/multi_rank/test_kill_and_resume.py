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
from pathlib import Path

import psutil
import pytest

if importlib.util.find_spec("megatron.training") is None:
    pytest.skip("this wheel of megatron-core has no megatron.training", allow_module_level=True)

REPOSITORY = Path(__file__).resolve().parents[2]
ITERATIONS, SAVE_INTERVAL, KILLS = 40, 4, 4
LIMIT_SECONDS = 150
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
    """A place with two paths and a checkpoint directory, where a training is started again and again."""

    def __init__(self, directory: Path):
        self.directory, self.paths = directory, [directory / "a", directory / "b"]
        for path in self.paths:
            path.mkdir(parents=True)
        self.life = 0

    def start(self) -> "subprocess.Popen[bytes]":
        self.life += 1
        self.log, self.record = self.directory / f"log{self.life}", self.directory / f"record{self.life}"
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
            *(
                "-m",
                "mlp_offload",
                "run",
                str(REPOSITORY / "scripts" / "recorded_gpt.py"),
                "--record",
                str(self.record),
            ),
            *("--hash-at", str(ITERATIONS)),
            *(*ARGUMENTS.split(), "--train-iters", str(ITERATIONS), "--lr-decay-iters", str(ITERATIONS)),
            *("--save", str(self.directory / "saved"), "--load", str(self.directory / "saved")),
            *("--save-interval", str(SAVE_INTERVAL), "--data-cache-path", str(self.directory / "cache")),
            *(word for path in self.paths for word in ("--mlp-offload-path", str(path))),
            *("--mlp-offload-job", "kills"),
        ]
        environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        with open(self.log, "wb") as log:
            return subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)

    def lines(self, rank: int) -> "list[dict]":
        """What a rank of this life has recorded of its iterations so far."""
        file = self.record / f"rank{rank:04d}.jsonl"
        whole = file.read_text().rpartition("\n")[0].splitlines() if file.exists() else []
        return [json.loads(line) for line in whole[1:]]

    def finish(self) -> "list[list[dict]]":
        """Let a life go on to the end; what it recorded on each rank."""
        process = self.start()
        try:
            status = process.wait(LIMIT_SECONDS)
        finally:
            kill_all_of(process)
        assert status == 0, self.log.read_text()[-6000:]
        return [self.lines(rank) for rank in range(2)]

    def kill_after(self, iteration_count: int, wait_seconds: float) -> None:
        process = self.start()
        deadline = time.monotonic() + LIMIT_SECONDS
        try:
            while len(self.lines(0)) < iteration_count:
                assert process.poll() is None and time.monotonic() < deadline, self.log.read_text()[-6000:]
                time.sleep(0.05)
            time.sleep(wait_seconds)
            assert process.poll() is None, "it ended before it could be killed"
        finally:
            kill_all_of(process)


def exact(lines: "list[dict]") -> "list[list]":
    """What must be equal bit for bit."""
    return [[line.get(key) for key in ("iteration", "loss", "grad_norm", "parameters_sha256")] for line in lines]


def kill_all_of(process: "subprocess.Popen[bytes]") -> None:
    """SIGKILL for torchrun and its ranks, which have groups of their own."""
    try:
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        family = []
    for member in family:
        try:
            if "mlp-offload-sweeper" not in member.cmdline():
                member.send_signal(signal.SIGKILL)
        except psutil.Error:
            continue
    process.wait(10)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_killed_run_goes_on_with_the_bits_of_an_uninterrupted_one(tmp_path):
    whole = Run(tmp_path / "whole").finish()
    assert [line["iteration"] for line in whole[0]] == list(range(1, ITERATIONS + 1))
    killed, chance = Run(tmp_path / "killed"), random.Random(1)
    for _ in range(KILLS):
        killed.kill_after(chance.randint(0, SAVE_INTERVAL + 2), chance.uniform(0, 0.3))
    ended = killed.finish()
    first = ended[0][0]["iteration"] - 1
    assert 0 < first < ITERATIONS and first % SAVE_INTERVAL == 0, "it should have gone on from a checkpoint"
    for rank in range(2):
        assert exact(ended[rank]) == exact(whole[rank][first:])
        assert "parameters_sha256" in ended[rank][-1]
    assert not any(file.is_file() for path in killed.paths for file in path.rglob("*"))
