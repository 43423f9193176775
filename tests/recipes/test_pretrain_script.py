"""``scripts/recipes/pretrain.sh``: what it would run, and each recipe trained with its sizes reduced, on two gloo ranks."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from mlp_offload.recipes import NAMES, load

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = REPOSITORY / "scripts" / "recipes" / "pretrain.sh"
ORDINARY = ("gpt-52b", "40GB")  # grouped queries, pipeline stages and uneven ones
OTHERS = [(name, memory) for name in NAMES for memory in ("40GB", "80GB") if (name, memory) != ORDINARY]
HIDDEN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def script(*arguments, timeout=60, **settings):
    kept = {k: v for k, v in os.environ.items() if k not in HIDDEN and not k.startswith("SLURM_")}
    environment = kept | {"PYTHON": sys.executable, "PYTHONPATH": str(REPOSITORY), "CUDA_VISIBLE_DEVICES": ""}
    environment |= {"PYTHONWARNINGS": "ignore"} | settings
    return subprocess.run(
        ["bash", str(SCRIPT), *arguments], capture_output=True, text=True, timeout=timeout, env=environment
    )


def command(done):
    """The words of the command that a dry run printed."""
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("command "))
    return shlex.split(line)[1:]


def test_a_dry_run_prints_the_complete_command_line():
    done = script(
        *("gpt-70b", "--dry-run", "--lr", "1e-5"),
        **{"OFFLOAD_PATHS": "/nvme,read=6GB/s $SCRATCH/me", "DATA": "/data/my text", "CHECKPOINTS": "/ckpt"},
        **{"NODE_RANK": "1", "MASTER_ADDR": "node7", "HOST_MEMORY": "60GiB"},
    )
    assert done.returncode == 0, done.stderr
    words = command(done)
    for flags in (
        ("--nnodes=2", "--node-rank=1", "--master-addr=node7", "--master-port=29500", "-m", "mlp_offload", "run"),
        load("gpt-70b").flags,
        ("--data-path", "/data/my text"),
        ("--save", "/ckpt", "--load", "/ckpt", "--mlp-offload-host-memory", "60GiB"),
        ("--mlp-offload-path", "/nvme,read=6GB/s", "--mlp-offload-path", "$SCRATCH/me", "--lr", "1e-5"),
    ):
        assert any(words[i : i + len(flags)] == list(flags) for i in range(len(words))), flags
    assert words[-2:] == ["--lr", "1e-5"]


@pytest.mark.parametrize(
    "settings, begin",
    [
        (
            {"LAUNCH": "srun", "GPU_MEMORY": "40GB"},
            ["srun", "--kill-on-bad-exit=1", "--nodes=4", "--ntasks-per-node=4"],
        ),
        ({"LAUNCH": "exec"}, [sys.executable, "-m", "mlp_offload", "run", "pretrain_gpt"]),
    ],
)
def test_other_launchers(settings, begin):
    assert command(script("gpt-70b", "--dry-run", **settings))[: len(begin)] == begin


def test_eight_gpus_a_node_are_half_the_nodes():
    done = script("gpt-70b", "--dry-run", GPUS_PER_NODE="8")
    assert "--standalone" in command(done) and "--nproc-per-node=8" in command(done) and not done.stderr
    assert "--nnodes=3" in command(script("gpt-70b", "--dry-run", GPUS_PER_NODE="3"))


def test_our_own_flags_count_wherever_they_stand():
    done = script("gpt-70b", "--train-iters", "10", "--small", "--lr", "1", "--dry-run", PYTHON=sys.executable)
    words = command(done)
    assert words[-4:] == ["--train-iters", "10", "--lr", "1"] and "--nproc-per-node=2" in words
    assert not {"--small", "--dry-run"} & set(words)


@pytest.mark.parametrize(
    "arguments, settings, status, message",
    [
        (["gpt-71b", "--dry-run"], {}, 1, "no recipe 'gpt-71b'; there are gpt-7b"),
        (["gpt-70b", "--dry-run"], {"LAUNCH": "mpirun"}, 2, "LAUNCH=mpirun: must be torchrun, srun or exec"),
        (
            ["gpt-70b", "--dry-run"],
            {"NODES": "1"},
            0,
            "warning: the recipe needs 8 GPUs, not 4; mlp-offload plan gpt-70b",
        ),
        (["gpt-70b", "--dry-run"], {"GPUS_PER_NODE": "x"}, 2, "GPUS_PER_NODE=x: must be a count of 1 or more"),
        (["gpt-70b", "--dry-run"], {"NODES": "0"}, 2, "NODES=0: must be a count of 1 or more"),
        ([], {}, 2, "NAME [--dry-run]"),
        (["--help"], {}, 0, "GPU_MEMORY"),
    ],
)
def test_what_it_tells(arguments, settings, status, message):
    done = script(*arguments, **settings)
    assert done.returncode == status and message in done.stdout + done.stderr


def check_small_run(name, memory, directory):
    paths = [directory / "a", directory / "b"]
    for path in paths:
        path.mkdir()
    done = script(name, "--small", timeout=280, GPU_MEMORY=memory, OFFLOAD_PATHS=" ".join(map(str, paths)))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    losses = [float(loss) for loss in re.findall(r"lm loss: (\S+)", done.stdout)]
    assert len(losses) == 3 and all(5 < loss < 7 for loss in losses)  # ln 256 = 5.5
    steps = re.findall(r"read (\S+ \w+) \| written (\S+ \w+) \| hits (\d+)/(\d+)", done.stdout)
    assert len(steps) == 3 and all("0 B" not in moved and int(hits) < int(of) for *moved, hits, of in steps)
    assert [list(path.iterdir()) for path in paths] == [[], []]


def test_a_recipe_trains_with_its_sizes_reduced(tmp_path):
    check_small_run(*ORDINARY, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("name, memory", OTHERS)
def test_every_recipe_trains_with_its_sizes_reduced(name, memory, tmp_path):
    check_small_run(name, memory, tmp_path)
