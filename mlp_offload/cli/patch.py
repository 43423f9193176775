"""``mlp-offload patch check|apply|revert DIR``: the flags and the switch inside Megatron-LM's own source.

[Note: files are known by content] A patch names each file's git blob id before and after it. So a tree's release is the
one whose ids its files have, a file that is already patched is known as such, and a file that anybody edited is neither
and is refused: nothing is searched for or guessed, and what is written is checked against the id.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import OffloadError
from . import output

PATCHES = Path(__file__).resolve().parents[1] / "patches"

_DESCRIPTION = """\
Put --optimizer-offload into Megatron-LM's source, or take it out again.

DIR holds `megatron/`: a checkout of Megatron-LM, or a site-packages directory. `mlp-offload run` needs no patch; a patched
Megatron needs no `mlp-offload run`: its own scripts have the flags, and OptimizerConfig has the field `optimizer_offload`
for training loops built on Megatron-Core. Where mlp-offload is not installed, patched source behaves as before.

  check    which release DIR is, which files the patch changes, whether it is applied; changes nothing
  apply    apply the patch; twice is as good as once
  revert   put the release's files back, byte for byte

A release is known by the content of its files. If one of them was edited, all is left as it is.
"""

_EXAMPLE = """\
examples:
  mlp-offload patch check ~/Megatron-LM
  mlp-offload patch apply ~/Megatron-LM
  torchrun --nproc-per-node 8 ~/Megatron-LM/pretrain_gpt.py ... --use-distributed-optimizer \\
      --optimizer-offload mlp --mlp-offload-path /nvme/scratch --mlp-offload-path /lustre/me/scratch

  the installed Megatron-Core, and what to write in a training loop of your own:
    mlp-offload patch apply "$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
    OptimizerConfig(..., optimizer_offload=mlp_offload.OffloadConfig(paths=["/nvme/scratch"]))
"""


class PatchError(OffloadError):
    """The tree is not one that a patch is for, or could not be written; it is as it was."""


class Hunk(NamedTuple):
    """``old`` lines from line ``old_begin`` on (counted from 0) become ``new`` ones, which begin at ``new_begin``."""

    old_begin: int
    old: "list[bytes]"
    new_begin: int
    new: "list[bytes]"


class FilePatch(NamedTuple):
    """What a patch does to one file; ``before`` and ``after`` are git blob ids of the whole file."""

    part: str
    file: str
    before: str
    after: str
    hunks: "list[Hunk]"

    @property
    def lines_added(self) -> int:
        return sum(len(hunk.new) - len(hunk.old) for hunk in self.hunks)

    def turn(self, content: bytes, back: bool) -> bytes:
        """The patched file from the release's, or the other way round."""
        lines = split_lines(content)
        for hunk in reversed(self.hunks):
            begin, old, new = (hunk.new_begin, hunk.new, hunk.old) if back else (hunk.old_begin, hunk.old, hunk.new)
            lines[begin : begin + len(old)] = new
        result = b"".join(lines)
        if blob_id(result) != (self.before if back else self.after):
            raise PatchError(f"{self.part}.patch does not make of {self.file} what it says: reinstall mlp-offload")
        return result


class Tree(NamedTuple):
    """A directory that is known to be a release: its files with their content and whether they are patched."""

    directory: Path
    release: str
    files: "list[tuple[FilePatch, bytes, bool]]"

    @property
    def parts(self) -> "list[str]":
        return sorted({patch.part for patch, _, _ in self.files})

    @property
    def status(self) -> str:
        applied = [applied for _, _, applied in self.files]
        return "applied" if all(applied) else "partly applied" if any(applied) else "not applied"


def add_command(commands: Any) -> None:
    """Add ``patch`` to the subcommands of ``mlp-offload``."""
    raw = argparse.RawDescriptionHelpFormatter
    patch = commands.add_parser(
        "patch",
        help="add the flags to Megatron-LM's source, or remove them",
        description=_DESCRIPTION,
        epilog=_EXAMPLE,
        formatter_class=raw,
    )
    patch.add_argument("action", choices=("check", "apply", "revert"))
    patch.add_argument("directory", metavar="DIR", type=Path, help="Megatron-LM checkout or site-packages directory")
    output.add_json(patch)
    patch.set_defaults(execute=_execute)


def _execute(options: argparse.Namespace) -> int:
    action, directory = options.action, options.directory
    try:
        tree = examine(directory)
        back = action == "revert"
        changes = [patch.file for patch, _, applied in tree.files if applied == back]
        if action != "check":
            turn(tree, back)
            tree = examine(directory)
    except OSError as error:
        raise PatchError(f"{error}. Nothing was changed.") from error
    if options.json:
        files = [{"file": p.file, "part": p.part, "lines": p.lines_added, "applied": on} for p, _, on in tree.files]
        told = {"action": action, "directory": str(directory), "release": tree.release, "status": tree.status}
        told |= {"parts": tree.parts, "would_change" if action == "check" else "changed": changes, "files": files}
        output.print_json(told)
    else:
        print("\n".join(_text(tree, action, changes)))
    return 0


