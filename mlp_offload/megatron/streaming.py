"""Where Megatron's torch_dist strategies write and load offloaded state: subgroup by subgroup ([Note: streaming]).

Two methods are wrapped, so that no training script has to choose a strategy, and whichever it chooses works:

1. ``FileSystemWriterAsync.prepare_write_data``, in which stock brings all tensors of a rank together. Where deferred ones
   are among them, the writer instead writes each tensor as soon as it has it, in the process itself.
2. ``load`` of the load strategies. Deferred tensors are taken out before, and come back as ``StoredPiece``s, which say
   where they are; the optimizer's ``load_state_dict`` then reads them, after the model has its weights.

3. ``save`` and ``async_save`` of the save strategies; see ``background``.

State dicts without deferred tensors go through stock code as if nothing were wrapped.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import pickle
import queue
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelLoadStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import (
    TorchDistLoadShardedStrategy,
    TorchDistSaveShardedStrategy,
)
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.planner import WriteItemType

from ..checkpoint.pieces import DeferredTensor, StoredPiece, by_subgroup
from ..checkpoint.stored import StoredTensors
from ..errors import ConfigError, OffloadError
from . import background
from .state_dicts import deferred_in, without_deferred

_LOADERS = (TorchDistLoadShardedStrategy, FullyParallelLoadStrategyWrapper)


def install_hooks() -> None:
    """Wrap the methods above; a second call changes nothing."""
    for owner, name, hook in _hooks():
        _wrap(owner, name, hook)


def remove_hooks() -> None:
    """Put Megatron's own methods back."""
    for owner, name, _ in _hooks():
        method = getattr(owner, name)
        if hasattr(method, "stock"):
            setattr(owner, name, method.stock)


def _hooks() -> "list[tuple[type, str, Callable[..., Any]]]":
    hooks = [(FileSystemWriterAsync, "prepare_write_data", _prepare_write_data)]
    hooks += [(TorchDistSaveShardedStrategy, "save", background.save)]
    hooks += [(TorchDistSaveShardedStrategy, "async_save", background.async_save)]
    return hooks + [(strategy, "load", _load) for strategy in _LOADERS]


def _wrap(owner: type, name: str, hook: "Callable[..., Any]") -> None:
    stock = getattr(owner, name)  # its own, or inherited
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
    files = _files(writer, plan)
    # What is written at once is brought to the host one tensor after the other.
    entries = {name: ((item, _resolved(planner, item)) for item in items) for name, items in files.items()}
    save = background.current.get()
    if save is not None and save.held:
        # In another process, and later: copies, because what they are copies of goes on changing.
        entries = {
            name: [(item, _resolved(planner, item, copy=True)) for item in items] for name, items in files.items()
        }
        writer.results_queue = _results_queue()
    arguments = [writer.checkpoint_dir, writer.transforms, entries, writer.results_queue]
    if save is not None and not save.held:
        _write(*arguments)
        arguments = [writer.checkpoint_dir, writer.transforms, None, None]
    writer.get_save_function_and_args = lambda: (_write, None, arguments)


def _files(writer: FileSystemWriterAsync, plan: Any) -> "dict[str, list[Any]]":
    """Names of this rank's files, and what each of them is to hold."""
    groups = filesystem_async._split_by_separation_hint([list(plan.items)], writer.separation_hint)
    files = {}
    for number, (group, buckets) in enumerate(groups.items()):
        items = [item for bucket in buckets for item in bucket]
        if items:
            files[f"{group}{plan.storage_data.prefix}{number}{filesystem.DEFAULT_SUFFIX}"] = items
    return files


def _resolved(planner: Any, item: Any, copy: bool = False) -> Any:
    data = planner.resolve_data(item)
    return data if item.type == WriteItemType.BYTE_IO or isinstance(data, DeferredTensor) else _on_host(data, copy)


def _results_queue() -> Any:
    """Megatron's queue between the process that writes and this one; its name differs between versions."""
    names = ("get_write_results_queue", "_get_write_results_queue")
    return next(getattr(filesystem_async, name) for name in names if hasattr(filesystem_async, name))()


def _write(directory: Any, transforms: Any, files: "dict[str, Iterable[tuple[Any, Any]]] | None", results: Any) -> None:
    """Write the files of this rank, in whatever process this is; result or error go where Megatron looks for them.

    Args:
        files: name -> pairs of torch's write item and its data; None = it was done already.
    """
    if files is None:
        return
    try:
        written: "list[Any]" = []
        for name, entries in files.items():
            written += _write_file(directory, transforms, name, entries)
        results.put({0: written})
    except Exception as error:
        results.put(_portable(error))


def _portable(error: Exception) -> Exception:
    """The error, or its text where it does not survive the way to another process, which would end this one there."""
    try:
        pickle.loads(pickle.dumps(error))
        return error
    except Exception:
        return OffloadError(f"{type(error).__name__}: {error}")


def _write_file(directory: Any, transforms: Any, name: str, entries: "Iterable[tuple[Any, Any]]") -> "list[Any]":
    settings: "dict[str, Any]" = {}
    if "serialization_format" in inspect.signature(filesystem._write_item).parameters:
        settings["serialization_format"] = filesystem.SerializationFormat.TORCH_SAVE
    results: "list[Any]" = []
    with open(os.path.join(directory, name), "wb") as stream:

        def write(item: Any, data: Any) -> None:
            results.append(filesystem._write_item(transforms, stream, data, item, name, **settings))

        deferred = []
        for item, data in entries:
            if isinstance(data, DeferredTensor):
                deferred.append((data, item))
            else:
                write(item, data)
            del data
        for source, subgroup, members in by_subgroup(deferred):
            with source.arrays(subgroup) as arrays:
                for tensor, item in members:
                    write(item, tensor.piece.of(arrays))
        stream.flush()
        os.fsync(stream.fileno())
    return results


def _on_host(tensor: torch.Tensor, copy: bool) -> torch.Tensor:
    """The tensor on the host; its storage is no larger, because torch.save writes all of what a view is a part of."""
    tensor = tensor.detach()
    if tensor.device.type != "cpu":
        return (tensor.dequantize() if "dequantize" in type(tensor).__dict__ else tensor).cpu()
    if copy:
        return tensor.clone(memory_format=torch.contiguous_format)
    flat = tensor.contiguous().view(-1).view(torch.uint8)
    return torch.from_numpy(flat.numpy()).view(tensor.dtype).view(tensor.shape)


# ---------------------------------------------------------------------------------------------- load


def _load(
    stock: "Callable[..., Any]", strategy: Any, sharded_state_dict: Any, checkpoint_dir: Any, *args: Any, **kwargs: Any
) -> Any:
    deferred = list(deferred_in(sharded_state_dict))
    if not deferred:
        return stock(strategy, sharded_state_dict, checkpoint_dir, *args, **kwargs)
    tensors = StoredTensors(Path(checkpoint_dir))
    stored = [(path, _stored(tensors, sharded)) for path, sharded in deferred]
    loaded = stock(strategy, without_deferred(sharded_state_dict), checkpoint_dir, *args, **kwargs)
    for path, piece in stored:
        place = loaded
        for key in path[:-1]:
            place = place.setdefault(key, {})
        place[path[-1]] = piece
    return loaded


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
