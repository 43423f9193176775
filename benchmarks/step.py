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
  - ours and `sequential` must have equal losses, and weights equal in every bit, after each block; else it fails.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

import torch  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from benchmarks import report  # noqa: E402
from benchmarks.capped import CapError, CappedPath, capped, parse_cap  # noqa: E402
from benchmarks.gpt import GPT, shape_for  # noqa: E402
from benchmarks.systems.worker import device_of  # noqa: E402
from mlp_offload.config import PathConfig  # noqa: E402
from mlp_offload.errors import OffloadError  # noqa: E402
from mlp_offload.units import parse_bytes  # noqa: E402

SYSTEMS = ("mlp", "mlp_one_path", "deepspeed", "sequential")
STATE_BYTES = 12  # a parameter
DEFAULT_MEMORY_SHARE = 0.3  # of the state
SUBGROUPS_IN_MEMORY = 16
PAGE_BYTES = 4096


class BenchmarkError(Exception):
    """The benchmark cannot be run, or a system failed."""


class Worker:
    """A system in its own process (one of its ranks)."""

    def __init__(self, module: str, python: str, settings: "dict[str, Any]", log: Path, environment: "dict[str, str]"):
        self.name, self.log = settings["name"], log
        # The worker's output ends when it does, so nothing here waits for a dead process.
        with open(log, "w") as errors:
            self.process = subprocess.Popen(
                [python, "-m", f"benchmarks.systems.{module}", json.dumps(settings)],
                cwd=REPOSITORY,
                env=os.environ | environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                bufsize=1,
            )

    def answer(self) -> "dict[str, Any]":
        """Its next line."""
        line = self.process.stdout.readline()
        message = json.loads(line) if line else {"error": f"it ended with {self.process.wait()}"}
        if "error" in message:
            tail = "".join(self.log.read_text(errors="replace").splitlines(keepends=True)[-15:])
            raise BenchmarkError(f"{self.name}: {message['error'].strip()}\n{tail}")
        return message

    def ask(self, steps: int, compute: bool) -> None:
        self.process.stdin.write(json.dumps({"run": steps, "compute": compute}) + "\n")

    def close(self) -> None:
        """Let it remove its files; after a while, end it."""
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Bench:
    """All workers of one run, and what they measured."""

    def __init__(self, options: argparse.Namespace, paths: "list[PathConfig]", scratch: Path):
        self.options, self.paths, self.scratch = options, paths, scratch
        self.workers: "dict[str, list[Worker]]" = {}
        self.measured: "dict[str, report.Measured]" = {}
        self.devices = [device_of(path.resolved_directory()) for path in paths]
        known = all(path.read and path.write for path in paths)
        self.history = [report.Caps(0.0, [(path.read, path.write) for path in paths])] if known else None
        self.faster = max(range(len(paths)), key=lambda i: (paths[i].bytes_per_second or 0, -i))
        with torch.device("meta"):
            model = GPT(*shape_for(options.params), options.tokens)
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        self.host_memory = options.host_memory or int(DEFAULT_MEMORY_SHARE * STATE_BYTES * self.parameters)

    # ------------------------------------------------------------------------------------ workers

    def start(self, name: str) -> None:
        """Start a system and wait until its state is written."""
        options, used = self.options, [self.faster]
        if name == "mlp":
            used = list(range(len(self.paths)))
        module = "mlp" if name == "mlp_one_path" else name
        ranks = options.ranks if module == "mlp" else 1
        told = [str(self.paths[i]) if options.rates else self.paths[i].directory for i in used]
        memory = self.host_memory // ranks
        settings = {
            "name": name,
            "parent": os.getpid(),
            "params": options.params / ranks,
            "paths": told,
            "devices": self.devices,
            "host_memory": self.host_memory,
            "subgroup_size": options.subgroup_size or max(1, (memory // SUBGROUPS_IN_MEMORY - PAGE_BYTES) // 12 - 16),
            "threads": max(1, options.threads // ranks),
            "rank_count": ranks,
            "rendezvous": str(self.scratch / f"rendezvous-{name}"),
            "options": {"mlp": options.mlp_option, "deepspeed": options.deepspeed_option}.get(module, {}),
            "betas": [0.9, 0.95],
            "eps": 1e-8,
            "weight_decay": 0.1,
        } | {key: getattr(options, key) for key in ("batch", "tokens", "seed", "lr", "compute_seconds")}
        python, environment = sys.executable, {"OMP_NUM_THREADS": str(settings["threads"])}
        if module == "deepspeed":
            venv = Path(options.deepspeed_venv).resolve()
            python = str(venv / "bin" / "python")
            environment |= {
                "PATH": f"{venv}/bin{os.pathsep}{os.environ.get('PATH', '')}",
                "TORCH_EXTENSIONS_DIR": str(venv / "torch_extensions"),
                "DS_ACCELERATOR": "cpu",
            }
        workers = self.workers[name] = []
        for rank in range(ranks):
            log = self.scratch / f"{name}-{rank}.log"
            workers.append(Worker(module, python, settings | {"rank": rank}, log, environment))
        facts = [worker.answer()["ready"] for worker in workers]
        for key in ("parameters", "buffer_bytes"):
            if key in facts[0]:
                facts[0][key] = sum(fact[key] for fact in facts)
        self.measured[name] = report.Measured(used, facts[0], ranks=[[] for _ in workers])

    def run(
        self, name: str, steps: int, compute: bool, on_step: "Callable[[int], None] | None" = None
    ) -> "list[list[dict[str, Any]]]":
        """One block; the steps of each rank. ``on_step`` is called as each step of rank 0 ends."""
        workers, measured = self.workers[name], self.measured[name]
        for worker in workers:
            worker.ask(steps, compute)
        blocks: "list[list[dict[str, Any]]]" = [[] for _ in workers]
        for step in range(steps):
            for block, worker in zip(blocks, workers):
                block.append(worker.answer())
            if on_step is not None:
                on_step(step)
        ends = [worker.answer()["done"] for worker in workers]
        measured.checksums.append([end["weights_crc32"] for end in ends])
        measured.losses += [step["loss"] for step in blocks[0]] if compute else []
        measured.peak_rss_bytes = sum(end["peak_rss_bytes"] for end in ends)
        return blocks

    def measure(self, name: str) -> None:
        """One round of a system."""
        options, measured = self.options, self.measured[name]
        steps = options.drop + options.steps
        training = self.run(name, steps, compute=True)
        for rank, block in zip(measured.ranks, training):
            rank += block[options.drop :]
        if name == "stateless" or options.compute_seconds == 0:
            saturated = training
        else:
            saturated = self.run(name, steps, compute=False)
        for target, blocks in ((measured.training, training), (measured.saturated, saturated)):
            target += [report.slowest(ranks) for ranks in zip(*blocks)][options.drop :]

    def close(self) -> None:
        for worker in [worker for workers in self.workers.values() for worker in workers]:
            worker.close()

    # ------------------------------------------------------------------------------------- throttle

    def throttle(self, path: CappedPath) -> "dict[str, Any]":
        """Halve both caps of the faster path during a run of ours, and restore them; efficiency of every step."""
        options, used = self.options, self.measured["mlp"].paths
        before = (path.read, path.write)
        lowered_at, restored_at = options.drop + options.throttle_steps, options.drop + 2 * options.throttle_steps
        history = list(self.history)

        def change(step: int) -> None:
            if step + 1 in (lowered_at, restored_at):
                factor = 0.5 if step + 1 == lowered_at else 1.0
                path.set_caps(before[0] * factor, before[1] * factor)
                rates = list(self.history[0].rates)
                rates[self.faster] = (path.read, path.write)
                history.append(report.Caps(time.monotonic(), rates))

        try:
            blocks = self.run("mlp", restored_at + options.throttle_steps, compute=False, on_step=change)
        finally:
            path.set_caps(*before)
        steps = [report.slowest(ranks) for ranks in zip(*blocks)]
        values = [report.efficiency([step], used, history) for step in steps]
        return {
            "steps": [
                {
                    "step": i + 1,
                    "caps": [[int(b / (s["end"] - s["begin"])) for b in _span(s, [p], history)] for p in used],
                    "iteration_seconds": s["iteration_seconds"],
                    "efficiency": value,
                }
                for i, (s, value) in enumerate(zip(steps, values))
            ],
            "lowered_before_step": lowered_at + 1,
            "restored_before_step": restored_at + 1,
            # Steps after the change until one is above 0.90 again; None: none was.
            "steps_to_recover_when_lowered": _first_above(values[lowered_at:restored_at]),
            "steps_to_recover_when_restored": _first_above(values[restored_at:]),
        }


def _span(step: "dict[str, Any]", paths: "list[int]", history: "list[report.Caps]") -> "tuple[float, float]":
    return report.capacity(step["begin"], step["end"], paths, history)


def _first_above(values: "list[float]", limit: float = 0.90) -> "int | None":
    return next((i + 1 for i, value in enumerate(values) if value > limit), None)


# ---------------------------------------------------------------------------------------------- a run


@contextlib.contextmanager
def open_paths(options: argparse.Namespace) -> "Iterator[tuple[list[PathConfig], list[CappedPath]]]":
    """The paths of this run, with their rates where they are known; capped ones are made and removed."""
    if options.paths:
        yield [PathConfig.parse(path) for path in options.paths], []
        return
    state_bytes = STATE_BYTES * options.params * 1e6
    copies = sum({"mlp": 1.1, "mlp_one_path": 1.1, "deepspeed": 1.5, "sequential": 1.1}[s] for s in options.systems)
    size_bytes = int(copies * state_bytes + 2 * (options.host_memory or 0.3 * state_bytes) + 512 * 2**20)
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
        # DeepSpeed first: what it allocates is what everybody gets.
        order = ["stateless", *sorted(systems, key=lambda name: name != "deepspeed")]
        for name in order:
            say(f"starting {name}")
            bench.start(name)
            if name == "deepspeed" and options.host_memory is None:
                bench.host_memory = bench.measured[name].facts["buffer_bytes"]
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
        compute = statistics.median(s["forward_seconds"] + s["backward_seconds"] for s in measured["stateless"].training)
    results = {}
    for name in systems:
        reference = options.compute_seconds if compute is None else compute
        results[name] = report.summarize(
            measured[name], bench.history, reference if name == "deepspeed" else options.compute_seconds
        )
    if "sequential" in systems and bench.history is not None:
        results["sequential"]["sequential_bound_share"] = report.sequential_bound_share(
            measured["sequential"], bench.history
        )
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
    for heading in ("system", "update s", "iteration s", "compute s", "read B/p", "written B/p", "efficiency", "overlap s"):
        table.add_column(heading, justify="left" if heading == "system" else "right")
    for name in settings["systems"]:
        r = result[name]
        spread = r["efficiency_spread"]
        table.add_row(
            name,
            f"{r['update_seconds']:.3f} ({r['update_seconds_spread'][0]:.2f}-{r['update_seconds_spread'][1]:.2f})",
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
    where.add_argument("--paths", nargs="+", metavar="DIR[,read=RATE,write=RATE]", help="directories on idle local devices")
    where.add_argument("--capped", nargs="+", type=parse_cap, metavar="READ:WRITE", help="make paths of this speed, MB/s")
    parser.add_argument("--capped-where", metavar="DIR", help="directory for their images (default: /var/tmp)")
    parser.add_argument("--params", type=float, default=300, help="million parameters (default: 300)")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--host-memory", type=parse_bytes, metavar="BYTES", help="for buffers (default: as DeepSpeed's)")
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
    parser.add_argument("--subgroup-size", type=int, help="ours (default: 16 of them fit into the host memory)")
    parser.add_argument("--no-rates", dest="rates", action="store_false", help="do not tell ours how fast the paths are")
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
        result = run(options, lambda text: print(f"[{time.monotonic() - begin:6.1f} s] {text}", file=sys.stderr, flush=True))
    except (BenchmarkError, CapError, OffloadError, RuntimeError) as error:
        sys.exit(f"step: {error}")
    show(result, console)
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=1) + "\n")
    sys.exit(1 if result["errors"] else 0)


if __name__ == "__main__":
    main()
