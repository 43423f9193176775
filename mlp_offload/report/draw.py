"""Pictures of steps: one step on lanes, and the time of all steps by phase. Needs matplotlib, imported when called.

The functions draw on axes that they are given: for reports, for the simulator and for a figure of somebody else's.
"""

from __future__ import annotations

import io
import os
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..errors import OffloadError
from ..telemetry import Event, StepRecord
from .numbers import DIRECTIONS, GPU, GPU_UPDATE, StepNumbers

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Told apart by people who see colours differently (Okabe and Ito), on white and on black.
COLORS = {"fetch": "#56b4e9", "update": "#009e73", GPU_UPDATE: "#cc79a7", "flush": "#e69f00", "stall": "#d55e00"}
REST = "#9a9a9a"
MOST_POINTS = 400
"""Of a line over steps; above it, each point is the median of several steps."""


def need_matplotlib() -> None:
    """Raises OffloadError where it is not installed; call it before long work."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise OffloadError(f"pictures need matplotlib ({error}): pip install 'matplotlib>=3.8'") from error


def draw_step(record: StepRecord, axes: "Axes", title: str = "") -> None:
    """One step over time: a lane for each path and direction, for the update (CPU and GPU), and for the stall.

    Within a lane, events that were under way at the same time are drawn below each other.
    """
    paths = list(dict.fromkeys(e.path for e in record.events if e.phase in DIRECTIONS.values()))
    names = short_names(paths)
    lanes: "list[tuple[str, str, list[Event]]]" = []
    for path in sorted(paths):
        for direction, phase in DIRECTIONS.items():
            lanes.append((f"{names[path]}\n{direction}", phase, _events(record, phase, path)))
    lanes.append(("update", "update", [e for e in record.events if e.phase == "update" and e.path != GPU]))
    lanes.append(("update\non the GPU", GPU_UPDATE, _events(record, "update", GPU)))
    lanes.append(("stall", "stall", [e for e in record.events if e.phase == "stall"]))
    lanes = [lane for lane in lanes if lane[2] or lane[1] in ("update", "stall")]
    end = max([record.step_seconds, *(e.end for e in record.events)])
    factor, unit = (1e3, "ms") if end < 2 else (1.0, "s")
    for row, (_, phase, events) in enumerate(lanes):
        depth, rows = _rows(events)
        height = 0.8 / depth
        for k in range(depth):
            bars = [(e.begin * factor, (e.end - e.begin) * factor) for e, r in zip(events, rows) if r == k]
            axes.broken_barh(
                bars,
                (row - 0.4 + k * height, 0.92 * height if depth > 1 else height),
                facecolors=COLORS[phase],
                edgecolors=axes.get_facecolor() if len(bars) < 200 else "none",
                linewidth=0.4,
                rasterized=len(events) > 2000,
            )
    axes.axvline(record.step_seconds * factor, color=REST, linestyle="--", linewidth=1)
    late = record.step_seconds > 0.5 * end
    axes.annotate(
        "the step returns" if record.step_seconds > 0.97 * end else "the step returns, flushes go on",
        (record.step_seconds * factor, 1.0),
        xycoords=axes.get_xaxis_transform(),
        xytext=(3 if late else -3, 2),
        textcoords="offset points",
        ha="right" if late else "left",
        va="bottom",
        fontsize=8,
    )
    axes.set_yticks(range(len(lanes)), [name for name, _, _ in lanes])
    axes.set_ylim(len(lanes) - 0.4, -0.6)
    axes.set_xlim(0, end * factor * 1.01 or 1)
    axes.set_xlabel(f"{unit} since the start of the step")
    axes.set_title(title, fontsize=10, loc="left", pad=18)
    axes.spines[["top", "right"]].set_visible(False)


def draw_history(steps: "Sequence[StepNumbers]", axes: "Axes", title: str = "") -> None:
    """The time of each step: what the trainer's thread did, stacked, and the phases that go on beside it as lines."""
    numbers = [s.step if s.iteration is None else s.iteration for s in steps]
    phases = {p: [s.phases.get(p, 0.0) for s in steps] for p in COLORS if any(p in s.phases for s in steps)}
    whole = [s.step_seconds for s in steps]
    factor, unit = (1e3, "ms") if max(whole, default=0) < 2 else (1.0, "s")
    updates = [s.cpu_update_seconds for s in steps]
    rest = [max(0.0, w - u - s) for w, u, s in zip(whole, updates, phases["stall"])]
    x = _thin(numbers, 1.0)
    layers = [("update", updates, COLORS["update"]), ("stall", phases["stall"], COLORS["stall"])]
    layers.append(("rest of the step", rest, REST))
    axes.stackplot(
        x,
        [_thin(values, factor) for _, values, _ in layers],
        labels=[name for name, _, _ in layers],
        colors=[color for _, _, color in layers],
        alpha=0.75,
        linewidth=0,
    )
    marker = "." if len(x) <= 30 else ""
    for phase in ("fetch", "flush", GPU_UPDATE):
        if phase in phases:
            axes.plot(
                x,
                _thin(phases[phase], factor),
                color=COLORS[phase],
                label=f"{phase}, in parallel",
                lw=1.8,
                marker=marker,
            )
    axes.set_xlim(x[0], x[-1] if len(x) > 1 else x[0] + 1)
    axes.set_ylim(bottom=0)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("step" if steps[0].iteration is None else "iteration")
    axes.set_ylabel(f"{unit} a step")
    axes.set_title(title, fontsize=10, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=6, frameon=False, fontsize=9)


