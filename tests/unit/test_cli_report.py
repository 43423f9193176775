"""``mlp-offload report`` on the telemetry of real runs."""

import json
import os
import re
import signal
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from mlp_offload.cli.main import main

torch = pytest.importorskip("torch")
REPOSITORY = Path(__file__).resolve().parents[2]
KINDS = ("storage-bound", "update-bound", "balanced", "compute-bound")

TRAIN = """
import sys, time, torch
from mlp_offload import OffloadedAdamW
directory, steps, pause = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
weights = torch.nn.Parameter(torch.zeros(400_000))
optimizer = OffloadedAdamW([weights], paths=[f"{directory}/a,read=2GB/s,write=1GB/s", f"{directory}/b,read=1GB/s,write=1GB/s"],
    host_memory="1MiB", subgroup_size=10_000, engine="threads", update_threads=1, telemetry=f"{directory}/telemetry")
for step in range(steps):
    weights.grad = torch.ones(400_000)
    optimizer.step()
    time.sleep(pause)
optimizer.close()
"""


def start(directory, steps=6, pause=0.3):
    """A process that trains on two paths and writes telemetry."""
    for name in ("a", "b"):
        (directory / name).mkdir(exist_ok=True)
    command = [sys.executable, "-c", TRAIN, str(directory), str(steps), str(pause)]
    return subprocess.Popen(command, env=environment())


def environment():
    return os.environ | {"PYTHONPATH": str(REPOSITORY), "COLUMNS": "120"}


def follow(directory):
    command = [sys.executable, "-m", "mlp_offload", "report", str(directory), "--follow", "--every", "0.1"]
    return subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True)


@pytest.fixture(scope="module")
def followed_run(tmp_path_factory):
    """(telemetry of a run of six steps, what `report --follow` printed that was started before it)."""
    directory = tmp_path_factory.mktemp("run")
    with follow(directory / "telemetry") as follower:
        try:
            assert follower.stdout.readline().startswith("waiting: ")
            assert start(directory).wait(timeout=100) == 0
            told, _ = follower.communicate(timeout=60)
        finally:
            follower.kill()
    assert follower.returncode == 0
    return directory / "telemetry", told.splitlines()


@pytest.fixture
def run(followed_run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    return followed_run[0]


def told(capsys, *arguments):
    """(exit status, stdout, stderr) of the command."""
    try:
        status = main(["report", *map(str, arguments)])
    except SystemExit as stop:
        status = stop.code
    return (status, *capsys.readouterr())


def test_a_real_run_is_reported_with_its_own_numbers(run, capsys):
    status, output, _ = told(capsys, run, "--json")
    assert status == 0
    (found,) = json.loads(output)["runs"]
    lines = [json.loads(line) for line in (run / "rank0000.jsonl").read_text().splitlines()]
    header, steps, end = lines[0]["header"], lines[1:-1], lines[-1]
    assert "end" in end and (found["steps"], found["step_count"], found["starts"]) == ([2, 6], 5, 1)
    assert found["step_p50"] == sorted(step["step_seconds"] for step in steps[1:])[2]
    assert found["state_bytes"] == 12 * 400_000 and found["header"] == header
    # what was planned is what came: residents, and what stays in the buffers from one step to the next
    assert 0 < found["hit_rate"] == found["planned_hit_rate"] < 0.5
    for use in found["paths"]:
        key = "bytes_read" if use["direction"] == "read" else "bytes_written"
        assert use["bytes_a_step"] == sum(step[key][use["path"]] for step in steps[1:]) / 5 > 0
        assert use["known_bytes_per_second"] == (2e9 if (use["path"][-1], key) == ("a", "bytes_read") else 1e9)
        assert use["bytes_per_second"] > 0 and use["origin"] == "as configured"
    assert len(found["paths"]) == 4 and found["findings"][0]["kind"] in KINDS


def test_the_terminal_shows_numbers_paths_and_a_verdict(run, capsys):
    status, output, _ = told(capsys, run)
    assert status == 0
    assert re.search(r"^steps +5, 2 to 6 *$", output, re.MULTILINE)
    assert re.search(r"^a +read +\S+ MB +\S+ .B/s +2.00 GB/s", output, re.MULTILINE), output
    assert re.search(r"^> (" + "|".join(KINDS) + "): ", output, re.MULTILINE)
    assert "note:" not in output


def test_rates_that_are_given_take_the_place_of_those_of_the_run(run, capsys):
    _, output, _ = told(capsys, run, "--json", "--path", f"{run.parent}/a,read=3GB/s")
    rates = {
        (use["path"][-1], use["direction"]): use["known_bytes_per_second"]
        for use in json.loads(output)["runs"][0]["paths"]
    }
    assert rates == {("a", "read"): 3e9, ("a", "write"): None, ("b", "read"): 1e9, ("b", "write"): 1e9}


def test_a_path_may_be_called_as_the_table_calls_it(run, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # "a" is no directory here
    full, short = (
        json.loads(told(capsys, run, "--json", "--path", f"{name},read=3GB/s")[1])["runs"][0]["paths"]
        for name in (run.parent / "a", "a")
    )
    assert full == short and 3e9 in [use["known_bytes_per_second"] for use in short]


def test_pictures_and_html_need_nothing_else(run, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    png, html = tmp_path / "a.png", tmp_path / "a.html"
    status, output, _ = told(capsys, run, run, "--png", png, "--html", html)
    assert status == 0 and f"written: {png}" in output.replace("\n", "")
    content = png.read_bytes()
    width, height = (int.from_bytes(content[i : i + 4], "big") for i in (16, 20))
    assert content[:4] == b"\x89PNG" and width > 2000 and height > 500  # two runs beside each other

    class Page(HTMLParser):
        def __init__(self):
            super().__init__()
            self.open, self.tags, self.addresses = [], [], []

        def handle_starttag(self, tag, attributes):
            self.tags.append(tag)
            if tag not in ("meta", "br"):
                self.open.append(tag)
            self.addresses += [v for k, v in attributes if k in ("src", "href", "xlink:href") and not v.startswith("#")]

        def handle_startendtag(self, tag, attributes):
            self.tags.append(tag)

        def handle_endtag(self, tag):
            assert self.open.pop() == tag

    page = Page()
    page.feed(html.read_text())
    assert page.open == [] and page.addresses == [] and "script" not in page.tags
    assert page.tags.count("svg") == 4  # two runs, light and dark
    assert "url(http" not in html.read_text() and "a typical step" in html.read_text()


def test_several_runs_stand_beside_each_other(run, capsys):
    other = run.parent / ".." / run.parent.name / "telemetry"
    status, output, _ = told(capsys, run, other, "--json")
    assert status == 0 and [r["run"] for r in json.loads(output)["runs"]] == [str(run), str(other)]
    _, output, _ = told(capsys, run, other)
    assert re.search(r"^steps +5, 2 to 6 +5, 2 to 6 *$", output, re.MULTILINE)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["{tmp}/none"], "no such directory"),
        (["{tmp}"], "holds no rank0000.jsonl"),
        (["{run}", "{tmp}"], "holds no rank0000.jsonl"),
        (["{run}", "--png", "{tmp}/no/a.png"], "there is no directory {tmp}/no"),
        (["{run}", "--html", "{tmp}"], "Is a directory"),
        (["{run}", "--png", "{tmp}"], "Is a directory"),
        (["{run}", "{run}", "--follow"], "--follow shows one RUN"),
        (["{run}", "--follow", "--json"], "--follow shows one RUN"),
        (["{run}", "--every", "0"], "--every 0: must be above 0"),
        (["{run}", "--path", "/a"], "--path /a: give its rates"),
        (["{run}", "--path", "/a,read=fast"], "cannot read 'fast' as bytes"),
        (["{run}", "--path", "c,read=1GB/s"], "--path c: no such path; paths: {run}/../a, {run}/../b"),
        (
            ["{run}", "--follow", "--path", "/x/a,read=1GB/s"],
            "--path /x/a: no such path; paths: {run}/../a, {run}/../b",
        ),
    ],
)
def test_what_cannot_be_reported_is_told_in_one_line(run, tmp_path, capsys, arguments, message):
    place = {"tmp": tmp_path, "run": run}
    status, output, error = told(capsys, *(argument.format(**place) for argument in arguments))
    assert status == 1 and message.format(**place).replace("telemetry/../", "") in (error or output)
    assert error.count("\n") <= 1


