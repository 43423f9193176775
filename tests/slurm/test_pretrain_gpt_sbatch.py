import os
import shlex
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = REPOSITORY / "slurm" / "pretrain_gpt.sbatch"


def dry_run(*flags: str, **settings: str) -> "dict[str, str]":
    """What ``--dry-run`` prints, as label -> value."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    for name in ("LAUNCH", "OFFLOAD_PATHS", "HOST_MEMORY", "DATA", "PYTHON"):
        environment.pop(name, None)
    done = subprocess.run(
        ["bash", str(SCRIPT), "--dry-run", *flags],
        capture_output=True,
        text=True,
        timeout=20,
        env=environment | settings,
        check=True,
    )
    assert done.stderr == ""
    return {line[:16].strip(): line[16:].strip() for line in done.stdout.splitlines()}


def flag_values(command: "list[str]", flag: str) -> "list[str]":
    return [command[i + 1] for i, word in enumerate(command) if word == flag]


@pytest.mark.parametrize("script", sorted([*REPOSITORY.glob("slurm/*.sbatch"), *REPOSITORY.glob("scripts/*.sh")]))
def test_bash_can_read_the_script(script):
    done = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True, timeout=20)
    assert (done.returncode, done.stderr) == (0, "")


def test_srun_starts_one_task_a_rank():
    shown = dry_run("--train-iters", "9", SLURM_JOB_NUM_NODES="3", SLURM_NTASKS_PER_NODE="8", SLURM_JOB_ID="4711")
    command = shlex.split(shown["command"])
    assert shown["ranks"] == "24"
    assert command[:3] == ["srun", "--kill-on-bad-exit=1", "--ntasks-per-node=8"]
    assert command[command.index("-m") :][:4] == ["-m", "mlp_offload", "run", "pretrain_gpt"]
    assert flag_values(command, "--global-batch-size") == ["192"]
    assert flag_values(command, "--train-iters")[-1] == "9"


def test_torchrun_starts_one_task_a_node():
    settings = {"SLURM_JOB_NUM_NODES": "3", "SLURM_NTASKS_PER_NODE": "8", "SLURM_JOB_ID": "4711"}
    command = shlex.split(dry_run(LAUNCH="torchrun", **settings)["command"])
    assert command[:4] == ["srun", "--kill-on-bad-exit=1", "--ntasks=3", "--ntasks-per-node=1"]
    assert {"--nnodes=3", "--nproc-per-node=8", "--rdzv-id=4711"} < set(command)


def test_variables_in_paths_are_left_for_each_node_to_expand():
    shown = dry_run(OFFLOAD_PATHS="$LOCAL_SCRATCH /lustre/me", HOST_MEMORY="2GiB")
    command = shlex.split(shown["command"])
    assert flag_values(command, "--mlp-offload-path") == ["$LOCAL_SCRATCH", "/lustre/me"]
    assert flag_values(command, "--mlp-offload-host-memory") == ["2GiB"]


def test_node_local_scratch_of_the_job_is_the_default_path():
    assert dry_run(SLURM_TMPDIR="/local/4711")["paths"] == "$SLURM_TMPDIR"
    assert dry_run(TMPDIR="/big/tmp")["paths"] == "/big/tmp"


def test_an_unknown_launcher_is_refused():
    with pytest.raises(subprocess.CalledProcessError) as caught:
        dry_run(LAUNCH="mpirun")
    assert caught.value.returncode == 2 and "mpirun" in caught.value.stderr
