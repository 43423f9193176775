"""Batch scripts without SLURM: what they would start, what they refuse, and what each node decides for itself."""

import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPTS = REPOSITORY / "slurm"
SETTINGS = "LAUNCH OFFLOAD_PATHS HOST_MEMORY DATA PYTHON NODE_SCRATCH SITE RUN_DIR CPU_BIND NUMA_BIND TMPDIR"
PLACES = "/local/scratch /scratch/local /localscratch /local_scratch /mnt/nvme /raid/scratch"


def call(script: str, *words: str, cwd: Path = REPOSITORY, **settings: str) -> "subprocess.CompletedProcess[str]":
    """A script of ours, in an environment without SLURM's variables and without settings but those given."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_") and k not in SETTINGS.split()}
    command = ["bash", str(SCRIPTS / script), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=kept | settings, cwd=cwd)


def dry_run(*flags: str, script: str = "pretrain_gpt.sbatch", **settings: str) -> "dict[str, str]":
    """What ``--dry-run`` prints, as label -> value; "node": what it says of this host."""
    done = call(script, "--dry-run", *flags, **settings)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    return {line[:16].strip(): line[16:].strip() for line in lines} | {"node": "".join(lines[-1:])}


def flag_values(command: "list[str]", flag: str) -> "list[str]":
    return [command[i + 1] for i, word in enumerate(command) if word == flag]


@pytest.mark.parametrize(
    "script",
    sorted(
        file
        for pattern in ("slurm/*.sbatch", "slurm/*.sh", "slurm/sites/*.conf", "scripts/*.sh")
        for file in REPOSITORY.glob(pattern)
    ),
)
def test_bash_can_read_the_script(script):
    done = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True, timeout=20)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("script", ["megatron.sbatch", "pretrain_gpt.sbatch", "chain.sh"])
def test_help_says_what_it_is_for_and_how_it_is_called(script):
    done = call(script, "--help")
    assert done.returncode == 0 and not done.stderr and f"slurm/{script}" in done.stdout
    assert "#" not in done.stdout and "set -e" not in done.stdout


def test_srun_starts_one_task_a_rank():
    shown = dry_run("--train-iters", "9", SLURM_JOB_NUM_NODES="3", SLURM_NTASKS_PER_NODE="8", SLURM_JOB_ID="4711")
    command = shlex.split(shown["command"])
    assert shown["ranks"] == "24"
    assert command[:4] == ["srun", "--kill-on-bad-exit=1", "--cpu-bind=cores", "--ntasks-per-node=8"]
    assert command[4:7] == ["bash", "slurm/node.sh", "rank"]
    assert command[command.index("-m") :][:4] == ["-m", "mlp_offload", "run", "pretrain_gpt"]
    assert flag_values(command, "--global-batch-size") == ["192"]
    assert flag_values(command, "--train-iters")[-1] == "9"


def test_torchrun_starts_one_task_a_node():
    settings = {"SLURM_JOB_NUM_NODES": "3", "SLURM_NTASKS_PER_NODE": "8", "SLURM_JOB_ID": "4711"}
    command = shlex.split(dry_run(LAUNCH="torchrun", **settings)["command"])
    assert command[:3] == ["srun", "--kill-on-bad-exit=1", "--cpus-per-task=8"]
    assert command[3:5] == ["--ntasks=3", "--ntasks-per-node=1"]
    assert {"--nnodes=3", "--nproc-per-node=8", "--rdzv-id=4711"} < set(command)


def test_variables_in_paths_are_left_for_each_node_to_expand():
    shown = dry_run(OFFLOAD_PATHS="$LOCAL_SCRATCH /lustre/me", HOST_MEMORY="2GiB")
    command = shlex.split(shown["command"])
    assert flag_values(command, "--mlp-offload-path") == ["$LOCAL_SCRATCH", "/lustre/me"]
    assert flag_values(command, "--mlp-offload-host-memory") == ["2GiB"]


def test_cores_and_gpus_of_the_job_reach_its_step():
    """SLURM gives a step neither of them by itself, and binds one GPU a task where the job asked for GPUs a task."""
    command = dry_run(SLURM_CPUS_PER_TASK="12", SLURM_GPUS_ON_NODE="8", CPU_BIND="none")["command"]
    assert {"--cpus-per-task=12", "--gpu-bind=none"} < set(shlex.split(command)) and "--cpu-bind" not in command


def test_a_run_saves_where_it_loads_from_and_at_the_signal():
    shown = dry_run(SLURM_JOB_ID="4711")
    command = shlex.split(shown["command"])
    place = str(REPOSITORY / "runs" / "slurm-4711" / "checkpoints")
    assert flag_values(command, "--save") == flag_values(command, "--load") == [place] == [shown["checkpoints"]]
    assert "--exit-signal-handler" in command and flag_values(command, "--exit-signal") == ["SIGUSR1"]
    assert shown["on signal"] == "save, then requeue"
    shown = dry_run("--save", "/a", "--save=/b", SLURM_JOB_ID="4712", SLURM_ARRAY_JOB_ID="4711", EXIT_SIGNAL="USR2")
    assert shown["checkpoints"] == "/b" and shown["run directory"].endswith("runs/slurm-4711")
    assert shown["on signal"] == "save, then exit"
    assert flag_values(shlex.split(shown["command"]), "--exit-signal") == ["SIGUSR2"]


def test_what_a_run_begins_from_does_not_win_over_its_own_checkpoint(tmp_path):
    flags = ("pretrain_gpt", "--finetune", "--load", "/base", "--lr", "1")
    settings = {"script": "megatron.sbatch", "RUN_DIR": str(tmp_path)}
    own = str(tmp_path / "checkpoints")
    first = shlex.split(dry_run(*flags, **settings)["command"])
    assert flag_values(first, "--load") == [own, "/base"] and "--finetune" in first
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("7\n")
    later = shlex.split(dry_run(*flags, **settings)["command"])
    assert flag_values(later, "--load")[-1] == own and "--finetune" not in later
    assert later[-6:] == ["--load", "/base", "--lr", "1", "--load", own]
    # With its own checkpoint as what it begins from, all flags are as they were given.
    same = shlex.split(dry_run("pretrain_gpt", "--no-load-rng", "--load", own, **settings)["command"])
    assert same[-3:] == ["--no-load-rng", "--load", own]


def test_any_megatron_script_with_ones_own_flags():
    shown = dry_run("/megatron/pretrain_gpt.py", "--bf16", script="megatron.sbatch", OFFLOAD_PATHS="/a")
    command = shlex.split(shown["command"])
    run = command[command.index("-m") :]
    assert run[:5] == ["-m", "mlp_offload", "run", "/megatron/pretrain_gpt.py", "--use-distributed-optimizer"]
    assert run[-1] == "--bf16" and flag_values(run, "--mlp-offload-path") == ["/a"]
    done = call("megatron.sbatch")
    assert done.returncode == 2 and "sbatch --nodes 4" in done.stderr


def test_a_site_file_is_read_and_a_missing_one_refused(tmp_path):
    site = tmp_path / "site.conf"
    site.write_text("HOST_MEMORY=3GiB\nCPU_BIND=none\n")
    shown = dry_run(SITE=str(site))
    assert flag_values(shlex.split(shown["command"]), "--mlp-offload-host-memory") == ["3GiB"]
    assert shown["site"] == str(site)
    done = call("pretrain_gpt.sbatch", "--dry-run", SITE=str(tmp_path / "none"))
    assert done.returncode == 1 and "none: no such file" in done.stderr


@pytest.mark.parametrize(
    "settings",
    [
        {"LAUNCH": "mpirun"},
        {"EXIT_SIGNAL": "KILL"},
        {"IDLE_LIMIT": "0"},
        {"ON_SIGNAL": "sleep"},
        {"EXIT_SIGNAL": "TERM"},
    ],
)
def test_a_setting_that_cannot_be_is_refused(settings):
    name, value = next(iter(settings.items()))
    done = call("pretrain_gpt.sbatch", "--dry-run", **settings)
    assert done.returncode == 2 and f"{name}={value}: must be" in done.stderr


def test_without_slurm_nothing_is_started():
    done = call("pretrain_gpt.sbatch")
    assert done.returncode == 1 and "submit with sbatch, or look with --dry-run" in done.stderr


def test_a_chain_shares_name_and_run_directory(tmp_path):
    done = call("chain.sh", "--dry-run", "3", "--nodes", "4", "x.sbatch", "--lr", "1", cwd=tmp_path)
    first, *links = done.stdout.splitlines()
    assert first.startswith(f"run directory {tmp_path}/runs/mlp-offload-chain-")
    assert len(links) == 3 and len(set(links)) == 1
    assert "--dependency=singleton" in links[0] and links[0].strip().endswith("--nodes 4 x.sbatch --lr 1")
    for words in ([], ["0", "x"], ["two", "x"], ["2"]):
        assert call("chain.sh", *words).returncode == 2


# --- what each node decides


def test_scratch_is_the_first_directory_on_a_local_disk_and_the_others_are_told(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        settings = {"SLURM_TMPDIR": "/nowhere", "LOCAL_SCRATCH": memory, "TMPDIR": str(disk)}
        told = dry_run(**settings)["node"]
        assert f"scratch {disk} ($TMPDIR)" in told and " free" in told
        assert "not $SLURM_TMPDIR=/nowhere (no directory)" in told
        assert f"not $LOCAL_SCRATCH={memory} (tmpfs, which is memory)" in told
    assert f"scratch {disk} ($LOCAL_SCRATCH)" in dry_run(LOCAL_SCRATCH=str(disk), TMPDIR="/tmp")["node"]
    assert f"scratch {disk} (set)" in dry_run(NODE_SCRATCH=str(disk), TMPDIR="/tmp")["node"]
    if not any(map(os.path.isdir, PLACES.split())):
        assert "scratch /tmp (found)" in dry_run()["node"]
    assert "scratch" not in dry_run(OFFLOAD_PATHS="/a")["node"]


def test_the_check_names_node_path_and_reason(tmp_path):
    good = {"PYTHON": sys.executable, "PYTHONPATH": str(REPOSITORY), "SLURMD_NODENAME": "n7"}
    done = call("node.sh", "check", OFFLOAD_PATHS=f"{tmp_path},read=1GB/s", **good)
    assert done.returncode == 0 and f"node n7: path {tmp_path}, " in done.stdout
    assert list(tmp_path.iterdir()) == []
    for paths, message in (
        (f"{tmp_path} /nowhere", "node n7: path '/nowhere': No such file or directory"),
        ("$NOWHERE/x", "environment variable $NOWHERE is not set"),
        (f"{tmp_path},speed=1", "'speed'"),
    ):
        done = call("node.sh", "check", OFFLOAD_PATHS=paths, **good)
        assert done.returncode != 0 and message in done.stderr, done.stderr
    done = call("node.sh", "check", OFFLOAD_PATHS=str(tmp_path), SLURMD_NODENAME="n7", PYTHON="/nowhere/python")
    assert done.returncode == 1 and "node n7: PYTHON=/nowhere/python cannot be run here" in done.stderr


def test_the_check_finds_a_full_disk(tmp_path):
    script = 'mount -t tmpfs -o size=16k tmpfs "$OFFLOAD_PATHS" && exec bash "$1" check'
    command = ["unshare", "-Urm", "sh", "-c", script, "sh", str(SCRIPTS / "node.sh")]
    settings = {"PYTHON": sys.executable, "PYTHONPATH": str(REPOSITORY), "OFFLOAD_PATHS": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=os.environ | settings)
    if done.stderr.startswith(("unshare:", "mount:")):
        pytest.skip(f"no private mounts here: {done.stderr.strip()}")
    assert done.returncode == 1 and "No space left on device" in done.stderr and "Traceback" not in done.stderr


def test_a_rank_ignores_the_signal_until_its_program_handles_it():
    done = call("node.sh", "rank", "bash", "-c", "kill -USR1 $$; echo lives", OFFLOAD_PATHS="/a")
    assert (done.returncode, done.stdout) == (0, "lives\n")


def test_an_agent_tells_its_programs_status_whatever_signals_come_as_it_ends():
    """torchrun's agent is asked again and again while its ranks save."""
    for _ in range(5):
        kept = {k: v for k, v in os.environ.items() if k not in SETTINGS.split()}
        command = ["bash", str(SCRIPTS / "node.sh"), "agent", "sleep", "0.4"]
        agent = subprocess.Popen(command, env=kept | {"OFFLOAD_PATHS": "/a"}, stderr=subprocess.DEVNULL)
        time.sleep(0.2)
        while agent.poll() is None:
            agent.send_signal(signal.SIGUSR1)
            time.sleep(0.01)
        assert agent.returncode == 0


