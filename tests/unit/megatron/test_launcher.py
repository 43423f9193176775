"""The launcher with the real Megatron, on the CPU: each test is a run of ``python -m mlp_offload run``."""

import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mlp_offload.megatron.cpu_device import activate_in_children
from mlp_offload.telemetry import union_seconds

REPOSITORY = Path(__file__).resolve().parents[3]
TINY = """
    --num-layers 1 --hidden-size 64 --num-attention-heads 2 --seq-length 16 --max-position-embeddings 16
    --micro-batch-size 1 --global-batch-size 2 --train-iters 3 --lr 1e-3 --bf16 --mock-data --use-cpu-initialization
    --tokenizer-type NullTokenizer --vocab-size 128 --num-workers 0 --eval-iters 0 --eval-interval 1000 --log-interval 2
"""


def environment() -> "dict[str, str]":
    """This process's, without a GPU and without a rank."""
    hidden = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    kept = {name: value for name, value in os.environ.items() if name not in hidden and not name.startswith("SLURM_")}
    path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH", "")]))
    return kept | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "PYTHONWARNINGS": "ignore"}


def run(*arguments: str, ranks: int = 0, timeout: float = 100) -> "subprocess.CompletedProcess[str]":
    """``mlp-offload run ARGUMENTS``, under torchrun if ``ranks`` is given."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks else []
    command = [sys.executable, *torchrun, "-m", "mlp_offload", "run", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment())


def records(directory: Path, rank: int = 0) -> "list[dict]":
    lines = [json.loads(line) for line in (directory / f"rank{rank:04d}.jsonl").read_text().splitlines()]
    return [line for line in lines if "step" in line]


def test_one_process_trains_with_offload_and_tells_its_losses(tmp_path):
    storage = [tmp_path / "a", tmp_path / "b"]
    for directory in storage:
        directory.mkdir()
    offload = [f"--mlp-offload-path={directory}" for directory in storage]
    done = run(
        *("pretrain_gpt", *TINY.split(), "--use-distributed-optimizer", "--optimizer-offload", "mlp", *offload),
        *("--mlp-offload-subgroup-size", "3001", "--mlp-offload-host-memory", "600KiB"),
        *("--mlp-offload-telemetry", str(tmp_path / "telemetry"), "--log-params-norm"),
        *("--tensorboard-dir", str(tmp_path / "tensorboard")),
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    norms = [float(norm) for norm in re.findall(r"params norm: ([0-9.]+)", done.stdout)]
    assert norms and all(5 < norm < 100 for norm in norms)  # 0 where the fp32 weights were not found
    steps = records(tmp_path / "telemetry")
    assert [step["iteration"] for step in steps] == [1, 2, 3]
    assert all(3 < step["loss"] < 7 and step["grad_norm"] > 0 for step in steps)
    assert all(set(step["bytes_read"]) == {str(d) for d in storage} for step in steps)
    summaries = [line for line in done.stdout.splitlines() if "| offload: step" in line]
    assert [line.split()[1] for line in summaries] == ["2"]
    assert done.stderr.count("no GPU found") == 1
    assert "  state                 579.4 KiB: 59328 parameters of 10 bytes in 20 subgroups" in done.stdout
    assert "  host_memory           600.0 KiB" in done.stdout
    assert f"  path                  {storage[1]}: " in done.stdout
    assert [list(directory.iterdir()) for directory in storage] == [[], []]
    if importlib.util.find_spec("tensorboard"):
        scalars_are_those_of_the_telemetry(tmp_path / "tensorboard", steps[0], storage)


def scalars_are_those_of_the_telemetry(directory: Path, step: "dict", storage: "list[Path]") -> None:
    """At iteration 2, the interval's end, Megatron's own writer got the one step that was complete: the first."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory))
    events.Reload()
    ours = {tag[12:]: events.Scalars(tag) for tag in events.Tags()["scalars"] if tag.startswith("mlp-offload/")}
    assert all([event.step for event in found] == [2] for found in ours.values())
    values = {name: events[0].value for name, events in ours.items()}
    assert values["step-seconds"] == pytest.approx(step["step_seconds"], abs=2e-6)
    for phase in ("fetch", "update", "flush", "stall"):
        assert values[f"{phase}-seconds"] == pytest.approx(step[f"{phase}_seconds"], abs=2e-6)
    assert values["hit-rate"] == pytest.approx(step["hit_count"] / (step["hit_count"] + step["fetch_count"]))
    for i, path in enumerate(map(str, storage)):
        for direction, phase, moved in (("read", "fetch", "bytes_read"), ("write", "flush", "bytes_written")):
            seconds = union_seconds((e[2], e[3]) for e in step["events"] if (e[0], e[4]) == (phase, path))
            rate = values[f"path-{i}-{direction}-GB-per-second"]
            assert rate == pytest.approx(step[moved][path] / seconds / 1e9, rel=0.05)


def test_an_option_that_offload_refuses_is_told_in_one_line(tmp_path):
    done = run("pretrain_gpt", *TINY.split(), "--optimizer-offload", "mlp", f"--mlp-offload-path={tmp_path}")
    assert done.returncode == 1
    told = [line for line in done.stderr.splitlines() if line.startswith("mlp-offload: rank")]
    assert len(told) == 1 and "--use-distributed-optimizer" in told[0]
    assert "Traceback" not in done.stderr


def test_help_shows_our_flags_beside_megatrons_and_bare_percent_signs():
    done = run("pretrain_gpt", "--help")
    assert done.returncode == 0, done.stderr[-2000:]
    text = " ".join(done.stdout.split())
    assert "headroom (e.g. 1.10 = 10%)" in text and "--mlp-offload-path DIR" in text


