"""Training steps side by side: ours on all paths, ours on the faster one, DeepSpeed ZeRO-3, and streaming without overlap.

    python benchmarks/step.py --params 300 --capped 400:400 200:200 --json OUT
    python benchmarks/step.py --params 1000 --paths /nvme/scratch,read=6GB/s,write=4GB/s /lustre/me --compute-seconds 5

Every system has a process of its own, the same GPT, batch, seed and learning rate, weights and gradients in bf16, and
the same host memory for buffers: what DeepSpeed allocates when its pinned buffers may take 30 % of the state.

How it is measured
  - Blocks of steps without a pause, systems in turn, in the other order each round; the first two steps of each block are
    dropped (the block before was another system's, so the pipeline starts empty and the throttle full).
  - An iteration lasts from the end of the one before to its own end. Bytes are those of the kernel's counters of the
    devices at these moments; between blocks each system waits for what it has in flight.
  - Each round has two blocks a system. One with forward and backward (or `--compute-seconds`) gives the times and bytes.
    One of updates only, gradients as they are, gives `efficiency`: with no pause there is nothing to hide transfers
    behind, so it cannot exceed 1.00, and if it does this program says so and fails. (DeepSpeed writes its gradients
    there, too, as after each backward pass.) What was moved while the model computed is `overlap_seconds`. With
    `--compute-seconds 0` both are the same block.
  - `compute_seconds` of DeepSpeed is that of the model alone, without an optimizer: its backward pass also writes.
  - `predicted` is the update of ours as `mlp_offload.simulator` has it, from the rates of the paths, the host memory, the pause and
    the parameters a second at which Adam ran here; nothing is fitted. Not known where the rates of the paths are not.
  - DeepSpeed's losses must be near those of the others, or this fails: a baseline that skips work is no baseline.
  - ours and `sequential` must have equal losses, and weights equal in every bit, after each block; else it fails.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from benchmarks import report  # noqa: E402
from benchmarks.capped import CapError, CappedPath, capped, parse_cap  # noqa: E402
from benchmarks.prediction import predict  # noqa: E402
from benchmarks.workers import DEFAULT_MEMORY_SHARE, STATE_BYTES, Bench, BenchmarkError  # noqa: E402
from mlp_offload.config import PathConfig  # noqa: E402
from mlp_offload.errors import OffloadError  # noqa: E402
from mlp_offload.units import parse_bytes  # noqa: E402

SYSTEMS = ("mlp", "mlp_one_path", "deepspeed", "sequential")


# ---------------------------------------------------------------------------------------------- a run


@contextlib.contextmanager
def open_paths(options: argparse.Namespace) -> "Iterator[tuple[list[PathConfig], list[CappedPath]]]":
    """The paths of this run, with their rates where they are known; capped ones are made and removed."""
    if options.paths:
        paths = [PathConfig.parse(path) for path in options.paths]
        yield [dataclasses.replace(path, directory=os.path.abspath(path.resolved_directory())) for path in paths], []
        return
    state_bytes = STATE_BYTES * options.params * 1e6
    copies = sum({"mlp": 1.1, "mlp_one_path": 1.1, "deepspeed": 1.5, "sequential": 1.1}[s] for s in options.systems)
    size_bytes = int(
        copies * state_bytes + 2 * (options.host_memory or DEFAULT_MEMORY_SHARE * state_bytes) + 512 * 2**20
    )
    with capped(options.capped, size_bytes, options.capped_where) as paths:
        yield [PathConfig(path.directory, path.read, path.write) for path in paths], paths


def run(options: argparse.Namespace, say: "Callable[[str], None]") -> "dict[str, Any]":
    """Everything; the contents of the JSON file, with what is wrong with it under "errors"."""
    notes: "list[str]" = []
    systems = list(options.systems)
    venv = Path(options.deepspeed_venv)
    if "deepspeed" in systems and not (venv / "ready").exists():
        systems.remove("deepspeed")
        notes.append(f"deepspeed is left out: no environment at {venv}; make it with benchmarks/setup_deepspeed.sh")
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mlp-offload-step-")))
        paths, capped_paths = stack.enter_context(open_paths(options))
        bench = Bench(options, paths, scratch)
        stack.callback(bench.close)
        # DeepSpeed first, alone: what it allocates is what everybody gets.
        order = ["stateless", *sorted(systems, key=lambda name: name != "deepspeed")]
        for name in order:
            say(f"starting {name}")
            bench.start(name)
            if name == "deepspeed":
                bench.ready(name)
                if options.host_memory is None:
                    bench.host_memory = bench.measured[name].facts["buffer_bytes"]
        for name in order:
            if name not in bench.measured:
                bench.ready(name)
        for number in range(options.rounds):
            for name in order if number % 2 == 0 else reversed(order):
                say(f"round {number + 1} of {options.rounds}: {name}")
                bench.measure(name)
        throttled = None
        if options.throttle:
            say("throttle: mlp")
            throttled = bench.throttle(capped_paths[bench.faster])
    measured = bench.measured
    compute = None
    if options.compute_seconds is None:
        compute = statistics.median(
            s["forward_seconds"] + s["backward_seconds"] for s in measured["stateless"].training
        )
    results = {}
    for name in systems:
        reference = options.compute_seconds if compute is None else compute
        results[name] = report.summarize(
            measured[name], bench.history, reference if name == "deepspeed" else options.compute_seconds
        )
        if name in ("mlp", "mlp_one_path"):
            staging_count = options.mlp_option.get("staging_count", 0)
            results[name] |= predict(results[name], bench.used_by(name), bench.history, options.ranks, staging_count)
    if "sequential" in systems and bench.history is not None:
        results["sequential"]["sequential_bound_share"] = report.sequential_bound_share(
            measured["sequential"], bench.history
        )
    if options.ranks == 1:
        for name in systems:
            above = measured[name].peak_rss_bytes - measured["stateless"].peak_rss_bytes
            results[name]["peak_rss_over_stateless_bytes"] = above
    kept = {name: measured[name] for name in systems}
    errors = report.impossible(results, kept, len(paths))
    settings = vars(options) | {
        "parameters": bench.parameters,
        "host_memory": bench.host_memory,
        "host_memory_share_of_state": bench.host_memory / (STATE_BYTES * bench.parameters),
        "paths": [str(path) for path in paths],
        "faster_path": bench.faster,
        "systems": systems,
        "command": " ".join(sys.argv),
    }
    if options.ranks > 1:
        notes.append(f"ours run on {options.ranks} ranks with one GPT of {options.params / options.ranks:g} M each")
    exact = [name for name in systems if name in report.EXACT and len(measured[name].ranks) == 1]
    return results | {
        "settings": settings,
        "ratios": report.ratios(results),
        "throttle": throttled,
        "stateless": {"compute_seconds": compute, "peak_rss_bytes": measured["stateless"].peak_rss_bytes},
        "equal_in_every_bit": exact if len(exact) > 1 and not report.differences({n: kept[n] for n in exact}) else [],
        "notes": notes,
        "errors": errors,
    }


def show(result: "dict[str, Any]", console: Console) -> None:
    """The table a person reads."""
    settings = result["settings"]
    console.print(
        f"{settings['parameters'] / 1e6:.1f} M parameters, {settings['host_memory'] / 2**20:.0f} MiB for buffers "
        f"({settings['host_memory_share_of_state']:.0%} of the state), paths {', '.join(settings['paths'])}"
    )
    table = Table()
    for heading in (
        "system",
        "update s",
        "predicted s",
        "iteration s",
        "compute s",
        "read B/p",
        "written B/p",
        "efficiency",
        "overlap s",
    ):
        table.add_column(heading, justify="left" if heading == "system" else "right")
    for name in settings["systems"]:
        r = result[name]
        spread, predicted = r["efficiency_spread"], r.get("predicted_update_seconds")
        table.add_row(
            name,
            f"{r['update_seconds']:.3f} ({r['update_seconds_spread'][0]:.2f}-{r['update_seconds_spread'][1]:.2f})",
            "-" if predicted is None else f"{predicted:.3f} ({r['prediction_error']:+.1%})",
            f"{r['iteration_seconds']:.3f}",
            f"{r['compute_seconds']:.3f}",
            f"{r['bytes_read_per_parameter']:.2f}",
            f"{r['bytes_written_per_parameter']:.2f}",
            "-" if spread is None else f"{r['efficiency']:.3f} ({spread[0]:.2f}-{spread[1]:.2f})",
            "-" if r["overlap_seconds"] is None else f"{r['overlap_seconds']:.3f}",
        )
    console.print(table)
    for name, value in result["ratios"].items():
        console.print(f"{name:<36} {value:.2f}")
    share = result.get("sequential", {}).get("sequential_bound_share")
    if share is not None:
        console.print(f"{'sequential: share of its own bound':<36} {share:.3f}")
    if result["throttle"]:
        for step in result["throttle"]["steps"]:
            caps = "  ".join(f"{r / 1e6:.0f}:{w / 1e6:.0f}" for r, w in step["caps"])
            console.print(f"throttle step {step['step']:>3}  caps {caps}  efficiency {step['efficiency']:.3f}")
    for note in result["notes"]:
        console.print(f"note: {note}")
    for error in result["errors"]:
        console.print(f"[bold red]WRONG[/]: {error}", highlight=False)


def parse(arguments: "list[str] | None" = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument(
        "--paths", nargs="+", metavar="DIR[,read=RATE,write=RATE]", help="directories on idle local devices"
    )
    where.add_argument(
        "--capped", nargs="+", type=parse_cap, metavar="READ:WRITE", help="make paths of this speed, MB/s"
    )
    parser.add_argument("--capped-where", metavar="DIR", help="directory for their images (default: /var/tmp)")
    parser.add_argument("--params", type=float, default=300, help="million parameters (default: 300)")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument(
        "--host-memory", type=parse_bytes, metavar="BYTES", help="for buffers (default: as DeepSpeed's)"
    )
    parser.add_argument("--compute-seconds", type=float, help="a pause instead of forward and backward")
    parser.add_argument("--ranks", type=int, default=1, help="processes of ours that share the paths (default: 1)")
    parser.add_argument("--throttle", action="store_true", help="also halve and restore the faster path's caps (ours)")
    parser.add_argument("--throttle-steps", type=int, default=6, help="steps before, with and after it (default: 6)")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4, help="steady steps a block (default: 4)")
    parser.add_argument("--drop", type=int, default=2, help="steps dropped at the start of each block (default: 2)")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=128, help="of each sequence (default: 128)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="default: all cores")
    parser.add_argument("--subgroup-size", type=int, help="ours (default: 32 of them fit into the host memory)")
    parser.add_argument(
        "--no-rates", dest="rates", action="store_false", help="do not tell ours how fast the paths are"
    )
    parser.add_argument("--mlp-option", nargs="+", type=_key_value, default=[], metavar="KEY=VALUE", help="of ours")
    parser.add_argument("--deepspeed-option", nargs="+", type=_key_value, default=[], metavar="KEY=VALUE")
    parser.add_argument("--deepspeed-venv", default=str(REPOSITORY / ".work" / "deepspeed"), metavar="DIR")
    parser.add_argument("--json", metavar="OUT", help="also write everything to this file")
    options = parser.parse_args(arguments)
    options.mlp_option, options.deepspeed_option = dict(options.mlp_option), dict(options.deepspeed_option)
    for name in ("ranks", "rounds", "steps", "threads", "throttle_steps"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if options.throttle and not (options.capped and "mlp" in options.systems):
        parser.error("--throttle needs --capped, and mlp among --systems")
    return options


def _key_value(text: str) -> "tuple[str, Any]":
    key, separator, value = text.partition("=")
    if not separator:
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    try:
        return key, json.loads(value)
    except json.JSONDecodeError:
        return key, value


def main() -> None:
    options = parse()
    # Ended from outside, leave as after Ctrl-C: workers, mounts and files are taken away on the way out.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    begin = time.monotonic()
    console = Console(width=None if sys.stdout.isatty() else 140)
    try:
        result = run(
            options, lambda text: print(f"[{time.monotonic() - begin:6.1f} s] {text}", file=sys.stderr, flush=True)
        )
    except (BenchmarkError, CapError, OffloadError, RuntimeError) as error:
        sys.exit(f"step: {error}")
    show(result, console)
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=1) + "\n")
    sys.exit(1 if result["errors"] else 0)


if __name__ == "__main__":
    main()
