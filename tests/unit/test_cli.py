"""What a newcomer types first: help that teaches, wrong options that are told at once."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mlp_offload.cli import output
from mlp_offload.cli.main import main

REPOSITORY = Path(__file__).resolve().parents[2]


def told(capsys, *arguments):
    """(exit status, stdout, stderr) of the command."""
    try:
        status = main(arguments)
    except SystemExit as stop:
        status = stop.code
    return (status, *capsys.readouterr())


def test_help_shows_a_command_line_to_copy(capsys):
    for arguments in (["--help"], ["run", "--help"]):
        status, output, _ = told(capsys, *arguments)
        assert status == 0
        assert "torchrun --nproc-per-node 2 --no-python mlp-offload run pretrain_gpt" in output
        assert "--mlp-offload-path /nvme/scratch --mlp-offload-path /lustre/me/scratch" in output


def test_the_command_line_needs_neither_torch_nor_the_native_module():
    blocked = "import sys; sys.modules['torch'] = sys.modules['numpy'] = sys.modules['mlp_offload._native'] = None\n"
    code = blocked + "from mlp_offload.cli.main import main; sys.exit(main(['--help']))"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_without_a_command_it_shows_the_help_and_fails(capsys):
    status, output, error = told(capsys)
    assert (status, output) == (2, "")
    assert "example:" in error and "mlp-offload run --help" in error


def test_an_unknown_command_is_told_with_those_that_exist(capsys):
    status, _, error = told(capsys, "fly")
    assert status == 2 and "'fly'" in error and "run" in error.splitlines()[-1]


@pytest.mark.parametrize(
    "arguments, status, message",
    [
        (["--help"], 0, "--iterations"),
        (["--iteratons", "20"], 2, "unrecognized arguments: --iteratons 20"),
        (["--iterations", "3"], 2, "--iterations must be at least 10"),
        (["--paths", "/nowhere/at/all"], 2, "--paths /nowhere/at/all: not a directory"),
    ],
)
def test_the_quickstart_tells_wrong_options_before_it_sets_anything_up(tmp_path, arguments, status, message):
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    for name in ("quickstart.sh", "quickstart.py"):
        (scripts / name).write_bytes((REPOSITORY / "scripts" / name).read_bytes())
    (scripts / "setup_env.sh").write_text("echo SETTING UP")
    done = subprocess.run(
        ["bash", str(scripts / "quickstart.sh"), *arguments], capture_output=True, text=True, cwd=tmp_path, timeout=60
    )
    assert done.returncode == status
    assert message in done.stdout + done.stderr and "SETTING UP" not in done.stdout


def test_the_quickstart_takes_paths_from_where_it_was_called(tmp_path):
    (tmp_path / "state").mkdir()
    command = [sys.executable, str(REPOSITORY / "scripts" / "quickstart.py"), "--check-options", "--paths", "state"]
    assert subprocess.run(command, cwd=tmp_path, timeout=60).returncode == 0


SIMULATE = (
    "simulate",
    "1e6",
    "--host-memory",
    "4MB",
    "--subgroup-size",
    "100000",
    "--path",
    "/a,read=1GB/s,write=1GB/s",
)
PLAN = ("plan", "gpt-7b", "--path", "/a,read=1GB/s,write=1GB/s")


def command(*arguments):
    return [sys.executable, "-m", "mlp_offload", *arguments]


@pytest.mark.parametrize("arguments", [("--help",), ("plan", "--help"), (*SIMULATE, "--json"), PLAN])
def test_a_reader_that_has_gone_ends_it_without_a_word(arguments):
    """As `| head -0` does: nobody reads the pipe when the first line is written, whether from a buffer or through rich."""
    with subprocess.Popen(
        command(*arguments), cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        process.stdout.close()
        error = process.stderr.read().decode()
        assert (process.wait(timeout=60), error) == (141, "")


@pytest.mark.parametrize("arguments", [("--help",), (*SIMULATE, "--json"), (*PLAN, "--json"), SIMULATE])
def test_output_that_cannot_be_written_is_told_in_one_line(arguments):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command(*arguments), cwd=REPOSITORY, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60
        )
    assert (done.returncode, done.stderr) == (1, "mlp-offload: standard output: No space left on device\n")


def test_an_error_of_something_else_is_not_taken_for_one_of_the_output(monkeypatch, capsys):
    def fail(options):
        print("begun")
        raise OSError(errno.ENOSPC, "elsewhere")

    monkeypatch.setattr("mlp_offload.cli.plan._execute", fail)
    with pytest.raises(OSError, match="elsewhere"):
        main(["plan"])
    assert capsys.readouterr().out == "begun\n"


def test_ctrl_c_ends_a_command_with_one_line(tmp_path):
    os.mkfifo(tmp_path / "plan.json")  # a plan that does not come
    asked = command("simulate", "--plan", str(tmp_path / "plan.json"))
    with (
        subprocess.Popen(asked, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process,
        open(tmp_path / "plan.json", "w"),  # open when the command is
    ):
        process.send_signal(signal.SIGINT)
        told, error = process.communicate(timeout=60)
    assert (process.returncode, told, error) == (130, "", "mlp-offload: interrupted\n")


def test_json_has_no_nan_and_no_infinity(capsys):
    output.print_json({"a": [float("nan"), 1.5], "b": {"c": float("inf"), "d": ("x", None)}})
    assert capsys.readouterr().out == '{"ok": true, "a": [null, 1.5], "b": {"c": null, "d": ["x", null]}}\n'
