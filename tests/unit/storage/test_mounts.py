"""Directories on one file system have one key; others have other keys."""

import os
import shutil
import subprocess
import sys

import pytest

from mlp_offload.storage.mounts import Mount, device_key, mount_of

SHM = "/dev/shm"


def test_directories_of_one_file_system_share_a_key_and_others_do_not(tmp_path):
    (tmp_path / "a").mkdir()
    assert device_key(tmp_path / "a") == device_key(tmp_path)
    if os.stat(SHM).st_dev != os.stat(tmp_path).st_dev:
        assert device_key(SHM) != device_key(tmp_path)
    assert device_key("/proc") != device_key("/sys")


def test_the_mount_is_what_the_kernel_says():
    assert mount_of("/proc/self") == Mount("proc", "proc")
    with pytest.raises(FileNotFoundError):
        mount_of("/nowhere")


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="mounts need root and unshare")
def test_a_bind_mount_is_the_same_device_and_a_mount_inside_another(tmp_path):
    program = """
import sys
from mlp_offload.storage.mounts import device_key
print(*(device_key(d) for d in sys.argv[1:]), sep="\\n")
"""
    for name in ("bind", "inner mount", "bind/below"):
        (tmp_path / name).mkdir()
    (tmp_path / "source" / "below").mkdir(parents=True)
    odd = 'odd="$1/$(printf "\\377")" && mkdir "$odd" && mount -t tmpfs odd "$odd" && '  # a name that is not UTF-8
    script = odd + 'mount --bind "$1/source" "$1/bind" && mount -t tmpfs fast "$1/inner mount" && shift && exec "$@"'
    places = [tmp_path, tmp_path / "bind" / "below", tmp_path / "inner mount"]
    command = ["unshare", "-m", "sh", "-c", script, "sh", tmp_path, sys.executable, "-c", program, *places]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    outer, bound, inner = done.stdout.splitlines()
    assert outer == bound == device_key(tmp_path)
    assert inner.startswith("tmpfs fast ")


@pytest.mark.parametrize(
    "mount, shared",
    [
        (Mount("nfs4", "server:/export"), True),
        (Mount("lustre", "10.0.0.1@o2ib:/scratch"), True),
        (Mount("cifs", "//server/share"), True),
        (Mount("ext4", "/dev/nvme0n1p1"), False),
        (Mount("unknown", "0:45"), False),
    ],
)
def test_only_what_lies_on_servers_has_one_key_for_all_hosts(tmp_path, monkeypatch, mount, shared):
    monkeypatch.setattr("mlp_offload.storage.mounts.mount_of", lambda directory: mount)
    keys = set()
    for host in ("n1", "n2"):
        monkeypatch.setattr("socket.gethostname", lambda host=host: host)
        keys.add(device_key(tmp_path))
    assert len(keys) == (1 if shared else 2)
