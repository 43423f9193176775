"""The doctor tries things on real directories, limits and installations, says what it found and what to do, and leaves nothing."""

import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import pytest

from mlp_offload import _native
from mlp_offload.cli import check_machine, check_paths, check_software
from mlp_offload.cli.findings import NOTE, OK, PROBLEM
from mlp_offload.cli.main import main
from mlp_offload.storage.jobdir import ScratchFile
from mlp_offload.storage.locks import lock_path, lock_room

REPOSITORY = Path(__file__).resolve().parents[2]
TOOLS = ("unshare", "losetup", "mkfs.ext4")

as_root = pytest.mark.skipif(
    os.geteuid() != 0 or not all(map(shutil.which, TOOLS)), reason="mounts need root and " + ", ".join(TOOLS)
)

MACHINE = """
import dataclasses, json
from mlp_offload.cli.check_machine import check_machine
from mlp_offload.cli.check_software import native_module
print(json.dumps([dataclasses.asdict(finding) for finding in check_machine(native_module()[0])]))
"""
PATHS = """
import dataclasses, json, sys
from mlp_offload.cli.check_paths import check_paths
from mlp_offload.cli.check_software import native_module
print(json.dumps([dataclasses.asdict(finding) for finding in check_paths(sys.argv[1:], native_module()[0])]))
"""


def by_subject(findings):
    return {finding["subject"] if isinstance(finding, dict) else finding.subject: finding for finding in findings}


def in_process(program, *arguments, before=(), environment=None, **settings):
    """Findings by subject of a program in a process of its own."""
    command = [*before, sys.executable, "-c", program, *map(str, arguments)]
    env = {k: v for k, v in os.environ.items() if not k.startswith("SLURM")} | {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        command, capture_output=True, text=True, env=env | (environment or {}), timeout=60, **settings
    )
    assert done.returncode == 0, done.stderr
    return by_subject(json.loads(done.stdout))


# ------------------------------------------------------------------------------------------ the command


@pytest.fixture(scope="module")
def examined(tmp_path_factory):
    """(status, what was printed) of the whole command on a real directory."""
    place = tmp_path_factory.mktemp("path")
    command = [sys.executable, "-m", "mlp_offload", "doctor", "--json", str(place)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, timeout=280)
    assert os.listdir(place) == []
    return done.returncode, json.loads(done.stdout), place


@pytest.mark.full
def test_where_runs_work_nothing_is_a_problem(examined):
    status, told, place = examined
    assert (status, told["ok"], told["problem_count"]) == (0, True, 0), told
    found = by_subject(told["findings"])
    for subject in (
        "native module",
        "Adam kernel",
        "PyTorch",
        "Megatron-Core",
        "node-local locks",
        "room",
        "state file",
    ):
        assert found[subject]["level"] == OK, found[subject]
    assert found["PyTorch"]["found"].startswith(version("torch"))
    assert found["Megatron-Core"]["found"].startswith(version("megatron-core"))
    assert {finding["area"] for finding in told["findings"]} == {"software", "machine", str(place)}


@pytest.mark.full
def test_what_was_built_is_what_the_module_says(examined):
    found = by_subject(examined[1]["findings"])
    assert found["Adam kernel"]["found"] == f"{', '.join(_native.adam_variants())} run on this processor"
    assert (found["io_uring engine"]["level"] == OK) == _native.io_uring_compiled
    assert (found["io_uring"]["level"] == OK) == _native.io_uring_available()[0]
    built = (REPOSITORY / "mlp_offload" / "_cuda.so").exists()
    assert found["CUDA kernels"]["found"].startswith("built" if built else "not built")


def test_a_problem_is_status_1_and_the_table_says_what_to_do(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("mlp_offload.cli.doctor.check_software", lambda: iter(()))
    assert main(["doctor", f"{tmp_path}/[nowhere]"]) == 1
    output, _ = capsys.readouterr()
    assert "[nowhere]" in output and "No such file or directory" in output and "Create it on every node" in output
    assert "1 problem: a run will not work here" in output
    assert main(["doctor", "--json", str(tmp_path)]) == 0
    assert json.loads(capsys.readouterr()[0])["ok"]


# ------------------------------------------------------------------------------------------ software


def test_without_torch_it_works_and_says_so(tmp_path):
    """The whole command, in an interpreter that finds no torch."""
    (tmp_path / "torch.py").write_text("raise ImportError('no torch on purpose')")
    program = "import sys; from mlp_offload.cli.main import main; sys.exit(main(['doctor', '--json']))"
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{REPOSITORY}"}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment, cwd=tmp_path
    )
    assert done.returncode == 1, done.stderr
    found = by_subject(json.loads(done.stdout)["findings"])
    assert found["PyTorch"]["level"] == PROBLEM and "no torch on purpose" in found["PyTorch"]["found"]
    assert found["native module"]["level"] == found["node-local locks"]["level"] == OK


