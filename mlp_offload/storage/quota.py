"""What a user may still take where quotas are set, as the programs ``quota`` and ``lfs quota`` tell it.

Tried with stand-ins for both only. Project quotas are not looked at.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ..units import format_bytes

_SECONDS = 10.0


class Quota(NamedTuple):
    """Of one user or group; limits are the lower ones that are set, None where there are none."""

    whose: str
    used_bytes: int
    limit_bytes: "int | None"
    used_inodes: int
    limit_inodes: "int | None"

    def __str__(self) -> str:
        parts = []
        if self.limit_bytes is not None:
            parts.append(f"{format_bytes(self.used_bytes)} of {format_bytes(self.limit_bytes)}")
        if self.limit_inodes is not None:
            parts.append(f"{self.used_inodes} of {self.limit_inodes} files")
        return f"{self.whose}: {' and '.join(parts) or 'no limit'}"

    @property
    def exhausted(self) -> bool:
        """Whether nothing more can be written."""
        return any(
            limit is not None and used >= limit
            for used, limit in ((self.used_bytes, self.limit_bytes), (self.used_inodes, self.limit_inodes))
        )


def quotas_of(directory: str | os.PathLike[str], kind: str) -> "tuple[list[Quota], str]":
    """(quotas with a limit that bind us in ``directory``, what there is to say of them). Never raises.

    Args:
        kind: of the file system, from ``mount_of``.
    """
    found, reasons = [], []
    for flag, whose, number in (("-u", "user", os.geteuid()), ("-g", "group", os.getegid())):
        command = ["lfs", "quota", "-q", flag, str(number), os.fspath(directory)]
        if kind != "lustre":
            command = ["quota", "-v", "-w", "-p", f"--filesystem={_mount_point(directory)}", flag, str(number)]
        if shutil.which(command[0]) is None:
            return [], f"not known: there is no program {command[0]} here"
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "errors": "replace"}
        try:
            # Its status is 1 also where a quota is exceeded.
            done = subprocess.run(command, timeout=_SECONDS, **pipes)
        except (OSError, subprocess.SubprocessError) as error:
            return [], f"not known: {error}"
        quota = _parse(f"{whose} {number}", done.stdout.splitlines())
        if quota is not None:
            found.append(quota)
        elif done.stderr.strip():
            reason = done.stderr.strip().splitlines()[0]
            reasons += [] if "no quota enabled" in reason else [reason]
    limited = [quota for quota in found if quota.limit_bytes is not None or quota.limit_inodes is not None]
    if limited:
        return limited, "; ".join(map(str, limited))
    return [], "no limit" if found or not reasons else f"not known: {reasons[0]}"


def _parse(whose: str, lines: Sequence[str]) -> "Quota | None":
    """From the columns: file system, KiB, quota, limit, grace, files, quota, limit, grace; a long name has its own line."""
    words: "list[str]" = []
    for line in lines:
        if not line.lstrip().startswith(("Disk quotas", "Filesystem")):
            words += line.split()
    for i in range(len(words) - 8 + 1):
        columns = words[i : i + 8]
        numbers = [columns[k].rstrip("*") for k in (0, 1, 2, 4, 5, 6)]
        if all(number.isdigit() for number in numbers):
            used, soft, hard, files, file_soft, file_hard = map(int, numbers)
            limit, file_limit = _lower(soft, hard), _lower(file_soft, file_hard)
            return Quota(whose, used * 1024, limit and limit * 1024, files, file_limit)
    return None


def _lower(soft: int, hard: int) -> "int | None":
    """The lower limit that is set; 0 means none."""
    return min((limit for limit in (soft, hard) if limit), default=None)


def _mount_point(directory: str | os.PathLike[str]) -> Path:
    real = Path(directory).resolve()
    return next(place for place in (real, *real.parents) if os.path.ismount(place))
