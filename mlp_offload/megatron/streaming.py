"""Where Megatron's torch_dist strategies write and load offloaded state: subgroup by subgroup ([Note: streaming]).

Two methods are wrapped, so that no training script has to choose a strategy, and whichever it chooses works:

1. ``FileSystemWriterAsync.prepare_write_data``, in which stock brings all tensors of a rank together. Where deferred ones
   are among them, the writer instead writes each tensor as soon as it has it, in the process itself.
2. ``load`` of the load strategies. Deferred tensors are taken out before, and come back as ``StoredPiece``s, which say
   where they are; the optimizer's ``load_state_dict`` then reads them, after the model has its weights.

State dicts without deferred tensors go through stock code as if nothing were wrapped.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import queue
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelLoadStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.planner import WriteItemType

from ..checkpoint.pieces import DeferredTensor, StoredPiece, by_subgroup
from ..checkpoint.stored import StoredTensors
from ..errors import ConfigError, OffloadError

_LOADERS = (TorchDistLoadShardedStrategy, FullyParallelLoadStrategyWrapper)


def install_hooks() -> None:
    """Wrap the methods above; a second call changes nothing."""
    _wrap(FileSystemWriterAsync, "prepare_write_data", _prepare_write_data)
    for strategy in _LOADERS:
        _wrap(strategy, "load", _load)


def remove_hooks() -> None:
    """Put Megatron's own methods back."""
    for owner, name in ((FileSystemWriterAsync, "prepare_write_data"), *((strategy, "load") for strategy in _LOADERS)):
        setattr(owner, name, getattr(vars(owner)[name], "stock", vars(owner)[name]))


def _wrap(owner: type, name: str, hook: "Callable[..., Any]") -> None:
    stock = vars(owner)[name]
    if not hasattr(stock, "stock"):

        @functools.wraps(stock)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return hook(stock, *args, **kwargs)

        wrapper.stock = stock
        setattr(owner, name, wrapper)


# ---------------------------------------------------------------------------------------------- save


def _prepare_write_data(stock: "Callable[..., Any]", writer: FileSystemWriterAsync, plan: Any, planner: Any) -> None:
    tensors = (item for item in plan.items if item.type != WriteItemType.BYTE_IO)
    deferred = any(isinstance(planner.resolve_data(item), DeferredTensor) for item in tensors)
    if not deferred or getattr(writer, "use_msc", False):  # multi-storage client: no files to write to
        stock(writer, plan, planner)
        return
    writer.write_buckets = [()]  # one result is to come
    writer.results_queue = queue.Queue()
    writer.get_save_function_and_args = lambda: (functools.partial(_write, writer, plan, planner), None, [])


def _write(writer: FileSystemWriterAsync, plan: Any, planner: Any) -> None:
    """Write everything this rank has; the result, or the error, is left where the writer tells it to all ranks."""
    try:
        groups = filesystem_async._split_by_separation_hint([list(plan.items)], writer.separation_hint)
        results: "list[Any]" = []
        for number, (group, buckets) in enumerate(groups.items()):
            items = [item for bucket in buckets for item in bucket]
            if items:
                name = f"{group}{plan.storage_data.prefix}{number}{filesystem.DEFAULT_SUFFIX}"
                results += _write_file(writer, name, items, planner)
        writer.results_queue.put({0: results})
    except Exception as error:
        writer.results_queue.put(error)


