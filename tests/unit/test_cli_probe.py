"""The probe command: what it says is what was measured, a run finds it, and nothing is left, however it ends."""

import dataclasses
import json
import os
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from mlp_offload import rates as rates_module
from mlp_offload.cli.main import main
from mlp_offload.cli.probe import Case, _store, plan
from mlp_offload.config import OffloadConfig, PathConfig
from mlp_offload.storage import probe_processes
from mlp_offload.storage.facts import facts_of
from mlp_offload.storage.locks import lock_room
from mlp_offload.storage.meter import Moved
from mlp_offload.storage.mounts import device_key, mount_of
from mlp_offload.storage.probe_cache import load

REPOSITORY = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-m", "mlp_offload", "probe"]
QUICK = ["--seconds", "0.1", "--size", "32MiB"]

as_root = pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="mounts need root and unshare")


def call(*arguments, cache, **settings):
    environment = os.environ | {"XDG_CACHE_HOME": str(cache), "PYTHONPATH": str(REPOSITORY)}
    command = [*COMMAND, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, **settings)


@pytest.fixture(scope="module")
def memory():
    place = tempfile.mkdtemp(prefix="mlp-offload-test-", dir="/dev/shm")
    yield Path(place)
    os.rmdir(place)  # and nothing is left in it


@pytest.fixture(scope="module")
def probed(tmp_path_factory, memory):
    """(directories, cache, what was printed) of a disk and memory, one process and two."""
    disk, cache = tmp_path_factory.mktemp("disk"), tmp_path_factory.mktemp("cache")
    done = call(*QUICK, "--processes", 2, "--json", disk, memory, cache=cache)
    assert done.returncode == 0, done.stderr
    return [disk, memory], cache, json.loads(done.stdout)


def test_each_path_is_measured_alone_and_with_the_others_by_one_process_and_by_more(probed):
    (disk, memory), _, told = probed
    rows = {(r["directory"], r["process_count"], r["at_once"]): r for r in told["measurements"]}
    assert set(rows) == {(str(d), n, k) for d in (disk, memory) for n in (1, 2) for k in (1, 2)}
    assert len(rows) == len(told["measurements"])
    for row in rows.values():
        assert row["block_size"] == 2**21
        assert all(1e6 < row[name] < 1e12 for name in ("read", "write", "mixed_read", "mixed_write"))
        for direction in ("read", "write"):
            assert 0 < row[f"{direction}_latency_median"] <= row[f"{direction}_latency_p99"] < 10
    assert os.listdir(disk) == os.listdir(memory) == []


def test_the_facts_of_each_path_are_those_of_its_file_system(probed):
    (disk, memory), _, told = probed
    assert [path["directory"] for path in told["paths"]] == [str(disk), str(memory)]
    for path, directory in zip(told["paths"], (disk, memory)):
        assert (path["kind"], path["source"]) == mount_of(directory)
        assert path["device"] == device_key(directory)
        assert path["total_bytes"] == os.statvfs(directory).f_blocks * os.statvfs(directory).f_frsize
        assert path["alignment"] >= 512 and path["engine"] in ("io_uring", "threads")
    assert told["paths"][1]["in_memory"] and told["paths"][1]["kind"] == "tmpfs"
    same = device_key(disk) == device_key(memory)
    assert bool(told["shared_devices"]) == same


def test_the_flags_are_read_by_a_run_and_have_the_rates_of_all_paths_and_processes(probed):
    directories, _, told = probed
    for directory, line in zip(directories, told["flags"]):
        option, spec = shlex.split(line)
        path = PathConfig.parse(spec)
        assert (option, path.directory) == ("--mlp-offload-path", str(directory))
        (row,) = [
            r
            for r in told["measurements"]
            if (r["directory"], r["process_count"], r["at_once"]) == (str(directory), 2, 2)
        ]
        assert path.read == pytest.approx(row["mixed_read"], rel=0.01)
        assert path.write == pytest.approx(row["mixed_write"], rel=0.01)


