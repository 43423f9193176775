"""Judge a quickstart run: was the offloaded training identical to stock, did the state move, did the loss fall?"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from mlp_offload.report.draw import draw_history
from mlp_offload.report.numbers import StepNumbers
from mlp_offload.telemetry import StepRecord, read_steps

STATE_BYTES = 10  # a parameter: a bf16 weight's 16-bit remainder of main_param, exp_avg and exp_avg_sq in fp32
LEAST_FALL_NATS = 2.0
LEAST_MOVED = 0.5


@dataclass
class Verdict:
    """What the two runs showed.

    Attributes:
        compared: iterations of the stock run.
        identical: "losses", "gradient norms", "parameters" -> the same bits on every rank.
        losses: of all iterations, nats a token; stock_losses: of the compared ones.
        moved: ("read" or "written", "kernel" or "ours") -> bytes of all ranks, an iteration; None: not counted.
        state_bytes: of all ranks.
        telemetry: by rank, one record a step.
        seconds: of each iteration, of offloaded and of stock.
    """

    compared: int
    identical: "dict[str, bool]"
    losses: "list[float]"
    stock_losses: "list[float]"
    state_bytes: int
    moved: "dict[tuple[str, str], list[int] | None]"
    telemetry: "list[list[StepRecord]]"
    seconds: "dict[str, list[float]]" = field(default_factory=dict)

    @property
    def fall(self) -> float:
        """Nats between the first loss and the mean of the last five."""
        last = self.losses[-5:]
        return self.losses[0] - sum(last) / len(last)

    def least_moved(self, direction: str) -> "float | None":
        """By the kernel's counters: the smallest share of the state that any step moved; None if not counted."""
        counted = self.moved[direction, "kernel"]
        return min(counted) / self.state_bytes if counted else None

    @property
    def all_identical(self) -> bool:
        return all(self.identical.values())

    @property
    def complaints(self) -> "list[str]":
        """What is not as it should be, each with the number."""
        found = [f"{what} differ from the stock optimizer's" for what, same in self.identical.items() if not same]
        if not self.fall >= LEAST_FALL_NATS:
            found.append(f"the loss fell by {self.fall:.2f} nats, not by {LEAST_FALL_NATS:g} or more")
        for direction in ("read", "written"):
            share = self.least_moved(direction)
            if share is None:
                found.append(f"the kernel did not count what was {direction} (/proc/self/io)")
            elif share < LEAST_MOVED:
                found.append(
                    f"in one step the kernel counted {share:.0%} of the state as {direction}, less than {LEAST_MOVED:.0%}; "
                    "it counts nothing on tmpfs: give --paths on a drive"
                )
        return found

    @property
    def good(self) -> bool:
        return not self.complaints


def judge(run: Path, ranks: int, compared: int) -> Verdict:
    """Read what both runs recorded in ``run``."""
    offloaded = [_read(run / "offloaded-record" / f"rank{r:04d}.jsonl") for r in range(ranks)]
    stock = [_read(run / "stock-record" / f"rank{r:04d}.jsonl") for r in range(ranks)]
    telemetry = [read_steps(run / "telemetry" / f"rank{r:04d}.jsonl") for r in range(ranks)]

    def same(key: str, iterations: "range") -> bool:
        pairs = [(a[i].get(key), b[i].get(key)) for a, b in zip(offloaded, stock) for i in iterations]
        return all(x is not None and x == y for x, y in pairs)

    each = range(1, compared + 1)
    return Verdict(
        compared=compared,
        identical={
            "losses": same("loss", each),
            "gradient norms": same("grad_norm", each),
            "parameters": same("parameters_sha256", range(compared, compared + 1)),
        },
        losses=[float.fromhex(line["loss"]) for line in offloaded[-1][1:]],
        stock_losses=[float.fromhex(line["loss"]) for line in stock[-1][1:]],
        state_bytes=STATE_BYTES * offloaded[0][0]["parameter_numel"],
        moved={
            ("read", "kernel"): _kernel_bytes(offloaded, "read_bytes"),
            ("written", "kernel"): _kernel_bytes(offloaded, "write_bytes"),
            ("read", "ours"): _our_bytes(telemetry, "bytes_read"),
            ("written", "ours"): _our_bytes(telemetry, "bytes_written"),
        },
        telemetry=telemetry,
        seconds={
            "offloaded": [line["seconds"] for line in offloaded[-1][1:]],
            "stock": [line["seconds"] for line in stock[-1][1:]],
        },
    )


