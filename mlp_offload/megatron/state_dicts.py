"""Deferred tensors in a sharded state dict, which is a tree of dicts: find them, leave them out, let them read elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from megatron.core.dist_checkpointing.mapping import ShardedTensor

from ..checkpoint.pieces import DeferredTensor, StateSource


def deferred_in(tree: Any, path: "tuple[Any, ...]" = ()) -> "Iterator[tuple[tuple[Any, ...], ShardedTensor]]":
    """Sharded tensors whose data is deferred, with their keys from the root on; they lie in dicts."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from deferred_in(value, (*path, key))
    elif isinstance(tree, ShardedTensor) and isinstance(tree.data, DeferredTensor):
        yield path, tree


def without_deferred(tree: Any) -> Any:
    """A copy without them, and without dicts that held nothing else, which stock would look for in what it loaded."""
    if not isinstance(tree, dict):
        return tree
    rest: "dict[Any, Any]" = {}
    for key, value in tree.items():
        if isinstance(value, ShardedTensor) and isinstance(value.data, DeferredTensor):
            continue
        kept = without_deferred(value)
        if kept or not isinstance(value, dict) or not value:
            rest[key] = kept
    return rest


def with_sources(tree: Any, sources: "Mapping[int, StateSource]") -> Any:
    """A copy whose deferred tensors read from ``sources``."""
    if isinstance(tree, dict):
        return {key: with_sources(value, sources) for key, value in tree.items()}
    if isinstance(tree, ShardedTensor) and isinstance(tree.data, DeferredTensor):
        return replace(tree, data=DeferredTensor(tree.data.piece, sources[id(tree.data.source)]))
    return tree
