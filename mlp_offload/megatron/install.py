"""Let ``get_megatron_optimizer`` build offloaded optimizers, by wrapping it; patches call the same function."""

from __future__ import annotations

import functools
import inspect
import itertools
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, ClassVar

import megatron.core.optimizer as factory_module
import torch
from megatron.core.optimizer import optimizer as stock_module

from ..adam.kernel import AdamKernel, default_threads
from ..config import OffloadConfig
from ..device_updates import gpu_for_updates
from ..errors import ConfigError, SelfCheckError
from ..pipeline import StepPipeline
from ..plan.refusals import validate
from ..ranks import rank_context
from ..startup import describe, header, progress
from ..transfers import pin_memory, staging_bytes
from ..updates import main_itemsize
from .chain import OffloadedChainedOptimizer
from .distributed_optimizer import MLPDistributedOptimizer
from .gradients import clip_coefficient
from .self_check import check_built, check_internals
from .streaming import install_hooks, remove_hooks

_FACTORY = "get_megatron_optimizer"
_CLIP = "clip_grad_by_total_norm_fp32"
_PARAMS_NORM_MODULE, _PARAMS_NORM = "megatron.training.utils", "calc_params_l2_norm"


class _Replacement:
    """Stands in a Megatron module for the function ``stock``; what we keep, we keep in it."""

    def __init__(self, stock: "Callable[..., Any]"):
        functools.update_wrapper(self, stock)
        self.stock = stock


class OffloadedFactory(_Replacement):
    """Stands for ``get_megatron_optimizer``."""

    config: OffloadConfig

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return build_offloaded_optimizer(self.config, self.stock, *args, **kwargs)


class ClipHook(_Replacement):
    """Stands for ``clip_grad_by_total_norm_fp32``: our optimizers remember the coefficient, others get ``stock``."""

    def __init__(self, stock: "Callable[..., Any]"):
        super().__init__(stock)
        self.owners: "weakref.WeakSet[MLPDistributedOptimizer]" = weakref.WeakSet()

    def __call__(self, parameters, max_norm, total_norm, use_decoupled_grad=False):
        views = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        owner = next((owner for owner in self.owners if views and owner.owns(views[0])), None)
        if owner is None:
            return self.stock(views, max_norm, total_norm, use_decoupled_grad)
        owner.remember_clip(views, clip_coefficient(max_norm, total_norm))


class ParamsNorm(_Replacement):
    """Stands for ``calc_params_l2_norm`` of ``--log-params-norm``: our optimizers' masters are shown to ``stock``."""

    def __init__(self, stock: "Callable[..., Any]"):
        super().__init__(stock)
        self.owners: "weakref.WeakSet[MLPDistributedOptimizer]" = weakref.WeakSet()

    def __call__(self, *args: Any, **kwargs: Any) -> float:
        with ExitStack() as stack:
            for owner in self.owners:
                stack.enter_context(owner.main_params_for_norm())
            return self.stock(*args, **kwargs)


class _Resources:
    """What the optimizers of one build share; given back by ``close``, when the last one goes, or at exit.

    Attributes:
        name: tells apart the builds of this process that have not been closed, as of an actor and a critic.
    """

    _names_in_use: "ClassVar[set[str]]" = set()

    def __init__(self) -> None:
        names = itertools.chain(["optimizer"], (f"optimizer{number}" for number in itertools.count(2)))
        self.name = next(name for name in names if name not in self._names_in_use)
        self._names_in_use.add(self.name)
        self.stack = ExitStack()
        self.stack.callback(self._names_in_use.discard, self.name)
        self.close = weakref.finalize(self, self.stack.close)


def install(config: OffloadConfig) -> None:
    """From now on ``get_megatron_optimizer`` builds offloaded optimizers. A second call replaces ``config``.

    The name is replaced wherever a loaded module of Megatron holds it; call this before a script imports it.

    Raises:
        SelfCheckError: Megatron-Core lacks something private that we rely on.
    """
    current = getattr(factory_module, _FACTORY)
    if not isinstance(current, OffloadedFactory):
        check_internals()
        current = OffloadedFactory(current)
        _replace_everywhere(_FACTORY, current.stock, current)
    current.config = config
    _install_clip_hook()
    install_hooks()