def _write_file(writer: FileSystemWriterAsync, name: str, items: "list[Any]", planner: Any) -> "list[Any]":
    settings: "dict[str, Any]" = {}
    if "serialization_format" in inspect.signature(filesystem._write_item).parameters:
        settings["serialization_format"] = filesystem.SerializationFormat.TORCH_SAVE
    results: "list[Any]" = []
    with open(os.path.join(writer.checkpoint_dir, name), "wb") as stream:

        def write(item: Any, data: Any) -> None:
            results.append(filesystem._write_item(writer.transforms, stream, data, item, name, **settings))

        deferred = []
        for item in items:
            data = planner.resolve_data(item)
            if isinstance(data, DeferredTensor):
                deferred.append((data, item))
            else:
                write(item, data if item.type == WriteItemType.BYTE_IO else _on_host(data))
            del data
        for source, subgroup, members in by_subgroup(deferred):
            with source.arrays(subgroup) as arrays:
                for tensor, item in members:
                    write(item, tensor.piece.of(arrays))
        stream.flush()
        os.fsync(stream.fileno())
    return results


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor on the host; its storage is no larger, because torch.save writes all of what a view is a part of."""
    tensor = tensor.detach()
    if tensor.device.type != "cpu":
        return (tensor.dequantize() if "dequantize" in type(tensor).__dict__ else tensor).cpu()
    flat = tensor.contiguous().view(-1).view(torch.uint8)
    return torch.from_numpy(flat.numpy()).view(tensor.dtype).view(tensor.shape)


# ---------------------------------------------------------------------------------------------- load


def _load(
    stock: "Callable[..., Any]", strategy: Any, sharded_state_dict: Any, checkpoint_dir: Any, *args: Any, **kwargs: Any
) -> Any:
    deferred = list(_deferred(sharded_state_dict))
    if not deferred:
        return stock(strategy, sharded_state_dict, checkpoint_dir, *args, **kwargs)
    tensors = StoredTensors(Path(checkpoint_dir))
    stored = [(path, _stored(tensors, sharded)) for path, sharded in deferred]
    loaded = stock(strategy, _without_deferred(sharded_state_dict), checkpoint_dir, *args, **kwargs)
    for path, piece in stored:
        place = loaded
        for key in path[:-1]:
            place = place.setdefault(key, {})
        place[path[-1]] = piece
    return loaded


def _deferred(tree: Any, path: "tuple[Any, ...]" = ()) -> "Iterator[tuple[tuple[Any, ...], ShardedTensor]]":
    """Sharded tensors whose data is deferred, with their keys from the root on; they lie in dicts."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from _deferred(value, (*path, key))
    elif isinstance(tree, ShardedTensor) and isinstance(tree.data, DeferredTensor):
        yield path, tree


def _without_deferred(tree: Any) -> Any:
    """A copy without them, and without dicts that held nothing else, which stock would look for in what it loaded."""
    if not isinstance(tree, dict):
        return tree
    rest: "dict[Any, Any]" = {}
    for key, value in tree.items():
        if isinstance(value, ShardedTensor) and isinstance(value.data, DeferredTensor):
            continue
        kept = _without_deferred(value)
        if kept or not isinstance(value, dict) or not value:
            rest[key] = kept
    return rest


def _stored(tensors: StoredTensors, sharded: ShardedTensor) -> StoredPiece:
    shape = tensors.shape(sharded.key)
    if shape != tuple(sharded.global_shape) and not sharded.allow_shape_mismatch:
        raise ConfigError(
            f"checkpoint: {sharded.key} has shape {shape}, and this run's {tuple(sharded.global_shape)}; it was saved with "
            "another model or layout: load it with --no-load-optim, or save it in the fully_reshardable format"
        )
    return StoredPiece(
        sharded.data.piece, tensors, sharded.key, tuple(sharded.global_offset), sharded.allow_shape_mismatch
    )


@contextlib.contextmanager
def errors_on_all_ranks(group: Any) -> "Iterator[None]":
    """A block that all ranks of ``group`` run: when one fails all do, so that none waits for it in a later collective."""
    error = None
    try:
        yield
    except Exception as caught:
        error = caught
    failed = torch.tensor([int(error is not None)], dtype=torch.int, device=torch.cuda.current_device())
    torch.distributed.all_reduce(failed, op=torch.distributed.ReduceOp.MAX, group=group)
    if error is not None:
        raise error
    if failed.item():
        raise OffloadError(
            "another data-parallel rank could not load its part of the optimizer state; its own message says why"
        )
