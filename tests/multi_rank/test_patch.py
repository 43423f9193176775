"""The patch for Megatron-LM's source: applies once, and the patched source trains with offload without the launcher."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

if importlib.util.find_spec("megatron.training") is None:
    pytest.skip("this wheel of megatron-core has no megatron.training to patch", allow_module_level=True)

REPOSITORY = Path(__file__).resolve().parents[2]
PATCH = REPOSITORY / "patches" / "0.19.2" / "optimizer-offload.patch"

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


@pytest.fixture
def tree(tmp_path):
    """A copy of the installed Megatron."""
    installed = Path(importlib.util.find_spec("megatron.core").origin).parent.parent
    shutil.copytree(installed, tmp_path / "source" / "megatron", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path / "source"


def apply(tree, *options):
    return subprocess.run(["git", "apply", *options, str(PATCH)], cwd=tree, capture_output=True, text=True)


def test_the_patched_source_trains_with_offload(tree, tmp_path):
    before = (tree / "megatron/training/arguments.py").read_text()
    done = apply(tree)
    assert done.returncode == 0, done.stderr
    assert apply(tree, "--check").returncode != 0, "it must not apply twice"
    (tmp_path / "state").mkdir()
    arguments = (
        "--num-layers 1 --hidden-size 64 --num-attention-heads 2 --seq-length 32 --max-position-embeddings 32 --bf16"
        " --mock-data --tokenizer-type NullTokenizer --vocab-size 128 --micro-batch-size 2 --global-batch-size 2"
        " --use-distributed-optimizer --lr 1e-3 --train-iters 3 --eval-iters 0 --eval-interval 100 --split 1,0,0 --use-cpu-initialization"
        " --num-workers 0 --optimizer-offload mlp --mlp-offload-host-memory 300KiB --mlp-offload-subgroup-size 5000"
        f" --mlp-offload-path {tmp_path}/state --mlp-offload-telemetry {tmp_path}/telemetry"
    )
    environment = os.environ | {
        "PYTHONPATH": f"{tree}:{REPOSITORY}",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "0",
        **{"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "OMP_NUM_THREADS": "1"},
    }
    command = [sys.executable, "-c", TRAIN, *arguments.split()]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    lines = [json.loads(line) for line in (tmp_path / "telemetry" / "rank0000.jsonl").read_text().splitlines()]
    assert [line["iteration"] for line in lines] == [1, 2, 3]
    assert all(line["loss"] > 0 and line["fetch_count"] > line["hit_count"] for line in lines)
    assert apply(tree, "--reverse").returncode == 0
    assert (tree / "megatron/training/arguments.py").read_text() == before
