"""Node-local locks: one holder at a time, gone with the process, not kept by children."""

import os
import signal
import subprocess
import sys
import time
import uuid

import pytest

from mlp_offload.errors import ConfigError
from mlp_offload.storage.locks import NodeLock, lock_path, lock_room, private_directory, read_holder

HOLDER = """
import os, sys, time
from mlp_offload.storage.locks import NodeLock
lock = NodeLock.acquire(sys.argv[1], {"pid": os.getpid()}, 5)
child = os.fork() if sys.argv[2] == "fork" else -1
if child == 0:
    time.sleep(60)
    os._exit(0)
print(child, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def key():
    name = f"test-{uuid.uuid4()}"
    yield name
    lock_path(name).unlink(missing_ok=True)


def start_holder(key: str, how: str) -> "tuple[subprocess.Popen, int]":
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, key, how], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    return holder, int(holder.stdout.readline())


def end(process: subprocess.Popen) -> None:
    process.kill()
    process.wait()
    process.stdin.close()
    process.stdout.close()


def test_a_held_lock_is_refused_and_tells_its_holder(key):
    lock = NodeLock.acquire(key, {"pid": 4711, "job": "slurm-1"})
    assert NodeLock.acquire(key, {"pid": 1}) is None
    assert read_holder(key) == {"pid": 4711, "job": "slurm-1"}
    lock.release()
    lock.release()
    assert not lock.path.exists() and read_holder(key) == {}


def test_what_a_longer_lived_file_said_before_does_not_remain(key):
    lock_path(key).write_text("x" * 1000)
    lock = NodeLock.acquire(key, {"pid": 1})
    assert read_holder(key) == {"pid": 1}
    lock.release()


def test_waiting_ends_at_the_deadline(key):
    lock = NodeLock.acquire(key, {})
    started = time.monotonic()
    assert NodeLock.acquire(key, {}, 0.3) is None
    assert 0.3 <= time.monotonic() - started < 5
    lock.release()


def test_a_lock_that_becomes_free_while_we_wait_is_taken(key):
    holder, _ = start_holder(key, "plain")
    assert NodeLock.acquire(key, {}) is None
    holder.stdin.close()  # it ends now
    lock = NodeLock.acquire(key, {}, 10)
    assert lock is not None
    lock.release()
    holder.wait()
    holder.stdout.close()


def test_sigkill_frees_the_lock_even_with_a_forked_child_alive(key):
    holder, child = start_holder(key, "fork")
    try:
        assert NodeLock.acquire(key, {}) is None
        end(holder)
        os.kill(child, 0)
        lock = NodeLock.acquire(key, {}, 5)
        assert lock is not None
        lock.release()
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_child_that_ends_or_releases_does_not_free_its_parents_lock(key):
    lock = NodeLock.acquire(key, {})
    pid = os.fork()
    if pid == 0:
        lock.release()
        os._exit(0)
    os.waitpid(pid, 0)
    assert lock.path.exists() and NodeLock.acquire(key, {}) is None
    lock.release()


def test_executed_programs_do_not_keep_the_lock(key):
    lock = NodeLock.acquire(key, {})
    with subprocess.Popen(["sleep", "60"], close_fds=False) as program:
        lock._close()
        again = NodeLock.acquire(key, {})
        program.kill()
    assert again is not None
    again.release()


CRITICAL = """
import os, sys, time
from mlp_offload.storage.locks import NodeLock
key, mark, count = sys.argv[1], sys.argv[2], 0
end = time.monotonic() + 1.5
while time.monotonic() < end:
    lock = NodeLock.acquire(key, {}, 0.0)
    if lock is not None:
        os.close(os.open(mark, os.O_CREAT | os.O_EXCL))  # fails when another is inside
        time.sleep(0.0002)
        os.unlink(mark)
        lock.release()
        count += 1
print(count)
"""


def test_only_one_process_is_ever_inside_although_the_file_comes_and_goes(key, tmp_path):
    command = [sys.executable, "-c", CRITICAL, key, str(tmp_path / "inside")]
    runs = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(4)]
    results = [(run.communicate(), run.returncode) for run in runs]
    assert [(out[1], code) for out, code in results] == [("", 0)] * 4
    assert sum(int(out[0]) for out, _ in results) >= 10


def test_the_room_is_private_and_in_node_local_memory():
    room = lock_room()
    assert room.stat().st_mode & 0o777 == 0o700 and room.stat().st_uid == os.geteuid()
    assert str(room) == f"/dev/shm/mlp-offload-{os.geteuid()}" or not os.access("/dev/shm", os.W_OK)


@pytest.mark.parametrize(
    "kind, reason", [("link", "symbolic link"), ("open", "mode 0710"), ("file", "not a directory")]
)
def test_a_directory_that_is_not_private_is_refused(tmp_path, kind, reason):
    path = tmp_path / "d"
    if kind == "link":
        (tmp_path / "real").mkdir(0o700)
        path.symlink_to("real")
    elif kind == "open":
        path.mkdir()
        path.chmod(0o710)
    else:
        path.touch()
    with pytest.raises(ConfigError, match=reason):
        private_directory(path)


def test_a_directory_of_somebody_else_is_refused(tmp_path):
    if os.geteuid() != 0:
        pytest.skip("only root can give a directory to somebody else")
    path = tmp_path / "d"
    path.mkdir(0o700)
    os.chown(path, 12345, 12345)
    with pytest.raises(ConfigError, match="belongs to user id 12345"):
        private_directory(path)