@pytest.mark.parametrize("mode", ["rank", "agent"])
def test_a_signal_while_the_site_file_is_read_ends_nothing(tmp_path, mode):
    site = tmp_path / "site.conf"
    site.write_text("kill -USR1 $$; kill -USR1 $$\n")
    done = call("node.sh", mode, "echo", "started", OFFLOAD_PATHS="/a", SITE=str(site))
    assert (done.returncode, done.stdout) == (0, "started\n")


def test_a_rank_binds_itself_to_the_numa_node_of_its_gpu(tmp_path):
    """Two NUMA nodes and four GPUs, as sysfs, nvidia-smi and numactl show them."""
    nodes = tmp_path / "sys" / "devices" / "system" / "node"
    nodes.mkdir(parents=True)
    (nodes / "online").write_text("0-1\n")
    for bus, numa in (("3b", 1), ("5e", 1), ("86", 0), ("af", 0)):
        device = tmp_path / "sys" / "bus" / "pci" / "devices" / f"0000:{bus}:00.0"
        device.mkdir(parents=True)
        (device / "numa_node").write_text(f"{numa}\n")
    commands = {
        "nvidia-smi": "printf '00000000:%s:00.0\\n' 3B 5E 86 AF",
        "numactl": 'if [ "$1" = --show ]; then echo "cpubind: ${NODES:-0 1}"; else echo "$1 $2"; shift 2; exec "$@"; fi',
    }
    for name, script in commands.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    settings = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SYSFS": str(tmp_path / "sys"), "OFFLOAD_PATHS": "/a"}

    def bound(**more: str) -> str:
        done = call("node.sh", "rank", "echo", "started", **settings, **more)
        assert done.returncode == 0 and done.stdout.endswith("started\n")
        return done.stdout

    for rank, numa in enumerate((1, 1, 0, 0)):
        assert f"--cpunodebind={numa} --preferred={numa}\nstarted" in bound(SLURM_LOCALID=str(rank))
        assert f"--cpunodebind={numa} --preferred={numa}\nstarted" in bound(LOCAL_RANK=str(rank), SLURM_LOCALID="0")
    # no such GPU: by the number of ranks
    more = {"SLURM_LOCALID": "5", "SLURM_NTASKS_PER_NODE": "8"}
    assert "--cpunodebind=1" in bound(**more)
    # a part of a node: its NUMA nodes are not the first, and not the GPU's
    assert [bound(SLURM_LOCALID=rank, SLURM_NTASKS_PER_NODE="2", NODES="2 3").split()[-3] for rank in "01"] == [
        "--cpunodebind=2",
        "--cpunodebind=3",
    ]
    # the scheduler has bound it; switched off; one NUMA node
    assert bound(SLURM_LOCALID="0", NODES="1") == "started\n"
    assert bound(SLURM_LOCALID="0", NUMA_BIND="off") == "started\n"
    (nodes / "online").write_text("0\n")
    assert bound(SLURM_LOCALID="0") == "started\n"
