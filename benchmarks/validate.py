"""The performance model beside published runs of 44 to 107 billion parameters on one node: what it says, and how far off it is.

    python benchmarks/validate.py
    python benchmarks/validate.py --markdown > docs/performance_model.md

Exit status 1 when an error is larger than what is claimed.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

REPOSITORY = Path(__file__).resolve().parents[1]
PUBLISHED = Path(__file__).with_name("published_runs.json")

UPDATE_BYTES = {"deepspeed": 28, "mlp-offload": 24}
"""A parameter, in one update: fp32 master, exp_avg and exp_avg_sq are read and written; DeepSpeed reads fp32 gradients, too."""

BACKWARD_BYTES = {"deepspeed": 4, "mlp-offload": 0}
"""A parameter, in the backward pass: DeepSpeed writes the fp32 gradients."""

BACKWARD_FORWARDS = 3
"""With activation checkpointing a backward pass is a forward pass again and twice its work."""

FITTED = "52B"
"""The one model whose runs the two constants are taken from."""

CLAIMED = 0.10
"""Largest relative error of what is claimed."""

CLAIMED_MODELS = {"deepspeed": {"40B", "52B", "70B", "100B", "120B"}, "mlp-offload": {"40B", "52B", "70B"}}


class Row(NamedTuple):
    """One published run and what the model says of it; errors are relative to what was measured."""

    system: str
    model: str
    parameters: float
    update_seconds: float
    predicted_update_seconds: float
    iteration_seconds: float
    predicted_iteration_seconds: float
    source: str

    @property
    def update_error(self) -> float:
        return self.predicted_update_seconds / self.update_seconds - 1

    @property
    def iteration_error(self) -> float:
        return self.predicted_iteration_seconds / self.iteration_seconds - 1

    @property
    def claimed(self) -> bool:
        return self.model.split(",")[0] in CLAIMED_MODELS[self.system]

    @property
    def worst(self) -> float:
        return max(abs(self.update_error), abs(self.iteration_error))


def fit(runs: "list[dict[str, Any]]") -> "dict[str, float]":
    """Bytes/s of each system: bytes of the update over its time, in its run of the model ``FITTED``."""
    return {
        run["system"]: UPDATE_BYTES[run["system"]] * run["parameters"] / (run["update_ms"] / 1e3)
        for run in runs
        if run["model"] == FITTED
    }


def predict(run: "dict[str, Any]", rates: "dict[str, float]") -> Row:
    """Update and iteration of a run from its parameters, its forward time and the system's constant."""
    system, parameters = run["system"], run["parameters"]
    update = UPDATE_BYTES[system] * parameters / rates[system]
    compute = (1 + BACKWARD_FORWARDS) * run["forward_ms"] / 1e3
    return Row(
        system,
        run["model"],
        parameters,
        run["update_ms"] / 1e3,
        update,
        run["iteration_ms"] / 1e3,
        compute + BACKWARD_BYTES[system] * parameters / rates[system] + update,
        run["source"],
    )


def broken_claims(rows: "list[Row]") -> "list[str]":
    """What is claimed and not so."""
    return [
        f"{row.system} {row.model}: error {row.worst:.1%} is above {CLAIMED:.0%}"
        for row in rows
        if row.claimed and row.worst > CLAIMED
    ]


def table(rows: "list[Row]") -> "list[list[str]]":
    """Headings, then a line a run."""
    lines = [["system", "model", "parameters", "update s", "model says", "error", "iteration s", "model says", "error"]]
    for row in rows:
        update = [f"{row.update_seconds:.1f}", f"{row.predicted_update_seconds:.1f}"]
        update.append("fitted" if row.model == FITTED else f"{row.update_error:+.1%}")
        iteration = [
            f"{row.iteration_seconds:.1f}",
            f"{row.predicted_iteration_seconds:.1f}",
            f"{row.iteration_error:+.1%}",
        ]
        lines.append([row.system, row.model, f"{row.parameters / 1e9:.2f} B", *update, *iteration])
    return lines


def text(rows: "list[Row]", rates: "dict[str, float]") -> str:
    """What a person reads."""
    lines = table(rows)
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    shown = [
        "  ".join(cell.ljust(w) if i < 2 else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths)))
        for line in lines
    ]
    constants = [
        f"constant of {system}, from its {FITTED} run: {rate / 1e9:.3f} GB/s" for system, rate in rates.items()
    ]
    return "\n".join([*constants, "", *shown, "", *_verdict(rows)])


