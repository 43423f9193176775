"""Storage that lies or fills up in the middle of a run: the right numbers, or a stop that names the subgroup."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mlp_offload import OffloadedAdamW
from mlp_offload.errors import ChecksumError, OffloadError, PathIOError


def make(directories, numel=40960, **options):
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.randn(numel))
    settings = {"subgroup_size": 4096, "host_memory": "200KiB", "staging_count": 4, **options}
    return p, OffloadedAdamW([p], lr=1e-2, paths=[str(d) for d in directories], **settings)


def step(p, optimizer, seed):
    p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(seed))
    optimizer.step()


def state_files(directory):
    return sorted(Path(directory).rglob("*.state"))


@pytest.fixture
def settled(tmp_path):
    """A parameter and its optimizer after two steps, with nothing in flight."""
    p, optimizer = make([tmp_path])
    for seed in (1, 2):
        step(p, optimizer, seed)
    optimizer._pipeline.tiers.settle()
    yield p, optimizer, state_files(tmp_path)[0]
    optimizer.close()
    assert not state_files(tmp_path)


@pytest.mark.parametrize("place", [0, 4 * 4096 + 17, 12 * 4096 - 1])
def test_a_flipped_byte_stops_the_run_with_the_subgroup_named(settled, place):
    p, optimizer, file = settled
    tiers = optimizer._pipeline.tiers
    index, entry = next((i, e) for i, e in enumerate(tiers.table) if e.slot >= 0)
    offset = tiers.files[0].offset(entry.slot) + place
    with open(file, "r+b") as stream:
        stream.seek(offset)
        byte = stream.read(1)[0]
        stream.seek(offset)
        stream.write(bytes([byte ^ 0x10]))
        os.fsync(stream.fileno())
    with pytest.raises(
        ChecksumError,
        match=rf"subgroup {index} \(step 2\).*slot {entry.slot}, offset={tiers.files[0].offset(entry.slot)}",
    ):
        step(p, optimizer, 3)
    with pytest.raises(OffloadError, match="can no longer be used: step 3 ended with ChecksumError"):
        step(p, optimizer, 4)
    with pytest.raises(OffloadError, match="can no longer be used"):
        optimizer.state_dict()


def test_a_truncated_state_file_stops_the_run_with_the_subgroup_named(settled):
    p, optimizer, file = settled
    os.truncate(file, 0)
    with pytest.raises(
        PathIOError, match=r"read .*\.state offset=\d+ bytes=\d+: the file ended early.*only copy of subgroup \d+"
    ):
        step(p, optimizer, 3)


# Runs in a process that sees a tmpfs of 4 MiB on one of the paths. The slots of the state file are punched out and the
# space is given to another file, so that the next flushes really meet a full file system.
FULL_PATH = """
import os, subprocess, sys, glob
sys.path.insert(0, sys.argv[3])
import torch
from test_state_faults import make, step, state_files
full, other = sys.argv[1], sys.argv[2]
directories = [full] + ([other] if other else [])
q, resident = make([sys.argv[4]], host_memory="2MiB", name="resident")
p, optimizer = make(directories)
for seed in (1, 2):
    step(p, optimizer, seed); step(q, resident, seed)
tiers = optimizer._pipeline.tiers
tiers.settle()
file = tiers.files[0]
for slot in range(file.slot_count):
    if slot not in {e.slot for e in tiers.table if e.path == 0}:
        subprocess.run(["fallocate", "--punch-hole", "--offset", str(file.offset(slot)), "--length", str(file.slot_bytes), str(file.path)], check=True)
hog = os.open(full + "/hog", os.O_WRONLY | os.O_CREAT)
try:
    while os.write(hog, bytes(4096)):
        pass
except OSError:
    os.close(hog)
try:
    for seed in (3, 4):
        step(p, optimizer, seed); step(q, resident, seed)
    tiers.settle()
    print("equal" if torch.equal(p, q) else "different")
    print(sum(e.path == 0 for e in tiers.table), "on the full path")
except Exception as error:
    print(type(error).__name__, error)
optimizer.close(); resident.close()
print("left behind:", state_files(full))
"""


def run_with_full_path(tmp_path, other):
    full, home = tmp_path / "full", tmp_path / "home"
    full.mkdir()
    home.mkdir()
    script = 'mount -t tmpfs -o size=4m tmpfs "$2" && exec "$0" -c "$1" "$2" "$3" "$4" "$5"'
    arguments = [sys.executable, FULL_PATH, str(full), str(other or ""), str(Path(__file__).parent), str(home)]
    done = subprocess.run(
        ["unshare", "-Urm", "sh", "-c", script, *arguments], capture_output=True, text=True, timeout=120
    )
    if done.returncode and done.stderr.startswith(("unshare:", "mount:")):
        pytest.skip(f"no private mounts here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    assert "left behind: []" in done.stdout
    return done.stdout, done.stderr


def test_a_path_that_fills_up_hands_its_subgroups_to_another(tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    out, err = run_with_full_path(tmp_path, other)
    assert out.startswith("equal\n"), out + err
    assert "ENOSPC" in err and "is safe in memory and goes to" in err


def test_the_only_path_filling_up_stops_the_run_with_the_subgroup_named(tmp_path):
    out, err = run_with_full_path(tmp_path, None)
    assert out.startswith("PathIOError write "), out + err
    assert (
        "No space left on device (ENOSPC). Subgroup " in out
        and "is safe in memory; no other path has a free slot" in out
    )
