"""Two ranks that train with the real Megatron, and what ends them: nothing runs on and nothing stays."""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

pytest.importorskip("megatron.training", reason="this wheel of megatron-core has no megatron.training")

REPOSITORY = Path(__file__).resolve().parents[2]
LIMIT_SECONDS = 60
ARGUMENTS = """
    --num-layers 1 --hidden-size 64 --num-attention-heads 2 --seq-length 16 --max-position-embeddings 16
    --micro-batch-size 1 --global-batch-size 2 --train-iters 1000000 --lr 1e-3 --bf16 --mock-data
    --use-cpu-initialization --tokenizer-type NullTokenizer --vocab-size 128 --num-workers 0 --eval-iters 0
    --eval-interval 1000000 --log-interval 5 --use-distributed-optimizer --optimizer-offload mlp
    --mlp-offload-subgroup-size 3001 --mlp-offload-host-memory 300KiB
"""
RAISES = """
import os, runpy
from mlp_offload.pipeline import StepPipeline
steps, step = 0, StepPipeline.step
def raising(self, *arguments):
    global steps
    steps += 1
    if steps == 10 and os.environ["RANK"] == "1":
        raise ValueError("of rank 1 alone")
    return step(self, *arguments)
StepPipeline.step = raising
runpy.run_module("mlp_offload.megatron.pretrain_gpt", run_name="__main__", alter_sys=True)
"""


def end_of_job(directory: Path, script: str, act: "Callable[[psutil.Process, list[psutil.Process]], None]") -> str:
    """Train until some steps are done, ``act`` on torchrun and its ranks, see that all is gone; returns stderr."""
    paths = [directory / "a", directory / "b"]
    for path in paths:
        path.mkdir()
    variables = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    variables["PYTHONPATH"] = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "mlp_offload"]
    command += ["run", script, *ARGUMENTS.split(), *(f"--mlp-offload-path={path}" for path in paths)]
    output, errors = directory / "output", directory / "errors"
    with open(output, "w") as out, open(errors, "w") as err:
        torchrun = psutil.Popen(command, stdout=out, stderr=err, env=variables, start_new_session=True)
    everybody: "set[psutil.Process]" = set()
    try:
        deadline = time.monotonic() + LIMIT_SECONDS
        while "| offload: step" not in output.read_text() and torchrun.poll() is None:
            assert time.monotonic() < deadline, errors.read_text()
            time.sleep(0.2)
        everybody = set(torchrun.children(recursive=True))  # ranks and sweepers
        act(torchrun, sorted((p for p in everybody if is_rank(p)), key=lambda p: p.pid))
        assert torchrun.wait(LIMIT_SECONDS) != 0
        _, alive = psutil.wait_procs(everybody, timeout=20)
        assert not alive
    finally:
        for process in [torchrun, *everybody]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    assert [list(path.iterdir()) for path in paths] == [[], []]
    return errors.read_text()


def is_rank(process: psutil.Process) -> bool:
    try:
        return "mlp_offload" in process.cmdline()
    except psutil.Error:  # it just ended
        return False


ENDS = {
    "SIGTERM to torchrun": lambda torchrun, ranks: torchrun.send_signal(signal.SIGTERM),
    "SIGINT to torchrun": lambda torchrun, ranks: torchrun.send_signal(signal.SIGINT),
    "SIGKILL to one rank": lambda torchrun, ranks: ranks[1].kill(),
    "SIGTERM to one rank": lambda torchrun, ranks: ranks[0].terminate(),
}


@pytest.mark.parametrize("end", ENDS)
def test_a_signal_ends_all_ranks_and_removes_all_files(tmp_path, end):
    errors = end_of_job(tmp_path, "pretrain_gpt", ENDS[end])
    assert "mlp-offload: rank 0: Traceback" not in errors and "mlp-offload: rank 1: Traceback" not in errors
    if "one rank" in end:
        assert end.split()[0] in errors.partition("Root Cause")[2]


def test_an_exception_on_one_rank_ends_the_other_and_is_the_only_one_told(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(RAISES)
    errors = end_of_job(tmp_path, str(script), lambda torchrun, ranks: None)
    assert "ValueError: of rank 1 alone" in errors
    assert errors.count("mlp-offload: rank") == 1