def markdown(rows: "list[Row]", rates: "dict[str, float]", published: "dict[str, Any]") -> str:
    """docs/performance_model.md."""
    headings, *lines = table(rows)
    shown = [
        "| " + " | ".join(cells) + " |" for cells in (headings, ["---"] * 2 + ["---:"] * (len(headings) - 2), *lines)
    ]
    return _PAGE.format(
        deepspeed=rates["deepspeed"] / 1e9,
        mlp=rates["mlp-offload"] / 1e9,
        table="\n".join(shown),
        verdict="\n\n".join(_verdict(rows)),
        **{key: published[key] for key in ("about", "source", "setting", "parameters")},
    )


def _verdict(rows: "list[Row]") -> "list[str]":
    told = []
    for system, name in (("deepspeed", "DeepSpeed"), ("mlp-offload", "MLP-Offload")):
        inside = [row for row in rows if row.system == system and row.claimed]
        models = " ".join(dict.fromkeys(row.model.split(",")[0] for row in inside))
        told.append(
            f"{name}, {models}: the largest error is {max(row.worst for row in inside):.1%} (claimed: {CLAIMED:.0%})."
        )
        for row in rows:
            if row.system == system and not row.claimed:
                told.append(
                    f"{name}, {row.model}: update {row.update_error:+.1%}, iteration {row.iteration_error:+.1%}; nothing is claimed. "
                    "How much of the state stayed in host memory is not known of this run, and is not fitted."
                )
    return told


_PAGE = """\
# Performance model

Written by `python benchmarks/validate.py --markdown`; `tests/benchmarks/test_validate.py` holds this page to the command.

An update that storage limits takes bytes over bandwidth:

```
update seconds    = parameters * bytes of the update a parameter / bandwidth
iteration seconds = 4 * forward seconds + parameters * bytes of the backward pass a parameter / bandwidth + update seconds
```

| system | bytes of the update | bytes of the backward pass |
|---|---|---|
| DeepSpeed ZeRO-3 on NVMe | 28: reads fp32 master, both moments and gradient, writes all but the gradient | 4: writes the fp32 gradient |
| MLP-Offload | 24: reads and writes master and both moments | 0 |

Forward seconds are those of each log. With activation checkpointing the backward pass is three of them. Nothing else of a run is
put in: no backward time, no device.

## Beside published runs

{about}: {source}.
{setting}.
Parameters are {parameters}; models are named as there.

Two constants are fitted, one a system, each from the update of its 52B run alone: **DeepSpeed {deepspeed:.3f} GB/s**, **MLP-Offload
{mlp:.3f} GB/s**. The first is one NVMe volume, reads and writes together. The second is the NVMe volume and the parallel file system
together *and* what stays in host memory between steps, because the logs do not tell these apart: it is no device's bandwidth, and it
holds only as long as that share is the same. All other numbers under "model says" are predictions.

{table}

{verdict}

## The simulator

`mlp-offload simulate` does not use these formulas. It runs the step pipeline itself on paths that are only bandwidths, with a clock
that jumps; order, hits, bytes and shares are those of a real run. Where storage limits a step, both agree
(`tests/unit/test_simulator.py`). `benchmarks/step.py` prints its prediction beside each measurement.

What it leaves out: the memory bandwidth that transfers, checksums and the update share; differences between the ranks of a node, which
do all at the same time; other jobs on a shared file system.
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="one JSON object")
    form.add_argument("--markdown", action="store_true", help="the page docs/performance_model.md")
    options = parser.parse_args()
    published = json.loads(PUBLISHED.read_text())
    rates = fit(published["runs"])
    rows = [predict(run, rates) for run in published["runs"]]
    errors = broken_claims(rows)
    if options.json:
        items = [
            row._asdict() | {key: getattr(row, key) for key in ("update_error", "iteration_error", "claimed")}
            for row in rows
        ]
        print(
            json.dumps(
                {"ok": not errors, "constants_bytes_per_second": rates, "rows": items, "errors": errors}, indent=1
            )
        )
    else:
        print(
            markdown(rows, rates, published) if options.markdown else text(rows, rates),
            end="" if options.markdown else "\n",
        )
    for error in errors:
        print(f"validate: {error}", file=sys.stderr)
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
