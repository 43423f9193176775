"""The plan as tables for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from ..plan.memory import Need
from ..prediction import Prediction, lifetime
from ..report.tables import keep_whole
from ..units import format_bytes, format_seconds

if TYPE_CHECKING:
    from ..plan.search import Fit
    from .plan_build import Plan


def show(plan: "Plan") -> None:
    """Print it."""
    console = Console(highlight=False, soft_wrap=False)
    need, job, machine = plan.need, plan.need.job, plan.need.machine
    model, layout = job.model, job.layout
    console.print(
        f"[bold]{plan.title}[/]: {plan.parameters:,} parameters, {model.num_layers} layers of {model.hidden_size}, "
        f"vocabulary padded to {model.padded_vocab_size(layout.tp):,}",
        soft_wrap=True,
    )
    console.print(
        f"{machine.nodes} node{_s(machine.nodes)} x {machine.gpus_per_node} GPUs of {format_bytes(machine.gpu_memory)}: "
        f"TP {layout.tp}, PP {layout.pp}, "
        f"{f'CP {layout.cp}, ' if layout.cp > 1 else ''}{f'EP {layout.ep}, ' if layout.ep > 1 else ''}DP {need.dp}; "
        f"{need.micro_batches} micro-batch{'es' if need.micro_batches > 1 else ''} of {job.training.micro_batch_size} x {model.seq_length} tokens",
        soft_wrap=True,
    )
    console.print(keep_whole(_gpu_table(plan)), crop=False)
    console.print(keep_whole(_node_table(need)), crop=False)
    if plan.prediction:
        console.print(keep_whole(_time_table(plan, plan.prediction)), crop=False)
    if need.fits:
        console.print("[bold green]it fits[/]")
    else:
        console.print("[bold red]it does not fit[/]")
        for shortage in need.shortages:
            console.print(f"  {shortage}", markup=False, soft_wrap=True)
        console.print("what makes it fit, each by itself and tried:")
        for change in plan.changes:
            console.print(f"  {change}", markup=False, soft_wrap=True)
    console.print("[dim]what this rests on:[/]")
    for line in plan.assumptions:
        console.print(f"  {line}", style="dim", markup=False, soft_wrap=True)
    if job.unused:
        console.print(
            f"  flags that change nothing here: {' '.join(job.unused)}", style="dim", markup=False, soft_wrap=True
        )


def show_recipes(rows: "Sequence[dict[str, Any]]") -> None:
    """The table of recipes."""
    table = Table(title="recipes on nodes of four GPUs and 512 GiB; (nodes without offload)", title_justify="left")
    for column in ("recipe", "params", "GPU GB", "nodes", "layout", "GPU peak", "paths"):
        table.add_column(column, justify="left" if column in ("recipe", "layout") else "right", no_wrap=True)
    for row in rows:
        table.add_row(
            *(row["name"], f"{row['parameters'] / 1e9:.1f} B", str(row["gpu_memory_gib"])),
            *(f"{row['nodes']} ({row['stock_nodes']})", f"TP{row['tp']} PP{row['pp']} DP{row['dp']}"),
            *(format_bytes(max(row["gpu_bytes"], row["gpu_startup_bytes"])), format_bytes(row["path_bytes"])),
        )
    Console().print(keep_whole(table), crop=False)


def recipes_markdown(rows: "Sequence[dict[str, Any]]") -> str:
    """The same for ``docs/recipes.md``."""
    lines = [
        "| recipe | parameters | GPU | nodes | nodes without offload | layout | on a GPU | at start-up | on a node's paths |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| `{row['name']}` | {row['parameters'] / 1e9:.1f} B | {row['gpu_memory_gib']} GB | {row['nodes']} | {row['stock_nodes']} "
            f"| TP {row['tp']}, PP {row['pp']}, DP {row['dp']} | {format_bytes(row['gpu_bytes'])} | "
            f"{format_bytes(row['gpu_startup_bytes'])} | {format_bytes(row['path_bytes']) if row['path_bytes'] else '-'} |"
        )
    return "\n".join(lines)


# ------------------------------------------------------------------------------------------ helpers


def _gpu_table(plan: "Plan") -> Table:
    need, stock, training = plan.need, plan.stock, plan.need.job.training
    table = Table(title=f"one GPU, the fullest ({need.machine.gpus} GPUs)", title_justify="left")
    table.add_column("")
    table.add_column("with offload", justify="right")
    table.add_column("stock Megatron", justify="right")
    gradients = "fp32" if training.gradient_bytes == 4 else training.dtype
    rows = [
        (f"weights ({training.dtype})", "weights"),
        (f"gradients ({gradients})", "gradients"),
        ("fp32 masters and Adam moments", "state"),
        ("activations (estimate)", "activations"),
        ("total", "total"),
    ]
    for text, name in rows:
        table.add_row(
            text, *(format_bytes(getattr(n.gpu, name)) for n in (need, stock)), end_section=name == "activations"
        )
    table.add_row("at start-up", *(format_bytes(max(s.startup for s in n.stages)) for n in (need, stock)))
    room = format_bytes(need.machine.gpu_memory - need.machine.gpu_reserve)
    table.add_row("there is", room, room, end_section=True)
    gpu_fits = not any(s.what.startswith("GPU") for s in need.shortages)
    table.add_row("fits on these nodes", "yes" if gpu_fits else "no", "yes" if stock.fits else "no")
    table.add_row("fewest nodes, in any layout", _nodes(plan.fewest), _nodes(plan.stock_fewest))
    return table


def _node_table(need: Need) -> Table:
    table = Table(title="one node", title_justify="left")
    table.add_column("")
    table.add_column("needs", justify="right")
    table.add_column("has", justify="right")
    table.add_column("")
    ranks = need.machine.gpus_per_node
    assert need.host is not None and need.residency is not None
    share = len(need.residency.residents) / len(need.subgroups)
    there = len(need.residency.device_residents) / len(need.subgroups)
    on_gpus = f", {there:.0%} on the GPUs" if there else ""
    state = sum(need.shard_numels) * need.state_bytes * ranks
    table.add_row(
        "state",
        format_bytes(state),
        "",
        f"{need.state_bytes} bytes a parameter, {len(need.subgroups)} subgroups a rank",
    )
    table.add_row(
        *("host memory", format_bytes(need.host.total), format_bytes(need.machine.host_memory)),
        f"buffers {format_bytes(need.host.buffers)} ({share:.0%} of the state stays there{on_gpus}), processes "
        f"{format_bytes(need.host.processes)}, a save {format_bytes(need.host.save)}",
    )
    for path in need.paths:
        has = "?" if path.path.capacity is None else format_bytes(path.path.capacity)
        table.add_row(
            *(f"path {path.path.directory}", format_bytes(path.needed), has),
            f"{path.subgroups} subgroups a rank, and spare slots",
        )
    return table


def _time_table(plan: "Plan", prediction: Prediction) -> Table:
    table = Table(title="one iteration (predicted)", title_justify="left")
    table.add_column("")
    table.add_column("", justify="right")
    table.add_column("")
    seconds = format_seconds
    bound = f"the paths need {seconds(prediction.bound_seconds)} for its bytes"
    if plan.need.all_resident:
        bound = "no state is on a path"
    hits = f"{prediction.hit_rate:.0%} of subgroups found in memory"
    table.add_row("forward and backward", seconds(prediction.compute_seconds), "")
    table.add_row("optimizer step", seconds(prediction.step_seconds), bound)
    table.add_row("  fetch", seconds(prediction.fetch_seconds), hits)
    table.add_row("  update", seconds(prediction.update_seconds), "")
    table.add_row("  flush", seconds(prediction.flush_seconds), "goes on into the next forward pass")
    table.add_row("  waiting for storage", seconds(prediction.stall_seconds), "")
    table.add_row(
        "iteration",
        seconds(prediction.iteration_seconds),
        f"{prediction.tokens_per_second:,.0f} tokens a second",
        end_section=True,
    )
    for use in prediction.paths:
        if plan.need.all_resident:
            table.add_row(f"path {use.directory}", "", "holds no state")
            continue
        moved = f"{format_bytes(use.step_read_bytes)} read, {format_bytes(use.step_written_bytes)} written a step"
        table.add_row(f"path {use.directory}", "", f"{moved}; {lifetime(use)}")
    grace = ""
    if plan.grace_seconds is not None:
        short = prediction.exit_seconds - plan.grace_seconds
        grace = f"; grace of {plan.grace_seconds:g} s: {'enough' if short <= 0 else f'{short:.0f} s too short'}"
    table.add_row(
        "last checkpoint",
        seconds(prediction.save_seconds),
        f"{format_bytes(prediction.checkpoint_bytes)} in all, at most this long",
    )
    table.add_row("from signal to end", seconds(prediction.exit_seconds), f"the iteration ends first{grace}")
    training = plan.need.job.training
    if training.save_interval:
        every = f"{training.save_interval:,} iterations (--save-interval): what a crash costs at most"
        table.add_row("checkpoint every", seconds(prediction.save_every_seconds), every)
    if training.iterations:
        table.add_row("whole training", seconds(prediction.run_seconds), f"{training.iterations:,} iterations")
    return table


def _nodes(fit: "Fit | None") -> str:
    if fit is None:
        return "none tried"
    layout = fit.need.job.layout
    return f"{fit.need.machine.nodes} (TP {layout.tp}, PP {layout.pp})"


def _s(count: int) -> str:
    return "" if count == 1 else "s"