def test_without_the_native_module_it_works_and_says_what_to_build(tmp_path):
    """A copy of the package as it is before it is built."""
    shutil.copytree(
        REPOSITORY / "mlp_offload",
        tmp_path / "mlp_offload",
        ignore=shutil.ignore_patterns("*.so", "csrc", "__pycache__"),
    )
    (tmp_path / "torch.py").write_text("raise ImportError('not looked at here')")
    (tmp_path / "path").mkdir()
    # An editable install would find the module that it has built.
    program = """
import runpy, sys
sys.meta_path = [finder for finder in sys.meta_path if "editable" not in getattr(finder, "__module__", "")]
sys.argv = ["mlp-offload", "doctor", "--json", "path"]
runpy.run_module("mlp_offload", run_name="__main__")
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=os.environ | {"PYTHONPATH": ""})
    assert done.returncode == 1, done.stderr
    found = by_subject(json.loads(done.stdout)["findings"])
    assert found["native module"]["level"] == PROBLEM and "pip install ." in found["native module"]["advice"]
    assert found["CUDA kernels"]["level"] == NOTE and found["CUDA kernels"]["found"].startswith("not built")
    assert found["io_uring"]["found"].startswith("not tried") and found["state file"]["found"].startswith("not tried")


@pytest.mark.parametrize(
    "loaded, level, text",
    [
        ({"megatron": "0.19.2"}, OK, "tested"),
        ({"megatron": "0.19.2+cbd5115"}, OK, "0.19.2+cbd5115"),
        ({"megatron": "0.18.2"}, NOTE, "the test suite runs on 0.16.1 and 0.19.2"),
        ({"megatron": "0.15.0", "megatron_error": "SelfCheckError: lacks x"}, PROBLEM, "lacks x"),
        ({"megatron_error": "ModuleNotFoundError: megatron"}, NOTE, "OffloadedAdamW, for plain PyTorch, needs none"),
    ],
)
def test_megatron_is_judged_by_what_is_there(loaded, level, text):
    (finding,) = check_software._megatron(loaded)
    assert finding.level == level and text in finding.found
    assert bool(finding.advice) == (level != OK)


def test_a_crash_while_torch_loads_is_told_as_such(monkeypatch):
    monkeypatch.setattr(check_software, "_LOAD", "import os; os.abort()")
    (finding,) = check_software._torch(check_software._load())
    assert finding.level == PROBLEM and "ended with status -6" in finding.found


@pytest.mark.parametrize(
    "loaded, gpus, level, text",
    [
        ({"gpus": 0}, [], OK, "no GPU to run them on, which is no obstacle"),
        ({"gpus": 1, "kernels": [[True, ""]]}, ["GPU, 80 GiB"], OK, "load on 1 GPUs"),
        ({"gpus": 1, "kernels": [[False, "too old"]]}, ["GPU, 80 GiB"], NOTE, "too old"),
    ],
)
def test_cuda_kernels_need_no_gpu(monkeypatch, tmp_path, loaded, gpus, level, text):
    monkeypatch.setattr(check_software, "_driver_gpus", lambda: gpus)
    (tmp_path / "_cuda.so").symlink_to(_native.__file__)  # a library that loads
    monkeypatch.setattr(check_software, "_PACKAGE", tmp_path)
    finding = by_subject(check_software._cuda(loaded))["CUDA kernels"]
    assert finding.level == level and text in finding.found


def test_gpus_that_torch_does_not_see_are_a_problem(monkeypatch):
    monkeypatch.setattr(check_software, "_driver_gpus", lambda: ["GPU, 80 GiB"])
    finding = by_subject(check_software._cuda({"gpus": 0}))["PyTorch and GPUs"]
    assert finding.level == PROBLEM and "CUDA_VISIBLE_DEVICES" in finding.advice


# ------------------------------------------------------------------------------------------ machine


def test_limits_cores_batch_system_and_scratch_are_seen_with_what_to_do(tmp_path):
    one = min(os.sched_getaffinity(0))

    def lower():
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**30, resource.RLIM_INFINITY))
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (2**16, 2**16))
        os.sched_setaffinity(0, {one})

    variables = {
        "SLURM_JOB_ID": "4711",
        "SLURM_TMPDIR": str(tmp_path),
        "LOCAL_SCRATCH": "/dev/shm",
        "TMPDIR": "/no/where",
    }
    found = in_process(MACHINE, environment=variables, preexec_fn=lower)
    assert found["file size"]["level"] == NOTE and "1.0 GiB" in found["file size"]["found"]
    assert found["file size"]["advice"] == "ulimit -f unlimited"
    assert found["open files"]["level"] == NOTE and "200" in found["open files"]["found"]
    assert "64.0 KiB" in found["locked memory"]["found"]
    assert found["cores"]["level"] == NOTE and f"1 of {os.cpu_count()} cores ({one})" in found["cores"]["found"]
    assert found["batch system"]["found"] == "SLURM job 4711; job name slurm-4711"
    assert found["$SLURM_TMPDIR"]["level"] == OK and found["$SLURM_TMPDIR"]["found"].startswith(f"{tmp_path}: ")
    assert found["$LOCAL_SCRATCH"]["level"] == NOTE and "this is host memory" in found["$LOCAL_SCRATCH"]["found"]
    assert found["$TMPDIR"]["level"] == NOTE and "No such file" in found["$TMPDIR"]["found"]


@pytest.mark.full
@pytest.mark.skipif(
    not _native.io_uring_available()[0] or os.geteuid() != 0, reason="needs io_uring, and root to leave it"
)
def test_registered_buffers_are_tried_for_real():
    """Root locks as much as it likes, another user only as much as the limit says."""

    program = """
