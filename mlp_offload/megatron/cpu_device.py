"""Megatron on a machine without a GPU: for trials and tests, with the gloo backend.

Megatron-Core asks for CUDA at many places: ``device="cuda"``, streams, events, the CUDA random-number generator, tensor
type strings, the nccl backend. ``activate()`` answers each of them with the CPU's own, so that unmodified Megatron code
trains a small model. It replaces attributes of torch only, before Megatron is first imported, and only where
``torch.cuda.is_available()`` is False; that function keeps saying False, so whoever asks gets the truth.

``REPLACED`` says what is replaced and why. What this cannot show: every ``.cuda()`` and ``.to("cuda")`` returns the
same tensor and every stream is the caller's thread, so a missing wait or a wrong alias between host and device stays
unseen. Transformer Engine, Apex and context parallelism need a GPU.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch._dynamo  # imported lazily by torch.optim; must see torch as it is

REPLACED = {
    "devices": "current_device, set_device, device_count, properties: Megatron asks at start-up; the answer is cpu",
    "streams": "Stream, Event, stream, current_stream, synchronize: one queue, the caller's thread, always done",
    "random": "the CUDA generator's state and seed: kept in the CPU generator, which draws dropout and weights here",
    "memory": "memory_allocated, memory_stats, empty_cache: 0 and nothing; Megatron logs them",
    "tensors": "cuda(), pin_memory(), to('cuda'), device='cuda', torch.cuda.FloatTensor: the CPU tensor itself",
    "type": "Tensor.type() says torch.cuda.*: the distributed optimizer and clipping compare these strings",
    "groups": "nccl becomes gloo; device_id, device_ids and pg_options fall away; split sizes become integers",
    "compile": "torch.compile returns the function: compiling takes longer than a trial and needs a C++ compiler",
    "start": "megatron.training refuses to start without CUDA unless allow_no_cuda is passed; the launcher passes it",
}

_CPU = torch.device("cpu")
_FACTORIES = ("arange", "as_tensor", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn", "randperm")
_FACTORIES += ("tensor", "zeros", "empty_like", "full_like", "ones_like", "rand_like", "randn_like", "zeros_like")
_TENSOR_TYPES = ("BFloat16", "Bool", "Byte", "Char", "Double", "Float", "Half", "Int", "Long", "Short")
_MARK = "_mlp_offload_cpu_device"


def needed() -> bool:
    """True where torch sees no CUDA device."""
    return not torch.cuda.is_available()


def activate(announce: bool = True) -> bool:
    """Let Megatron run on the CPU of this process; call it before anything imports ``megatron``.

    A second call does nothing. On a machine with a GPU nothing is touched.

    Args:
        announce: print one line on rank 0.
    Returns:
        True where the CPU takes the GPU's place.
    """
    if hasattr(torch.cuda, _MARK):
        return True
    if not needed():
        return False
    _replace_devices()
    _replace_streams()
    _replace_random()
    _replace_memory()
    _replace_tensors()
    _replace_groups()
    torch.compile = _no_compile
    setattr(torch.cuda, _MARK, True)
    if announce and os.environ.get("RANK", "0") == "0":
        print("mlp-offload: no GPU found: running on the CPU with gloo, for trials and tests", file=sys.stderr)
    return True


def activate_in_children(environment: "dict[str, str]") -> None:
    """Put ``cpu_site`` first on PYTHONPATH: Python processes started from here activate the CPU as well.

    Megatron's torch_dist checkpoints spawn processes. A Python process that never imports ``megatron`` pays nothing.
    """
    site = str(Path(__file__).with_name("cpu_site"))
    others = [p for p in environment.get("PYTHONPATH", "").split(os.pathsep) if p and p != site]
    environment["PYTHONPATH"] = os.pathsep.join([site, *others])


# ------------------------------------------------------------------------------------------ devices


class _Properties:
    name, major, minor, multi_processor_count = "cpu", 9, 0, 1
    total_memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _replace_devices() -> None:
    memory = _Properties.total_memory
    _set(
        torch.cuda,
        current_device=lambda: _CPU,
        set_device=_nothing,
        device_count=lambda: int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1"))),
        get_device_properties=lambda *a, **k: _Properties(),
        get_device_capability=lambda *a, **k: (_Properties.major, _Properties.minor),
        get_device_name=lambda *a, **k: _Properties.name,
        mem_get_info=lambda *a, **k: (memory, memory),
    )
    _set(torch.cuda.nvtx, range_push=_nothing, range_pop=_nothing)


# ------------------------------------------------------------------------------------------ streams


class _Stream:
    """The caller's thread: whatever was asked of it is already done."""

    device, cuda_stream = _CPU, 0

    def __init__(self, *args: Any, **settings: Any) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def record_event(self, event: Any = None) -> "_Event":
        return event or _Event()

    def __enter__(self) -> "_Stream":
        return self

    def __exit__(self, *error: Any) -> None:
        pass


