"""Patched source trains with offload: Megatron-Core by OptimizerConfig alone, megatron.training by its own flags."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from launch import run_scenarios
from megatron_trees import RELEASES, unpack

from mlp_offload.cli.main import main
from mlp_offload.telemetry import read_steps

REPOSITORY = Path(__file__).resolve().parents[2]
# Later releases need Python 3.12
RUNNABLE = [release for release in RELEASES if sys.version_info >= (3, 12) or release == "0.16.1"]
WITH_TRAINING = "0.19.2"

# What a script does on a machine without GPUs; the flags come from the patched source alone.
TRAIN = """
import functools, runpy, sys
from mlp_offload.megatron import cpu_device, switch, wheel_gaps
if cpu_device.activate():
    from megatron.training.initialize import initialize_megatron
    switch.rebind(initialize_megatron, functools.partial(initialize_megatron, allow_no_cuda=True))
wheel_gaps.fill()
runpy.run_module("mlp_offload.megatron.pretrain_gpt", run_name="__main__", alter_sys=True)
"""

ALONE = """
import argparse, sys
sys.modules["mlp_offload"] = None  # as if it were not installed
from megatron.core.optimizer import OptimizerConfig
from megatron.training.arguments import add_megatron_arguments
parser = add_megatron_arguments(argparse.ArgumentParser())
assert "--lr" in parser._option_string_actions and "--optimizer-offload" not in parser._option_string_actions
assert OptimizerConfig().optimizer_offload == "none"
"""


def patched_tree(release, directory):
    tree = unpack(release, directory)
    assert main(["patch", "apply", str(tree)]) == 0
    return tree


def run(tree, program, *arguments):
    """A Python program with the Megatron of ``tree``; it must end well."""
    environment = os.environ | {
        "PYTHONPATH": f"{tree}:{REPOSITORY}",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "0",
        **{"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "OMP_NUM_THREADS": "1"},
    }
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, cwd=tree.parent, env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.mark.parametrize("release", RUNNABLE)
def test_patched_megatron_core_trains_the_bits_of_stock(release, tmp_path):
    tree = patched_tree(release, tmp_path / "tree")
    scenario = {"kind": "patched", "steps": 3, "layout": {}}
    for rank in run_scenarios(2, {"DP2": scenario}, tmp_path, megatron=tree)["DP2"]:
        assert rank["core"].startswith(str(tree))
        assert (rank["stock class"], rank["patched class"]) == ("DistributedOptimizer", "MLPDistributedOptimizer")
        assert (rank["stock field"], rank["patched field"]) == ("str", "OffloadConfig")
        assert rank["stock"] == rank["patched"]
        assert len({step["loss"] for step in rank["stock"]["steps"]}) == 3
        word, empty, unknown = rank["errors"]
        assert word.startswith("OptimizerConfig.optimizer_offload='mlp' does not say where state lives: give ")
        assert empty.startswith("OptimizerConfig.optimizer_offload={'paths': []} does not say where")
        assert unknown.startswith("optimizer_offload: unknown key 'path'; did you mean 'paths'?")


@pytest.mark.skipif(WITH_TRAINING not in RUNNABLE, reason="needs Python 3.12")
def test_patched_megatron_training_trains_with_its_own_flags(tmp_path):
    tree = patched_tree(WITH_TRAINING, tmp_path / "tree")
    (tmp_path / "state").mkdir()
    arguments = (
        "--num-layers 1 --hidden-size 64 --num-attention-heads 2 --seq-length 32 --max-position-embeddings 32 --bf16"
        " --mock-data --tokenizer-type NullTokenizer --vocab-size 128 --micro-batch-size 2 --global-batch-size 2"
        " --use-distributed-optimizer --lr 1e-3 --train-iters 3 --eval-iters 0 --eval-interval 100 --split 1,0,0 --use-cpu-initialization"
        " --num-workers 0 --optimizer-offload mlp --mlp-offload-host-memory 300KiB --mlp-offload-subgroup-size 5000"
        f" --mlp-offload-path {tmp_path}/state --mlp-offload-telemetry {tmp_path}/telemetry"
    )
    run(tree, TRAIN, *arguments.split())
    steps = read_steps(tmp_path / "telemetry" / "rank0000.jsonl")
    assert [step.iteration for step in steps] == [1, 2, 3]
    assert all(step.loss > 0 and step.fetch_count > step.hit_count for step in steps)


@pytest.mark.skipif(WITH_TRAINING not in RUNNABLE, reason="needs Python 3.12")
def test_patched_source_without_mlp_offload_has_no_flag_and_starts(tmp_path):
    run(patched_tree(WITH_TRAINING, tmp_path / "tree"), ALONE)