import os, resource, sys
from mlp_offload.cli import check_machine
from mlp_offload.storage import buffers, engine  # while root may read them
resource.setrlimit(resource.RLIMIT_MEMLOCK, (2**16, 2**16))
print(check_machine._registered_buffers().level)
os.setgid(65534), os.setuid(65534)
finding = check_machine._registered_buffers()
print(finding.level, finding.advice)
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        cwd="/",
        env={"PYTHONPATH": str(REPOSITORY), "TMPDIR": "/tmp"},
    )
    assert done.stdout.splitlines() == ["ok", "note ulimit -l unlimited"], done


@pytest.mark.full
@pytest.mark.skipif(not shutil.which("strace") or not _native.io_uring_compiled, reason="needs strace and io_uring")
def test_a_ring_that_the_kernel_refuses_is_a_note():
    before = ["strace", "-f", "-qq", "-o", "/dev/null", "-e", "inject=io_uring_setup:error=EPERM"]
    found = in_process(MACHINE, before=before)
    assert found["io_uring"]["level"] == NOTE and "Operation not permitted" in found["io_uring"]["found"]
    assert "not needed by the threads engine" in found["locked memory"]["found"]


def test_a_job_without_memory_is_told(monkeypatch):
    monkeypatch.setattr("mlp_offload.storage.memory.available_memory_bytes", lambda: 2**28)
    (finding,) = check_machine._memory()
    assert finding.level == NOTE and finding.found.startswith("256.0 MiB can be taken")


def test_a_lock_directory_that_others_can_enter_is_a_problem(monkeypatch):
    """In a mount namespace of its own, where /dev/shm is another one."""
    script = 'mount -t tmpfs none /dev/shm && mkdir -m 755 /dev/shm/mlp-offload-0 && exec "$@"'
    if os.geteuid() != 0 or not shutil.which("unshare"):
        pytest.skip("mounts need root and unshare")
    found = in_process(MACHINE, before=["unshare", "-m", "sh", "-c", script, "sh"])["node-local locks"]
    assert found["level"] == PROBLEM and "/dev/shm/mlp-offload-0 is open to others" in found["found"]


# ------------------------------------------------------------------------------------------ paths


