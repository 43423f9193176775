"""``mlp-offload simulate`` as it is typed."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mlp_offload.cli.main import main
from mlp_offload.config import OffloadConfig
from mlp_offload.pipeline import StepPipeline
from mlp_offload.ranks import RankContext
from mlp_offload.simulator import SimulatedPath, simulate

REPOSITORY = Path(__file__).resolve().parents[2]
PATHS = ("--path", "/nvme,read=4GB/s,write=2GB/s", "--path", "/pfs,read=1GB/s,write=1GB/s")
ASKED = ("1e9", *PATHS, "--host-memory", "2GB", "--compute-seconds", "1.5", "--subgroup-size", "1e7")


def told(capsys, *arguments):
    """(exit status, stdout, stderr) of the command."""
    try:
        status = main(["simulate", *map(str, arguments)])
    except SystemExit as stop:
        status = stop.code
    return (status, *capsys.readouterr())


def test_json_has_the_numbers_of_the_simulator(capsys):
    status, output, _ = told(capsys, *ASKED, "--ranks", 2, "--adam-rate", "8e8", "--steps", 4, "--json")
    result = json.loads(output)
    records = simulate(
        [10**9],
        paths=[SimulatedPath("/nvme", 4e9, 2e9), SimulatedPath("/pfs", 1e9, 1e9)],
        host_memory_bytes=2 * 10**9,
        subgroup_size=10**7,
        adam_parameters_per_second=8e8,
        compute_seconds=1.5,
        local_rank_count=2,
        steps=4,
    )
    assert status == 0 and result["ok"]
    assert result["step_p50"] == pytest.approx(sorted(r.step_seconds for r in records[1:])[1])
    assert result["iteration_p50"] == pytest.approx(result["step_p50"] + 1.5, rel=0.02)
    assert result["phases"]["update"]["seconds"] == pytest.approx(1e9 / 8e8)
    read = {use["path"]: use for use in result["paths"] if use["direction"] == "read"}
    assert read["/nvme"]["bytes_a_step"] == pytest.approx(2 * records[-1].bytes_read["/nvme"], rel=0.05), (
        "of both ranks"
    )
    assert read["/nvme"]["known_bytes_per_second"] == 4e9, "the node's"
    assert 0.9 < result["efficiency"] <= 1.0
    assert result["inputs"]["local_rank_count"] == 2 and result["inputs"]["paths"][1]["name"] == "/pfs"


def test_the_table_says_what_was_assumed(capsys):
    status, output, _ = told(capsys, *ASKED, "--ranks", 2)
    assert status == 0
    for words in (
        "1000 M parameters, each of 2 ranks, Adam at 1e+09/s (assumed)",
        "fetch",
        "flush",
        "stall",
        "share of the bound",
        "hit rate",
    ):
        assert words in " ".join(output.split()), words
    assert "rank skew" not in output
    assert "(assumed)" not in told(capsys, *ASKED, "--adam-rate", "1e9")[1]


def test_picture_and_trace_of_virtual_steps(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    status, output, _ = told(capsys, *ASKED, "--png", tmp_path / "s.png", "--trace", tmp_path / "s.json")
    assert status == 0 and f"written: {tmp_path / 's.png'}" in output
    assert (tmp_path / "s.png").read_bytes().startswith(b"\x89PNG")
    names = {e["args"].get("name") for e in json.loads((tmp_path / "s.json").read_text())["traceEvents"]}
    assert {"/nvme read", "/pfs write", "update", "stall"} <= names


class Nothing:
    def prepare(self, subgroup):
        pass

    def update(self, subgroup, state):
        state.exp_avg.fill(1)


def test_picture_and_trace_of_measured_steps(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / "disk").mkdir()
    config = OffloadConfig.from_mapping(
        {
            "paths": [str(tmp_path / "disk")],
            "host_memory": 5 * 8192,
            "subgroup_size": 700,
            "telemetry": str(tmp_path / "log"),
        }
    )
    pipeline = StepPipeline(config, {"all": [20_000]}, RankContext(7, 3, 4), main_itemsize=2)
    pipeline.log_start({"host": "here"})
    pipeline.initialize(lambda *_: None)
    for _ in range(3):
        pipeline.step("all", Nothing())
    pipeline.close()
    log = tmp_path / "log" / "rank0007.jsonl"
    status, output, _ = told(
        capsys, "--telemetry", log, "--json", "--png", tmp_path / "s.png", "--trace", tmp_path / "s.json"
    )
    result = json.loads(output)
    assert (status, result["inputs"], result["steps"]) == (0, None, [2, 3])
    events = json.loads((tmp_path / "s.json").read_text())["traceEvents"]
    assert {e["pid"] for e in events} == {7}
    assert sum(e["name"].startswith("update ") for e in events) == 3 * -(-20_000 // 700)
    assert (tmp_path / "s.png").read_bytes().startswith(b"\x89PNG")
    assert (
        "--host-memory is for steps that are simulated" in told(capsys, "--telemetry", log, "--host-memory", "1GB")[2]
    )


def test_a_plan_and_options_over_it(capsys, tmp_path):
    plan = tmp_path / "plan.json"
    inputs = {
        "numels": [10**8, 10**7],
        "paths": [{"name": "/nvme", "read_bytes_per_second": 1e9, "write_bytes_per_second": 5e8}],
        "host_memory_bytes": 10**8,
        "subgroup_size": 10**6,
        "main_itemsize": 2,
        "adam_parameters_per_second": 1e9,
        "copy_bytes_per_second": 0,
        "compute_seconds": 0.1,
        "local_rank_count": 4,
    }
    plan.write_text(json.dumps({"ok": True, "simulate": inputs}))
    first = json.loads(told(capsys, "--plan", plan, "--json")[1])
    second = json.loads(told(capsys, "--plan", plan, "--host-memory", "200MB", "--ranks", 2, "--json")[1])
    assert first["inputs"]["numels"] == [10**8, 10**7] and first["inputs"]["local_rank_count"] == 4
    assert second["inputs"]["host_memory_bytes"] == 2 * 10**8
    assert second["step_p50"] < 0.6 * first["step_p50"]
    for text, message in (
        ("{}", "KeyError('simulate')"),
        ("nonsense", "is not what `mlp-offload plan ... --json` writes"),
        (json.dumps({"simulate": inputs | {"speed": 1}}), "unknown ['speed'] under 'simulate'"),
        (json.dumps({"simulate": inputs | {"paths": [{"name": "a"}]}}), "read_bytes_per_second"),
    ):
        plan.write_text(text)
        status, _, error = told(capsys, "--plan", plan)
        assert status == 1 and message in error, error


@pytest.mark.parametrize(
    "arguments, status, message",
    [
        ((), 2, "one of the arguments PARAMETERS --plan --telemetry is required"),
        (("many",), 2, "'many' is not a number of at least 0"),
        (("1e9", "--ranks", "1.5"), 2, "'1.5' is not a whole number above 0"),
        (("1e9", "--steps", "inf"), 2, "'inf' is not a whole number above 0"),
        (("1e9",), 1, "give --host-memory BYTES"),
        (("1e9", "--host-memory", "2GB"), 1, "there is no path"),
        (("1e9", "--host-memory", "1XB", *PATHS), 1, "cannot read '1XB' as bytes"),
        (
            ("1e9", "--host-memory", "1GB", "--path", "/a,read=1GB/s"),
            1,
            "give both rates, as in /a,read=6GB/s,write=5GB/s",
        ),
        (
            ("1e9", "--host-memory", "1GB", "--path", "/a,read=1GB/s,write=1GB/s,latency=soon"),
            1,
            "'soon' is not a number",
        ),
        (("1e9", "--host-memory", "1GB", "--path", "/a,read=1GB/s,write=1GB/s,speed=2"), 1, "unknown key 'speed'"),
        (("1e9", "--host-memory", "10MB", *PATHS), 1, "raise host_memory to"),
        (("1e9", "--adam-rate", "0", "--host-memory", "1GB", *PATHS), 1, "adam_parameters_per_second is 0.0"),
        (
            ("1e9", "--host-memory", "9GB", "--gpu-memory", "1GB"),
            1,
            "updates on a GPU need copy_bytes_per_second (--copy",
        ),
        (("1e9", "--host-memory", "9GB", "--gpu-memory", "1kB", "--copy-rate", "20GB/s"), 1, "holds 0 buffers"),
        ((*ASKED, "--gpu-memory", "1GB", "--update-device", "cpu"), 1, "set gpu_memory to 0 or update_device to auto"),
        (("--telemetry", "/dev/null", "--gpu-memory", "1GB"), 1, "--gpu-memory is for steps that are simulated"),
        (("--telemetry", "/no/such/rank0000.jsonl"), 1, "No such file"),
        (("--telemetry", "/dev/null"), 1, "holds no step"),
        (("--plan", "/no/such/plan.json"), 1, "No such file"),
        ((*ASKED, "--trace", "/no/such/directory/s.json"), 1, "make it first"),
        ((*ASKED, "--png", "/no/such/directory/s.png"), 1, "make it first"),
        ((*ASKED, "--trace", "/proc"), 1, "--trace /proc: Is a directory"),
    ],
)
def test_what_is_wrong_is_told(capsys, arguments, status, message):
    found, _, error = told(capsys, *arguments)
    assert found == status and message in error, error


def test_paths_are_written_as_for_a_run_with_two_keys_more():
    path = SimulatedPath.parse("/nvme,read=6GB/s,write=5GB/s,capacity=1TiB,engine=threads,both=7GB/s,latency=2e-4")
    assert path == SimulatedPath("/nvme", 6e9, 5e9, 7e9, 2e-4)


def test_it_works_without_torch_and_says_what_pictures_need(tmp_path):
    code = "import sys; sys.modules['torch'] = sys.modules['matplotlib'] = None; from mlp_offload.cli.main import main; sys.exit(main(sys.argv[1:]))"

    def run(*more):
        command = [sys.executable, "-c", code, "simulate", *ASKED, *more]
        return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60)

    assert run().returncode == 0
    done = run("--png", str(tmp_path / "s.png"), "--trace", str(tmp_path / "s.json"))
    assert done.returncode == 1 and "pictures need matplotlib" in done.stderr
    assert not list(tmp_path.iterdir()), "told before any work"


@pytest.mark.parametrize("columns", [60, 80])
def test_a_narrow_terminal_costs_no_content(capsys, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    paths = (
        "--path",
        "/nvme/scratch,read=6GB/s,write=5GB/s",
        "--path",
        f"/{'long' * 6}/scratch,read=4GB/s,write=4GB/s",
    )
    status, output, _ = told(capsys, "17e9", "--ranks", "4", "--host-memory", "60GiB", "--compute-seconds", "4", *paths)
    assert status == 0
    table = output[output.index("\npath ") : output.index("\nnvme/scratch: /nvme")]
    names = "".join(line.split()[0] for line in table.strip().splitlines()[1:])
    assert names == 2 * "nvme/scratch" + 2 * f"{'long' * 6}/scratch", table
    assert re.findall(r" write .* (\S+ TB) *$", table, re.MULTILINE) == ["396 TB", "318 TB"], table
    if columns == 80:
        assert max(map(len, output.splitlines())) <= 80