def show(console: Console, verdict: Verdict, run: Path, seconds: "dict[str, float]") -> None:
    """Print the table, draw the picture, write summary.json."""
    picture = draw(verdict, run / "quickstart.png")
    table = Table(title="GPT pre-training with optimizer state on storage", show_header=False, title_justify="left")
    for row in rows(verdict, seconds):
        table.add_row(*row)
    console.print(table)
    for complaint in verdict.complaints:
        console.print(f"[red]not good:[/] {complaint}", soft_wrap=True)
    console.print(f"identical to stock: {'yes' if verdict.all_identical else 'no'}")
    summary = dict(rows(verdict, seconds)) | {"complaints": verdict.complaints}
    (run / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    console.print(f"picture: {picture}\neverything else: {run}", soft_wrap=True)


def rows(verdict: Verdict, seconds: "dict[str, float]") -> "list[tuple[str, str]]":
    """The table's rows."""
    steps = [record for rank in verdict.telemetry for record in rank]
    hits, fetches = (sum(getattr(r, key) for r in steps) for key in ("hit_count", "fetch_count"))
    found = [
        ("loss, first and last", f"{verdict.losses[0]:.3f} -> {verdict.losses[-1]:.3f} (-{verdict.fall:.2f} nats)"),
        ("iterations", f"{len(verdict.losses)} with offload, {verdict.compared} with stock"),
        ("seconds, start-up included", " | ".join(f"{name} {s:.0f}" for name, s in seconds.items())),
        ("seconds an iteration (median)", " | ".join(f"{n} {_median(s):.2f}" for n, s in verdict.seconds.items())),
        ("optimizer state", f"{verdict.state_bytes / 1e6:.0f} MB in host memory and on paths"),
    ]
    for path in sorted({path for r in steps for path in (*r.bytes_read, *r.bytes_written)}):
        read, written = (
            sum(moved.get(path, 0) for moved in (getattr(r, key) for r in steps))
            for key in ("bytes_read", "bytes_written")
        )
        found.append((f"path {path}", f"{read / 1e9:.2f} GB read | {written / 1e9:.2f} GB written"))
    for direction in ("read", "written"):
        ours, kernel = sum(verdict.moved[direction, "ours"] or []), verdict.moved[direction, "kernel"]
        counted = "not counted" if kernel is None else f"{sum(kernel) / 1e9:.2f} GB, each step at least "
        share = "" if kernel is None else f"{verdict.least_moved(direction):.0%} of the state"
        found.append((f"{direction} after step 1", f"{ours / 1e9:.2f} GB | kernel: {counted}{share}"))
    found.append(("hit rate", f"{hits / max(1, hits + fetches):.0%} of subgroups found in host memory"))
    answers = ", ".join(f"{what} {'yes' if same else 'NO'}" for what, same in verdict.identical.items())
    found.append((f"identical to stock, {verdict.compared} iterations", answers))
    return found


def draw(verdict: Verdict, file: Path) -> Path:
    """Loss curve, and the time of each step by phase on rank 0."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (top, bottom) = pyplot.subplots(2, 1, figsize=(9, 8), sharex=True, layout="constrained")
    each = range(1, len(verdict.losses) + 1)
    top.plot(each, verdict.losses, label="with offload")
    top.plot(each[: len(verdict.stock_losses)], verdict.stock_losses, "kx", label="stock")
    top.set(ylabel="loss (nats a token)", title="GPT on Python's standard library, optimizer state on storage")
    top.legend()
    draw_history([StepNumbers.of(record) for record in verdict.telemetry[0]], bottom, "optimizer step by phase, rank 0")
    figure.savefig(file, dpi=120)
    return file


# ------------------------------------------------------------------------------------------ helpers


def _read(file: Path) -> "list[dict[str, Any]]":
    return [json.loads(line) for line in file.read_text().splitlines()]


def _kernel_bytes(records: "list[list[dict[str, Any]]]", key: str) -> "list[int] | None":
    """What the kernel counted for all ranks in each iteration after the first."""
    if any(line[key] is None for rank in records for line in rank):
        return None
    steps = range(2, len(records[0]))
    return [sum(rank[i][key] - rank[i - 1][key] for rank in records) for i in steps]


def _our_bytes(telemetry: "list[list[StepRecord]]", key: str) -> "list[int]":
    """What the telemetry counted for all ranks in each step after the first."""
    return [sum(sum(getattr(record, key).values()) for record in step) for step in list(zip(*telemetry))[1:]]


def _median(values: "list[float]") -> float:
    return sorted(values)[len(values) // 2]
