"""What README.md and the pages in docs/ say to type, typed; sizes and places are those of this machine."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from megatron_trees import unpack

from mlp_offload.config import OffloadConfig

REPOSITORY = Path(__file__).resolve().parents[2]
DOCS = REPOSITORY / "docs"
needs_training = pytest.mark.skipif(sys.version_info < (3, 12), reason="megatron.training needs Python 3.12")
TINY = """--num-layers 1 --hidden-size 64 --num-attention-heads 2 --seq-length 32 --max-position-embeddings 32 --bf16
    --mock-data --data-cache-path cache --tokenizer-type NullTokenizer --vocab-size 128 --micro-batch-size 2
    --global-batch-size 4 --split 1,0,0 --use-cpu-initialization --num-workers 0 --lr 1e-3 --train-iters 3
    --eval-iters 0 --eval-interval 100 --log-interval 1 --mlp-offload-subgroup-size 5000""".replace("\n", " ")


def blocks(page):
    """The commands of a page, block by block."""
    return re.findall(r"^```bash\n(.*?)^```$", (REPOSITORY / page).read_text(), re.MULTILINE | re.DOTALL)


def replaced(script, *pairs):
    for what, by in pairs:
        assert what in script, f"{what!r} is no longer in:\n{script}"
        script = script.replace(what, by)
    return script


def typed(script, directory, timeout, **settings):
    """A shell in ``directory`` that ends at the first command that fails; its output."""
    commands = Path(sys.executable).parent
    environment = os.environ | {
        "PATH": f"{commands}:{os.environ['PATH']}",
        "PYTHONPATH": str(REPOSITORY),
        "PYTHONWARNINGS": "ignore",
        "OMP_NUM_THREADS": "1",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "COLUMNS": "140",
        **settings,
    }
    done = subprocess.run(
        ["bash", "-e", "-o", "pipefail", "-c", script],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


@needs_training
def test_the_tutorial_goes_from_probe_to_resume(tmp_path):
    *commands, remove = blocks("docs/tutorial.md")
    assert remove == "rm -r tutorial\n" and len(commands) == 10
    output = typed("\n".join(commands), tmp_path, 280)
    assert (tmp_path / "tutorial/checkpoints/latest_checkpointed_iteration.txt").read_text() == "20"
    assert "iteration       20/      20" in output and output.count("iteration       10/      20") == 1
    for made in ("timeline.png", "timeline.json", "report.png", "report.html"):
        assert (tmp_path / "tutorial" / made).stat().st_size > 10_000
    assert not list((tmp_path / "tutorial/nvme").iterdir()) + list((tmp_path / "tutorial/pfs").iterdir())
    typed(remove, tmp_path, 10)
    assert not list(tmp_path.iterdir())


def test_the_commands_of_the_tuning_guide_run(tmp_path):
    report, simulate = blocks("docs/tuning.md")
    program = """
import torch
from mlp_offload import OffloadedAdamW
model = torch.nn.Linear(256, 256)
optimizer = OffloadedAdamW(model.parameters(), paths=["."], host_memory="400KiB", subgroup_size=8192, telemetry="t")
for _ in range(4):
    model(torch.randn(8, 256)).square().mean().backward()
    optimizer.step()
optimizer.close()
"""
    typed(f"python -c '{program}'\n{report.replace('TELEMETRY_DIR', 't')}{simulate}", tmp_path, 120)
    assert {"step.png", "timeline.png"} <= {file.name for file in tmp_path.iterdir()}


def test_the_tuning_guide_names_every_option():
    text = (DOCS / "tuning.md").read_text()
    missing = [name for name in OffloadConfig.__dataclass_fields__ if f"`{name}`" not in text]
    assert not missing


@needs_training
def test_the_readme_trains_with_a_megatron_script_that_is_not_changed(tmp_path):
    _, train, *_ = blocks("README.md")
    (tmp_path / "pretrain_gpt.py").write_text(
        'import runpy; runpy.run_module("mlp_offload.megatron.pretrain_gpt", run_name="__main__", alter_sys=True)'
    )
    for name in ("nvme", "lustre"):
        (tmp_path / name).mkdir()
    command = replaced(
        train,
        ("pip install .     # or: pip install '.[te]' with Transformer Engine\n", ""),
        ("--nproc-per-node 8", "--nproc-per-node 2"),
        ("... your Megatron arguments, with --use-distributed-optimizer ...", f"{TINY} --use-distributed-optimizer"),
        ("/lustre/me/scratch", f"{tmp_path}/lustre"),
        ("64GiB", "300KiB"),
    )
    output = typed(command, tmp_path, 200, SLURM_TMPDIR=str(tmp_path / "nvme"))
    assert_it_streamed(output, iterations=3)
    assert f"path                  {tmp_path}/nvme" in output and f"path                  {tmp_path}/lustre" in output


@needs_training
def test_the_readme_trains_with_a_patched_checkout(tmp_path):
    *_, patched, _ = blocks("README.md")
    tree = unpack("0.19.2", tmp_path / "Megatron-LM")
    # What a script does on a machine without GPUs; the flags come from the patched source alone.
    (tree / "pretrain_gpt.py").write_text("""
import functools, runpy
from mlp_offload.megatron import cpu_device, switch, wheel_gaps
if cpu_device.activate():
    from megatron.training.initialize import initialize_megatron
    switch.rebind(initialize_megatron, functools.partial(initialize_megatron, allow_no_cuda=True))
wheel_gaps.fill()
runpy.run_module("mlp_offload.megatron.pretrain_gpt", run_name="__main__", alter_sys=True)
""")
    (tmp_path / "nvme").mkdir()
    command = replaced(
        patched,
        ("--nproc-per-node 8", "--nproc-per-node 2"),
        ("pretrain_gpt.py ...", f"pretrain_gpt.py {TINY} --use-distributed-optimizer --mlp-offload-host-memory 300KiB"),
        ("/nvme/scratch", f"{tmp_path}/nvme"),
    )
    settings = {"HOME": str(tmp_path), "PYTHONPATH": f"{tree}:{REPOSITORY}"}
    assert_it_streamed(typed(command, tmp_path, 250, **settings), iterations=3)


def assert_it_streamed(output, iterations):
    steps = re.findall(r"read (\S+ \w+) \| written (\S+ \w+) \| hits (\d+)/(\d+)", output)
    assert len(steps) == iterations, output
    assert all("0 B" not in moved and int(hits) < int(of) for *moved, hits, of in steps), steps


@needs_training
def test_the_commands_of_the_recipes_page_run(tmp_path):
    (commands,) = blocks("docs/recipes.md")
    *run, last = commands.strip().splitlines()
    script = replaced("\n".join(run), ("scripts/", f"{REPOSITORY}/scripts/"))
    output = typed(script, tmp_path, 280, OFFLOAD_PATHS=str(tmp_path))
    assert "Llama 2 70B" in output
    assert_it_streamed(output, iterations=3)
    # The last one needs an allocation, which a dry run does not.
    output = typed(replaced(last, ("scripts/", f"{REPOSITORY}/scripts/")) + " --dry-run", tmp_path, 60)
    assert "srun" in output and "--mlp-offload-path /nvme --mlp-offload-path /lustre/me" in output
