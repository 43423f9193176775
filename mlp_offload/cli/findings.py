"""What `mlp-offload doctor` found out, one thing at a time."""

from __future__ import annotations

from dataclasses import dataclass

OK, NOTE, PROBLEM = "ok", "note", "problem"


@dataclass(frozen=True)
class Finding:
    """One thing that was tried or looked at.

    Attributes:
        area: "software", "machine", or the path's directory.
        level: OK; NOTE: a run works, but should be known or could be better; PROBLEM: it stops a run.
        found: in one line.
        advice: what to do about it; empty where there is nothing to do.
    """

    area: str
    subject: str
    level: str
    found: str
    advice: str = ""
