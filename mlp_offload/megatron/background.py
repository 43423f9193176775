"""Saving in the background: another process of Megatron's writes a snapshot of the state while training goes on.

``async_save`` of Megatron's strategies pins the state where it is (``snapshot``), and what is to be written then reads from
there. Where the paths have no room for that, the save is done before ``async_save`` returns, and the log says so.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..errors import CapacityError, ConfigError
from ..snapshot import Snapshot, SnapshotSource, take_snapshot
from .state_dicts import deferred_in, with_sources

if TYPE_CHECKING:
    from .shard_states import ShardStates

log = logging.getLogger(__name__)


@dataclass
class BackgroundSave:
    """A save that is to be written in the background, and the snapshots that are held for it."""

    held: "list[Snapshot]"

    def release(self) -> None:
        for snapshot in self.held:
            snapshot.release()


# The save that is being planned: None = it is written before it returns.
current: "ContextVar[BackgroundSave | None]" = ContextVar("current", default=None)
_in_the_foreground: "ContextVar[bool]" = ContextVar("_in_the_foreground", default=False)


@dataclass(frozen=True)
class _SnapshotState:
    """A space of a snapshot as a ``StateSource``."""

    source: SnapshotSource
    space: str
    travels = True

    @contextlib.contextmanager
    def arrays(self, subgroup: int) -> "Iterator[dict[str, torch.Tensor]]":
        yield self.source.read(self.space, subgroup)


def save(stock: "Callable[..., Any]", *args: Any, **kwargs: Any) -> Any:
    """In place of ``save``: stock's calls ``async_save``, and runs what it returns at once."""
    token = _in_the_foreground.set(True)
    try:
        return stock(*args, **kwargs)
    finally:
        _in_the_foreground.reset(token)


def async_save(
    stock: "Callable[..., Any]", strategy: Any, sharded_state_dict: Any, checkpoint_dir: Any, *args: Any, **kwargs: Any
) -> Any:
    """In place of ``async_save``: the request that stock makes, of the state as it is now.

    Raises:
        ConfigError: the writer is one that cannot read state on storage.
        WeightsChangedError, PathIOError: as from ``take_snapshot``.
    """
    sources = {id(s.data.source): s.data.source for _, s in deferred_in(sharded_state_dict)}
    if _in_the_foreground.get() or not sources:
        return stock(strategy, sharded_state_dict, checkpoint_dir, *args, **kwargs)
    call = inspect.signature(stock).bind(strategy, sharded_state_dict, checkpoint_dir, *args, **kwargs)
    call.apply_defaults()
    if call.arguments.get("async_strategy", "mcore") != "mcore":
        raise ConfigError(
            "--async-save of offloaded state works with --async-strategy mcore only; the strategy nvrx would write the state "
            "that training has by then reached"
        )
    save = BackgroundSave([])
    try:
        snapshots = _snapshots(list(sources.values()), save.held)
    except CapacityError as error:
        log.warning("the checkpoint is not written in the background but now, and training waits for it: %s", error)
    else:
        sharded_state_dict = with_sources(sharded_state_dict, snapshots)
    token = current.set(save)
    try:
        request = stock(strategy, sharded_state_dict, checkpoint_dir, *args, **kwargs)
    except BaseException:
        save.release()
        raise
    finally:
        current.reset(token)
    request.finalize_fns.insert(0, save.release)  # the writers are done; what comes after it may fail
    return request


def _snapshots(sources: "list[ShardStates]", held: "list[Snapshot]") -> "dict[int, _SnapshotState]":
    """One snapshot a pipeline, which goes to ``held``; and what to read by id of each source."""
    found: "dict[int, _SnapshotState]" = {}
    try:
        for pipeline in {id(source.pipeline): source.pipeline for source in sources}.values():
            members = [source for source in sources if source.pipeline is pipeline]
            held.append(take_snapshot(pipeline, {source.space: source.work for source in members}))
            stored = held[-1].source()
            found |= {id(source): _SnapshotState(stored, source.space) for source in members}
    except BaseException:
        while held:
            held.pop().release()
        raise
    return found