def test_a_number_of_steps_that_is_none_is_refused(run, capsys):
    assert told(capsys, run, "--last", "0")[0] == 2


def test_it_works_without_torch_and_says_when_matplotlib_is_missing(run, tmp_path):
    blocked = "import sys; sys.modules.update(dict.fromkeys(sys.argv.pop(1).split(',')))\nfrom mlp_offload.cli.main import main\nsys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", blocked]
    done = subprocess.run(
        [*command, "torch,megatron,numpy,matplotlib", "report", str(run)], env=environment(), timeout=100
    )
    assert done.returncode == 0
    # told before anything is read: of the two errors here this is the first
    asked = [*command, "matplotlib", "report", str(tmp_path / "none"), "--png", str(tmp_path / "a.png")]
    done = subprocess.run(asked, env=environment(), capture_output=True, text=True, timeout=100)
    assert done.returncode == 1 and "pip install 'matplotlib" in done.stderr and not done.stdout


def test_following_begins_before_the_run_and_ends_with_it(followed_run):
    _, lines = followed_run
    assert lines[-1] == "the run has ended"
    told = [int(line.split()[1]) for line in lines if line.startswith("step ")]
    assert told == sorted(set(told)) and told[-1] == 6 and len(told) >= 3  # as they came, not all at the end


ENDLESS = """
import sys, time, os, socket
from mlp_offload.telemetry import StepLog, StepRecord
log = StepLog(sys.argv[1], 0)
log.start({"host": socket.gethostname(), "pid": os.getpid(), "pid_namespace": os.readlink("/proc/self/ns/pid")})
for step in range(1, 10**6):
    log.write(StepRecord(step=step, step_seconds=0.1, started=time.monotonic()))
    time.sleep(0.1)
"""


def test_following_ends_with_ctrl_c_and_when_the_run_is_killed(tmp_path):
    trainer = subprocess.Popen([sys.executable, "-c", ENDLESS, str(tmp_path)], env=environment())
    followers = [follow(tmp_path) for _ in range(2)]
    try:
        for follower in followers:
            lines = iter(follower.stdout.readline, "")
            assert any(line.startswith("step ") for line in lines)
        followers[0].send_signal(signal.SIGINT)
        assert followers[0].communicate(timeout=60)[0].splitlines()[-1] == "stopped following; the run goes on"
        assert followers[0].returncode == 0 and trainer.poll() is None
        trainer.kill()
        trainer.wait()
        told = followers[1].communicate(timeout=60)[0].splitlines()[-1]
        assert told == f"rank 0 did not end in order: its process {trainer.pid} is gone"
    finally:
        for process in (trainer, *followers):
            process.kill()
            process.wait()
            if process.stdout:
                process.stdout.close()
