"""The words of squeue and qstat. A real slurmctld is asked in tests/slurm; of PBS there is only its documented behaviour."""

import pytest

from mlp_offload.storage.scheduler import ask


@pytest.fixture
def command(tmp_path, monkeypatch):
    """Puts a shell script on PATH as the only command there."""

    def put(name, script):
        file = tmp_path / name
        file.write_text(f"#!/bin/sh\n{script}\n")
        file.chmod(0o755)

    monkeypatch.setenv("PATH", str(tmp_path))
    return put


@pytest.mark.parametrize(
    "script, known, reason",
    [
        ("echo RUNNING", True, "job 4711 is running"),
        ("echo PENDING", True, "job 4711 is pending"),
        ("echo COMPLETED; echo RUNNING", True, "completed, running"),
        ("echo CANCELLED", False, "job 4711 is cancelled"),
        ("true", False, "job 4711 is gone"),
        ("echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1", False, "knows no job 4711"),
        ("echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1", None, "Unable to contact"),
    ],
)
def test_slurm(command, script, known, reason):
    command("squeue", f'case "$*" in *--jobs=4711*) ;; *) exit 3;; esac\n{script}')
    word = ask("slurm-4711")
    assert word.known is known and reason in word.reason


@pytest.mark.parametrize("status, known", [(0, True), (153, False), (35, False), (1, None)])
def test_pbs_with_the_brackets_of_an_array(command, status, known):
    command("qstat", f'[ "$1" = "17[3].server" ] || exit 9\necho told >&2\nexit {status}')
    assert ask("pbs-17_3_.server").known is known


def test_nobody_to_ask(command):
    for job in ("slurm-4711", "pbs-17.server", "local-me-host", "mine", "slurm-x"):
        assert ask(job).known is None
    assert ask("slurm-4711").reason == "there is no squeue here to ask"
