"""Job directories and scratch files: names, refusals, and that files die with their owner, however it dies."""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import pytest

from mlp_offload.errors import ConfigError, PathInUseError
from mlp_offload.storage.heartbeat import FRESH_SECONDS
from mlp_offload.storage.jobdir import ScratchFile, check_directories, host_name, job_name
from mlp_offload.storage.locks import NodeLock, boot_time, lock_path
from mlp_offload.storage.sweeper import Sweeper

HOLDER = """
import os, signal, sys, time
from mlp_offload.storage.jobdir import ScratchFile
directory, how = sys.argv[1:]
file = ScratchFile.create(directory, job="j", rank=0, name="optimizer")
file.path.write_bytes(bytes(1 << 20))
closed = os.pipe()
child = os.fork() if how == "fork" else 0
if how == "fork" and child == 0:
    file.close()  # does nothing here
    os.write(closed[1], b"x")
    time.sleep(60)
    os._exit(0)
if child:
    os.read(closed[0], 1)
print(os.getpid(), file.sweeper_pid, child, flush=True)
sys.stdin.readline()
if how == "exception":
    raise RuntimeError("on purpose")
if how == "_exit":
    os._exit(3)
if how == "close":
    file.close()
"""


class Holder:
    """A process that holds ``directory``'s rank 0 file of job j."""

    def __init__(self, directory, how="exit", before=()):
        command = [*before, sys.executable, "-c", HOLDER, str(directory), how]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(command, text=True, start_new_session=True, **pipes)
        self.pid, self.sweeper_pid, self.child_pid = map(int, self.process.stdout.readline().split())

    def go_on(self):
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        if self.child_pid:
            os.kill(self.child_pid, signal.SIGKILL)
        with suppress(ProcessLookupError):
            os.kill(self.sweeper_pid, signal.SIGCONT)  # in case a test failed while it was stopped
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


def create(directory, rank=0, name="optimizer", job="j"):
    return ScratchFile.create(directory, job=job, rank=rank, name=name)


def state_path(directory, rank=0, name="optimizer", job="j", host=None) -> Path:
    return Path(directory).resolve() / f"mlp-offload-{job}" / f"{host or host_name()}-rank{rank:04d}-{name}.state"


def not_touched_lately(path):
    """As a living owner would have done; it has no lock either."""
    os.utime(path, (time.time() - FRESH_SECONDS - 1,) * 2)


