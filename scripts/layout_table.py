"""Write docs/parallelism.md from a run of the comparisons of tests/multi_rank, on each interpreter that is given.

    python scripts/layout_table.py PYTHON [PYTHON...]

Each interpreter has mlp-offload's dependencies, one version of Megatron-Core and the built extension. It takes about two
minutes a version on two cores. The test suite compares the file with what it ran itself, so edit this script, not the file.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
PAGE = REPOSITORY / "docs" / "parallelism.md"
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "tests" / "multi_rank")]
EQUAL, NOT_EQUAL, NOT_RUN = "equal", "NOT EQUAL", "not run"

Columns = "dict[str, dict[str, str]]"  # version of Megatron-Core -> scenario -> verdict

HEAD = """\
# Parallelism and options

Written by `scripts/layout_table.py` from a test run; `tests/multi_rank/test_equal_to_stock.py` runs the same comparisons and
holds this page to what it finds.

Each row is a small GPT that is trained twice in the same process group, from the same weights on the same batches: by Megatron's
own distributed optimizer with the arithmetic of `torch.optim.AdamW(fused=True)`, and by the offloaded one with most of its state on
two paths. **equal** means, on every rank: the same losses, gradient norms, zero counts and executed steps, and the same sha256 of all
weights and of all fp32 state (master, `exp_avg`, `exp_avg_sq`) at the end. bf16 weights and fp32 `main_grad`, five steps with
clipping active, unless the row says otherwise. Without a GPU: gloo, no Transformer Engine, no Apex.

"""
TAIL = """\

- TP, PP, EP, CP, DP: tensor, pipeline, expert, context and data parallel. *Overlapped*: gradient reduction and parameter gather overlap with
  backward and forward passes, in buckets of 20,000 elements.
- *EP*: dense parameters and experts are two optimizers; both share one pipeline, one pool and one memory budget.
- *CP2, its groups only*: the optimizer and the gradient reduction see the groups of context parallelism; attention over parts of a sequence
  needs Transformer Engine and is untested.
- *Sequence parallel* runs with a layer norm of the test's own: Megatron's refuses without Transformer Engine or Apex.
- *Schedules*: learning rate and weight decay change from step to step, and `--decoupled-lr` makes more parameter groups.
- *Rerun*: every forward and backward pass runs twice, as with `--rerun-mode report_stats`. *offload_to_cpu*: optimizer, gradient and parameter
  buffers leave and come back before each step, as between rollouts of reinforcement learning.
- *Params norm*: `--log-params-norm`. The whole state is read from the tiers once more, each time Megatron asks: every iteration.
- *Norm as a tensor*: as with Transformer Engine, where the norm stays on the GPU.

## Refused by name

With `--optimizer-offload mlp`, these end the run before a model is built. The first column is the option's name in Megatron's arguments and configs.

| option | offload |
|---|---|
"""


def verdict(ranks: "list[dict[str, Any]]") -> str:
    """What a cell says about a scenario, from what each rank returned."""
    first = ranks[0]
    if "lacks" in first:
        return f"has no `{first['lacks']}`"
    if "stock_fails" in first:
        return f"stock: {first['stock_fails'].partition(' when ')[0]}"
    return EQUAL if all(rank["ours"] == rank["stock"] for rank in ranks) else NOT_EQUAL


def comparisons() -> "list[tuple[int, str]]":
    """Number of processes and name of every scenario that has a row."""
    from scenarios import LAYOUTS

    return [(n, name) for n, group in LAYOUTS.items() for name, entry in group.items() if entry["kind"] == "compare"]


def render(columns: Columns) -> str:
    """The page."""
    from mlp_offload.plan.refusals import RULES

    versions = sorted(columns)
    lines = ["| processes | layout and features | " + " | ".join(f"Megatron-Core {v}" for v in versions) + " |"]
    lines.append("|---" * (2 + len(versions)) + "|")
    for count, name in comparisons():
        cells = [columns[version].get(name, NOT_RUN) for version in versions]
        lines.append("| " + " | ".join([str(count), name, *cells]) + " |")
    refused = [f"| `{rule.option}` | {rule.reason} |" for rule in RULES]
    return HEAD + "\n".join(lines) + "\n" + TAIL + "\n".join(refused) + "\n"


def parse(page: str) -> Columns:
    """The verdicts on a page that ``render`` wrote."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line.startswith("|")]
    versions = [cell.rpartition(" ")[2] for cell in rows[0][2:]]
    table = [row for row in rows[2:] if row[0].isdigit()]
    return {version: {row[1]: row[2 + i] for row in table} for i, version in enumerate(versions)}


def collect() -> "tuple[str, dict[str, str]]":
    """Version and verdicts of the Megatron-Core of this interpreter."""
    from launch import run_scenarios
    from scenarios import LAYOUTS

    verdicts: "dict[str, str]" = {}
    for count, group in LAYOUTS.items():
        compared = {name: entry for name, entry in group.items() if entry["kind"] == "compare"}
        with tempfile.TemporaryDirectory() as place:
            results = run_scenarios(count, compared, Path(place))
        verdicts |= {name: verdict(ranks) for name, ranks in results.items()}
    return metadata.version("megatron-core"), verdicts


def main(interpreters: "list[str]") -> None:
    if interpreters == ["--collect"]:
        print(json.dumps(collect()))
        return
    if not interpreters:
        sys.exit(__doc__)
    columns: Columns = {}
    for interpreter in interpreters:
        environment = dict(os.environ, PYTHONPATH=str(REPOSITORY))
        command = [interpreter, __file__, "--collect"]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        version, verdicts = json.loads(done.stdout.splitlines()[-1])
        columns[version] = verdicts
        print(f"{version}: {sum(v == EQUAL for v in verdicts.values())} of {len(verdicts)} equal", file=sys.stderr)
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(render(columns))


if __name__ == "__main__":
    main(sys.argv[1:])
