"""``mlp-offload simulate``: how long steps would take on paths that are given as bandwidths, as a table, a picture and a trace."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
from pathlib import Path
from typing import Any

from ..config import UPDATE_DEVICES, OffloadConfig
from ..errors import ConfigError, OffloadError
from ..plan.devices import GPU_ADAM_RATE
from ..report import draw
from ..report.analysis import Report, analyze
from ..report.numbers import StepNumbers
from ..report.verdict import judge
from ..telemetry import StepRecord, read_line
from ..trace import chrome_trace, write_trace
from ..units import parse_bytes
from . import output

ADAM_RATE = 1e9
"""Parameters a second of one rank where none are given: a handful of cores."""

_INPUTS = (
    *("paths", "host_memory", "subgroup_size", "staging_count", "full_masters", "adam_rate", "copy_rate"),
    *("gpu_memory", "update_device", "gpu_adam_rate", "compute_seconds", "ranks", "steps"),
)
"""Options that say what is simulated."""

_DESCRIPTION = """\
Run the step pipeline on a virtual clock: the same order, hits, bytes and shares as a real run, on paths that are only bandwidths.
Nothing is read or written, and neither torch nor a GPU is needed.

Say how many parameters one rank has (those of the model / (TP * PP * DP)), or give what `mlp-offload plan --json` wrote.
All ranks of a node do the same at once and share its paths. With --telemetry a trace is made of steps that were measured.
"""

_EXAMPLES = """\
examples:
  17 billion parameters a rank, four ranks, one NVMe volume and a parallel file system:
    mlp-offload simulate 17e9 --ranks 4 --host-memory 60GiB --compute-seconds 4 \\
        --path /nvme/scratch,read=6GB/s,write=5GB/s --path /lustre/me/scratch,read=4GB/s,write=4GB/s

  what would twice the host memory give? Change --host-memory and compare the tables.

  what would 10 GiB of spare GPU memory give?
    mlp-offload simulate 17e9 ... --copy-rate 20GB/s --gpu-memory 10GiB

  a drive that gives 7 GB/s in both directions together, and 0.2 ms until the first byte comes:
    --path /nvme/scratch,read=6GB/s,write=5GB/s,both=7GB/s,latency=0.0002

  look at the steps (the trace loads in https://ui.perfetto.dev, and stays on your machine):
    mlp-offload simulate 17e9 ... --png steps.png --trace steps.json

  the plan of a model, with more memory; the steps of a run:
    mlp-offload plan gpt-70b ... --json > plan.json; mlp-offload simulate --plan plan.json --host-memory 80GiB
    mlp-offload simulate --telemetry runs/a/rank0000.jsonl --trace steps.json --png steps.png
"""


def add_command(commands: Any) -> None:
    """Add ``simulate`` to the subcommands of ``mlp-offload``."""
    parser = commands.add_parser(
        "simulate",
        help="how long steps would take, on a virtual clock; timelines",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("parameters", nargs="?", type=_number, metavar="PARAMETERS", help="of one rank, as in 17e9")
    what.add_argument(
        "--plan", metavar="FILE", type=Path, help="what `mlp-offload plan ... --json` wrote; options win over it"
    )
    what.add_argument(
        "--telemetry", metavar="FILE.jsonl", type=Path, help="draw measured steps (of the newest start in it)"
    )
    parser.add_argument(
        "--path",
        dest="paths",
        metavar="NAME,read=BYTES/s,write=BYTES/s[,both=BYTES/s][,latency=SECONDS]",
        action="append",
        help="bandwidth of a path of the node; both: the most of the two directions together; repeat for several",
    )
    parser.add_argument("--host-memory", metavar="BYTES", help="for state buffers, per rank")
    parser.add_argument(
        "--subgroup-size", metavar="N", type=_count, help=f"elements (default: {OffloadConfig().subgroup_size})"
    )
    parser.add_argument("--staging-count", metavar="N", type=_count, help="buffers in motion (default: 2 + 2 a path)")
    parser.add_argument(
        "--full-masters", action="store_true", help="12 bytes a parameter, as with master_weights=full (default: 10)"
    )
    parser.add_argument(
        "--adam-rate",
        metavar="N",
        type=_number,
        help=f"parameters/s that one rank updates (default: {ADAM_RATE:g}; benchmarks/adam.py measures it)",
    )
    parser.add_argument(
        "--copy-rate",
        metavar="BYTES/s",
        help="between GPU and host, each way, per rank (default: none; weights and gradients are in host memory)",
    )
    parser.add_argument(
        "--gpu-memory", metavar="BYTES", help="spare GPU memory for state, per rank, as --mlp-offload-gpu-memory"
    )
    parser.add_argument(
        "--update-device",
        choices=UPDATE_DEVICES,
        help="where subgroups are updated, as --mlp-offload-update-device (default: auto)",
    )
    parser.add_argument(
        "--gpu-adam-rate",
        metavar="N",
        type=_number,
        help=f"parameters/s that the GPU updates (default: {GPU_ADAM_RATE:g}; benchmarks/gpu.py measures it)",
    )
    parser.add_argument("--compute-seconds", metavar="SECONDS", type=_number, help="forward and backward (default: 0)")
    parser.add_argument(
        "--ranks", metavar="N", type=_count, help="ranks of the node, which share the paths (default: 1)"
    )
    parser.add_argument("--steps", metavar="N", type=_count, help="default: 5; the first is left out of the table")
    parser.add_argument("--trace", metavar="FILE", type=Path, help="write all steps as a trace for ui.perfetto.dev")
    parser.add_argument("--png", metavar="FILE", type=Path, help="draw a typical step, and the time of all steps")
    output.add_json(parser)
    parser.set_defaults(execute=_execute)


def _execute(options: argparse.Namespace) -> int:
    from ..simulator import simulate  # needs the native module, which `doctor` does without

    for name in ("png", "trace"):
        if file := getattr(options, name):
            output.check_file(f"--{name}", file)
    if options.png:
        draw.need_matplotlib()
    inputs: "dict[str, Any]" = {}
    if options.telemetry:
        _refuse_inputs(options)
        records, header = _read(options.telemetry)
        name, rank = str(options.telemetry), header.get("rank", 0)
        steps = [StepNumbers.of(record) for record in records]
        report = analyze({rank: steps}, {rank: header} if header else None)
    else:
        inputs = _inputs(options)
        records, rank = simulate(**inputs), 0
        steps = [StepNumbers.of(record) for record in records]
        name = _name(inputs, assumed=options.adam_rate is None and options.plan is None)
        given = {p.name: (p.read_bytes_per_second, p.write_bytes_per_second) for p in inputs["paths"]}
        report = analyze(dict.fromkeys(range(inputs["local_rank_count"]), steps), given=given)
        report = dataclasses.replace(report, skew=None)  # ranks are equal because they are simulated so
    if options.trace:
        write_trace(options.trace, chrome_trace(records, name, rank))
    if options.png:
        draw.save_png(
            draw.figure([(_typical(records, report), steps, f"{name}; step {report.typical_step[1]}", "all steps")]),
            options.png,
        )
    if options.json:
        shown = inputs | {"paths": [dataclasses.asdict(p) for p in inputs["paths"]]} if inputs else None
        output.print_json({"inputs": shown} | report.as_dict())
        return 0
    from rich.console import Console

    from ..report.tables import render

    console = Console(highlight=False)
    console.print(render([(name, report, judge(report))]), crop=False)
    for file in filter(None, (options.png, options.trace)):
        console.print(f"written: {file}", soft_wrap=True, markup=False)
    return 0


def _name(inputs: "dict[str, Any]", assumed: bool) -> str:
    ranks, rate = inputs["local_rank_count"], inputs["adam_parameters_per_second"]
    who = f", each of {ranks} ranks" if ranks > 1 else ""
    return f"simulated: {sum(inputs['numels']) / 1e6:.0f} M parameters{who}, Adam at {rate:.3g}/s{' (assumed)' if assumed else ''}"


def _inputs(options: argparse.Namespace) -> "dict[str, Any]":
    """The arguments of ``simulate``: defaults, over them a plan, over that what was asked for.

    Raises:
        ConfigError: one is missing or cannot be read.
    """
    from ..simulator import SimulatedPath  # needs the native module, which `doctor` does without

    inputs: "dict[str, Any]" = {
        "paths": [],
        "subgroup_size": OffloadConfig().subgroup_size,
        "adam_parameters_per_second": ADAM_RATE,
        "compute_seconds": 0.0,
        "local_rank_count": 1,
    }
    inputs |= _planned(options.plan) if options.plan else {"numels": [round(options.parameters)]}
    asked = {
        "paths": options.paths and [SimulatedPath.parse(spec) for spec in options.paths],
        "host_memory_bytes": options.host_memory and parse_bytes(options.host_memory, "--host-memory"),
        "subgroup_size": options.subgroup_size,
        "staging_count": options.staging_count,
        "main_itemsize": 4 if options.full_masters else None,
        "adam_parameters_per_second": options.adam_rate,
        "copy_bytes_per_second": options.copy_rate and parse_bytes(options.copy_rate, "--copy-rate"),
        "gpu_memory_bytes": options.gpu_memory and parse_bytes(options.gpu_memory, "--gpu-memory"),
        "update_device": options.update_device,
        "gpu_adam_parameters_per_second": options.gpu_adam_rate,
        "compute_seconds": options.compute_seconds,
        "local_rank_count": options.ranks,
        "steps": options.steps,
    }
    inputs |= {key: value for key, value in asked.items() if value is not None}
    if "host_memory_bytes" not in inputs:
        raise ConfigError(
            "give --host-memory BYTES, the host memory for state buffers of one rank, as in --host-memory 60GiB"
        )
    return inputs


def _planned(file: Path) -> "dict[str, Any]":
    """What stands under ``simulate`` in the JSON of a plan: arguments of ``simulator.simulate``, paths as objects."""
    from ..simulator import SimulatedPath, simulate  # needs the native module, which `doctor` does without

    try:
        items = json.loads(file.read_text(encoding="utf-8"))
        inputs = dict(items["simulate"])
        inputs["paths"] = [SimulatedPath(**path) for path in inputs["paths"]]
        inputs["numels"] = [int(numel) for numel in inputs["numels"]]
    except OSError as error:
        raise ConfigError(f"plan {str(file)!r}: {error.strerror}") from error
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"plan {str(file)!r} is not what `mlp-offload plan ... --json` writes: {error!r}") from error
    known = set(simulate.__annotations__) - {"return"}
    if set(inputs) - known:
        raise ConfigError(
            f"plan {str(file)!r}: unknown {sorted(set(inputs) - known)} under 'simulate'; known: {sorted(known)}"
        )
    return inputs


def _refuse_inputs(options: argparse.Namespace) -> None:
    """Measured steps are what they are."""
    for name in _INPUTS:
        if getattr(options, name):
            flag = "--path" if name == "paths" else "--" + name.replace("_", "-")
            raise ConfigError(
                f"{flag} is for steps that are simulated; --telemetry shows those that were measured: leave out one"
            )


def _read(file: Path) -> "tuple[list[StepRecord], dict[str, Any]]":
    """The steps of the newest start in a rank's telemetry, and its header."""
    records: "list[StepRecord]" = []
    header: "dict[str, Any]" = {}
    try:
        with open(file, "rb") as stream:
            for found in map(read_line, stream):
                if isinstance(found, StepRecord):
                    if records and found.step <= records[-1].step:  # a restart that wrote no header
                        records, header = [], {}
                    records.append(found)
                elif found and "header" in found:
                    records, header = [], found["header"]
    except OSError as error:
        raise OffloadError(
            f"telemetry {str(file)!r}: {error.strerror}; give a rank's file, such as DIR/rank0000.jsonl"
        ) from error
    if not records:
        raise OffloadError(f"telemetry {str(file)!r} holds no step; write it with --mlp-offload-telemetry DIR")
    return records, header


def _typical(records: "list[StepRecord]", report: Report) -> StepRecord:
    return next(record for record in records if record.step == report.typical_step[1])


def _number(text: str) -> float:
    with contextlib.suppress(ValueError):
        value = float(text)
        if 0 <= value < float("inf"):
            return value
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 0")


def _count(text: str) -> int:
    with contextlib.suppress(ValueError, OverflowError):
        value = float(text)
        if value >= 1 and value == int(value):
            return int(value)
    raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
