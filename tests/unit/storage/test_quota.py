"""What ``quota`` and ``lfs quota`` say of limits. Both are stand-ins that print what the real ones print."""

import os

import pytest

from mlp_offload.storage.facts import facts_of, shared_devices, striping
from mlp_offload.storage.mounts import device_key
from mlp_offload.storage.quota import Quota, quotas_of

PLAIN = """Disk quotas for user me (uid 1000):
     Filesystem  blocks   quota   limit   grace   files   quota   limit   grace
"""
LONG = "server.cluster.example.org:/export/scratch/projects/42\n"


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Makes a program that notes its arguments and prints ``user`` after ``-u`` and ``group`` after ``-g``."""

    def make(name, user, group="", then="exit 0"):
        programs = tmp_path / "bin"
        programs.mkdir()
        (tmp_path / "user").write_text(user)
        (tmp_path / "group").write_text(group)
        file = programs / name
        file.write_text(
            f'#!/bin/sh\necho "$*" >> "{tmp_path}/log"\n'
            f'case " $* " in *" -u "*) cat "{tmp_path}/user";; *) cat "{tmp_path}/group";; esac\n{then}\n'
        )
        file.chmod(0o755)
        monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")

    make.calls = lambda: (tmp_path / "log").read_text().splitlines()
    return make


def test_the_lower_limit_of_bytes_and_files_counts(tmp_path, program):
    program("quota", PLAIN + " /dev/sda1  2048  8192  10240  0  7  0  100  0\n")
    quotas, told = quotas_of(tmp_path, "ext4")
    assert quotas == [Quota(f"user {os.geteuid()}", 2048 * 1024, 8192 * 1024, 7, 100)]
    assert told == f"user {os.geteuid()}: 2.0 MiB of 8.0 MiB and 7 of 100 files"
    assert not quotas[0].exhausted
    assert program.calls()[0].endswith(f" -u {os.geteuid()}") and "--filesystem=/" in program.calls()[0]


@pytest.mark.parametrize(
    "line, exhausted",
    [
        (" /dev/sda1  10240*  8192  10240  1700000000  7  0  0  0\n", True),
        (f" {LONG} 8192  0  8192  0  7  0  0  0\n", True),
        (f" {LONG} 8191  0  8192  0  100  0  100  0\n", True),
        (" /dev/sda1  10  8192  10240  0  7  0  0  0\n", False),
    ],
)
def test_an_exhausted_quota_is_known_as_such_whatever_the_status(tmp_path, program, line, exhausted):
    program("quota", PLAIN + line, then="exit 1")
    (quota,), _ = quotas_of(tmp_path, "nfs4")
    assert quota.exhausted == exhausted


def test_lustre_is_asked_with_its_own_tool_for_user_and_group(tmp_path, program):
    program("lfs", "/scratch  2048  0  4096  -  7  0  0  -\n", "/scratch\n  9000*  0  9000  6d  7  0  0  -\n")
    quotas, told = quotas_of(tmp_path, "lustre")
    assert [quota.exhausted for quota in quotas] == [False, True]
    assert told.count(" of ") == 2 and f"group {os.getegid()}" in told
    assert program.calls() == [
        f"quota -q -u {os.geteuid()} {tmp_path}",
        f"quota -q -g {os.getegid()} {tmp_path}",
    ]


@pytest.mark.parametrize(
    "output, then, told",
    [
        (PLAIN + " /dev/sda1  2048  0  0  0  7  0  0  0\n", "exit 0", "no limit"),
        ("", "echo 'quota: /x not found or has no quota enabled.' >&2; exit 1", "no limit"),
        ("", "echo 'quota: server does not answer' >&2; exit 1", "not known: quota: server does not answer"),
        ("", "exec sleep 60", "not known: .*timed out"),
    ],
)
def test_no_limit_and_no_answer_differ(tmp_path, program, output, then, told, monkeypatch):
    monkeypatch.setattr("mlp_offload.storage.quota._SECONDS", 0.3)
    program("quota", output, output, then)
    quotas, said = quotas_of(tmp_path, "ext4")
    assert quotas == []
    if ".*" in told:
        assert said.startswith("not known: ") and "timed out" in said
    else:
        assert said == told


def test_without_the_tool_it_is_not_known(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert quotas_of(tmp_path, "ext4") == ([], "not known: there is no program quota here")
    assert quotas_of(tmp_path, "lustre") == ([], "not known: there is no program lfs here")


def test_facts_are_those_of_the_file_system_and_shared_devices_are_found(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    a, b = (facts_of(tmp_path / name) for name in ("a", "b"))
    assert a.free_bytes > 0 and a.device == device_key(tmp_path) and not a.network
    assert facts_of("/dev/shm").in_memory
    assert shared_devices([a, b]) == [(a.device, [a.directory, b.directory])]
    assert shared_devices([a]) == []
    with pytest.raises(FileNotFoundError):
        facts_of(tmp_path / "nowhere")


def test_striping_is_told_in_one_line_or_why_not(tmp_path, program, monkeypatch):
    program("lfs", "", "stripe_count:  4 stripe_size:   4194304 pattern:       0 stripe_offset: -1\n")
    assert striping(tmp_path) == "stripe count 4; stripe size 4194304 bytes"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert striping(tmp_path) == "not known: there is no program lfs here"