def test_a_run_finds_what_one_process_got_and_measures_nothing(probed, monkeypatch):
    directories, cache, told = probed
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setattr("mlp_offload.storage.probe_cache.probe", None)
    found = rates_module.first_rates(OffloadConfig(paths=tuple(map(str, directories))), directories, 0)
    for rate, directory in zip(found, directories):
        assert rate.origin.startswith("from the cache")
        (row,) = [
            r
            for r in told["measurements"]
            if (r["directory"], r["process_count"], r["at_once"]) == (str(directory), 1, 2)
        ]
        assert (rate.path.read, rate.path.write) == (round(row["mixed_read"]), round(row["mixed_write"]))


def test_the_table_tells_shared_devices_and_settings_are_as_asked_and_nothing_is_kept(tmp_path):
    directories = [tmp_path / "a", tmp_path / "b c"]
    for directory in directories:
        directory.mkdir()
    options = ["--engine", "threads", "--no-direct", "--no-cache", "--processes", "1", "--block-size", "64KiB"]
    done = call(*QUICK, *options, *directories, cache=tmp_path / "cache")
    assert done.returncode == 0, done.stderr
    assert f"{directories[0]} and '{directories[1]}' lie on one device ({device_key(tmp_path)})" in done.stdout
    assert "engine threads; " in done.stdout and "measured through the page cache" in done.stdout
    assert "64.0 KiB" in done.stdout and "2.0 MiB" not in done.stdout
    assert "measuring for about" in done.stderr
    assert not (tmp_path / "cache").exists() and [os.listdir(d) for d in directories] == [[], []]


