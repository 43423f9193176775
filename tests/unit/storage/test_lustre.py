"""Which layout a job directory gets on Lustre. ``lfs`` is a stand-in that records its arguments."""

import os

import pytest

from mlp_offload.storage.jobdir import ScratchFile
from mlp_offload.storage.lustre import stripe, stripe_lustre
from mlp_offload.storage.mounts import Mount

PLAIN = "stripe_count:  {} stripe_size:   1048576 pattern:       0 stripe_offset: -1"
GROWS = """  lcm_layout_gen:    0
  lcm_entry_count:   2
    lcme_id:             N/A
      stripe_count:  1       stripe_size:   1048576       pattern:       raid0       stripe_offset: -1
    lcme_id:             N/A
      stripe_count:  8       stripe_size:   1048576       pattern:       raid0       stripe_offset: -1
"""


@pytest.fixture
def lfs(tmp_path, monkeypatch):
    """Makes an ``lfs`` that answers getstripe with a text, and gives its command lines so far, one a list entry."""
    log = tmp_path / "commands"

    def make(answer="", then="exit 0"):
        programs = tmp_path / "bin"
        programs.mkdir()
        (tmp_path / "answer").write_text(answer)
        file = programs / "lfs"
        file.write_text(
            f'#!/bin/sh\necho "$*" >> "{log}"\n[ "$1" = getstripe ] && exec cat "{tmp_path}/answer"\n{then}\n'
        )
        file.chmod(0o755)
        monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")

    make.commands = lambda: log.read_text().splitlines() if log.exists() else []
    return make


@pytest.mark.parametrize("count", ["0", "1"])
def test_files_on_one_target_are_spread_over_four(tmp_path, lfs, count):
    lfs(PLAIN.format(count))
    stripe_lustre(tmp_path / "job", True)
    assert lfs.commands() == [f"getstripe -d {tmp_path}/job", f"setstripe -c 4 -S 4M {tmp_path}/job"]


@pytest.mark.parametrize("layout", [PLAIN.format(8), PLAIN.format(-1), GROWS, PLAIN.format(1) + " pool: flash", "?"])
def test_what_somebody_has_set_stays(tmp_path, lfs, layout, caplog):
    lfs(layout)
    stripe_lustre(tmp_path / "job", True)
    assert lfs.commands() == [f"getstripe -d {tmp_path}/job"]
    assert not caplog.records


@pytest.mark.parametrize(
    "then, reason", [("echo no permission >&2; exit 1", "no permission"), ("sleep 60", "timed out")]
)
def test_a_failure_is_one_line_with_the_command_to_run(tmp_path, lfs, then, reason, caplog, monkeypatch):
    monkeypatch.setattr("mlp_offload.storage.lustre._LFS_SECONDS", 0.5)
    lfs(PLAIN.format(1), f"exec {then}" if then.startswith("sleep") else then)
    stripe_lustre(tmp_path / "a job", True)
    (record,) = caplog.records
    assert record.levelname == "WARNING" and reason in record.getMessage()
    assert record.getMessage().endswith(f"run once: lfs setstripe -c 4 -S 4M {tmp_path}")


def test_without_lfs_one_rank_advises(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("PATH", str(tmp_path))
    stripe_lustre(tmp_path / "job", False)
    assert not caplog.records
    stripe_lustre(tmp_path / "job", True)
    (record,) = caplog.records
    assert "no program lfs" in record.getMessage() and f"lfs setstripe -c 4 -S 4M {tmp_path}" in record.getMessage()


def test_other_file_systems_are_left_alone(tmp_path, lfs):
    lfs(PLAIN.format(1))
    stripe(tmp_path, True)
    stripe(tmp_path / "nowhere", True)
    assert lfs.commands() == []


def test_the_job_directory_is_striped_before_the_state_file_is_made(tmp_path, lfs, monkeypatch):
    lfs(PLAIN.format(1), 'ls -A "$6" >> "$0.seen"; exit 0')
    monkeypatch.setattr("mlp_offload.storage.lustre.mount_of", lambda directory: Mount("lustre", "mgs@tcp:/scratch"))
    with ScratchFile.create(tmp_path, job="j", rank=0, name="n") as scratch:
        assert lfs.commands()[-1] == f"setstripe -c 4 -S 4M {scratch.path.parent}"
        assert (tmp_path / "bin" / "lfs.seen").read_text() == ""