def test_a_flag_that_nobody_knows_is_refused():
    done = run("pretrain_gpt", *TINY.split(), "--num-layrs", "2")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].endswith("error: unrecognized arguments: --num-layrs 2")


SAME_MOMENT = """
import torch
from mlp_offload.megatron import pretrain_gpt
torch.distributed.init_process_group("nccl")
torch.distributed.barrier()
torch.distributed.destroy_process_group()
pretrain_gpt.main()
"""


def test_bad_input_is_told_once_by_all_ranks_before_the_model_is_built_and_as_torchruns_root_cause(tmp_path):
    flags = ["--use-distributed-optimizer", "--optimizer-offload", "mlp", f"--mlp-offload-path={tmp_path}/missing"]
    (tmp_path / "script.py").write_text(SAME_MOMENT)
    done = run(str(tmp_path / "script.py"), *TINY.split(), *flags, ranks=2)
    assert done.returncode == 1
    message = f"ConfigError: path '{tmp_path}/missing': No such file or directory. Create it on every node"
    told = [line for line in done.stderr.splitlines() if message in line]
    assert [line.partition("mlp-offload: rank")[0].strip() for line in told] == ["", "traceback :"]
    assert "building" not in done.stdout and "number of parameters" not in done.stdout


def test_a_missing_script_is_told_without_loading_torch():
    begin = time.monotonic()
    done = run("no_such_script.py")
    assert done.returncode == 1
    assert done.stderr.splitlines()[0].startswith("mlp-offload: rank 0: ConfigError: script 'no_such_script.py'")
    assert time.monotonic() - begin < 60


SCRIPT = """
import multiprocessing, sys
from pathlib import Path
import neighbour                                     # lies beside the script

def child(queue):
    import megatron.core                             # the import that lets the CPU take the GPU's place
    import torch
    queue.put((str(torch.cuda.current_device()), torch.cuda.is_available()))

if __name__ == "__main__":
    from megatron.training.arguments import parse_args
    args = parse_args()
    assert args.optimizer_offload == "mlp" and args.mlp_offload_path == ["/x"], args
    assert Path(sys.argv[0]).name == "script.py" and sys.argv[1] == "--optimizer-offload"
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=child, args=(queue,))
    process.start()
    print("CHILD", *queue.get(timeout=60))
    process.join()
    sys.exit(int(args.seed))
"""


def test_a_script_runs_as_main_with_our_flags_and_its_children_find_the_cpu(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "neighbour.py").write_text("")
    done = run(str(tmp_path / "script.py"), "--optimizer-offload", "mlp", "--mlp-offload-path", "/x", "--seed", "7")
    assert done.returncode == 7, done.stderr[-3000:]
    assert "CHILD cpu False" in done.stdout


ONE_RANK_FAILS = """
import os, torch
from mlp_offload.errors import PathIOError
torch.distributed.init_process_group("nccl")
torch.distributed.barrier()
if torch.distributed.get_rank() == 1:
    raise PathIOError("/scratch/rank0001.state", "write", 0, 4096, 122)
torch.distributed.all_reduce(torch.zeros(1, device="cuda"))          # waits for rank 1, in vain
"""


def test_no_rank_stays_in_a_collective_after_another_failed(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(ONE_RANK_FAILS)
    begin = time.monotonic()
    done = run(str(script), ranks=2)
    assert done.returncode != 0
    assert time.monotonic() - begin < 90
    assert "mlp-offload: rank 1: PathIOError: write /scratch/rank0001.state offset=0 bytes=4096" in done.stderr
    assert "EDQUOT" in done.stderr


@pytest.mark.parametrize("megatron_first", [False, True])
def test_other_python_processes_pay_nothing_and_keep_their_sitecustomize(tmp_path, megatron_first):
    (tmp_path / "sitecustomize.py").write_text("import os; os.environ['HIDDEN_SITE'] = 'ran'")
    variables = environment() | {"PYTHONPATH": os.pathsep.join([str(tmp_path), environment()["PYTHONPATH"]])}
    activate_in_children(variables)
    activate_in_children(variables)  # twice must not lengthen the path
    assert variables["PYTHONPATH"].count("cpu_site") == 1
    statement = "import megatron.core" if megatron_first else "import json"
    program = f"{statement}; import os, sys; print(os.environ.get('HIDDEN_SITE'), 'torch' in sys.modules)"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=variables)
    assert done.stdout.split() == ["ran", str(megatron_first)], done.stderr


@pytest.mark.full
def test_a_signal_that_was_ignored_at_the_start_is_so_again_when_python_ends(tmp_path):
    """A batch script asks again and again; Python gives handled signals back to the kernel, which would kill the rank."""
    script = tmp_path / "script.py"
    script.write_text(
        "import atexit, signal, sys\n"
        "signal.signal(signal.SIGUSR1, lambda *ignored: None)\n"
        "atexit.register(lambda: print('ignored', signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN))\n"
        "sys.exit(0 if len(sys.argv) == 2 else None)\n"
    )
    for arguments in ([], ["exits"]):
        for shell, ignored in (("trap '' USR1; ", True), ("", False)):
            command = [sys.executable, "-m", "mlp_offload", "run", str(script), *arguments]
            done = subprocess.run(
                ["bash", "-c", f'{shell}exec "$@"', "bash", *command],
                capture_output=True, text=True, timeout=100, env=environment(),
            )  # fmt: skip
            assert (done.returncode, f"ignored {ignored}" in done.stdout) == (0, True), done.stdout + done.stderr
