"""Batch scripts on a real slurmctld with two nodes: training, preemption, and what goes wrong."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import cluster
import psutil
import pytest

from mlp_offload.storage import scheduler

if importlib.util.find_spec("megatron.training") is None:
    pytest.skip("this wheel of megatron-core has no megatron.training", allow_module_level=True)

REPOSITORY = Path(__file__).resolve().parents[2]
LIMIT_SECONDS = 200
pytestmark = pytest.mark.timeout(600)
# No dropout: on the CPU it draws from the generator that a new data loader also draws from.
ARGUMENTS = """
    --num-layers 2 --hidden-size 64 --num-attention-heads 2 --seq-length 32 --max-position-embeddings 32 --bf16
    --mock-data --tokenizer-type NullTokenizer --vocab-size 128 --micro-batch-size 2 --global-batch-size 8 --split 1,0,0
    --lr 1e-3 --eval-iters 0 --eval-interval 1000 --use-cpu-initialization --num-workers 0
    --hidden-dropout 0 --attention-dropout 0 --save-interval 1000 --ckpt-format torch_dist
    --mlp-offload-subgroup-size 4099
"""
# Each life of a job records in a directory of its own.
RECORDED = """
import os, runpy, sys
scripts, record = {scripts!r}, {record!r}
sys.argv += ["--record", record + os.environ["SLURM_JOB_ID"] + "-" + os.environ.get("SLURM_RESTART_COUNT", "0")]
sys.path.insert(0, scripts)
runpy.run_path(scripts + "/recorded_gpt.py", run_name="__main__")
"""
IDLE = """
import os, signal, sys, time
signal.signal(signal.SIGUSR1, lambda *ignored: os._exit(0))
print("idle", flush=True)
time.sleep(600)
"""


@pytest.fixture(scope="module")
def slurm() -> "Iterator[cluster.Cluster]":
    cluster.install()
    with cluster.Cluster() as running:
        yield running


class Place:
    """Directories of a test; scratch of node n1 is n1/, and so on."""

    def __init__(self, directory: Path, slurm: cluster.Cluster, tasks: int, iterations: int):
        self.directory, self.slurm, self.tasks, self.iterations = directory, slurm, tasks, iterations
        self.run_directory, self.log = directory / "run", directory / "log"
        for name in ("n1", "n2", "shared", "record"):
            (directory / name).mkdir(parents=True)
        self.site = directory / "site.conf"
        self.site.write_text(f"export LOCAL_SCRATCH={directory}/$SLURMD_NODENAME\nunset SLURM_TMPDIR\n")
        self.script = directory / "script.py"
        self.script.write_text(
            RECORDED.format(scripts=str(REPOSITORY / "scripts"), record=str(directory / "record") + "/")
        )

    @property
    def settings(self) -> "dict[str, str]":
        return {
            "PYTHON": sys.executable,
            "PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")]),
            "PYTHONWARNINGS": "ignore",
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "MASTER_ADDR": "127.0.0.1",  # the nodes' names stand in no name service
            "GLOO_SOCKET_IFNAME": "lo",
            "SITE": str(self.site),
            "OFFLOAD_PATHS": f"$NODE_SCRATCH {self.directory}/shared",
            "HOST_MEMORY": "300KiB",
            "RUN_DIR": str(self.run_directory),
        }

    def words(self, *flags: str) -> "list[str]":
        """What follows the sbatch command."""
        options = ["--nodes=2", f"--ntasks-per-node={self.tasks}", "--time=60", f"--output={self.log}"]
        length = ["--train-iters", str(self.iterations), "--lr-decay-iters", str(self.iterations)]
        recorded = ["--hash-at", str(self.iterations), "--data-cache-path", str(self.directory / "cache")]
        arguments = [*ARGUMENTS.split(), *length, *(recorded if "recorded_gpt" in self.script.read_text() else [])]
        return [*options, "slurm/megatron.sbatch", str(self.script), *arguments, *flags]

    def submit(self, *flags: str, **settings: str) -> str:
        return self.slurm.submit(*self.words(*flags), cwd=REPOSITORY, **(self.settings | settings))

    def text(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def lines(self, rank: int = 0) -> "list[dict]":
        """What a rank has recorded in all lives, in order."""
        lives = sorted((self.directory / "record").iterdir(), key=lambda life: list(map(int, life.name.split("-"))))
        files = [life / f"rank{rank:04d}.jsonl" for life in lives]
        texts = [file.read_text().rpartition("\n")[0] for file in files if file.exists()]
        return [json.loads(line) for text in texts for line in text.splitlines()]

    def until(self, true: "Callable[[], bool]", job: str) -> None:
        deadline = time.monotonic() + LIMIT_SECONDS
        while not true():
            assert time.monotonic() < deadline and self.slurm.state(job) not in cluster.ENDED, self.text()[-6000:]
            time.sleep(0.1)

    def trained(self, count: int = 3) -> bool:
        """Whether this life, or an earlier one, has done some iterations."""
        return len(self.lines()) > count

    def exact(self) -> "list[list]":
        """What must be equal bit for bit, by rank and iteration; an iteration is recorded in one life only."""
        keys = ("iteration", "loss", "grad_norm", "parameters_sha256")
        return [
            [[line.get(key) for key in keys] for line in self.lines(rank) if "loss" in line]
            for rank in range(2 * self.tasks)
        ]

    def left(self) -> "list[str]":
        """What is on the paths."""
        return [str(file) for name in ("n1", "n2", "shared") for file in (self.directory / name).rglob("*")]


def test_two_nodes_train_each_on_its_own_scratch_and_leave_nothing(tmp_path, slurm):
    place = Place(tmp_path, slurm, tasks=1, iterations=4)
    job = place.submit()
    assert slurm.wait(job, LIMIT_SECONDS) == "COMPLETED", place.text()[-6000:]
    text = place.text()
    for node in ("n1", "n2"):
        assert f"node {node}: scratch {tmp_path}/{node} ($LOCAL_SCRATCH)" in text
        assert f"node {node}: path {tmp_path}/{node}," in text
    assert f"path                  {tmp_path}/n1: " in text  # of rank 0, which the training itself tells
    assert [[line[0] for line in rank] for rank in place.exact()] == [[1, 2, 3, 4]] * 2
    assert place.left() == []
    assert (place.run_directory / "finished").exists()
    assert (place.run_directory / "checkpoints" / "latest_checkpointed_iteration.txt").read_text().strip() == "4"
    os.environ["SLURM_CONF"] = slurm.environment["SLURM_CONF"]
    try:  # the real squeue's words
        assert scheduler.ask(f"slurm-{job}") == (False, f"squeue: job {job} is completed")
        assert scheduler.ask("slurm-999999") == (False, "squeue knows no job 999999")
    finally:
        del os.environ["SLURM_CONF"]


def test_a_path_that_one_node_lacks_fails_the_job_at_once_and_leaves_nothing(tmp_path, slurm):
    place = Place(tmp_path, slurm, tasks=2, iterations=4)
    job = place.submit(OFFLOAD_PATHS=f"{tmp_path}/shared {tmp_path}/$SLURMD_NODENAME")
    (tmp_path / "n2").rmdir()
    assert slurm.wait(job, 60) == "FAILED"
    text = place.text()
    assert f"node n2: path '{tmp_path}/n2': No such file or directory. Create it on every node" in text
    assert f"node n1: path {tmp_path}/n1," in text
    assert "not started: the nodes above cannot use their paths" in text
    assert "Traceback" not in text and not place.run_directory.exists()
    (tmp_path / "n2").mkdir()
    assert place.left() == []


def test_slurm_takes_what_the_readme_submits(tmp_path, slurm):
    place = Place(tmp_path, slurm, tasks=1, iterations=1)
    blocks = re.findall(r"^```bash\n(.*?)^```$", (REPOSITORY / "slurm/README.md").read_text(), re.MULTILINE | re.DOTALL)
    text = "".join(blocks).replace("\\\n", " ")
    # As many nodes, tasks and cores as there are here; it has no GPUs.
    scaled = {"nodes": "2", "ntasks-per-node": "1", "cpus-per-task": "1"}
    for option, value in scaled.items():
        text, found = re.subn(rf"--{option} \S+", f"--{option} {value}", text)
        assert found
    commands = [re.sub(r"--gpus-per-node \S+", "", line) for line in text.splitlines() if "--dry-run" not in line]
    assert len(commands) == 5
    for command in commands:
        words = shlex.split(command, comments=True)
        if words[0] == "sbatch":
            words.insert(1, "--test-only")
        else:
            words[1:3] = [words[1], "1", "--test-only"]
        done = subprocess.run(
            words, cwd=REPOSITORY, env=slurm.environment | place.settings, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0 and "to start at" in done.stderr, (words, done)


@pytest.mark.full
@pytest.mark.parametrize("launch", ["srun", "torchrun"])
def test_a_preempted_job_saves_requeues_itself_and_ends_with_the_bits_of_an_uninterrupted_one(tmp_path, slurm, launch):
    places = {}
    for name in ("whole", "preempted"):
        (tmp_path / name).mkdir()
        places[name] = place = Place(tmp_path / name, slurm, tasks=2, iterations=60)
        job = place.submit(LAUNCH=launch)
        if name == "preempted":
            place.until(place.trained, job)
            slurm.command("scancel", "--signal=USR1", "--batch", job)
        assert slurm.wait(job, LIMIT_SECONDS) == "COMPLETED", place.text()[-6000:]
        assert place.left() == [] and (place.run_directory / "finished").exists()
    whole, preempted = places["whole"], places["preempted"]
    text = preempted.text()
    assert "training is asked to save and end" in text and "(restart 1)" in text
    assert "starts from iteration 0 (restart 0)" in text
    begun = [line["iteration"] for line in preempted.lines() if "loss" not in line]
    assert len(begun) == 2 and begun[0] == 0 and 3 <= begun[1] < 60
    assert f"starts from iteration {begun[1]} (restart 1)" in text
    assert whole.exact() == preempted.exact()
    assert whole.exact()[0][-1][3] and len(whole.exact()[0]) == 60


@pytest.mark.full
def test_a_job_that_is_preempted_before_it_trains_goes_back_to_the_queue(tmp_path, slurm):
    place = Place(tmp_path, slurm, tasks=1, iterations=4)
    checking = tmp_path / "checking"
    with open(place.site, "a") as site:  # the first check of the paths takes its time
        site.write(f"[ -e {checking}-$SLURMD_NODENAME ] || {{ touch {checking}-$SLURMD_NODENAME; sleep 5; }}\n")
    job = place.submit()
    place.until(Path(f"{checking}-n2").exists, job)
    slurm.command("scancel", "--signal=USR1", "--batch", job)
    assert slurm.wait(job, LIMIT_SECONDS) == "COMPLETED", place.text()[-6000:]
    assert "(restart 1)" in place.text() and (place.run_directory / "finished").exists()
    assert [line[0] for line in place.exact()[0]] == [1, 2, 3, 4] and place.left() == []


@pytest.mark.full
def test_a_run_that_stops_early_is_not_complete_and_what_it_began_from_counts_once(tmp_path, slurm):
    base = Place(tmp_path / "base", slurm, tasks=1, iterations=4)
    assert slurm.wait(base.submit(), LIMIT_SECONDS) == "COMPLETED", base.text()[-6000:]
    place = Place(tmp_path / "next", slurm, tasks=1, iterations=8)
    flags = (
        "--load",
        str(base.run_directory / "checkpoints"),
        "--exit-interval",
        "6",
        "--override-opt_param-scheduler",
    )
    for begins, finished in ((0, False), (6, True)):
        job = place.submit(*flags)
        assert slurm.wait(job, LIMIT_SECONDS) == "COMPLETED", place.text()[-6000:]
        assert f"starts from iteration {begins} (restart 0)" in place.text()
        assert (place.run_directory / "finished").exists() == finished
    text = place.text()
    assert "the script ended before the end of its training" in text and "were for the first start" in text
    assert [line[0] for line in place.exact()[0]] == [5, 6, 7, 8]


@pytest.mark.full
def test_a_job_that_saves_nothing_does_not_requeue_for_ever(tmp_path, slurm):
    place = Place(tmp_path, slurm, tasks=1, iterations=4)
    place.script.write_text(IDLE)
    job = place.submit(IDLE_LIMIT="2")
    for life in (1, 2):
        place.until(lambda life=life: place.text().splitlines().count("idle") == 2 * life, job)
        slurm.command("scancel", "--signal=USR1", "--batch", job)
    assert slurm.wait(job, LIMIT_SECONDS) == "FAILED"
    text = place.text()
    assert "no progress: the last 2 starts all began at iteration 0" in text
    assert f"remove {place.run_directory}/starts" in text and text.splitlines().count("idle") == 4


@pytest.mark.full
def test_what_a_rank_that_was_killed_with_its_sweeper_left_goes_with_the_job(tmp_path, slurm):
    place = Place(tmp_path, slurm, tasks=1, iterations=100000)
    job = place.submit()
    place.until(place.trained, job)
    (tmp_path / "n1" / "foreign").write_text("keep")
    of_job = [p for p in psutil.process_iter() if str(tmp_path) in " ".join(cmdline(p))]
    sweepers = [p for p in of_job if "mlp-offload-sweeper" in cmdline(p)]
    ranks = [p for p in of_job if cmdline(p)[:3] == [sys.executable, "-m", "mlp_offload"]]
    assert (len(sweepers), len(ranks)) == (4, 2)
    for process in [*sweepers, *ranks]:
        process.kill()
    assert slurm.wait(job, LIMIT_SECONDS) == "FAILED"
    text = place.text()
    assert "was killed" in text and "removed" in text
    assert place.left() == [str(tmp_path / "n1" / "foreign")]
    assert not (place.run_directory / "finished").exists()


@pytest.mark.full
def test_scancel_ends_all_and_leaves_nothing(tmp_path, slurm):
    place = Place(tmp_path, slurm, tasks=1, iterations=100000)
    job = place.submit()
    place.until(place.trained, job)
    slurm.command("scancel", job)
    assert slurm.wait(job, LIMIT_SECONDS) == "CANCELLED"
    deadline = time.monotonic() + 30
    while place.left() and time.monotonic() < deadline:
        time.sleep(0.2)
    assert place.left() == [] and slurm.state(job) == "CANCELLED"


@pytest.mark.full
def test_links_of_a_chain_continue_each_other_until_the_run_is_complete(tmp_path, slurm):
    place = Place(tmp_path, slurm, tasks=1, iterations=60)
    command = ["bash", "slurm/chain.sh", "3", "--open-mode=append", *place.words()]
    environment = slurm.environment | place.settings
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    jobs = [line.split()[-1] for line in done.stdout.splitlines() if line.startswith("Submitted")]
    assert len(jobs) == 3
    place.until(place.trained, jobs[0])
    slurm.command("scancel", "--signal=USR1", "--batch", jobs[0])
    for job in jobs:
        assert slurm.wait(job, LIMIT_SECONDS) == "COMPLETED", place.text()[-6000:]
    iterations = [line[0] for line in place.exact()[0]]
    assert iterations == list(range(1, 61))
    assert f"{place.run_directory} is complete; nothing to do" in place.text()
    assert place.left() == []


def cmdline(process: psutil.Process) -> "list[str]":
    try:
        return process.cmdline()
    except psutil.Error:  # it just ended
        return []
