"""From the options of ``mlp-offload plan`` to all that it tells."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .. import recipes
from ..config import OffloadConfig, PathConfig
from ..errors import ConfigError
from ..plan.megatron_flags import Job, read_flags
from ..plan.memory import Machine, Need, data_parallel, needs_of
from ..plan.model import total_numel
from ..plan.search import (
    Fit,
    changes_that_fit,
    layout_flags,
    leanest_layout,
    more_host_memory,
    more_state_in_memory,
    on_these_nodes,
    smallest,
)
from ..prediction import Endurance, Prediction, Rates, predict
from ..units import format_bytes, format_rate, parse_bytes

ASSUMED_PATH = PathConfig("nvme", read=5 * 10**9, write=3 * 10**9)


@dataclass(frozen=True)
class Plan:
    """All that the command tells, for text, JSON and picture alike.

    Attributes:
        need: with offload; ``stock`` without, on the same nodes.
        fewest, stock_fewest: on the fewest nodes, with and without offload; None = on no number that was tried.
        changes: what would make it fit, where it does not: to do and why that is enough.
        prediction: None where no step can be simulated, as there is no room for its state.
        grace_seconds: between a signal and the end of the job; None = not asked.
        assumptions: what the numbers rest on that nobody has given.
    """

    name: str
    title: str
    need: Need
    stock: Need
    fewest: "Fit | None"
    stock_fewest: "Fit | None"
    changes: "tuple[str, ...]"
    prediction: "Prediction | None"
    rates: Rates
    grace_seconds: "float | None"
    assumptions: "tuple[str, ...]"

    @property
    def parameters(self) -> int:
        return total_numel(self.need.job.model, self.need.job.layout)

    @property
    def ends_in_time(self) -> "bool | None":
        if self.grace_seconds is None or self.prediction is None:
            return None
        return self.prediction.exit_seconds <= self.grace_seconds


def make_plan(options: argparse.Namespace) -> Plan:
    """All numbers for the options of the command line.

    Raises:
        ConfigError: what is asked cannot be told; says why, and what to give.
    """
    gpu_memory = recipes.parse_gpu_memory(options.gpu_memory)
    name, title, flags, recipe = _flags_of(options.model, options.more, gpu_memory)
    job = read_flags(flags)
    assumptions: "list[str]" = []
    machine = _machine(options, job, recipe, gpu_memory, assumptions)
    own_layout = recipe is not None and not any("-model-parallel-size" in flag for flag in options.more)
    job = _on_machine(job, machine, own_layout, assumptions)
    rates = _rates(options)
    endurance = {e.directory: e for e in map(Endurance.parse, options.endurance)}
    if options.grace is not None and not 0 < options.grace < math.inf:
        raise ConfigError(f"--grace {options.grace:g}: must be a number of seconds above 0")
    need, stock = needs_of(job, machine), needs_of(job, machine, offload=False)
    prediction = predict(need, rates, endurance) if need.paths or need.all_resident else None
    assumptions += _assumed(need, prediction, rates, options)
    fewest, stock_fewest = smallest(job, machine, True), smallest(job, machine, False)
    changes = () if need.fits else _changes(job, machine, need, fewest)
    return Plan(
        *(
            name,
            title,
            need,
            stock,
            fewest,
            stock_fewest,
            changes,
            prediction,
            rates,
            options.grace,
            tuple(assumptions),
        ),
    )


def recipe_row(name: str, gigabytes: int) -> "dict[str, Any]":
    """What the table of recipes tells of one, on nodes of 512 GiB with one drive."""
    recipe = recipes.load(name, gigabytes * 2**30)
    job = read_flags(recipe.flags)
    machine = Machine(recipe.nodes, recipe.gpus_per_node, recipe.gpu_memory, paths=(ASSUMED_PATH,))
    need = needs_of(job, machine)
    stock = smallest(job, machine, offload=False)
    assert need.host is not None
    return {
        "name": name,
        "title": recipe.title,
        "source": recipe.source,
        "parameters": total_numel(job.model, job.layout),
        "gpu_memory_gib": gigabytes,
        "nodes": recipe.nodes,
        "gpus_per_node": recipe.gpus_per_node,
        "fits": need.fits,
        "stock_nodes": stock.need.machine.nodes if stock else None,
        "tp": job.layout.tp,
        "pp": job.layout.pp,
        "dp": need.dp,
        "gpu_bytes": need.gpu.total,
        "gpu_startup_bytes": max(n.startup for n in need.stages),
        "host_bytes": need.host.total,
        "path_bytes": sum(p.needed for p in need.paths),
    }


# ------------------------------------------------------------------------------------------ helpers


def _flags_of(
    model: "str | None", more: Sequence[str], gpu_memory: int
) -> "tuple[str, str, list[str], recipes.Recipe | None]":
    """(name, title, flags, the recipe if it is one)."""
    if model is None:
        if not more:
            raise ConfigError(
                f"no model: give a recipe ({', '.join(recipes.NAMES)}), a file of Megatron flags, or flags after --"
            )
        return "flags", "the flags given", list(more), None
    if model in recipes.NAMES:
        recipe = recipes.load(model, gpu_memory)
        return model, recipe.title, [*recipe.flags, *more], recipe
    try:
        text = Path(model).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not text"
        raise ConfigError(
            f"{model!r} is no recipe ({', '.join(recipes.NAMES)}), and no file of flags: {reason}"
        ) from error
    return Path(model).name, f"flags in {model}", [*recipes.read_args(text, model), *more], None


def _machine(
    options: argparse.Namespace, job: Job, recipe: "recipes.Recipe | None", gpu_memory: int, assumptions: "list[str]"
) -> Machine:
    gpus_per_node = (
        options.gpus_per_node if options.gpus_per_node is not None else recipe.gpus_per_node if recipe else 4
    )
    if gpus_per_node < 1 or (options.nodes is not None and options.nodes < 1):
        raise ConfigError("--nodes and --gpus-per-node must be at least 1")
    nodes = options.nodes or (recipe.nodes if recipe else 0)
    nodes = nodes or math.lcm(job.layout.model_parallel, gpus_per_node) // gpus_per_node
    host_memory = 512 * 2**30
    if options.host_memory is None:
        assumptions.append(f"host memory of a node: {format_bytes(host_memory)}; tell it with --host-memory")
    else:
        host_memory = parse_bytes(options.host_memory, "--host-memory")
    offload = job.offload or OffloadConfig()
    paths = tuple(PathConfig.parse(path) for path in options.path) or offload.paths
    if not paths:
        paths = (ASSUMED_PATH,)
        assumptions.append(f"one path a node, {ASSUMED_PATH}, of unknown capacity; tell yours with --path")
    machine = Machine(
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        gpu_memory=gpu_memory,
        host_memory=host_memory,
        gpu_reserve=parse_bytes(options.gpu_reserve, "--gpu-reserve"),
        host_reserve=parse_bytes(options.host_reserve, "--host-reserve"),
        paths=tuple(_with_rates(path, offload, options.probe, assumptions) for path in paths),
    )
    return machine


def _on_machine(job: Job, machine: Machine, own_layout: bool, assumptions: "list[str]") -> Job:
    """The job, or a recipe in another layout where its own does not go with the number of GPUs.

    Args:
        own_layout: the layout is the recipe's and not the caller's.

    Raises:
        ConfigError: the sizes do not divide; names the fewest nodes on which the model fits.
    """
    if own_layout and machine.gpus % job.layout.model_parallel and (other := leanest_layout(job, machine)):
        assumptions.append(f"the recipe's layout is not for {machine.gpus} GPUs; taken instead: {layout_flags(other)}")
        return other
    try:
        data_parallel(job, machine.gpus)
    except ConfigError as error:
        fewest = smallest(job, machine, True)
        hint = f". It fits on {fewest.change}" if fewest else ""
        raise ConfigError(f"{error}{hint}") from error
    return job


def _with_rates(path: PathConfig, offload: OffloadConfig, probe: bool, assumptions: "list[str]") -> PathConfig:
    """The path with both rates: as given, as measured before, or (``probe``) as measured now."""
    if path.read is not None and path.write is not None:
        return path
    from ..storage.mounts import device_key
    from ..storage.probe_cache import load, measure_once

    settings: "dict[str, Any]" = {
        "kind": offload.engine if path.engine == "auto" else path.engine,
        "direct": offload.direct,
        "threads": offload.threads,
        "iodepth": offload.iodepth,
        "block_size": offload.block_size,
    }
    try:
        directory = path.resolved_directory()
        found = measure_once(directory, **settings)[0] if probe else load(device_key(directory), settings)
        why = ""
    except (OSError, ConfigError) as error:
        found, why = None, f", and cannot be measured here: {error}"
    if found is None:
        raise ConfigError(
            f"path {path.directory!r}: its bandwidth is not known{why}; write {path.directory},read=BYTES/s,write=BYTES/s, "
            "or measure it with --probe on a node that has it"
        )
    read, write = round(found.read_bytes_per_second), round(found.write_bytes_per_second)
    assumptions.append(
        f"path {path.directory}: read {format_rate(read)}, write {format_rate(write)}, as measured on this machine"
    )
    return replace(path, read=path.read or read, write=path.write or write)


def _rates(options: argparse.Namespace) -> Rates:
    given = {
        "adam": options.adam_rate,
        "copy": options.copy_rate and parse_bytes(options.copy_rate, "--copy-rate"),
        "gpu_adam": options.gpu_adam_rate,
        "gpu_flops": options.gpu_flops,
        "mfu": options.mfu,
    }
    return Rates(
        **{name: value for name, value in given.items() if value is not None},
        tokens_per_second=options.tokens_per_second,
        compute_seconds=options.compute_seconds,
        save=options.save_rate and parse_bytes(options.save_rate, "--save-rate"),
    )


def _assumed(need: Need, prediction: "Prediction | None", rates: Rates, options: argparse.Namespace) -> "list[str]":
    from ..plan.activations import FORMULA
    from ..plan.devices import updates_on_gpu

    machine, training = need.machine, need.job.training
    lines = [
        f"activations: an estimate ({FORMULA}), {'without' if training.flash_attention else 'with'} attention scores in memory",
        f"{format_bytes(machine.gpu_reserve)} of each GPU and {format_bytes(machine.host_reserve)} of a node's memory for each rank are "
        "kept for what no formula counts (--gpu-reserve, --host-reserve)",
        "every rank of a node is taken to be as full as the fullest",
        "weights are twice on the GPU while Megatron copies them into its own buffer at start-up",
    ]
    if need.job.offload is None:
        lines.append("the flags do not switch offload on: counted as if they had --optimizer-offload mlp")
    if prediction is not None:
        lines.append(f"forward and backward: {prediction.compute_origin}")
        if options.adam_rate is None:
            lines.append(f"a rank's CPU updates {rates.adam:g} parameters a second (--adam-rate)")
        if options.gpu_adam_rate is None and updates_on_gpu(need.job.offload or OffloadConfig()):
            lines.append(f"a GPU updates {rates.gpu_adam:g} parameters a second (--gpu-adam-rate)")
        if options.copy_rate is None:
            lines.append(f"{format_rate(rates.copy)} between a GPU and its host, each way (--copy-rate)")
        if options.save_rate is None:
            lines.append("a checkpoint is written as fast as a node writes to its last path (--save-rate)")
    if any(path.capacity is None for path in machine.paths):
        lines.append("paths without capacity= are taken to have room")
    return lines


def _changes(job: Job, machine: Machine, need: Need, fewest: "Fit | None") -> "tuple[str, ...]":
    """What makes it fit; each line was tried."""
    lines = [f"{fit.change}: {format_bytes(fit.need.gpu.total)} on a GPU" for fit in changes_that_fit(job, machine)]
    if kept := more_state_in_memory(job, machine):
        assert kept.need.host is not None
        lines.append(f"{kept.change}: {format_bytes(kept.need.host.total)} of a node's memory")
    if other := on_these_nodes(job, machine, True):
        lines.append(f"another layout: {other.change}")
    for path in need.paths:
        if path.path.capacity is not None and path.needed > path.path.capacity:
            lines.append(
                f"path {path.path.directory}: {format_bytes(path.needed)} instead of {format_bytes(path.path.capacity)}"
            )
    if any(s.what.startswith("host") for s in need.shortages) and (gib := more_host_memory(job, machine)):
        lines.append(f"host memory of a node: {gib} GiB")
    if fewest is not None and fewest.need.machine.nodes > machine.nodes:
        lines.append(f"more nodes: {fewest.change}")
    return tuple(lines) or ("nothing that was tried (other flags, layouts, up to 1024 nodes) makes it fit",)