def vanished(*paths, seconds=20.0) -> bool:
    deadline = time.monotonic() + seconds
    while any(os.path.lexists(path) for path in paths):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def ended(pid, seconds=20.0) -> bool:
    """Whether the process is gone, or a zombie that its parent did not collect."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.02)
    return False


# --- names


@pytest.mark.parametrize(
    "environment, name",
    [
        ({"SLURM_JOB_ID": "4711", "TORCHELASTIC_RUN_ID": "x"}, "slurm-4711"),
        ({"PBS_JOBID": "17[3].server"}, "pbs-17_3_.server"),
        ({"LSB_JOBID": "9"}, "lsf-9"),
        ({"TORCHELASTIC_RUN_ID": "a/b"}, "torchrun-a_b"),
        ({"SLURM_JOB_ID": "", "PBS_JOBID": "5"}, "pbs-5"),
    ],
)
def test_job_name_comes_from_the_batch_system(monkeypatch, environment, name):
    for variable in ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    assert job_name() == name
    assert job_name("mine/../x y") == "mine_.._x_y"


def test_job_name_without_a_batch_system_is_local_to_user_and_host(monkeypatch):
    for variable in ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert re.fullmatch(rf"local-[A-Za-z0-9._-]+-{re.escape(host_name())}", job_name("auto"))


@pytest.mark.parametrize("text", ["", "x" * 101])
def test_names_of_impossible_length_are_refused(tmp_path, text):
    with pytest.raises(ConfigError, match="characters"):
        job_name(text)
    with pytest.raises(ConfigError, match="name: .* characters"):
        create(tmp_path, name=text)


# --- directories that cannot be used


def test_missing_directories_files_and_loops_are_refused(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    for name, reason in (("missing", "No such file"), ("file", "not a directory"), ("loop", "ymbolic link|ymlink")):
        with pytest.raises(ConfigError, match=rf"path '{tmp_path / name}'.*({reason})"):
            check_directories([tmp_path / name])


def test_a_directory_without_write_permission_is_refused():
    directory = Path(tempfile.mkdtemp(dir="/tmp"))  # which any user can reach, unlike tmp_path
    try:
        directory.chmod(0o555)
        code = (
            "import os, sys; from mlp_offload.storage.jobdir import check_directories\n"
            "os.geteuid() or os.setuid(65534)\n"
            "check_directories([sys.argv[1]])"
        )
        done = subprocess.run([sys.executable, "-c", code, directory], capture_output=True, text=True, check=False)
        assert f"ConfigError: path '{directory}' is not writable for user id" in done.stderr
    finally:
        directory.rmdir()


def test_the_same_directory_twice_is_refused_also_through_links(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    (tmp_path / "link").symlink_to("a")
    assert check_directories([tmp_path / "b", tmp_path / "link"]) == [tmp_path / "b", tmp_path / "a"]
    for second in ("a", "link", "b/../a", "a/"):
        with pytest.raises(ConfigError, match=f"is the same directory as '{tmp_path / 'a'}'"):
            check_directories([f"{tmp_path}/a", f"{tmp_path}/{second}"])


def test_the_same_directory_through_a_bind_mount_is_refused(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    code = "import sys; from mlp_offload.storage.jobdir import check_directories; check_directories(sys.argv[1:])"
    script = 'mount --bind "$1" "$2" && exec "$3" -c "$4" "$1" "$2"'
    paths = [str(tmp_path / "a"), str(tmp_path / "b")]
    command = ["unshare", "-rm", "sh", "-c", script, "sh", *paths, sys.executable, code]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "ConfigError" not in done.stderr and "ermission" in done.stderr + done.stdout:
        pytest.skip(f"no mount namespace here: {done.stderr.strip()}")
    assert f"ConfigError: path '{paths[1]}' is the same directory as '{paths[0]}'" in done.stderr


def test_a_job_directory_that_is_not_ours_alone_is_refused_and_nothing_in_it_touched(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    victim = elsewhere / state_path(tmp_path).name
    victim.write_text("keep")
    (tmp_path / "mlp-offload-j").symlink_to(elsewhere)
    with pytest.raises(ConfigError, match="symbolic link"):
        create(tmp_path)
    assert victim.read_text() == "keep"
    (tmp_path / "mlp-offload-j").unlink()
    (tmp_path / "mlp-offload-j").mkdir()
    (tmp_path / "mlp-offload-j").chmod(0o755)
    with pytest.raises(ConfigError, match="mode 0755"):
        create(tmp_path)
    assert not lock_path(str(state_path(tmp_path))).exists()


# --- life of a file


def test_a_file_is_private_and_close_removes_everything(tmp_path):
    file = create(tmp_path, rank=3)
    sweeper = file.sweeper_pid
    assert file.path == tmp_path / "mlp-offload-j" / f"{host_name()}-rank0003-optimizer.state"
    assert (file.path.stat().st_mode & 0o777, file.path.stat().st_size) == (0o600, 0)
    assert file.path.parent.stat().st_mode & 0o777 == 0o700
    file.path.write_bytes(bytes(1 << 20))
    with (
        create(tmp_path, rank=4) as other,
        create(tmp_path, rank=3, name="second") as second,
        open(file.path, "rb") as orphan,  # of a forked child, say
    ):
        file.close()
        assert os.fstat(orphan.fileno()).st_blocks == 0
        file.close()
        assert other.path.exists() and second.path.exists() and not file.path.exists()
    assert list(tmp_path.iterdir()) == [] and not lock_path(str(file.path)).exists()
    assert not os.path.exists(f"/proc/{sweeper}")


def test_close_works_after_the_file_was_removed_and_the_sweeper_killed(tmp_path, caplog):
    file = create(tmp_path)
    file.path.unlink()
    os.kill(file.sweeper_pid, signal.SIGKILL)
    assert ended(file.sweeper_pid)
    file.close()
    assert list(tmp_path.iterdir()) == [] and "ended early" in caplog.text


@pytest.mark.parametrize("how", ["exit", "exception", "_exit", "close", "fork", "SIGTERM", "SIGKILL"])
def test_files_vanish_however_the_process_ends(tmp_path, how):
    path = state_path(tmp_path)
    with Holder(tmp_path, how) as holder:
        assert path.stat().st_size == 1 << 20
        if how == "fork":
            holder.process.kill()
            os.kill(holder.child_pid, 0)
        elif how.startswith("SIG"):
            holder.process.send_signal(getattr(signal, how))
        else:
            holder.go_on()
        assert vanished(path, path.parent, lock_path(str(path)))
        assert ended(holder.sweeper_pid)
        with create(tmp_path) as again:
            assert again.reclaimed_bytes == 0


def test_a_signal_to_the_whole_job_does_not_end_the_sweeper_before_its_work(tmp_path):
    path = state_path(tmp_path)
    with Holder(tmp_path) as holder:
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
            os.kill(holder.sweeper_pid, number)
        time.sleep(0.1)
        holder.process.kill()
        assert vanished(path, path.parent)


def test_a_kill_of_the_whole_process_group_spares_the_sweeper(tmp_path):
    path = state_path(tmp_path)
    with Holder(tmp_path) as holder:
        os.killpg(holder.pid, signal.SIGKILL)
        assert vanished(path, path.parent)


def test_a_dismissed_sweeper_leaves_everything_alone(tmp_path):
    files = [tmp_path / "directory" / "file", tmp_path / "lock"]
    files[0].parent.mkdir()
    for file in files:
        file.touch()
    with files[1].open() as lock:
        sweeper = Sweeper(files[0].parent, [files[0]], files[1], lock.fileno())
        sweeper.dismiss()
        sweeper.dismiss()
    assert all(file.exists() for file in files)
    assert not os.path.exists(f"/proc/{sweeper.pid}")


def test_names_are_never_run_as_shell_and_only_our_files_are_removed(tmp_path):
    directory = tmp_path / "-rf $(touch pwned) `touch pwned`; touch pwned 'a\" \n *"
    job_directory = directory / "mlp-offload-j"
    job_directory.mkdir(parents=True)
    job_directory.chmod(0o700)
    kept = [directory / "other", job_directory / "other-host-rank0000-optimizer.state"]
    for file in kept:
        file.write_text("keep")
    with Holder(directory) as holder:
        holder.process.kill()
        assert vanished(state_path(directory), lock_path(str(state_path(directory))))
    assert [file.read_text() for file in kept] == ["keep", "keep"]
    assert sorted(path.name for path in tmp_path.rglob("*") if "pwned" in path.name) == [directory.name]


def test_a_living_holder_is_named_with_job_time_and_next_step(tmp_path):
    with Holder(tmp_path) as holder:
        started = time.monotonic()
        with pytest.raises(PathInUseError) as caught:
            create(tmp_path / "." / ".." / tmp_path.name)
        assert 1.5 < time.monotonic() - started < 10
        text = str(caught.value)
        assert f"process {holder.pid} of job 'j' (since {time.strftime('%Y-%m-%d')}" in text
        assert str(state_path(tmp_path)) in text and "is running" in text and "another path" in text
        assert state_path(tmp_path).stat().st_size == 1 << 20
        with create(tmp_path, name="second"), create(tmp_path, job="k"):
            pass


def test_a_job_that_is_just_ending_is_waited_for(tmp_path):
    with Holder(tmp_path, "close") as holder:
        waiting = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(tmp_path), "close"],
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        time.sleep(0.5)
        holder.go_on()
        assert waiting.stdout.readline().split()
        assert waiting.communicate("\n", timeout=20) is not None
        assert waiting.returncode == 0


def test_what_a_dead_process_left_is_reclaimed_but_not_what_lives_or_lies_on_other_hosts(tmp_path, caplog):
    with Holder(tmp_path) as holder, create(tmp_path, rank=1) as alive:
        os.kill(holder.sweeper_pid, signal.SIGKILL)  # as when a batch system kills everything at once
        holder.process.kill()
        holder.process.wait()
        assert state_path(tmp_path).exists()
        dead = state_path(tmp_path, rank=7)
        dead.write_bytes(bytes(3 << 20))
        not_touched_lately(dead)
        foreign = [
            state_path(tmp_path, rank=0, host="n1"),
            state_path(tmp_path, rank=0, host=host_name() + "-b"),
            alive.path.parent / "notes.txt",
        ]
        for path in foreign:
            path.write_text("keep")
        caplog.clear()
        with open(dead) as orphan, create(tmp_path) as file:
            assert os.fstat(orphan.fileno()).st_blocks == 0
            assert file.reclaimed_bytes >= 4 << 20
            assert file.path.stat().st_size == 0 and alive.path.exists() and not dead.exists()
            assert [path.read_text() for path in foreign] == ["keep"] * 3
        assert [record.getMessage() for record in caplog.records] == [
            f"path '{tmp_path}': removed 4.0 MiB left by dead processes (job j)"
        ]
    assert not lock_path(str(dead)).exists()
    shutil.rmtree(alive.path.parent)


def test_what_another_job_left_is_reclaimed_too_but_not_what_is_not_ours(tmp_path, caplog):
    """Under torchrun every start has a new name."""
    dead, strangers = state_path(tmp_path, job="dead"), state_path(tmp_path, job="open-to-others")
    for path, mode in ((dead, 0o700), (strangers, 0o755)):
        path.parent.mkdir(mode=mode)
        path.write_bytes(bytes(1 << 20))
        not_touched_lately(path)
    with create(tmp_path, job="alive") as alive, create(tmp_path, job="next", rank=1) as file:
        assert alive.path.exists() and file.path.exists() and strangers.exists()
        assert not dead.parent.exists()
    messages = [record.getMessage() for record in caplog.records]
    assert messages == [f"path '{tmp_path}': removed 1.0 MiB left by dead processes (job dead)"]


def test_a_job_whose_locks_cannot_be_seen_here_keeps_its_file(tmp_path):
    """A container, or a job under SLURM's job_container/tmpfs, has a /dev/shm of its own."""
    script = 'mount -t tmpfs none /dev/shm && exec "$@"'
    apart = ["unshare", "-Urm", "sh", "-c", script, "sh"]
    tried = subprocess.run([*apart, "true"], capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"no private mounts here: {tried.stderr.strip()}")
    with Holder(tmp_path, before=apart) as holder:
        theirs = state_path(tmp_path)
        with create(tmp_path, job="other") as file:
            assert file.reclaimed_bytes == 0 and theirs.stat().st_size == 1 << 20
        with pytest.raises(PathInUseError, match=f"{theirs} was touched less than 10 minutes ago, by a process that"):
            create(tmp_path)
        assert theirs.stat().st_size == 1 << 20
        # What a host that has started since finds belongs to nobody; nor does what was not touched for so long.
        os.utime(theirs, (boot_time() - 1,) * 2)
        with create(tmp_path, job="other") as file:
            assert file.reclaimed_bytes == 1 << 20
        holder.go_on()


