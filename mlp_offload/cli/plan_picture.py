"""The plan as a picture: what a GPU, a node's memory and each path hold, beside what there is."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..plan.memory import Need
from ..report.draw import save_png

if TYPE_CHECKING:
    from .plan_build import Plan

GIB = 2**30
_COLOURS = {
    "weights": "#1b4f72",
    "weights, once more": "#7fb3d5",
    "gradients": "#2e86c1",
    "fp32 masters, moments": "#c0392b",
    "activations": "#f0b27a",
    "kept free": "#d5d8dc",
    "processes": "#aab7b8",
    "a save": "#7fb3d5",
    "optimizer state": "#c0392b",
}


def draw(plan: "Plan", file: Path) -> None:
    """Write the picture. Needs matplotlib.

    Raises:
        OffloadError: the file cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    need, machine = plan.need, plan.need.machine
    figure, (gpu, node) = pyplot.subplots(
        1, 2, figsize=(11, 4.8), gridspec_kw={"width_ratios": [4, 2 + len(need.paths)]}
    )
    bars = {
        "offload\ntraining": _training(need),
        "offload\nstart-up": _startup(need),
        "stock\ntraining": _training(plan.stock),
    }
    reserve = {"kept free": machine.gpu_reserve}
    _bars(gpu, {name: parts | reserve for name, parts in bars.items()}, dict.fromkeys(bars, machine.gpu_memory))
    gpu.set_title("one GPU, the fullest")
    _bars(node, *_node(need))
    node.set_title("one node")
    verdict = "fits" if need.fits else "does not fit"
    layout = need.job.layout
    figure.suptitle(
        f"{plan.title}, {plan.parameters / 1e9:.1f} B parameters: {verdict} on {machine.nodes} x {machine.gpus_per_node} GPUs "
        f"(TP {layout.tp}, PP {layout.pp}, DP {need.dp})"
    )
    figure.tight_layout()
    try:
        save_png(figure, file)
    finally:
        pyplot.close(figure)


def _training(need: Need) -> "dict[str, float]":
    gpu = need.gpu
    parts = {"weights": gpu.weights, "gradients": gpu.gradients, "fp32 masters, moments": gpu.state}
    return parts | {"activations": max(gpu.activations, gpu.update)}


def _startup(need: Need) -> "dict[str, float]":
    worst = max(need.stages, key=lambda stage: stage.startup)
    again = worst.startup - worst.weights - worst.gradients
    return {"weights": worst.weights, "weights, once more": again, "gradients": worst.gradients}


def _node(need: Need) -> "tuple[dict[str, dict[str, float]], dict[str, float | None]]":
    assert need.host is not None
    parts: "dict[str, dict[str, float]]" = {
        "memory": {"processes": need.host.processes, "optimizer state": need.host.buffers, "a save": need.host.save}
    }
    limits: "dict[str, float | None]" = {"memory": need.machine.host_memory}
    for path in need.paths:
        name = f"path\n{path.path.directory}"
        parts[name] = {"optimizer state": path.needed}
        limits[name] = path.path.capacity
    return parts, limits


def _bars(axes: Any, bars: "dict[str, dict[str, float]]", limits: "dict[str, float | None]") -> None:
    """Stacked bars in GiB; a line across each where its room ends, unless that is far above all bars."""
    labelled = set()
    tops = {name: sum(parts.values()) / GIB for name, parts in bars.items()}
    near = {name: limit / GIB for name, limit in limits.items() if limit and limit / GIB <= 2 * max(tops.values())}
    highest = max([*tops.values(), *near.values()])
    for position, (name, parts) in enumerate(bars.items()):
        bottom = 0.0
        for part, nbytes in parts.items():
            if nbytes:
                label = part if part not in labelled else None
                axes.bar(position, nbytes / GIB, 0.6, bottom, color=_COLOURS[part], label=label)
                labelled.add(part)
                bottom += nbytes / GIB
        limit = limits[name]
        text = f"{bottom:,.0f}" if limit is None else f"{bottom:,.0f} of {limit / GIB:,.0f}"
        above = near.get(name, 0.0)
        height = above if 0 <= above - bottom < 0.08 * highest else bottom  # not across the line
        axes.annotate(text, (position, height), (0, 2), textcoords="offset points", ha="center", fontsize=9)
        if name in near:
            label = None if "there is" in labelled else "there is"
            labelled.add("there is")
            axes.hlines(above, position - 0.42, position + 0.42, colors="black", linestyles="--", label=label)
    axes.set_xticks(range(len(bars)), list(bars))
    axes.set_ylabel("GiB")
    axes.set_ylim(0, highest * 1.35)  # room for the legend
    axes.margins(x=0.12)
    axes.legend(fontsize=8, ncols=3, loc="upper left", frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
