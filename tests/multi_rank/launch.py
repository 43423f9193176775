"""One launch of ``worker.py`` for many scenarios: importing Megatron takes longer than running most of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from mlp_offload.megatron import cpu_device

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
LIMIT_SECONDS = 240
# A prime, so that subgroups are cut inside parameters; with this memory only a few of some 30 stay on the host.
OFFLOAD = {"subgroup_size": 4099, "host_memory": "512KiB", "update_threads": 1}


def run_scenarios(
    process_count: int, scenarios: "dict[str, dict[str, Any]]", directory: Path, megatron: "Path | None" = None
) -> "dict[str, list[dict[str, Any]]]":
    """What each scenario returned, one entry a rank. Everything is written below ``directory``.

    Args:
        megatron: the source tree to take Megatron from, if not the installed one.
    Raises:
        AssertionError: a scenario failed, or all of them took longer than ``LIMIT_SECONDS``; with the output.
    """
    paths = [directory / "path0", directory / "path1"]
    for path in paths:
        path.mkdir()
    request, results = directory / "scenarios.json", directory / "results.json"
    offload = OFFLOAD | {"paths": [str(path) for path in paths], "job": "test"}
    scenarios = {name: scenario | {"directory": str(directory)} for name, scenario in scenarios.items()}
    request.write_text(json.dumps({"offload": offload, "scenarios": scenarios}))
    environment = dict(os.environ, OMP_NUM_THREADS="1", CUDA_DEVICE_MAX_CONNECTIONS="1", PYTHONWARNINGS="ignore")
    sources = [*([megatron] if megatron else []), REPOSITORY, REPOSITORY / "scripts"]
    environment["PYTHONPATH"] = os.pathsep.join([*map(str, sources), environment.get("PYTHONPATH", "")])
    cpu_device.activate_in_children(environment)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={process_count}"]
    process = subprocess.Popen(
        [*command, str(HERE / "worker.py"), str(request), str(results)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=LIMIT_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        raise AssertionError(f"no result within {LIMIT_SECONDS} s:\n{output[-20000:]}") from None
    if process.returncode != 0:
        raise AssertionError(f"torchrun ended with {process.returncode}:\n{output[-20000:]}")
    left = [str(file) for path in paths for file in path.rglob("*") if file.is_file()]
    if left:
        raise AssertionError(f"scratch files are left behind: {left}")
    return json.loads(results.read_text())
