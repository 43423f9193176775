"""A report as one HTML file: no network, no script, pictures inside, readable in light and dark."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from .analysis import Report
from .tables import DEFINITIONS, PATH_COLUMNS, path_cells, side_by_side
from .verdict import Finding

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1b1b; --soft: #666; --line: #ddd; --ground: #fff; --mark: #0072b2; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e6e6; --soft: #a0a0a0; --line: #383c44; --ground: #16181c; --mark: #56b4e9; }
  .light { display: none; }
}
@media (prefers-color-scheme: light) { .dark { display: none; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--ground); max-width: 72rem; margin: 2rem auto;
  padding: 0 1rem; }
h1 { font-size: 1.3rem; } h2 { font-size: 1.1rem; margin-top: 2rem; overflow-wrap: anywhere; }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .2rem 1.2rem .2rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
th { font-weight: 600; } tbody th { font-weight: 400; color: var(--soft); white-space: pre; }
.paths td:nth-child(n+3), .paths th:nth-child(n+3) { text-align: right; padding: .2rem 0 .2rem 1.2rem; }
.paths td:first-child { overflow-wrap: anywhere; }
.finding { border-left: 4px solid var(--mark); padding: .1rem 0 .1rem .8rem; margin: .6rem 0; }
.note { color: var(--soft); font-size: .9rem; } svg { width: 100%; height: auto; } .scroll { overflow-x: auto; }
"""


def page(
    runs: "Sequence[tuple[str, Report, Sequence[Finding]]]",
    pictures: "Sequence[tuple[str, str]]",
    version: str,
    when: str,
) -> str:
    """The whole document.

    Args:
        runs: name, numbers and findings of each.
        pictures: of each run, two ``<svg>`` elements: for a light and for a dark background.
        version: of the package; ``when`` it was written.
    """
    several = len(runs) > 1
    title = "Optimizer offload" + ("" if several else f": {runs[0][0]}")
    names = "".join(f"<th>{escape(name)}</th>" for name, _, _ in runs)
    body = "".join(
        f"<tr><th>{escape(label)}</th>{''.join(f'<td>{escape(v)}</td>' for v in values)}</tr>"
        for label, values in side_by_side(runs)
    )
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>mlp-offload report</title><style>{_STYLE}</style></head><body><h1>{escape(title)}</h1>",
    ]
    verdicts = [
        (f"<h2>{escape(name)}</h2>" if several else "")
        + "".join(f'<p class="finding">{escape(finding.text)}</p>' for finding in findings)
        for name, _, findings in runs
    ]
    head = f"<thead><tr><th></th>{names}</tr></thead>" if several else ""
    parts += [*verdicts, f'<div class="scroll"><table>{head}<tbody>{body}</tbody></table></div>']
    for (name, report, _), (light, dark) in zip(runs, pictures):
        if several:
            parts.append(f"<h2>{escape(name)}</h2>")
        if report.paths:
            columns = "".join(f"<th>{column}</th>" for column in PATH_COLUMNS)
            uses = ("".join(f"<td>{escape(cell)}</td>" for cell in path_cells(use)) for use in report.paths)
            cells = "".join(f"<tr>{row}</tr>" for row in uses)
            parts.append(
                f'<div class="scroll"><table class="paths"><thead><tr>{columns}</tr></thead><tbody>{cells}</tbody></table></div>'
            )
        parts.append(f'<div class="light">{light}</div><div class="dark">{dark}</div>')
    parts += [f'<p class="note">{escape(line)}</p>' for line in DEFINITIONS]
    parts.append(f'<p class="note">mlp-offload {escape(version)}, {escape(when)}</p></body></html>\n')
    return "\n".join(parts)
