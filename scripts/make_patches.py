#!/usr/bin/env python3
"""Make the patches of a Megatron-LM release from the edits below.

    python scripts/make_patches.py RELEASE TREE        (for instance: 0.19.2 ~/Megatron-LM)

TREE is a checkout of the release, or a directory that its wheel was unpacked into. Writes
mlp_offload/patches/RELEASE/core.patch, and training.patch where TREE has megatron/training.

For a new release: run it. An anchor that no longer matches exactly once is named; mend it so that it does for all
releases, run the script for each, then the tests, which have the list of releases (tests/megatron_trees.py).
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from mlp_offload.cli.patch import PATCHES, blob_id, split_lines  # noqa: E402


class Edit(NamedTuple):
    """``text`` is put behind the one place in ``file`` that is ``anchor``; both are whole lines."""

    file: str
    anchor: str
    text: str


# Edits only insert, at most one in a file. Without mlp-offload installed the patched source behaves as before.
EDITS = {
    "core": (
        Edit(
            "megatron/core/optimizer/optimizer_config.py",
            "    #######################\n    # Optimizer Offload\n    #######################\n\n",
            "    optimizer_offload: object = 'none'\n"
            '    """\'none\', or an mlp_offload.OffloadConfig that says where optimizer state lives."""\n'
            "\n",
        ),
        Edit(
            "megatron/core/optimizer/__init__.py",
            # the end of get_megatron_optimizer's docstring
            "        dump_param_to_param_group_map (Optional[str]): path to dump parameter to param group map.\n"
            "\n"
            "    Returns:\n"
            "        Instance of MegatronOptimizer.\n"
            '    """\n'
            "\n",
            "    if config.optimizer_offload != 'none':\n"
            "        from mlp_offload.megatron.install import build_from_optimizer_config\n"
            "        return build_from_optimizer_config(get_megatron_optimizer, locals())\n"
            "\n",
        ),
    ),
    "training": (
        Edit(
            "megatron/training/arguments.py",
            "    parser = _add_sft_args(parser)\n",
            "    try:  # --optimizer-offload and its options\n"
            "        from mlp_offload.megatron.switch import add_flags\n"
            "        parser = add_flags(parser)\n"
            "    except ModuleNotFoundError:\n"
            "        pass\n",
        ),
        Edit(
            "megatron/training/global_vars.py",
            "    _ensure_var_is_not_initialized(_GLOBAL_ARGS, 'args')\n    set_args(args)\n",
            "    if getattr(args, 'optimizer_offload', 'none') != 'none':\n"
            "        from mlp_offload.megatron.switch import switch_on\n"
            "        switch_on(args)\n",
        ),
    ),
}


def make_patches(tree: Path) -> "dict[str, bytes]":
    """The text of each part's patch for ``tree``; without "training" where the tree has no megatron/training.

    Raises:
        SystemExit: an anchor does not match exactly once; names file, anchor and count.
    """
    return {
        part: b"".join(_diff(tree, edit) for edit in edits)
        for part, edits in EDITS.items()
        if (tree / "megatron" / part).is_dir()
    }


def _diff(tree: Path, edit: Edit) -> bytes:
    """One file's section of a patch, in git's format: the index line holds the file's id before and after."""
    old = (tree / edit.file).read_bytes()
    anchor, text = edit.anchor.encode(), edit.text.encode()
    places = [match.end() for match in re.finditer(b"(?m)^" + re.escape(anchor), old)]
    if len(places) != 1:
        raise SystemExit(
            f"{tree / edit.file}: must match exactly once, but matches {len(places)} times:\n{edit.anchor}"
        )
    new = old[: places[0]] + text + old[places[0] :]
    lines, added, first = split_lines(old), split_lines(text), old.count(b"\n", 0, places[0])
    begin, end = _context(lines, first)
    header = (
        f"diff --git a/{edit.file} b/{edit.file}\n"
        f"index {blob_id(old)}..{blob_id(new)} 100644\n"
        f"--- a/{edit.file}\n"
        f"+++ b/{edit.file}\n"
        f"@@ -{begin + 1},{end - begin} +{begin + 1},{end - begin + len(added)} @@\n"
    )
    body = [b" " + line for line in lines[begin:first]]
    body += [b"+" + line for line in added]
    body += [b" " + line for line in lines[first:end]]
    return header.encode() + b"".join(body)


def _context(lines: "list[bytes]", first: int) -> "tuple[int, int]":
    """The fewest lines around the insertion before ``lines[first]``, as many above as below, that occur only once."""
    for count in range(1, min(first, len(lines) - first) + 1):
        begin, end = first - count, first + count
        wanted = lines[begin:end]
        if sum(lines[i : i + 2 * count] == wanted for i in range(len(lines))) == 1:
            return begin, end
    raise SystemExit(f"line {first + 1}: no context occurs only once")


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("release", metavar="RELEASE")
    parser.add_argument("tree", metavar="TREE", type=Path)
    options = parser.parse_args()
    for part, patch in make_patches(options.tree).items():
        file = PATCHES / options.release / f"{part}.patch"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(patch)
        print(f"wrote {file}")


if __name__ == "__main__":
    main()
