"""``mlp-offload clean``: what is in use stays, whatever else; what real dead processes left goes."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mlp_offload.cli.main import main
from mlp_offload.storage import leftovers
from mlp_offload.storage.jobdir import ScratchFile, host_name
from mlp_offload.storage.locks import HELD, boot_time, lock_path, look

HOLDER = """
import sys
from mlp_offload.storage.jobdir import ScratchFile
file = ScratchFile.create(sys.argv[1], job="slurm-4711", rank=0, name="optimizer")
file.path.write_bytes(bytes(1 << 20))
print(file.sweeper_pid, flush=True)
sys.stdin.readline()
"""
OLD = 3600.0


@pytest.fixture(autouse=True)
def schedulers(tmp_path_factory, monkeypatch):
    """No squeue at first; the test may say what it answers."""
    directory = tmp_path_factory.mktemp("commands")
    monkeypatch.setenv("PATH", str(directory))

    def answer(script):
        (directory / "squeue").write_text(f"#!/bin/sh\n{script}\n")
        (directory / "squeue").chmod(0o755)

    return answer


@contextlib.contextmanager
def holder(directory):
    """A process that holds the file of rank 0, and its sweeper's id."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(directory)], text=True, **pipes) as process:
        sweeper = int(process.stdout.readline())
        try:
            yield process, sweeper
        finally:
            process.kill()  # the sweeper removes the file


def kill_everything(process, sweeper):
    """As a batch system does, sweeper first: nobody is left to remove the file."""
    os.kill(sweeper, signal.SIGKILL)
    process.kill()
    process.wait()
    path = next(Path(process.args[-1]).glob("*/*.state"))
    while look(str(path)) == HELD:  # the sweeper, which is not our child, is still ending
        time.sleep(0.01)


def file_of(directory, host="n7", rank=0, job="slurm-4711", age=0.0, nbytes=1 << 20):
    path = Path(directory) / f"mlp-offload-{job}" / f"{host}-rank{rank:04d}-optimizer.state"
    path.parent.mkdir(mode=0o700, exist_ok=True)
    path.write_bytes(bytes(nbytes))
    os.utime(path, (time.time() - age,) * 2)
    return path


def clean(capsys, *arguments):
    """What the command says with --json; the files' names -> verdict."""
    status = main(["clean", *map(str, arguments), "--json"])
    answer = json.loads(capsys.readouterr().out)
    assert status == (0 if answer["ok"] else 1)
    return answer, {Path(item["path"]).name: item["verdict"] for item in answer.get("found", [])}


def test_a_live_process_keeps_its_file_whatever_the_clock_and_the_scheduler_say(tmp_path, capsys, schedulers):
    schedulers("exit 0")
    with holder(tmp_path):
        path = file_of(tmp_path, host=host_name(), age=30 * 86400)
        answer, verdicts = clean(capsys, tmp_path, "--yes")
        assert verdicts == {path.name: "live"} and answer["removed_bytes"] == 0
        assert path.stat().st_size == 1 << 20


def test_what_a_killed_job_left_is_listed_and_with_yes_removed(tmp_path, capsys):
    with holder(tmp_path) as (process, sweeper):
        kill_everything(process, sweeper)
        path = next(tmp_path.glob("*/*.state"))
        for _ in range(2):  # dry by default
            answer, verdicts = clean(capsys, tmp_path)
            assert verdicts == {path.name: "dead"}
            assert (answer["dead_bytes"], answer["removed_bytes"]) == (1 << 20, 0)
        assert answer["found"][0]["reason"] == f"its process ({process.pid}) was killed"
        assert answer["found"][0]["host"] == host_name() and answer["found"][0]["job"] == "slurm-4711"
        with open(path) as orphan:
            # Somebody has it open: not dead, whatever the lock says.
            assert clean(capsys, tmp_path, "--yes")[1] == {path.name: "live"}
            assert os.fstat(orphan.fileno()).st_size == 1 << 20
        answer, _ = clean(capsys, tmp_path, "--yes")
        assert answer["removed_bytes"] == 1 << 20 and answer["found"][0]["removed"]
        assert list(tmp_path.iterdir()) == [] and not lock_path(str(path)).exists()
        assert clean(capsys, tmp_path) == (
            {"ok": True, "removed_bytes": 0, "dead_bytes": 0, "errors": [], "found": []},
            {},
        )


@pytest.mark.parametrize(
    "age, squeue, verdict",
    [
        (5.0, "exit 0", "live"),  # touched just now: the scheduler may be another cluster's
        (OLD, "exit 0", "dead"),
        (OLD, "echo COMPLETED", "dead"),
        (OLD, "echo RUNNING", "live"),
        (OLD, "echo PENDING", "live"),
        (OLD, "echo 'Unable to contact slurm controller' >&2; exit 1", "unknown"),
        (OLD, None, "unknown"),
    ],
)
def test_another_hosts_file(tmp_path, capsys, schedulers, age, squeue, verdict):
    if squeue:
        schedulers(squeue)
    path = file_of(tmp_path, age=age)
    answer, verdicts = clean(capsys, tmp_path, "--yes")
    assert verdicts == {path.name: verdict}
    assert path.exists() == (verdict != "dead")
    if verdict == "unknown":
        assert "run this command on n7" in answer["found"][0]["reason"]