class _Event:
    def __init__(self, *args: Any, **settings: Any) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        pass

    def wait(self, stream: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        return 0.0


def _replace_streams() -> None:
    only = _Stream()
    _set(
        torch.cuda,
        Stream=_Stream,
        Event=_Event,
        stream=lambda stream=None: contextlib.nullcontext(stream),
        set_stream=_nothing,
        current_stream=lambda *a, **k: only,
        default_stream=lambda *a, **k: only,
        synchronize=_nothing,
    )


# ------------------------------------------------------------------------------------------- random


class _Generators:
    """``torch.cuda.default_generators``: every device's generator is the CPU's."""

    def __getitem__(self, index: int) -> torch.Generator:
        return torch.default_generator

    def __len__(self) -> int:
        return 1


def _replace_random() -> None:
    def get_state(device: Any = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(state: torch.Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)

    def seed(value: int) -> None:
        torch.default_generator.manual_seed(int(value))

    # torch.manual_seed() itself calls manual_seed_all: it has seeded the CPU generator already
    for module in (torch.cuda, torch.cuda.random):
        _set(module, get_rng_state=get_state, set_rng_state=set_state, manual_seed=seed, manual_seed_all=_nothing)
    _set(torch.cuda, default_generators=_Generators(), _lazy_call=lambda function, **k: function())


# ------------------------------------------------------------------------------------------- memory


def _replace_memory() -> None:
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        setattr(torch.cuda, name, lambda *a, **k: 0)
    _set(
        torch.cuda,
        memory_stats=lambda *a, **k: defaultdict(int),
        reset_peak_memory_stats=_nothing,
        empty_cache=_nothing,
    )


# ------------------------------------------------------------------------------------------ tensors


def _replace_tensors() -> None:
    _set(torch.Tensor, cuda=_itself, pin_memory=_itself)
    _set(torch.nn.Module, cuda=_itself)
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    for name in _TENSOR_TYPES:
        setattr(torch.cuda, f"{name}Tensor", getattr(torch, f"{name}Tensor"))
    torch_to, torch_type = torch.Tensor.to, torch.Tensor.type

    @functools.wraps(torch_to)
    def to(self: torch.Tensor, *args: Any, **settings: Any) -> torch.Tensor:
        if "device" in settings:
            settings["device"] = _cpu_for_cuda(settings["device"])
        return torch_to(
            self, *(_cpu_for_cuda(a) if isinstance(a, (str, torch.device)) else a for a in args), **settings
        )

    @functools.wraps(torch_type)
    def type_(self: torch.Tensor, *args: Any, **settings: Any) -> Any:
        if args or settings:
            return torch_type(self, *args, **settings)
        name = torch_type(self)
        return name if name.startswith("torch.cuda.") else name.replace("torch.", "torch.cuda.", 1)

    _set(torch.Tensor, to=to, type=type_)


def _cpu_for_cuda(device: Any) -> Any:
    named_cuda = isinstance(device, (str, torch.device)) and str(device).startswith("cuda")
    bare_index = isinstance(device, int) and not isinstance(device, bool)
    return _CPU if named_cuda or bare_index else device


def _on_cpu(factory: "Callable[..., Any]") -> "Callable[..., Any]":
    @functools.wraps(factory)
    def on_cpu(*args: Any, **settings: Any) -> Any:
        if "device" in settings:
            settings["device"] = _cpu_for_cuda(settings["device"])
        return factory(*args, **settings)

    return on_cpu


# ------------------------------------------------------------------------------------------- groups


def _replace_groups() -> None:
    distributed = torch.distributed
    torch_init, torch_new_group = distributed.init_process_group, distributed.new_group
    torch_all_to_all, torch_barrier = distributed.all_to_all_single, distributed.barrier

    @functools.wraps(torch_init)
    def init_process_group(backend: "str | None" = None, *args: Any, **settings: Any) -> None:
        settings.pop("device_id", None)
        settings.pop("pg_options", None)
        torch_init("gloo", *args, **settings)

    @functools.wraps(torch_new_group)
    def new_group(*args: Any, **settings: Any) -> Any:
        if settings.get("backend") == "nccl":
            settings["backend"] = "gloo"
        settings.pop("device_id", None)
        settings.pop("pg_options", None)
        return torch_new_group(*args, **settings)

    @functools.wraps(torch_all_to_all)
    def all_to_all_single(
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        **settings: Any,
    ) -> Any:
        # the MoE dispatcher turns splits into integers only for tensors whose .is_cuda is True
        return torch_all_to_all(output, input, _integers(output_split_sizes), _integers(input_split_sizes), **settings)

    @functools.wraps(torch_barrier)
    def barrier(group: Any = None, async_op: bool = False, device_ids: Any = None) -> Any:
        return torch_barrier(group=group, async_op=async_op)

    _set(
        distributed,
        init_process_group=init_process_group,
        new_group=new_group,
        all_to_all_single=all_to_all_single,
        barrier=barrier,
    )


def _integers(sizes: "Iterable[Any] | None") -> "list[int] | None":
    return None if sizes is None else [int(size) for size in sizes]


# ------------------------------------------------------------------------------------------ helpers


def _set(owner: "ModuleType | type", **replacements: Any) -> None:
    for name, replacement in replacements.items():
        setattr(owner, name, replacement)


def _nothing(*args: Any, **settings: Any) -> None:
    pass


def _itself(self: Any, *args: Any, **settings: Any) -> Any:
    return self


def _no_compile(model: Any = None, **settings: Any) -> Any:
    return model if model is not None else _no_compile