def test_a_batch_systems_job_that_starts_again_finds_only_its_own(tmp_path):
    left = state_path(tmp_path, job="slurm-4711")
    left.parent.mkdir(mode=0o700)
    left.write_bytes(bytes(1 << 20))
    with create(tmp_path, job="slurm-4711") as file:
        assert file.reclaimed_bytes == 1 << 20 and file.path == left


def test_a_read_only_file_system_is_named_as_such(tmp_path):
    script = 'mount -t tmpfs -o ro tmpfs "$1" && exec "$2" -c "$3" "$1"'
    code = "import sys; from mlp_offload.storage.jobdir import check_directories; check_directories(sys.argv[1:])"
    command = ["unshare", "-Urm", "sh", "-c", script, "sh", str(tmp_path), sys.executable, code]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    if done.stderr.startswith(("unshare:", "mount:")):
        pytest.skip(f"no private mounts here: {done.stderr.strip()}")
    assert f"path '{tmp_path}' is on a file system that is mounted read-only" in done.stderr


def test_the_lock_is_not_free_before_a_dead_holders_files_are_gone(tmp_path):
    path = state_path(tmp_path)
    with Holder(tmp_path) as holder:
        os.kill(holder.sweeper_pid, signal.SIGSTOP)  # a sweeper that takes its time
        holder.process.kill()
        holder.process.wait()
        assert NodeLock.acquire(str(path), {}) is None
        resume = subprocess.Popen(["sh", "-c", f"sleep 3; kill -CONT {holder.sweeper_pid}"])
        with create(tmp_path) as file:  # longer than a living holder is waited for
            assert resume.wait() == 0
            assert ended(holder.sweeper_pid)
            time.sleep(0.2)
            assert file.path.exists() and file.reclaimed_bytes == 0


CHURN = """
import sys, time
from mlp_offload.storage.jobdir import ScratchFile
end = time.monotonic() + 2
while time.monotonic() < end:
    with ScratchFile.create(sys.argv[1], job="j", rank=int(sys.argv[2]), name="optimizer") as file:
        file.path.write_bytes(b"x")
        assert file.reclaimed_bytes == 0
"""


def test_ranks_come_and_go_in_one_job_directory(tmp_path):
    runs = [
        subprocess.Popen([sys.executable, "-c", CHURN, str(tmp_path), str(rank)], stderr=subprocess.PIPE, text=True)
        for rank in range(4)
    ]
    assert [(run.communicate()[1], run.returncode) for run in runs] == [("", 0)] * 4
    assert list(tmp_path.iterdir()) == []