def test_this_hosts_file_without_a_lock_counts_as_another_hosts_unless_the_host_has_started_since(
    tmp_path, capsys, schedulers
):
    """Containers may not share the place of the locks."""
    path = file_of(tmp_path, host=host_name(), age=OLD)
    booted = boot_time()
    assert 0 < booted < time.time()
    if time.time() - booted > 2 * OLD:
        assert clean(capsys, tmp_path)[1] == {path.name: "unknown"}
    os.utime(path, (booted - 60,) * 2)
    assert clean(capsys, tmp_path, "--yes")[1] == {path.name: "dead"}
    assert list(tmp_path.iterdir()) == []


def test_only_the_named_job_and_only_the_old(tmp_path, capsys, schedulers):
    schedulers("exit 0")
    old, other = file_of(tmp_path, age=3 * 86400), file_of(tmp_path, rank=1, job="slurm-471", age=OLD)
    assert len(clean(capsys, tmp_path)[1]) == 2
    assert clean(capsys, tmp_path, "--job", "471")[1] == {other.name: "dead"}
    assert clean(capsys, tmp_path, "--job", "slurm-4711")[1] == {old.name: "dead"}
    assert clean(capsys, tmp_path, "--job", "71")[1] == {}
    answer, _ = clean(capsys, tmp_path, "--older-than", "2d", "--yes")
    assert answer["removed_bytes"] == 1 << 20
    assert other.exists() and not old.parent.exists()


def test_foreign_files_and_links_are_told_and_never_touched(tmp_path, capsys, schedulers):
    schedulers("exit 0")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    victim = file_of(elsewhere, age=OLD)
    place = tmp_path / "path"
    place.mkdir()
    (place / "mlp-offload-slurm-1").symlink_to(victim.parent)
    dead = file_of(place, job="slurm-2", age=OLD)
    (dead.parent / "n7-rank0009-optimizer.state").symlink_to(victim)
    (dead.parent / "notes.txt").write_text("keep")
    (dead.parent / ".mlp-offload-probe-abc_1").write_text("x")
    os.utime(dead.parent / ".mlp-offload-probe-abc_1", (0, 0))
    shared = file_of(place, job="slurm-3", age=OLD)
    shared.parent.chmod(0o755)
    (place / "unrelated").write_text("keep")
    answer, verdicts = clean(capsys, place, "--yes")
    assert verdicts == {
        "mlp-offload-slurm-1": "foreign",
        ".mlp-offload-probe-abc_1": "dead",
        dead.name: "dead",
        "n7-rank0009-optimizer.state": "foreign",
        "notes.txt": "foreign",
        "mlp-offload-slurm-3": "foreign",
    }
    assert sorted(p.name for p in dead.parent.iterdir()) == ["n7-rank0009-optimizer.state", "notes.txt"]
    assert victim.stat().st_size == 1 << 20 and shared.exists() and (place / "unrelated").exists()


def test_empty_job_directories_go_when_they_are_old(tmp_path, capsys):
    for name, age in (("new", 0), ("old", OLD)):
        (tmp_path / f"mlp-offload-{name}").mkdir(mode=0o700)
        os.utime(tmp_path / f"mlp-offload-{name}", (time.time() - age,) * 2)
    clean(capsys, tmp_path, "--yes")
    assert [p.name for p in tmp_path.iterdir()] == ["mlp-offload-new"]


def test_a_file_that_changes_after_it_was_judged_is_left_alone(tmp_path, schedulers):
    schedulers("exit 0")
    path = file_of(tmp_path, age=OLD)
    (found,) = leftovers.find([tmp_path])
    os.utime(path)
    with pytest.raises(leftovers.OffloadError, match="written to it meanwhile"):
        leftovers.remove(found)
    (tmp_path / "here").mkdir()
    with ScratchFile.create(tmp_path / "here", job="j", rank=0, name="optimizer") as file:
        (live,) = leftovers.find([tmp_path / "here"])
        with pytest.raises(leftovers.OffloadError, match="a process has taken it"):
            leftovers.remove(live)
        assert file.path.exists() and path.exists()


def test_the_table_names_size_age_host_job_and_reason(tmp_path, capsys, schedulers):
    schedulers("echo FAILED")
    path = file_of(tmp_path, age=3 * OLD)
    assert main(["clean", str(tmp_path)]) == 0
    output = capsys.readouterr().out
    for part in ("dead", "slurm-4711", "n7", "1.0 MiB", "3 h ago", "squeue: job 4711 is failed", str(path)):
        assert part in output
    assert output.endswith("dead: 1.0 MiB, 1 file; --yes removes it\n")
    assert main(["clean", str(tmp_path), "--yes"]) == 0
    assert capsys.readouterr().out.endswith("removed 1.0 MiB, 1 file\n")
    assert main(["clean", str(tmp_path), "--job", "9"]) == 0
    assert capsys.readouterr().out == f"nothing of job 9 on {tmp_path}\n"


@pytest.mark.parametrize(
    "path, message", [("nowhere", "No such file"), ("mlp-offload-j", "give its parent"), ("$NOWHERE", "not set")]
)
def test_a_wrong_path_is_refused_before_anything_is_removed(tmp_path, capsys, monkeypatch, schedulers, path, message):
    schedulers("exit 0")
    dead = file_of(tmp_path, job="j", age=OLD)
    monkeypatch.chdir(tmp_path)
    assert main(["clean", str(tmp_path), path, "--yes"]) == 1
    assert message in capsys.readouterr().err
    assert dead.exists()


def test_a_wrong_age_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["clean", "/tmp", "--older-than", "2w"])
    assert "'2w' is not an age" in capsys.readouterr().err
