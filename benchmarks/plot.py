"""A picture of what ``benchmarks/step.py`` measured: an iteration of each system, and what its disks would allow.

python benchmarks/plot.py RESULT.json PICTURE.png
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

LABELS = {
    "mlp": "mlp-offload\nboth paths",
    "mlp_one_path": "mlp-offload\none path",
    "deepspeed": "DeepSpeed ZeRO-3\none path",
    "sequential": "load, update, store\none path",
}


def draw(result: "dict[str, Any]", picture: Path) -> None:
    """Bars from the medians; a mark where the path caps alone would put the end of the iteration."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    settings = result["settings"]
    names = [name for name in LABELS if name in settings["systems"]]
    figure, axes = pyplot.subplots(figsize=(8, 0.9 + 0.75 * len(names)), layout="constrained")
    fastest = result[names[0]]["iteration_seconds"]
    for row, name in enumerate(names):
        r = result[name]
        compute, rest = r["compute_seconds"], r["iteration_seconds"] - r["compute_seconds"]
        axes.barh(row, compute, color="#b8b8b8", label="forward and backward" if row == 0 else None)
        color = "#1f6fb4" if name.startswith("mlp") else "#d98b35"
        axes.barh(row, rest, left=compute, color=color)
        if r["efficiency"] is not None:
            bound = compute + r["efficiency"] * rest
            axes.plot([bound, bound], [row - 0.4, row + 0.4], color="black", lw=1.5)
        text = f" {r['iteration_seconds']:.1f} s"
        if name != names[0]:
            text += f"  ({r['iteration_seconds'] / fastest:.1f}x)"
        axes.text(r["iteration_seconds"], row, text, va="center")
    axes.plot([], [], color="black", lw=1.5, label="bound of the path caps for the bytes moved")
    axes.set_yticks(range(len(names)), [LABELS[name] for name in names])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.22 * max(result[name]["iteration_seconds"] for name in names))
    axes.set_xlabel("seconds an iteration (median)")
    million, share = settings["parameters"] / 1e6, settings["host_memory_share_of_state"]
    axes.set_title(f"{million:.0f} M parameters, the same host memory for all ({share:.0%} of the state)", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(picture, dpi=110)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path)
    parser.add_argument("picture", type=Path)
    options = parser.parse_args()
    draw(json.loads(options.result.read_text()), options.picture)


if __name__ == "__main__":
    main()
