"""``mlp-offload --print-completion``, sourced by real shells."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mlp_offload.cli.main import COMMANDS, main

REPOSITORY = Path(__file__).resolve().parents[2]
# What bash does on TAB after the words of $@, the last of which is being typed.
PRESS_TAB = """
source "$1"; shift
COMP_WORDS=("$@") COMP_CWORD=$(($# - 1)) COMP_LINE="$*" COMP_POINT=${#COMP_LINE} COMP_TYPE=9
function=$(complete -p mlp-offload | sed -n 's/.*-F \\([^ ]*\\) .*/\\1/p')
"$function" mlp-offload "${@: -1}" "${@: -2:1}"
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    def make(shell):
        command = [sys.executable, "-m", "mlp_offload", "--print-completion", shell]
        done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, timeout=60)
        assert (done.returncode, done.stderr) == (0, "")
        file = tmp_path_factory.mktemp("completion") / shell
        file.write_text(done.stdout)
        return file

    return make


def test_bash_completes_commands_options_and_directories(script, tmp_path):
    file = script("bash")
    (tmp_path / "scratch").mkdir()
    (tmp_path / "scratch.txt").touch()

    def tab(*words):
        command = ["bash", "--norc", "-c", PRESS_TAB, "bash", str(file), "mlp-offload", *words]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=60)
        assert done.stderr == ""
        return set(done.stdout.split())

    assert tab("") >= {module.__name__.rpartition(".")[2] for module in COMMANDS}
    assert tab("cl") == {"clean"}
    assert {"--yes", "--job", "--older-than", "--json"} <= tab("clean", "--")
    assert tab("clean", "scr") == {"scratch"}
    assert tab("run", "scr") == {"scratch", "scratch.txt"}
    assert tab("patch", "re") == {"revert"}
    assert tab("--print-completion", "z") == {"zsh"}


def test_zsh_can_read_its_script(script):
    file = script("zsh")
    assert file.read_text().startswith("#compdef mlp-offload\n") and "--older-than" in file.read_text()
    if shutil.which("zsh"):
        done = subprocess.run(["zsh", "-n", str(file)], capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (0, "")


def test_another_shell_and_a_missing_package_are_told(capsys, monkeypatch):
    for shell, status, message in (("fish", 2, "choose from"), ("bash", 1, "pip install shtab")):
        monkeypatch.setitem(sys.modules, "shtab", None)
        with pytest.raises(SystemExit) as stop:
            main(["--print-completion", shell])
        assert stop.value.code == status and message in capsys.readouterr().err