def examine(directory: Path) -> Tree:
    """Which release ``directory`` is.

    Raises:
        PatchError: none, or a file of it was edited; says which, and what can be done.
        OSError: a file cannot be read.
    """
    if not (directory / "megatron" / "core").is_dir():
        above = next((d for d in directory.resolve().parents if (d / "megatron" / "core").is_dir()), None)
        hint = f"give {above}" if above else "give a checkout of Megatron-LM, or a site-packages directory"
        raise PatchError(f"{directory} holds no megatron/core: {hint}")
    near: "tuple[int, str, list[str], list[FilePatch]]" = (0, "", [], [])
    for release in releases():
        # A wheel may come without megatron/training
        wanted = [p for p in load(release) if (directory / "megatron" / p.part).is_dir()]
        known, strange = [], []
        for patch in wanted:
            path = directory / patch.file
            content = path.read_bytes() if path.exists() else b""
            identity = blob_id(content)
            if identity in (patch.before, patch.after):
                known.append((patch, content, identity == patch.after))
            else:
                strange.append(patch.file + ("" if path.exists() else " (missing)"))
        if not strange:
            return Tree(directory, release, known)
        if len(known) > near[0]:
            near = (len(known), release, strange, wanted)
    raise PatchError(_refusal(directory, *near[1:]))


def turn(tree: Tree, back: bool) -> None:
    """Apply the patch, or revert it; all files or none.

    Raises:
        OSError: a file cannot be written; all are as they were.
    """
    changes = {tree.directory / p.file: p.turn(content, back) for p, content, applied in tree.files if applied == back}
    done: "list[Path]" = []
    with ExitStack() as stack:
        # Beside each file, so that renaming cannot fail for lack of space, back neither.
        places = {
            path: Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=".mlp-offload-", dir=path.parent)))
            for path in changes
        }
        for path, content in changes.items():
            shutil.copy2(path, places[path] / "old")
            _write_like(path, places[path] / "new", content)
        try:
            for path, place in places.items():
                os.replace(place / "new", path)
                done.append(path)
        except BaseException:
            for path in done:
                os.replace(places[path] / "old", path)
            raise


def releases() -> "list[str]":
    """The releases that patches are for, oldest first."""
    names = [place.name for place in PATCHES.iterdir() if place.is_dir()]
    return sorted(names, key=lambda name: [int(number) for number in name.split(".")])


def load(release: str) -> "list[FilePatch]":
    """All that the patches of a release do."""
    patches = sorted((PATCHES / release).glob("*.patch"))
    return [file for patch in patches for file in _parse(patch.stem, patch.read_bytes())]


def split_lines(content: bytes) -> "list[bytes]":
    """Lines with their newlines; only a newline ends one."""
    return re.findall(rb"[^\n]*\n|[^\n]+", content)


def blob_id(content: bytes) -> str:
    """git's name of a file's content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


# ------------------------------------------------------------------------------------------ helpers


def _parse(part: str, text: bytes) -> "list[FilePatch]":
    """A patch as ``scripts/make_patches.py`` writes it, with the full ids in its index lines."""
    files: "list[FilePatch]" = []
    for line in split_lines(text):
        if match := re.match(rb"diff --git a/(\S+) ", line):
            files.append(FilePatch(part, match[1].decode(), "", "", []))
        elif match := re.match(rb"index (\w{40})\.\.(\w{40})", line):
            files[-1] = files[-1]._replace(before=match[1].decode(), after=match[2].decode())
        elif match := re.match(rb"@@ -(\d+),\d+ \+(\d+),\d+ @@", line):
            files[-1].hunks.append(Hunk(int(match[1]) - 1, [], int(match[2]) - 1, []))
        elif line[:4] not in (b"--- ", b"+++ "):
            hunk = files[-1].hunks[-1]
            if line[:1] in b" -":
                hunk.old.append(line[1:])
            if line[:1] in b" +":
                hunk.new.append(line[1:])
    return files


def _write_like(model: Path, path: Path, content: bytes) -> None:
    """A file with the mode and, where we may, the owner of ``model``; on the disk when this returns."""
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    shutil.copymode(model, path)
    with suppress(PermissionError):
        os.chown(path, model.stat().st_uid, model.stat().st_gid)


def _refusal(directory: Path, release: str, strange: "list[str]", wanted: "list[FilePatch]") -> str:
    if not release:
        return (
            f"{directory} is none of the releases that patches are for ({', '.join(releases())}). Nothing was changed. "
            "`mlp-offload run` needs no patch"
        )
    parts = " ".join(str(PATCHES / release / f"{part}.patch") for part in sorted({p.part for p in wanted}))
    return (
        f"{directory} is Megatron-Core {release} but for {', '.join(strange)}: edited, or of another commit. Nothing was "
        f"changed, for the right place may have moved. Put the release's files back and repeat; or merge by hand with "
        f"`git apply --3way {parts}`; or use `mlp-offload run`, which needs no patch"
    )


def _text(tree: Tree, action: str, changes: "Sequence[str]") -> "list[str]":
    lines = [f"Megatron-Core {tree.release} in {tree.directory}"]
    for patch, _, applied in tree.files:
        state = "changed" if action != "check" and patch.file in changes else "applied" if applied else "not applied"
        lines.append(f"  {patch.part:<8}  {state:<11}  {patch.file}  ({patch.lines_added} lines)")
    if tree.parts == ["core"]:
        lines.append("There is no megatron/training: the core part only, OptimizerConfig(optimizer_offload=...).")
    if action == "check" and changes:
        lines.append(f"{tree.status}; it applies cleanly: mlp-offload patch apply {tree.directory}")
    elif action == "check":
        lines.append(f"applied; nothing to do. To take it out: mlp-offload patch revert {tree.directory}")
    elif changes:
        lines.append(f"{'reverted' if action == 'revert' else 'applied'}: {len(changes)} files changed")
    else:
        lines.append(f"{'not applied' if action == 'revert' else 'already applied'}: nothing changed")
    return lines