def test_what_is_kept_of_paths_on_one_device_is_their_sum(tmp_path, monkeypatch):
    """Of the case that a start would measure: one process, all paths at once."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in "abc":
        (tmp_path / name).mkdir()
    facts = [
        facts_of(tmp_path / "a"),
        facts_of(tmp_path / "b"),
        dataclasses.replace(facts_of(tmp_path / "c"), device="other"),
    ]
    cases = plan(3, 2, 1)
    mixed = [
        {p: {"read": Moved(10.0**c + p, c), "write": Moved(10.0**c + 2 * p, c)} for p in case.paths}
        for c, case in enumerate(cases)
    ]
    settings = {"kind": "auto", "direct": True, "threads": 4, "iodepth": 8, "block_size": 2**21}
    _store(cases, mixed, facts, [[settings]] * 3, 1.0)
    both, other = load(facts[0].device, settings), load("other", settings)
    assert cases[3] == Case(1, (0, 1, 2), 0)
    assert (both.read_bytes_per_second, both.write_bytes_per_second) == (2001.0, 2002.0)
    assert (other.read_bytes_per_second, other.write_bytes_per_second, other.read_bytes) == (1002.0, 1004.0, 3)


def test_the_plan_ends_with_the_case_that_a_run_is():
    assert plan(1, 1, 1) == [Case(1, (0,), 0)]
    assert plan(2, 4, 1) == [Case(n, paths, 0) for n in (1, 4) for paths in ((0,), (1,), (0, 1))]
    assert plan(2, 4, 2)[-2:] == [Case(4, (0, 1), 0), Case(4, (0, 1), 1)]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["{}/nowhere"], r"path '{}/nowhere': No such file or directory"),
        (["{}/file"], r"path '{}/file' is not a directory"),
        (["{}", "{}/."], r"is the same directory as"),
        (["{}", "--size", "1PB"], r"--size: cannot read '1PB'"),
        (["{}", "--size", "100TiB"], r"measuring takes 100.0 TiB on its device; .* may be used"),
        (["{},capacity=64MiB"], r"measuring takes 1.0 GiB on its device; 64.0 MiB may be used"),
        (["{}", "--size", "1MiB"], r"--size 1MiB: 2 processes with blocks of 2.0 MiB need at least 16.0 MiB"),
        (["{}", "--seconds", "0"], r"--seconds 0: must be at least 0.1"),
        (["{}", "--seconds", "nan"], r"--seconds nan: must be at least 0.1"),
        (["{}", "--processes", "0"], r"--processes 0: must be at least 1"),
        (["{}", "--block-size", "1000"], r"block_size 1000"),
        (["{}", "--iodepth", "0"], r"iodepth 0: must be at least 1"),
        (["{},speed=3"], r"unknown key 'speed'"),
        (["$NO_SUCH_VARIABLE/x"], r"environment variable \$NO_SUCH_VARIABLE is not set"),
    ],
)
def test_what_cannot_be_measured_is_told_before_any_work(tmp_path, capsys, monkeypatch, arguments, message):
    monkeypatch.setattr(probe_processes, "ProbeProcesses", None)
    monkeypatch.setattr("mlp_offload.cli.probe.gpu_count", lambda: 0)
    (tmp_path / "file").touch()
    assert main(["probe", *(argument.format(tmp_path) for argument in arguments)]) == 1
    output, error = capsys.readouterr()
    assert output == "" and error.startswith("mlp-offload probe: ")
    assert re.search(message.format(tmp_path), error), error


@as_root
def test_a_read_only_path_is_refused(tmp_path):
    script = 'mount -t tmpfs -o ro none "$1" && shift && exec "$@"'
    command = ["unshare", "-m", "sh", "-c", script, "sh", tmp_path, *COMMAND, "--json", tmp_path]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, cwd=REPOSITORY)
    assert done.returncode == 1
    assert "mounted read-only" in json.loads(done.stdout)["error"]


def test_room_that_is_promised_and_not_given_is_an_error_and_nothing_is_left(tmp_path):
    limit = 8 * 2**20
    limits = {"preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))}
    done = call(*QUICK, "--processes", 2, "--json", tmp_path, cache=tmp_path / "cache", **limits)
    assert done.returncode == 1
    expected = f"path '{tmp_path}': {2**24} bytes for measuring cannot be had: File too large"
    assert json.loads(done.stdout)["error"].startswith(expected)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "number, moment",
    [("KILL", "files"), pytest.param("KILL", "measuring", marks=pytest.mark.full), ("INT", "measuring")],
)
def test_nothing_is_left_after_a_signal(tmp_path, number, moment):
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    (tmp_path / "p").mkdir()
    command = [*COMMAND, "--seconds", "30", "--size", "32MiB", "--processes", "2", str(tmp_path / "p")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        deadline = time.monotonic() + 60
        while not os.listdir(tmp_path / "p"):
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.001)
        if moment == "measuring":
            while os.listdir(tmp_path / "p"):  # from then on the files have no name
                assert time.monotonic() < deadline
                time.sleep(0.01)
            time.sleep(0.5)
            assert any(str(tmp_path) in file for file in deleted_files(process)), "nothing is being measured"
        workers = psutil.Process(process.pid).children(recursive=True)
        begin = time.monotonic()
        process.send_signal(getattr(signal, f"SIG{number}"))
        _, error = process.communicate(timeout=60)
    finally:
        process.kill()
    if number == "INT":
        assert process.returncode == 130
        assert "interrupted; nothing is left" in error and "Traceback" not in error
    psutil.wait_procs(workers, timeout=20)
    assert not [worker for worker in workers if worker.is_running() and worker.status() != "zombie"]
    assert time.monotonic() - begin < 20
    assert os.listdir(tmp_path / "p") == []
    assert not [lock for lock in lock_room().glob("*.lock") if str(tmp_path) in lock.read_text()]


def deleted_files(process):
    """Names of files without a name that the workers of ``process`` have open."""
    found = []
    for worker in psutil.Process(process.pid).children(recursive=True):
        for entry in Path(f"/proc/{worker.pid}/fd").iterdir():
            try:
                target = os.readlink(entry)
            except OSError:
                continue
            if target.endswith(" (deleted)"):
                found.append(target)
    return found
