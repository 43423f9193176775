"""Host memory is what was configured: beside a stateless optimizer, over twenty steps, and nothing in the page cache.

python test_host_memory.py KIND DIRECTORY HOST_MEMORY    prints a line of JSON
"""

import ctypes
import json
import mmap
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

from mlp_offload import OffloadedAdamW

PARAMETERS, TENSORS, STEPS = 24_000_000, 12, 20
HOST_MEMORY = 128 * 2**20


def resident_pages(path: Path) -> int:
    """Pages of a file that are in the page cache, by mincore(2)."""
    with open(path, "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ | mmap.PROT_WRITE, flags=mmap.MAP_PRIVATE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
    pages = -(-len(mapped) // mmap.PAGESIZE)
    found = (ctypes.c_ubyte * pages)()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(len(mapped)), found):
        raise OSError(ctypes.get_errno(), "mincore")
    return sum(page & 1 for page in found)


def train(kind: str, directory: str, host_memory: int) -> "dict[str, int]":
    torch.set_num_threads(1)
    params = [
        torch.nn.Parameter(torch.full((PARAMETERS // TENSORS,), 1.0, dtype=torch.bfloat16)) for _ in range(TENSORS)
    ]
    for p in params:
        p.grad = torch.full_like(p, 0.01)
    options = {"paths": [directory], "host_memory": host_memory, "subgroup_size": 2**20, "update_threads": 1}
    optimizer = torch.optim.SGD(params, lr=1e-3) if kind == "sgd" else OffloadedAdamW(params, lr=1e-3, **options)
    process, seen = psutil.Process(), []
    for _ in range(STEPS):
        optimizer.step()
        seen.append(process.memory_info().rss)
    result = {"early": seen[4], "late": seen[-1], "peak": _peak(), "pages": 0, "file_pages": 0}
    if kind != "sgd":
        optimizer._pipeline.tiers.settle()
        (file,) = optimizer._pipeline.tiers.files
        result |= {"pages": resident_pages(file.path), "file_pages": file.nbytes // mmap.PAGESIZE}
        result["direct"] = file.direct
        optimizer.close()
    return result


def _peak() -> int:
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))


def run(kind: str, directory: Path) -> "dict[str, int]":
    done = subprocess.run(
        [sys.executable, __file__, kind, str(directory), str(HOST_MEMORY)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[2])},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_peak_memory_is_the_budget_and_does_not_grow(tmp_path):
    without, ours = run("sgd", tmp_path), run("ours", tmp_path)
    above = ours["peak"] - without["peak"]
    assert 0.8 * HOST_MEMORY < above <= 1.05 * HOST_MEMORY, f"{above / 2**20:.1f} MiB above a stateless optimizer"
    assert ours["late"] - ours["early"] < 0.01 * HOST_MEMORY
    if not ours["direct"]:
        pytest.skip("no direct I/O here: state goes through the page cache")
    assert ours["file_pages"] > 20_000 and ours["pages"] == 0


if __name__ == "__main__":
    print(json.dumps(train(sys.argv[1], sys.argv[2], int(sys.argv[3]))))
