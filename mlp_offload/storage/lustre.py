"""Lustre: a state file over several storage targets. Tried with a stand-in for ``lfs`` only, never on a real Lustre."""

from __future__ import annotations

import logging
import re
import shlex
import shutil
import subprocess
from pathlib import Path

from .mounts import mount_of

log = logging.getLogger(__name__)

# [Note: striping] Lustre puts a file on one target unless told otherwise, and one target is slower than a node's
# network. Sites advise to spread a few large files over several targets, and to keep to one target a file where files
# outnumber targets. Each rank has a file of its own and a node several ranks, so "all targets" (-c -1) would put every
# rank on every target: four are the middle way. With 4 MiB stripes the blocks in flight (8 of 2 MiB) lie on all four.
LAYOUT = ("-c", "4", "-S", "4M")

_LFS_SECONDS = 10.0


def stripe(job_directory: Path, may_advise: bool) -> None:
    """On Lustre, give ``job_directory`` a layout of four targets for the files that will be made in it. Never raises.

    Only where a file would lie on one target: whatever the user or the site has set beyond that (more targets, a pool,
    a layout that grows with the file) stays.

    Args:
        may_advise: whether to warn when striping cannot be set (one rank does).
    """
    try:
        kind = mount_of(job_directory).kind
    except OSError:
        return  # whoever makes a file there will say it better
    if kind == "lustre":
        stripe_lustre(job_directory, may_advise)


def stripe_lustre(job_directory: Path, may_advise: bool) -> None:
    """``stripe`` for a directory that is known to be on Lustre."""
    try:
        layout = layout_of(job_directory)
        if re.findall(r"stripe_count:\s*(-?\d+)", layout) not in (["0"], ["1"]) or "pool" in layout:
            return
        _lfs("setstripe", *LAYOUT, str(job_directory))
        log.info("%s: Lustre puts new files there on four targets (lfs setstripe %s)", job_directory, " ".join(LAYOUT))
    except (OSError, subprocess.SubprocessError) as error:
        detail = (getattr(error, "stderr", None) or str(error)).strip()
        advice = shlex.join(["lfs", "setstripe", *LAYOUT, str(job_directory.parent)])
        log.log(
            logging.WARNING if may_advise else logging.DEBUG,
            "path '%s' is on Lustre, and striping cannot be set (%s). A file on one target is slow; run once: %s",
            job_directory.parent,
            detail,
            advice,
        )


def layout_of(directory: Path) -> str:
    """What ``lfs getstripe`` says of files that will be made in a directory. Raises OSError or SubprocessError."""
    if shutil.which("lfs") is None:
        raise OSError("there is no program lfs here")
    return _lfs("getstripe", "-d", str(directory))


def _lfs(*arguments: str) -> str:
    """Raises OSError or SubprocessError."""
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "errors": "replace"}
    return subprocess.run(["lfs", *arguments], check=True, timeout=_LFS_SECONDS, **pipes).stdout
