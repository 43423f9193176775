"""The plan as JSON: bytes, seconds, counts; ``simulate`` holds what ``mlp-offload simulate --plan`` takes."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ..config import OffloadConfig
from ..plan.memory import GpuNeed, Need
from ..prediction import compute_of

if TYPE_CHECKING:
    from ..plan.search import Fit
    from .plan_build import Plan


def as_items(plan: "Plan") -> "dict[str, Any]":
    """Everything that the text says, and a little more."""
    need, machine, job = plan.need, plan.need.machine, plan.need.job
    return {
        "name": plan.name,
        "title": plan.title,
        "parameters": plan.parameters,
        "fits": need.fits,
        "shortages": [asdict(s) for s in need.shortages],
        "changes": list(plan.changes),
        "nodes": machine.nodes,
        "gpus_per_node": machine.gpus_per_node,
        "layout": asdict(job.layout) | {"dp": need.dp, "micro_batches": need.micro_batches},
        "model": asdict(job.model),
        "gpu": _gpu(need.gpu)
        | {"memory": machine.gpu_memory, "reserve": machine.gpu_reserve, "startup": _startup(need)},
        "stages": [_gpu(stage) for stage in need.stages],
        "host": (asdict(need.host) | {"total": need.host.total} if need.host else {}) | {"memory": machine.host_memory},
        "paths": [
            {
                "directory": p.path.directory,
                "needed": p.needed,
                "capacity": p.path.capacity,
                "read_bytes_per_second": p.path.read,
                "write_bytes_per_second": p.path.write,
                "subgroups": p.subgroups,
            }
            for p in need.paths
        ],
        "fewest_nodes": _fit(plan.fewest),
        "stock": _gpu(plan.stock.gpu)
        | {"fits": plan.stock.fits, "startup": _startup(plan.stock), "fewest_nodes": _fit(plan.stock_fewest)},
        "prediction": asdict(plan.prediction) if plan.prediction else None,
        "grace_seconds": plan.grace_seconds,
        "ends_in_time": plan.ends_in_time,
        "simulate": _simulate(plan),
        "assumptions": list(plan.assumptions),
        "used_flags": list(job.used),
        "unused_flags": list(job.unused),
    }


def _gpu(need: GpuNeed) -> "dict[str, int]":
    return asdict(need) | {"total": need.total}


def _startup(need: Need) -> int:
    return max(stage.startup for stage in need.stages)


def _fit(fit: "Fit | None") -> "dict[str, Any] | None":
    if fit is None:
        return None
    layout = fit.need.job.layout
    return {"nodes": fit.need.machine.nodes, "tp": layout.tp, "pp": layout.pp, "dp": fit.need.dp, "text": fit.change}


def _simulate(plan: "Plan") -> "dict[str, Any]":
    need, machine = plan.need, plan.need.machine
    config = need.job.offload or OffloadConfig()
    return {
        "numels": list(need.shard_numels),
        "paths": [
            {"name": p.directory, "read_bytes_per_second": p.read, "write_bytes_per_second": p.write}
            for p in machine.paths
        ],
        "host_memory_bytes": need.rank_budget,
        "subgroup_size": config.subgroup_size,
        "main_itemsize": need.state_bytes - 8,
        "adam_parameters_per_second": plan.rates.adam,
        "copy_bytes_per_second": plan.rates.copy,
        "compute_seconds": compute_of(need.job, machine.gpus, plan.rates)[0],
        "local_rank_count": machine.gpus_per_node,
        "staging_count": config.staging_count,
        "gpu_memory_bytes": config.gpu_memory,
        "update_device": config.update_device,
        "gpu_adam_parameters_per_second": plan.rates.gpu_adam,
    }