def figure(pictures: "Sequence[tuple[StepRecord, Sequence[StepNumbers], str, str]]", dark: bool = False) -> "Figure":
    """A figure of one run a column: a step above, all steps below.

    Args:
        pictures: (record of a step, steps of that rank, title of the upper picture, of the lower one) of each run.
        dark: for a dark background.
    """
    need_matplotlib()
    import matplotlib
    from matplotlib.figure import Figure

    lanes = max(len({(e.phase, e.path) for e in record.events}) for record, _, _, _ in pictures)
    upper = 1.2 + 0.5 * max(3, lanes)
    with matplotlib.rc_context(_style(dark)):
        drawn = Figure(figsize=(10 * len(pictures), upper + 3.6), layout="constrained")
        axes = drawn.subplots(2, len(pictures), squeeze=False, height_ratios=(upper, 3.4))
        for column, (record, steps, above, below) in enumerate(pictures):
            draw_step(record, axes[0][column], above)
            draw_history(steps, axes[1][column], below)
    return drawn


def save_png(drawn: "Figure", file: "str | os.PathLike[str]") -> None:
    """Raises OffloadError when the file cannot be written."""
    try:
        drawn.savefig(file, dpi=120, format="png")
    except OSError as error:
        raise OffloadError(f"picture {os.fspath(file)!r}: {error.strerror}") from error


def to_svg(drawn: "Figure", dark: bool = False) -> str:
    """The figure as one ``<svg>`` element without a background, with text as text."""
    import matplotlib

    stream = io.StringIO()
    with matplotlib.rc_context(_style(dark)):
        drawn.savefig(stream, format="svg", transparent=True, metadata={"Date": None})
    text = stream.getvalue()
    return text[text.index("<svg") :]


def short_names(paths: "Sequence[str]") -> "dict[str, str]":
    """Path -> as few of its last parts as tell the paths apart."""
    parts = {path: path.rstrip("/").split("/") for path in paths}
    for count in range(1, max(map(len, parts.values()), default=0) + 1):
        names = {path: "/".join(p[-count:]) for path, p in parts.items()}
        if len(set(names.values())) == len(names):
            return names
    return {path: path for path in paths}


# ------------------------------------------------------------------------------------------ helpers


def _events(record: StepRecord, phase: str, path: str) -> "list[Event]":
    return [e for e in record.events if e.phase == phase and e.path == path]


def _rows(events: "list[Event]") -> "tuple[int, list[int]]":
    """(how many rows it takes, the row of each event) so that no two events of a row overlap."""
    ends: "list[float]" = []
    rows = [0] * len(events)
    for i in sorted(range(len(events)), key=lambda i: events[i].begin):
        row = next((k for k, end in enumerate(ends) if end <= events[i].begin), len(ends))
        if row == len(ends):
            ends.append(0.0)
        ends[row], rows[i] = events[i].end, row
    return max(1, len(ends)), rows


def _thin(values: "Sequence[float]", factor: float) -> "list[float]":
    size = -(-len(values) // MOST_POINTS)
    return [statistics.median_low(values[i : i + size]) * factor for i in range(0, len(values), size or 1)]


def _style(dark: bool) -> "dict[str, Any]":
    ink, ground = ("#e6e6e6", "#16181c") if dark else ("#1b1b1b", "#ffffff")
    names = ("text.color", "axes.edgecolor", "axes.labelcolor", "axes.titlecolor", "xtick.color", "ytick.color")
    ground_names = ("axes.facecolor", "figure.facecolor", "savefig.facecolor")
    return (
        dict.fromkeys(names, ink)
        | dict.fromkeys(ground_names, ground)
        | {"svg.fonttype": "none", "svg.hashsalt": "mlp-offload"}
    )
