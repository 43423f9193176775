"""Real text that every machine has, ready for Megatron: the Python standard library's own sources.

Collects the sources of the interpreter that runs this, trains a byte-level BPE tokenizer on them and writes the tokens
as Megatron's indexed dataset. Files in the output directory:

    tokenizer.json, vocab.json, merges.txt   the tokenizer, for `tokenizers` and for GPT-2 style readers
    stdlib_text.bin, stdlib_text.idx         one document a source file, each ended by <|endoftext|>
    summary.json                             counts, and what made them; written last

Train on it with `--tokenizer-type NullTokenizer --vocab-size N --null-tokenizer-eod-id 0`: the tokens are already
numbers, so training needs no tokenizer library.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import shutil
import sysconfig
import tempfile
import warnings
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"
LEFT_OUT = {
    "test",
    "tests",
    "idlelib",
    "turtledemo",
    "lib2to3",
    "encodings",
    "pydoc_data",
    "site-packages",
    "dist-packages",
}
DATASET_NAME = "stdlib_text"


def collect_sources(library: Path) -> "list[str]":
    """The text of the standard library's modules in the order of their names; no tests, tables or demos."""
    files = sorted(f for f in library.rglob("*.py") if not LEFT_OUT.intersection(f.relative_to(library).parts))
    return [f.read_text(encoding="utf-8", errors="replace") for f in files]


def train_tokenizer(texts: "list[str]", vocab_size: int) -> Tokenizer:
    """Byte-level BPE, as GPT-2's: every text has tokens. END_OF_TEXT is token 0."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def write_dataset(texts: "list[str]", tokenizer: Tokenizer, prefix: Path, console: Console) -> int:
    """Write ``prefix``.bin and .idx; returns the number of tokens."""
    with warnings.catch_warnings():  # of kernels for training that are not needed here
        warnings.simplefilter("ignore")
        logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
        from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    end = tokenizer.token_to_id(END_OF_TEXT)
    dtype = DType.optimal_dtype(tokenizer.get_vocab_size())
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    token_count = 0
    for text in track(texts, "tokenizing", console=console, transient=True):
        ids = np.array([*tokenizer.encode(text).ids, end], dtype=dtype)
        builder.add_item(torch.from_numpy(ids.astype(np.int64)))
        builder.end_document()
        token_count += len(ids)
    builder.finalize(f"{prefix}.idx")
    return token_count


def prepare(out: Path, vocab_size: int, console: Console) -> "dict[str, int | str]":
    """Make ``out`` in one rename, or reuse it if the same Python and vocabulary size made it."""
    made_by = {"python": platform.python_version(), "vocab_size": vocab_size, "left_out": sorted(LEFT_OUT)}
    summary_file = out / "summary.json"
    if summary_file.is_file():
        summary = json.loads(summary_file.read_text())
        if made_by.items() <= summary.items():
            console.print(f"text: reusing {summary['token_count']:,} tokens in {out}", soft_wrap=True)
            return summary
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".prepare-") as scratch:
        texts = collect_sources(Path(sysconfig.get_paths()["stdlib"]))
        byte_count = sum(len(t.encode()) for t in texts)
        with console.status(f"training a tokenizer on {byte_count / 1e6:.1f} MB of Python's standard library"):
            tokenizer = train_tokenizer(texts, vocab_size)
        made = Path(scratch, "data")
        made.mkdir()
        tokenizer.save(str(made / "tokenizer.json"))
        tokenizer.model.save(str(made))
        token_count = write_dataset(texts, tokenizer, made / DATASET_NAME, console)
        counts = {"file_count": len(texts), "byte_count": byte_count, "token_count": token_count}
        summary = {**made_by, **counts, "dataset": DATASET_NAME, "eod_id": tokenizer.token_to_id(END_OF_TEXT)}
        (made / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
        if out.exists():
            shutil.rmtree(out)
        os.rename(made, out)
    console.print(f"text: {token_count:,} tokens from {len(texts)} source files ({byte_count / 1e6:.1f} MB) in {out}")
    return summary


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="directory to make")
    parser.add_argument("--vocab-size", type=int, default=4096, help="tokens of the vocabulary (default: 4096)")
    options = parser.parse_args()
    prepare(options.out, options.vocab_size, Console())


if __name__ == "__main__":
    main()