def uninstall() -> None:
    """Put Megatron's own functions back. Optimizers that were built can no longer be stepped."""
    current = getattr(factory_module, _FACTORY)
    if isinstance(current, OffloadedFactory):
        _replace_everywhere(_FACTORY, current, current.stock)
    params_norm = _params_norm()
    if isinstance(params_norm, ParamsNorm):
        _replace_everywhere(_PARAMS_NORM, params_norm, params_norm.stock)
    hook = getattr(stock_module, _CLIP)
    if isinstance(hook, ClipHook):
        setattr(stock_module, _CLIP, hook.stock)
    remove_hooks()


def build_offloaded_optimizer(
    config: OffloadConfig, stock_get_megatron_optimizer: "Callable[..., Any]", /, *args: Any, **kwargs: Any
) -> Any:
    """What ``stock_get_megatron_optimizer(*args, **kwargs)`` returns, with the state of its parts offloaded.

    All parts (dense, expert) share one pipeline, hence one host-memory budget. Their state is written to the paths
    before this returns, one subgroup at a time, so a path that is too small is an error here.

    Raises:
        ConfigError: an option that offload does not go together with.
        SelfCheckError: Megatron-Core is not built as we expect.
        CapacityError: host memory or the paths cannot hold the state.
    """
    call = inspect.signature(stock_get_megatron_optimizer).bind(*args, **kwargs).arguments
    chunks = call["model_chunks"]
    for chunk in chunks:
        if not hasattr(chunk, "ddp_config"):
            raise ConfigError(
                f"--optimizer-offload mlp: model chunk {type(chunk).__name__} is not wrapped in Megatron's "
                "DistributedDataParallel; wrap it, or use --optimizer-offload none (FSDP and MIMO models)"
            )
    validate(call["config"], *(config for chunk in chunks for config in (chunk.ddp_config, chunk.config)))
    check_internals()
    clip_hook = _install_clip_hook()
    install_hooks()
    with _class_replaced(), _field_off(call["config"]):
        built = stock_get_megatron_optimizer(*args, **kwargs)
    parts = [
        part for part in getattr(built, "chained_optimizers", [built]) if isinstance(part, MLPDistributedOptimizer)
    ]
    if not parts:
        raise SelfCheckError(
            f"{type(built).__name__} was built without the offloaded optimizer; use --optimizer-offload none"
        )
    clip_hook.owners.update(parts)
    _start(config, parts)
    _show_params_norm(parts)
    return built


def build_from_optimizer_config(get_megatron_optimizer: "Callable[..., Any]", names: "Mapping[str, Any]") -> Any:
    """What the patched ``get_megatron_optimizer`` returns where its ``config`` asks for offload.

    Args:
        names: its arguments by name, and maybe other names. ``config.optimizer_offload`` is an ``OffloadConfig`` or a
            mapping of its fields.
    Raises:
        ConfigError: it is anything else; and as ``build_offloaded_optimizer``.
    """
    wanted = names["config"].optimizer_offload
    options = OffloadConfig.from_mapping(wanted, "optimizer_offload") if isinstance(wanted, Mapping) else wanted
    if not isinstance(options, OffloadConfig) or not options.paths:
        raise ConfigError(
            f"OptimizerConfig.optimizer_offload={wanted!r} does not say where state lives: give "
            "mlp_offload.OffloadConfig(paths=['/nvme/scratch', ...]), or 'none'"
        )
    arguments = {name: names[name] for name in inspect.signature(get_megatron_optimizer).parameters}
    return build_offloaded_optimizer(options, get_megatron_optimizer, **arguments)


