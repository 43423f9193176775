"""What the pages in docs/ say to type, typed."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mlp_offload.config import OffloadConfig

REPOSITORY = Path(__file__).resolve().parents[2]
DOCS = REPOSITORY / "docs"


def blocks(page):
    """The commands of a page, block by block."""
    return re.findall(r"^```bash\n(.*?)^```$", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL)


def typed(script, directory, timeout):
    """A shell in ``directory`` that ends at the first command that fails; its output."""
    commands = Path(sys.executable).parent
    environment = os.environ | {
        "PATH": f"{commands}:{os.environ['PATH']}",
        "PYTHONPATH": str(REPOSITORY),
        "PYTHONWARNINGS": "ignore",
        "OMP_NUM_THREADS": "1",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "COLUMNS": "140",
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


@pytest.mark.skipif(sys.version_info < (3, 12), reason="megatron.training needs Python 3.12")
def test_the_tutorial_goes_from_probe_to_resume(tmp_path):
    *commands, remove = blocks("tutorial.md")
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
    report, simulate = blocks("tuning.md")
    program = """
import torch
from mlp_offload import OffloadedAdamW
model = torch.nn.Linear(256, 256)
optimizer = OffloadedAdamW(model.parameters(), paths=["."], host_memory="200KiB", subgroup_size=8192, telemetry="t")
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
