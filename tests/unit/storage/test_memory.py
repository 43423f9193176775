"""Available memory: the machine's, and the limits of cgroups of both versions."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from mlp_offload.storage.memory import available_memory_bytes, cgroup_available_bytes

GIB = 2**30
V2 = "30 23 0:26 {top} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = "36 32 0:30 {top} /sys/fs/cgroup/memory rw,nosuid - cgroup cgroup rw,memory\n"


def tree(root: Path, mountinfo: str, membership: str, groups: dict) -> Path:
    """A root with the files that the kernel would show."""
    for name, text in {"mountinfo": mountinfo, "cgroup": membership}.items():
        file = root / "proc/self" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    for group, files in groups.items():
        directory = root / "sys/fs/cgroup" / group
        directory.mkdir(parents=True, exist_ok=True)
        for name, value in files.items():
            (directory / name).write_text(f"{value}\n")
    return root


def v2(limit, usage, inactive_file=0):
    stat = f"anon 123\nfile 456\ninactive_file {inactive_file}\nactive_file 5"
    return {"memory.max": limit, "memory.current": usage, "memory.stat": stat}


def v1(limit, usage, inactive_file=0):
    stat = f"cache 1\ninactive_file 77\ntotal_inactive_file {inactive_file}"
    return {"memory.limit_in_bytes": limit, "memory.usage_in_bytes": usage, "memory.stat": stat}


def test_the_narrowest_of_our_version_2_group_and_its_ancestors_counts(tmp_path):
    groups = {"": {}, "slurm": v2(8 * GIB, 6 * GIB), "slurm/step": v2(5 * GIB, GIB), "other": v2(GIB, GIB)}
    root = tree(tmp_path, V2.format(top="/"), "0::/slurm/step\n", groups)
    assert cgroup_available_bytes(root) == 2 * GIB


def test_cache_that_is_reclaimed_first_is_not_usage(tmp_path):
    root = tree(tmp_path, V2.format(top="/"), "0::/job\n", {"job": v2(4 * GIB, 4 * GIB, 3 * GIB)})
    assert cgroup_available_bytes(root) == 3 * GIB


def test_no_limit_is_none(tmp_path):
    root = tree(tmp_path, V2.format(top="/"), "0::/job\n", {"job": v2("max", 4 * GIB)})
    assert cgroup_available_bytes(root) is None
    assert cgroup_available_bytes(tmp_path / "nothing here") is None


def test_a_container_sees_its_group_as_the_top(tmp_path):
    groups = {"memory": v1(9 * GIB, GIB), "memory/in": v1(3 * GIB, GIB)}
    root = tree(tmp_path, V1.format(top="/docker/abc"), "4:memory:/docker/abc/in\n", groups)
    assert cgroup_available_bytes(root) == 2 * GIB


def test_version_1_beside_an_empty_version_2(tmp_path):
    mounts = V1.format(top="/") + V2.format(top="/").replace("/sys/fs/cgroup ", "/sys/fs/cgroup/unified ")
    groups = {"memory/job": v1(3 * GIB, 2 * GIB, GIB), "memory": v1(9223372036854771712, 20 * GIB), "unified": {}}
    root = tree(tmp_path, mounts, "9:name=systemd:/\n4:cpu,memory:/job\n0::/\n", groups)
    assert cgroup_available_bytes(root) == 2 * GIB


def test_usage_over_the_limit_is_nothing_left(tmp_path):
    root = tree(tmp_path, V2.format(top="/"), "0::/job\n", {"job": v2(GIB, 2 * GIB)})
    assert cgroup_available_bytes(root) == 0


def test_here_it_is_at_most_what_the_machine_has():
    assert 0 < available_memory_bytes() <= psutil.virtual_memory().total


@pytest.fixture
def limited_group():
    """procs file of a real memory cgroup with a limit of 256 MiB."""
    version_1, version_2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
    parent, limit = (version_1, "memory.limit_in_bytes") if version_1.is_dir() else (version_2, "memory.max")
    group = parent / f"mlp-offload-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"this user may not make a cgroup here: {error}")
    try:
        try:
            (group / limit).write_text(str(256 * 2**20))
        except OSError as error:
            pytest.skip(f"no memory controller to set a limit with: {error}")
        yield group / "cgroup.procs"
    finally:
        group.rmdir()


def test_a_real_cgroup_limit_stops_a_pool_before_the_kernel_kills_the_process(limited_group):
    code = (
        "import os, sys; from mlp_offload.storage.buffers import BufferPool, available_memory_bytes\n"
        "open(sys.argv[1], 'w').write(str(os.getpid()))\n"
        "print(available_memory_bytes(), flush=True)\n"
        "BufferPool(4, 2**20).close()\n"
        "BufferPool(512, 2**20)"
    )
    done = subprocess.run([sys.executable, "-c", code, limited_group], capture_output=True, text=True, check=False)
    assert 200 * 2**20 < int(done.stdout) <= 256 * 2**20
    assert done.returncode == 1 and "CapacityError: host memory: 512 buffers" in done.stderr
