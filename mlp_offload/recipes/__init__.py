"""Pre-training recipes: the Megatron flags of GPTs from 7 to 280 billion parameters, for nodes of four GPUs.

    python -m mlp_offload.recipes gpt-70b                  its flags, one a line
    python -m mlp_offload.recipes gpt-70b --nodes          the nodes it needs
    python -m mlp_offload.recipes gpt-70b --gpu-memory 40GB --small    the same, small enough for two processes without a GPU

A recipe is a file of flags, ``NAME.args``: one flag a line, comments behind ``#``, the first of them its title. Lines after
``[80 GB: 2 nodes of 4 GPUs]`` hold for GPUs of at least that memory. Data, tokenizer, paths and checkpoints are not in it:
``scripts/recipes/pretrain.sh`` adds them.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import ConfigError
from ..units import format_bytes, parse_bytes

PLACE = Path(__file__).resolve().parent
NAMES = tuple(sorted((file.stem for file in PLACE.glob("*.args")), key=lambda name: int(re.sub(r"\D", "", name))))

_SECTION = re.compile(r"^\[(\d+) GB: (\d+) nodes? of (\d+) GPUs\]$", re.M)

SMALL_REMOVED = (
    # Megatron's own layer norm refuses it, and Transformer Engine needs a GPU
    "--sequence-parallel",
    # two layers leave nothing to deal out
    *("--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split"),
    # these would need a directory
    *("--save-interval", "--save-retain-interval", "--exit-signal-handler"),
)
"""Flags that ``small`` leaves out."""

SMALL_REPLACED = {
    "--num-layers": "2",
    "--hidden-size": "64",
    "--ffn-hidden-size": "192",
    "--num-attention-heads": "4",
    "--num-query-groups": "2",
    "--seq-length": "32",
    "--max-position-embeddings": "32",
    "--vocab-size": "256",
    "--global-batch-size": "4",
    "--train-iters": "3",
    "--lr-warmup-iters": "1",
    "--eval-iters": "0",
    "--eval-interval": "1000",
}
"""Values that ``small`` puts in place of a recipe's own, where it has the flag."""

SMALL_ADDED = (
    *("--transformer-impl", "local", "--use-cpu-initialization", "--no-persist-layer-norm", "--num-workers", "0"),
    *("--no-gradient-accumulation-fusion", "--no-masked-softmax-fusion", "--no-rope-fusion"),
    *(
        "--mlp-offload-subgroup-size",
        "4099",
        "--mlp-offload-host-memory",
        "256KiB",
        "--mlp-offload-update-threads",
        "1",
    ),
)
"""Flags that ``small`` adds: no GPU, no Transformer Engine; and so little host memory that state goes to the paths."""


@dataclass(frozen=True)
class Recipe:
    """One recipe for one size of GPU memory.

    Attributes:
        source: where the sizes come from.
        gpu_memory: bytes of the GPUs that it is made for; larger ones will do.
        flags: Megatron's and ours, in the order of the file.
    """

    name: str
    title: str
    source: str
    gpu_memory: int
    nodes: int
    gpus_per_node: int
    flags: "tuple[str, ...]"


def load(name: str, gpu_memory: "int | None" = None) -> Recipe:
    """The recipe for GPUs of ``gpu_memory`` bytes (None: for the largest that it knows).

    Raises:
        ConfigError: no recipe of that name, or none for GPUs as small; says which there are.
    """
    if name not in NAMES:
        raise ConfigError(f"no recipe {name!r}; there are {', '.join(NAMES)}")
    text = (PLACE / f"{name}.args").read_text(encoding="utf-8")
    title, *source = [line[1:].strip() for line in text.partition("\n\n")[0].splitlines()]
    common, *parts = _SECTION.split(text)  # four a section: GB, nodes, GPUs, flags
    sections = {int(parts[i]) * 2**30: parts[i + 1 : i + 4] for i in range(0, len(parts), 4)}
    fitting = [size for size in sections if gpu_memory is None or size <= gpu_memory]
    if not fitting:
        known = " or ".join(format_bytes(size) for size in sections)
        raise ConfigError(f"recipe {name}: for GPUs of {known}, not of {format_bytes(gpu_memory or 0)}")
    size = max(fitting)
    nodes, gpus, own = sections[size]
    flags = (*read_args(common), *read_args(own))
    return Recipe(name, title, " ".join(source), size, int(nodes), int(gpus), flags)


def parse_gpu_memory(text: str) -> int:
    """Bytes of a GPU: as they are sold, "80GB" means 80 GiB."""
    return parse_bytes(re.sub(r"(?i)gb$", "GiB", text.strip()), "--gpu-memory")


def read_args(text: str, name: str = "flags") -> "list[str]":
    """The words of a file of flags: blanks and line ends part them, quotes hold them together, ``#`` begins a comment,
    and a backslash goes on in the next line.

    Raises:
        ConfigError: a quote is not closed; says in which line of ``name`` its word begins.
    """
    words = shlex.shlex(text.replace("\\\n", " \n"), posix=True)  # the line end stays, so that lines can be counted
    words.whitespace_split = True
    try:
        return list(words)
    except ValueError as error:
        line = words.lineno - words.token.count("\n")
        reason = str(error).lower()
        raise ConfigError(
            f"{name}, line {line}: {reason}; close the quote, or write \\ before a quote or backslash that is meant"
        ) from error


def small(recipe: Recipe) -> "list[str]":
    """The same flags for a model of two layers on two processes without a GPU.

    What is changed stands in ``SMALL_REMOVED``, ``SMALL_REPLACED`` and ``SMALL_ADDED``. Of TP and PP, two processes can have one: PP
    where the recipe has pipeline stages, else TP where it has that, else DP.
    """
    pairs = list(_pairs(recipe.flags))
    sizes = {flag: int(values[0]) for flag, values in pairs if flag.endswith("model-parallel-size")}
    pp = 2 if sizes.get("--pipeline-model-parallel-size", 1) > 1 else 1
    tp = 2 if pp == 1 and sizes.get("--tensor-model-parallel-size", 1) > 1 else 1
    replaced = SMALL_REPLACED | {"--pipeline-model-parallel-size": str(pp), "--tensor-model-parallel-size": str(tp)}
    flags: "list[str]" = []
    for flag, values in pairs:
        if flag not in SMALL_REMOVED:
            flags += [flag, replaced[flag]] if flag in replaced else [flag, *values]
    return [*flags, *SMALL_ADDED]


def _pairs(flags: Sequence[str]) -> "Iterable[tuple[str, list[str]]]":
    """Each flag with its values."""
    starts = [i for i, word in enumerate(flags) if word.startswith("--")]
    for begin, end in zip(starts, [*starts[1:], len(flags)]):
        yield flags[begin], list(flags[begin + 1 : end])