def test_each_path_is_tried_and_left_as_it_was(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    findings = list(check_paths.check_paths([str(tmp_path / "a"), f"{tmp_path / 'b'},engine=threads"], _native))
    first = by_subject(finding for finding in findings if finding.area == str(tmp_path / "a"))
    second = by_subject(finding for finding in findings if finding.area == str(tmp_path / "b"))
    assert {first[s].level for s in ("room", "state file", "fallocate")} == {OK}
    assert second["engine threads"].level == OK
    assert first["shared device"].level == NOTE and str(tmp_path / "b") in first["shared device"].found
    assert os.listdir(tmp_path / "a") == os.listdir(tmp_path / "b") == []
    assert not [lock for lock in lock_room().glob("*.lock") if str(tmp_path) in lock.read_text()]


def test_memory_is_no_storage():
    place = tempfile.mkdtemp(prefix="mlp-offload-test-", dir="/dev/shm")
    try:
        found = by_subject(check_paths.check_paths([place], _native))
    finally:
        os.rmdir(place)
    assert found["file system"].level == NOTE and "raise host_memory" in found["file system"].advice


@pytest.mark.parametrize(
    "spec, text",
    [
        ("{}/no", "No such file"),
        ("{}/file", "is not a directory"),
        ("{},x=1", "unknown key"),
        ("$NONE_SUCH/a", "NONE_SUCH"),
    ],
)
def test_a_path_that_cannot_be_used_is_a_problem_and_the_others_are_still_looked_at(tmp_path, spec, text):
    (tmp_path / "file").touch()
    first, *others = check_paths.check_paths([spec.format(tmp_path), str(tmp_path)], _native)
    assert first.level == PROBLEM and text in first.found
    assert by_subject(others)["state file"].level == OK


def test_a_job_directory_that_others_can_enter_is_a_problem(tmp_path):
    (tmp_path / f"mlp-offload-doctor-{os.getpid()}").mkdir(mode=0o755)
    found = by_subject(check_paths.check_paths([str(tmp_path)], _native))["state file"]
    assert found.level == PROBLEM and "is open to others" in found.found


def test_what_dead_jobs_left_is_told_and_stays_and_living_ones_are_not_meant(tmp_path):
    program = """
import os, sys
from mlp_offload.storage.jobdir import ScratchFile
scratch = ScratchFile.create(sys.argv[1], job="dead", rank=0, name="n")
scratch.path.write_bytes(bytes(2**20))
os.kill(scratch.sweeper_pid, 9)
os.kill(os.getpid(), 9)
"""
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], cwd=REPOSITORY)
    with ScratchFile.create(tmp_path, job="alive", rank=0, name="n", reclaim=False) as scratch:
        found = by_subject(check_paths.check_paths([str(tmp_path)], _native))["left over"]
        assert scratch.path.exists()
    assert found.level == NOTE and "1.0 MiB of dead jobs: dead" in found.found
    assert found.advice.startswith(f"mlp-offload clean {tmp_path}")
    assert [file.name for file in tmp_path.iterdir()] == ["mlp-offload-dead"]
    (left,) = (tmp_path / "mlp-offload-dead").iterdir()
    lock_path(str(left)).unlink(missing_ok=True)  # nobody is there any more to remove it


@as_root
def test_a_read_only_and_a_full_file_system_are_problems(tmp_path):
    for name in ("ro", "full"):
        (tmp_path / name).mkdir()
    script = 'mount -t tmpfs -o ro none "$1/ro" && mount -t tmpfs -o size=1m none "$1/full" && shift && exec "$@"'
    before = ["unshare", "-m", "sh", "-c", script, "sh", str(tmp_path)]
    found = in_process(PATHS, tmp_path / "ro", tmp_path / "full", before=before)
    assert found["directory"]["level"] == PROBLEM and "mounted read-only" in found["directory"]["found"]
    assert found["room"]["level"] == PROBLEM and found["state file"]["level"] == PROBLEM
    assert "No space left" in found["state file"]["found"]


@as_root
@pytest.mark.full
def test_the_alignment_of_a_device_with_large_sectors_is_found(tmp_path):
    """And a file system without room for files, which only its inodes tell."""
    with open(tmp_path / "image", "wb") as image:
        image.truncate(2**26)
    (tmp_path / "m").mkdir()
    script = (
        'set -e; L=$(losetup --sector-size 4096 -f --show "$1/image"); trap "umount $1/m; losetup -d $L" EXIT\n'
        'mkfs.ext4 -q -N 16 "$L"; mount "$L" "$1/m"; shift; "$@"'
    )
    before = ["unshare", "-m", "sh", "-c", script, "sh", str(tmp_path)]
    found = in_process(PATHS, tmp_path / "m", before=before)
    assert re.search(r"taken with 4096 bytes alignment", found["O_DIRECT"]["found"])
    assert found["room"]["level"] == PROBLEM and "inodes free" in found["room"]["found"]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs another user")
def test_a_directory_of_somebody_else_is_a_problem(tmp_path):
    place = tempfile.mkdtemp(prefix="mlp-offload-test-", dir="/dev/shm")
    os.chmod(place, 0o755)
    program = f"""
import os
from mlp_offload.cli import check_machine, check_paths
from mlp_offload import _native
from mlp_offload.storage import facts, jobdir
from mlp_offload import config
os.setgid(65534), os.setuid(65534)
for finding in check_paths.check_paths([{place!r}], _native):
    print(finding.level, finding.found)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=REPOSITORY)
    os.rmdir(place)
    assert done.stdout.strip() == f"problem path '{place}' is not writable for user id 65534", done
