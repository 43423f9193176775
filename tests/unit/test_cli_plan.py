"""``mlp-offload plan``: what it says, in text, JSON and as a picture, and that it needs neither torch nor Megatron."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mlp_offload.cli import plan_text
from mlp_offload.cli.main import main
from mlp_offload.cli.plan import DOES_NOT_FIT
from mlp_offload.cli.plan_build import recipe_row
from mlp_offload.config import OffloadConfig
from mlp_offload.prediction import DAY_SECONDS, Endurance
from mlp_offload.recipes import NAMES, load, parse_gpu_memory, read_args, small
from mlp_offload.simulator import SimulatedPath, simulate
from mlp_offload.storage.mounts import device_key
from mlp_offload.storage.probe import Bandwidth
from mlp_offload.storage.probe_cache import store

REPOSITORY = Path(__file__).resolve().parents[2]
GIB = 2**30
PATHS = ("--path", "/a,read=4GB/s,write=2GB/s", "--path", "/b,read=1GB/s,write=1GB/s")
SMALL = """
--num-layers 2 --hidden-size 1024 --num-attention-heads 8 --seq-length 512 --vocab-size 32000 \\
--micro-batch-size 1 --global-batch-size 8 --max-position-embeddings 512    # learned positions
--bf16 --use-distributed-optimizer --optimizer-offload mlp
--mlp-offload-host-memory 64MiB --mlp-offload-subgroup-size 1000000
"""


def told(capsys, *arguments):
    """(exit status, stdout, stderr) of ``mlp-offload plan``."""
    try:
        status = main(["plan", *map(str, arguments)])
    except SystemExit as stop:
        status = stop.code
    return (status, *capsys.readouterr())


def items(capsys, *arguments, fits=True):
    """The JSON of a plan."""
    status, output, error = told(capsys, "--json", *arguments)
    assert status == (0 if fits else DOES_NOT_FIT), output + error
    return json.loads(output)


def test_a_recipe_fits_on_its_nodes_and_says_what_it_rests_on(capsys):
    status, output, error = told(capsys, "gpt-70b")
    assert (status, error) == (0, "")
    for text in (
        "Llama 2 70B: 68,980,842,496 parameters",
        "TP 4, PP 2, DP 1",
        "it fits",
        "stock Megatron",
        "512.0 GiB; tell it",
    ):
        assert text in output
    assert "35% are assumed to be reached" in output and "arXiv 2205.05198" in output


def test_what_does_not_fit_is_told_with_what_does_and_another_exit_status(capsys):
    status, output, _ = told(capsys, "gpt-70b", "--nodes", 1)
    assert status == 3
    assert "it does not fit" in output and "GPU memory: 99.4 GiB needed, 76.0 GiB there, 23.4 GiB short" in output
    change = (
        "more nodes: 2 nodes with --tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 --sequence-parallel"
    )
    assert change in output
    # and as it says:
    assert told(capsys, "gpt-70b", "--nodes", 2, "--", *change.partition("with ")[2].split())[0] == 0


def test_json_is_what_simulate_takes_and_predicts_the_same(capsys):
    plan = items(capsys, "gpt-120b", *PATHS, "--host-memory", "300GiB", "--adam-rate", 2e9, "--compute-seconds", 100)
    inputs = dict(plan["simulate"])
    inputs["paths"] = [SimulatedPath(**path) for path in inputs["paths"]]
    steps = simulate(**inputs, steps=4)
    predicted = plan["prediction"]
    assert predicted["step_seconds"] == pytest.approx(sum(s.step_seconds for s in steps[-2:]) / 2)
    assert predicted["iteration_seconds"] == pytest.approx(100 + predicted["step_seconds"])
    for use in predicted["paths"]:
        written = sum(s.bytes_written[use["directory"]] for s in steps[-2:]) / 2 * 4
        assert use["step_written_bytes"] == pytest.approx(written, abs=8)
        assert use["day_written_bytes"] == pytest.approx(written * DAY_SECONDS / predicted["iteration_seconds"])
    # 40 bytes a parameter and four ranks go through 5 GB/s read or 3 GB/s written, less what stays in memory
    assert predicted["bound_seconds"] == pytest.approx(
        max(u["step_written_bytes"] / r for u, r in zip(predicted["paths"], (2e9, 1e9)))
    )
    assert 0.95 < predicted["bound_seconds"] / predicted["step_seconds"] <= 1.05


def test_compute_is_given_or_reckoned_from_what_is_given(capsys, tmp_path):
    file = tmp_path / "model.args"
    file.write_text(SMALL)
    tokens = 8 * 512
    reckoned = items(capsys, file, *PATHS, "--gpu-flops", 1e12, "--mfu", 0.5)["prediction"]["compute_seconds"]
    matrices = 2 * 12 * 1024 * 1024 + 32000 * 1024
    assert reckoned == pytest.approx(3 * tokens * (2 * matrices + 2 * 2 * 512 * 1024) / (4 * 0.5e12))
    by_tokens = items(capsys, file, *PATHS, "--tokens-per-second", 1000)["prediction"]
    assert by_tokens["compute_seconds"] == pytest.approx(tokens / 1000)
    assert items(capsys, file, *PATHS, "--compute-seconds", 7)["prediction"]["compute_seconds"] == 7


def test_the_last_checkpoint_and_the_grace_time(capsys):
    common = ("gpt-20b", *PATHS, "--compute-seconds", 10, "--save-rate", "2GB/s")
    plan = items(capsys, *common)
    numel = plan["parameters"]
    assert plan["prediction"]["checkpoint_bytes"] == 14 * numel
    # all of it stays in host memory, so nothing is read; one node writes everything
    assert plan["prediction"]["save_seconds"] == pytest.approx(14 * numel / 2e9)
    leave = plan["prediction"]["exit_seconds"]
    assert leave == pytest.approx(plan["prediction"]["iteration_seconds"] + plan["prediction"]["save_seconds"])
    assert items(capsys, *common, "--grace", leave + 1)["ends_in_time"] is True
    assert items(capsys, *common, "--grace", leave - 1)["ends_in_time"] is False
    output = told(capsys, *common, "--grace", leave - 20)[1]
    assert "20 s too short" in output


def test_endurance_from_terabytes_written_or_drive_writes_a_day(capsys):
    assert Endurance.parse("/a,tbw=7000TB").nbytes == 7 * 10**15
    assert Endurance.parse("/a,dwpd=1,size=4TB").nbytes == 4 * 10**12 * 365 * 5
    assert Endurance.parse("/a,dwpd=3,size=4TB,years=1").nbytes == 3 * 4 * 10**12 * 365
    common = ("gpt-120b", *PATHS, "--host-memory", "300GiB", "--compute-seconds", 100, "--endurance", "/a,tbw=7000TB")
    on_a, on_b = items(capsys, *common)["prediction"]["paths"]
    assert on_a["worn_out_days"] == pytest.approx(7e15 / on_a["day_written_bytes"])
    assert on_b["worn_out_days"] is None
    assert (
        f"{on_a['day_written_bytes'] / 1e12:.3g} TB written a day: worn out after {on_a['worn_out_days']:.1f} days"
        in " ".join(told(capsys, *common)[1].replace("│", " ").split())
    )


def test_a_path_that_holds_no_state_is_not_worn(capsys):
    common = ("gpt-20b", "--path", "/a,read=6GB/s,write=4GB/s", "--endurance", "/a,tbw=7000TB")
    status, output, _ = told(capsys, *common)
    assert status == 0 and "path /a" in output and "holds no state" in output


def test_how_often_it_saves_and_how_long_the_training_is(capsys):
    common = ("gpt-7b", "--compute-seconds", 7200, "--", "--save-interval", 3, "--train-iters", 8760)
    prediction = items(capsys, *common)["prediction"]
    iteration = prediction["iteration_seconds"]
    assert prediction["save_every_seconds"] == pytest.approx(3 * iteration)
    assert prediction["run_seconds"] == pytest.approx(8760 * iteration)
    output = told(capsys, *common)[1]
    assert "6.0 h │ 3 iterations (--save-interval)" in output and "2.0 years │ 8,760 iterations" in output


def test_a_path_that_is_too_small_needs_no_other_where_the_node_has_memory(capsys):
    common = ("gpt-70b", "--path", "/a,read=6GB/s,write=4GB/s,capacity=50GB")
    plan = items(capsys, *common, fits=False)
    (change,) = [change for change in plan["changes"] if change.startswith("--mlp-offload-host-memory")]
    option, value = change.partition(":")[0].split()
    assert items(capsys, *common, "--", option, value)["fits"]


def test_a_file_of_flags_and_flags_behind_it_the_last_of_which_count(capsys, tmp_path):
    file = tmp_path / "model.args"
    file.write_text(SMALL)
    assert read_args(SMALL)[:2] == ["--num-layers", "2"] and "\n" not in read_args(SMALL)
    plan = items(capsys, file, *PATHS, "--nodes", 2, "--", "--num-layers", 4, "--lr", "1e-3")
    assert (plan["model"]["num_layers"], plan["nodes"], plan["layout"]["dp"]) == (4, 2, 8)
    assert plan["unused_flags"] == ["--lr"]
    without_file = items(capsys, *PATHS, "--", *read_args(SMALL), "--num-layers", 4)
    assert without_file["parameters"] == plan["parameters"]


def test_rates_come_from_what_was_measured_for_the_device(capsys, tmp_path):
    plain = ("gpt-120b", "--path", tmp_path, "--host-memory", "200GiB")
    config = OffloadConfig()
    settings = {"kind": config.engine, "direct": config.direct, "threads": config.threads}
    settings |= {"iodepth": config.iodepth, "block_size": 2**20}
    status, _, error = told(capsys, *plain, "--", "--mlp-offload-block-size", 2**20)
    assert status == 1 and f"{tmp_path},read=BYTES/s,write=BYTES/s" in error and "--probe" in error
    store(Bandwidth(device_key(tmp_path), 3e9, 1.5e9, 1, 1, 1.0, time.time()), settings)
    plan = items(capsys, *plain, "--", "--mlp-offload-block-size", 2**20)
    (path,) = plan["paths"]
    assert (path["read_bytes_per_second"], path["write_bytes_per_second"]) == (3 * 10**9, 1.5 * 10**9)
    assert any("read 3.00 GB/s, write 1.50 GB/s, as measured on this machine" in line for line in plan["assumptions"])


def test_probe_measures_a_path_that_nobody_has_measured(capsys, tmp_path):
    plan = items(
        capsys, "gpt-120b", "--path", tmp_path, "--host-memory", "200GiB", "--probe", "--", "--mlp-offload-iodepth", 3
    )
    (path,) = plan["paths"]
    assert path["read_bytes_per_second"] > 1e6 and path["write_bytes_per_second"] > 1e6
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["nothing"], "'nothing' is no recipe (gpt-7b, "),
        ([], "no model: give a recipe"),
        (["gpt-7b", "--gpu-memory", "16GB"], "recipe gpt-7b: for GPUs of 40.0 GiB or 80.0 GiB, not of 16.0 GiB"),
        (["gpt-7b", "--nodes", "0"], "--nodes and --gpus-per-node must be at least 1"),
        (["gpt-7b", "--path", "/a,red=1"], "unknown key 'red'"),
        (["gpt-7b", "--path", "$NOT_SET_ANYWHERE"], "environment variable $NOT_SET_ANYWHERE is not set"),
        (["gpt-7b", "--endurance", "nvme,tbw=much"], "endurance 'nvme,tbw=much': tbw: cannot read 'much'"),
        (["gpt-7b", "--endurance", "/elsewhere,tbw=7TB"], "endurance of '/elsewhere': no such path; paths: nvme"),
        (["gpt-7b", "--endurance", "nvme,dwpd=1"], "write DIR,tbw=7000TB or DIR,dwpd=1,size=3.84TB"),
        (["gpt-7b", "--mfu", "40"], "mfu is 40.0: it is a share, at most 1"),
        (["gpt-7b", "--grace", "-1"], "--grace -1: must be a number of seconds above 0"),
        (["gpt-7b", "--grace", "nan"], "--grace nan: must be a number of seconds above 0"),
        (["gpt-7b", "--grace", "inf"], "--grace inf: must be a number of seconds above 0"),
        (["gpt-7b", "--endurance", "nvme,dwpd=inf,size=1TB"], "endurance 'nvme,dwpd=inf,size=1TB': cannot convert"),
        (["gpt-7b", "--png", "/no/such/place/a.png"], "there is no directory /no/such/place; make it first"),
        (["nothing", "--png", "/proc"], "--png /proc: Is a directory; name a file in it"),  # before any work
        (["gpt-7b", "--png", "/proc/plan.png"], "picture '/proc/plan.png': No such file or directory"),
        (["gpt-7b", "--adam-rate", "0"], "--adam-rate 0: it must be above 0, and finite"),
        (["gpt-7b", "--path", "/no/such/place"], "write /no/such/place,read=BYTES/s,write=BYTES/s"),
        (["gpt-7b", "--", "--global-batch-size", "1023"], "not a multiple of --micro-batch-size 1 x DP 4. It fits on"),
        (["--", "--num-layers", "2"], "the following arguments are required: --hidden-size"),
    ],
)
def test_what_cannot_be_told_is_refused_with_the_reason(capsys, arguments, message):
    status, output, error = told(capsys, *arguments)
    assert status == 1 and output == "" and message in error


@pytest.mark.parametrize(
    "text, line, reason",
    [
        ("# it's a comment\n\n--lr 1 \\\n --bf16\n--data-path '/a\n--fp16\n", 5, "no closing quotation"),
        ("--lr 'a\nb'\n--data-path \\", 3, "no escaped character"),
    ],
)
def test_a_quote_that_is_not_closed_is_told_with_its_line(capsys, tmp_path, text, line, reason):
    file = tmp_path / "flags.args"
    file.write_text(text)
    status, output, error = told(capsys, file)
    assert (status, output) == (1, "") and error.startswith(f"mlp-offload plan: {file}, line {line}: {reason}; ")


def test_a_wrong_option_is_not_taken_for_a_flag_of_megatron(capsys):
    status, _, error = told(capsys, "gpt-7b", "--nods", "3", "--", "--lr", "1")
    assert status == 2 and "--nods" in error


def test_the_picture_is_drawn(capsys, tmp_path):
    file = tmp_path / "plan.png"
    assert told(capsys, "gpt-120b", *PATHS, "--host-memory", "300GiB", "--png", file)[0] == 0
    assert file.read_bytes().startswith(b"\x89PNG") and file.stat().st_size > 20_000


def test_it_needs_neither_torch_nor_megatron():
    blocked = "import sys; sys.modules.update(dict.fromkeys(('torch', 'megatron', 'matplotlib'))); "
    code = f"{blocked}from mlp_offload.cli.main import main; sys.exit(main({['plan', 'gpt-280b', '--host-memory', '200GiB']!r}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr
    assert "Gopher 280B" in done.stdout and "it fits" in done.stdout


def test_the_page_of_recipes_is_what_the_command_writes():
    rows = [recipe_row(name, size) for name in NAMES for size in (40, 80)]
    assert all(row["fits"] and row["nodes"] <= row["stock_nodes"] for row in rows)
    page = (REPOSITORY / "docs" / "recipes.md").read_text()
    assert plan_text.recipes_markdown(rows) in page
    for name in NAMES:
        assert load(name).source.removeprefix("Source: ") in page


def test_a_recipe_for_larger_gpus_is_the_largest_that_it_is_made_for():
    assert parse_gpu_memory("80GB") == parse_gpu_memory("80 GiB") == 80 * GIB
    assert load("gpt-70b", 141 * GIB).nodes == load("gpt-70b", 80 * GIB).nodes < load("gpt-70b", 79 * GIB).nodes


@pytest.mark.parametrize("name", NAMES)
def test_the_small_variant_differs_where_it_says_so(name):
    recipe = load(name, 40 * GIB)
    flags = small(recipe)
    assert "--sequence-parallel" not in flags and flags[flags.index("--num-layers") + 1] == "2"
    sizes = [int(flags[flags.index(f"--{kind}-model-parallel-size") + 1]) for kind in ("tensor", "pipeline")]
    assert sorted(sizes) == [1, 2]
    for flag in (
        "--bf16",
        "--recompute-granularity",
        "--use-distributed-optimizer",
        "--optimizer-offload",
        "--clip-grad",
    ):
        assert flag in flags and flag in recipe.flags


@pytest.mark.parametrize("columns", ["60", "80"])
def test_the_table_of_recipes_is_whole_and_fits_eighty_columns(capsys, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    status, output, _ = told(capsys, "--recipes")
    assert status == 0 and "…" not in output and all(output.count(name) >= 2 for name in NAMES)
    assert max(map(len, output.splitlines())) <= 80


def test_a_narrow_terminal_cuts_no_path(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    status, output, _ = told(capsys, "gpt-70b", "--path", "/lustre/someone/scratch,read=1GB/s,write=1GB/s")
    assert status == 0 and "…" not in output