def _start(config: OffloadConfig, parts: "list[MLPDistributedOptimizer]") -> None:
    """One pipeline, one kernel for all parts that own shards; state from the model's weights."""
    spaces: "dict[str, MLPDistributedOptimizer]" = {}
    for part in parts:
        if part.shards:
            check_built(part)
            expert = any(group.get("is_expert_parallel") for group in part.param_groups)
            kind = "expert" if expert else "dense"
            count = sum(name.startswith(kind) for name in spaces)
            spaces[kind if count == 0 else f"{kind}{count}"] = part
    if not spaces:
        return
    context = rank_context(os.environ, torch.distributed.get_rank(), torch.distributed.get_world_size())
    weights_of = [[shard.weight for shard in part.shards] for part in spaces.values()]
    weights = [weight for part in weights_of for weight in part]
    staging = sum(staging_bytes(part, min(config.subgroup_size, sum(w.numel() for w in part))) for part in weights_of)
    resources = _Resources()
    try:
        kernel = AdamKernel(config.update_threads or default_threads(context.local_rank_count), config.adam_variant)
        resources.stack.callback(kernel.close)
        gpu, reason = gpu_for_updates(config, weights, kernel)
        first = context.rank == 0
        with progress() if first else nullcontext() as show:
            pipeline = StepPipeline(
                config,
                spaces={name: [shard.numel for shard in part.shards] for name, part in spaces.items()},
                rank=context,
                name=resources.name,
                reserved_bytes=staging,
                pin=pin_memory if weights[0].is_cuda else None,
                on_progress=show,
                main_itemsize=main_itemsize(config.master_weights, weights),
                gpu=gpu,
            )
            resources.stack.callback(pipeline.close)
            if first:
                print(describe(pipeline.tiers, context, kernel, pipeline.passing_count(), reason), flush=True)
            pipeline.log_start(header(pipeline.tiers, context, kernel))
            for name, part in spaces.items():
                part.start(pipeline, name, kernel, resources)
            pipeline.initialize(lambda space, subgroup, view: spaces[space].fill(subgroup, view))
    except BaseException:
        resources.close()
        raise


@contextmanager
def _class_replaced() -> "Iterator[None]":
    """The names by which Megatron's factory finds the classes of distributed and chained optimizers mean ours."""
    stock = factory_module.DistributedOptimizer, factory_module.ChainedOptimizer
    factory_module.DistributedOptimizer = MLPDistributedOptimizer
    factory_module.ChainedOptimizer = OffloadedChainedOptimizer
    try:
        yield
    finally:
        factory_module.DistributedOptimizer, factory_module.ChainedOptimizer = stock


@contextmanager
def _field_off(config: Any) -> "Iterator[None]":
    """Patched source calls us where ``optimizer_offload`` is not "none": it is, while we ask for the stock optimizer.

    The same object, not a copy: Megatron compares and changes it later.
    """
    wanted = getattr(config, "optimizer_offload", "none")
    if wanted == "none":
        yield
        return
    config.optimizer_offload = "none"
    try:
        yield
    finally:
        config.optimizer_offload = wanted


def _install_clip_hook() -> ClipHook:
    current = getattr(stock_module, _CLIP)
    if not isinstance(current, ClipHook):
        current = ClipHook(current)
        setattr(stock_module, _CLIP, current)
    return current


def _params_norm() -> "Callable[..., Any] | None":
    return getattr(sys.modules.get(_PARAMS_NORM_MODULE), _PARAMS_NORM, None)


def _show_params_norm(parts: "list[MLPDistributedOptimizer]") -> None:
    """Only ``megatron.training`` has this norm; who uses it has loaded it before the optimizer is built."""
    current = _params_norm()
    if current is None:
        return
    if not isinstance(current, ParamsNorm):
        stock, current = current, ParamsNorm(current)
        _replace_everywhere(_PARAMS_NORM, stock, current)
    current.owners.update(parts)


def _replace_everywhere(name: str, old: "Callable[..., Any]", new: "Callable[..., Any]") -> None:
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith("megatron.") and vars(module).get(name) is old:
            setattr(module, name, new)
