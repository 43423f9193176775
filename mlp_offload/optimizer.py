"""``OffloadedAdamW``: AdamW for plain PyTorch whose state lives in host memory and on storage paths."""

from __future__ import annotations

import copy
import logging
import os
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.autograd.graph import increment_version

from .adam.kernel import AdamKernel, adam_scalars, check_adam_options, default_threads
from .config import OffloadConfig
from .device_updates import gpu_for_updates
from .errors import ConfigError
from .pipeline import StepPipeline
from .plan.subgroups import Segment
from .ranks import RankContext, rank_context
from .startup import describe, header
from .telemetry import StepRecord
from .transfers import pin_memory, staging_bytes
from .updates import AdamWork, main_itemsize

log = logging.getLogger(__name__)

_SPACE = "params"


class OffloadedAdamW(torch.optim.Optimizer):
    """AdamW with fp32 master weights and moments on tiers, for fp32, bf16 and fp16 parameters.

    Each parameter has its own step count, as in ``torch.optim.AdamW``; one without a gradient is left alone. A
    parameter that was changed by other hands (``model.load_state_dict``) since the last step counts as the truth, and its
    master starts from it again. Of fp32 masters those stay that still round to their weight, and a change in place
    through ``p.data`` is not seen, as autograd does not see it either. With remainders (all parameters bf16, the default)
    every change is seen, and masters stay where no weight of the same parameter and subgroup has changed. What was
    decided at start-up is logged (level INFO).

    Args:
        params: parameters or groups, as for ``torch.optim.AdamW``; contiguous, all on one device.
        lr, betas, eps, weight_decay: as there; they can differ by group and change between steps.
        config: the options; or give single ones by name (``paths=[...]``, ``host_memory="64GiB"``, ...).
        name: tells two optimizers of one process apart on the same path.
        rank: place among the processes of this node; None = as torchrun's or srun's variables say.
        on_progress: called with (bytes written, bytes in all) while the state is written at start-up.

    Raises:
        ConfigError, CapacityError, PathInUseError: before any state is written.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: "float | torch.Tensor" = 1e-3,
        betas: "tuple[float, float]" = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        config: "OffloadConfig | None" = None,
        name: str = "optimizer",
        rank: "RankContext | None" = None,
        on_progress: "Callable[[int, int], None] | None" = None,
        **options: Any,
    ):
        self._pipeline: "StepPipeline | None" = None
        config = (config or OffloadConfig()).replace(**options)
        if not config.paths:
            raise ConfigError("OffloadedAdamW needs at least one path: paths=['/nvme/scratch', ...]")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        for group in self.param_groups:
            check_adam_options(**group)
        self._params: "list[torch.Tensor]" = [p for group in self.param_groups for p in group["params"]]
        self._numels = [p.numel() for p in self._params]
        weights = self._flat_weights()
        rank = rank or rank_context(os.environ)
        self._steps = [0] * len(self._params)
        self._versions = [p._version for p in self._params]
        self._subgroup_numel = min(config.subgroup_size, max(1, sum(self._numels)))
        threads = config.update_threads or default_threads(rank.local_rank_count)
        self._kernel = AdamKernel(threads, config.adam_variant)
        try:
            self._itemsize = main_itemsize(config.master_weights, weights)
            gpu, reason = gpu_for_updates(config, weights, self._kernel)
            self._pipeline = StepPipeline(
                config,
                {_SPACE: self._numels},
                rank,
                name=name,
                reserved_bytes=staging_bytes(weights, self._subgroup_numel),
                pin=pin_memory if weights and weights[0].is_cuda else None,
                on_progress=on_progress,
                main_itemsize=self._itemsize,
                gpu=gpu,
            )
            self._close = weakref.finalize(self, _close, self._pipeline, self._kernel)
            self._work = AdamWork(
                *(self._kernel, weights, self._subgroup_numel, self._itemsize),
                adopt_changes=True,
                gpu=self._pipeline.tiers.device,
            )
            self._addresses = [weight.data_ptr() for weight in weights]
            log.info("%s", describe(self._pipeline.tiers, rank, self._kernel, self._pipeline.passing_count(), reason))
            self._pipeline.log_start(header(self._pipeline.tiers, rank, self._kernel))
            self._pipeline.initialize(lambda space, subgroup, view: self._work.load_weights(subgroup, view))
        except BaseException:
            self.close()
            raise
        self.last_record: "StepRecord | None" = None

    @torch.no_grad()
    def step(self, closure: "Callable[[], Any] | None" = None) -> Any:
        """One AdamW step of every parameter that has a gradient. Flushes may go on after it returns.

        Raises:
            PathIOError, PathTimeoutError, ChecksumError: the state can no longer be used; nothing was lost silently.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        gradients: "list[torch.Tensor | None]" = []
        rows: "dict[tuple[int, int], int]" = {}  # (group, step) -> row: parameters may be at different steps
        scalars, group_index, stepped = [], [], []
        for g, group in enumerate(self.param_groups):
            for p in group["params"]:
                i = len(gradients)
                gradients.append(_flat_gradient(p))
                if p.grad is None:
                    group_index.append(0)
                    continue
                key = (g, self._steps[i] + 1)
                if key not in rows:
                    rows[key] = len(scalars)
                    scalars.append(
                        adam_scalars(group["lr"], group["betas"], group["eps"], group["weight_decay"], key[1])
                    )
                group_index.append(rows[key])
                stepped.append(i)
        if not stepped:
            return loss
        stale = self._stale()
        self._work.begin(gradients, scalars, group_index, stale)
        self.last_record = self._pipeline.step(_SPACE, self._work)
        self._work.end()
        for i in stepped:
            self._steps[i] += 1
            increment_version(self._params[i])
        self._versions = [p._version for p in self._params]
        return loss

    def state_dict(self) -> "dict[str, Any]":
        """The whole state in host memory, in the format of ``torch.optim.AdamW`` (which can load it).

        Parameters that are not fp32 have a further entry ``main_param``, their fp32 master weight.
        """
        state: "dict[int, dict[str, torch.Tensor]]" = {}
        for i, p in enumerate(self._params):
            if self._steps[i]:
                names = ["exp_avg", "exp_avg_sq"] + (["main_param"] if p.dtype != torch.float32 else [])
                state[i] = {name: torch.zeros(p.shape, dtype=torch.float32) for name in names}
                state[i]["step"] = torch.tensor(float(self._steps[i]))
        stale = self._stale()
        for subgroup in self._pipeline.subgroups[_SPACE]:
            with self._pipeline.read(_SPACE, subgroup) as view:
                arrays = self._work.read(subgroup, view, stale)
                for segment in subgroup.segments:
                    for name, tensor in state.get(segment.shard, {}).items():
                        if name != "step":
                            _part(tensor, segment).copy_(_of(arrays[name], segment))
        groups, first = [], 0
        for group in self.param_groups:
            count = len(group["params"])
            groups.append(
                {k: v for k, v in group.items() if k != "params"} | {"params": list(range(first, first + count))}
            )
            first += count
        return {"state": state, "param_groups": groups}

    @torch.no_grad()
    def load_state_dict(self, state_dict: "dict[str, Any]") -> None:
        """Take over a state from here or from ``torch.optim.AdamW``; masters it lacks come from the parameters.

        Load the parameters first: remainders of masters that are stored beside bf16 parameters must fit them.

        Raises:
            ConfigError: groups, shapes or masters do not fit; nothing is changed.
        """
        saved, state = copy.deepcopy(state_dict["param_groups"]), state_dict["state"]
        sizes = [len(group["params"]) for group in saved]
        if sizes != [len(group["params"]) for group in self.param_groups]:
            raise ConfigError(
                f"state_dict has groups of {sizes} parameters; this optimizer has "
                f"{[len(group['params']) for group in self.param_groups]}"
            )
        for group in saved:
            check_adam_options(**group)
        ids = [key for group in saved for key in group["params"]]
        entries = [state.get(key, {}) for key in ids]
        for i, (p, entry) in enumerate(zip(self._params, entries)):
            for name in ("exp_avg", "exp_avg_sq", "main_param"):
                if name in entry and entry[name].shape != p.shape:
                    raise ConfigError(
                        f"state_dict: {name} of parameter {i} has shape {tuple(entry[name].shape)}, not {tuple(p.shape)}"
                    )
            if entry and not {"step", "exp_avg", "exp_avg_sq"} <= entry.keys():
                raise ConfigError(
                    f"state_dict: parameter {i} has {sorted(entry)}; step, exp_avg and exp_avg_sq are needed"
                )
            if self._itemsize == 2 and "main_param" in entry:
                differ = int((entry["main_param"].to(p.device, p.dtype) != p).logical_and(~p.isnan()).sum())
                if differ:
                    raise ConfigError(
                        f"state_dict: {differ} of {p.numel()} masters of parameter {i} do not round to its values; load "
                        "the model before the optimizer, from the same checkpoint, or set master_weights to full"
                    )
        self._stale()
        for subgroup in self._pipeline.subgroups[_SPACE]:
            with self._pipeline.modify(_SPACE, subgroup) as view, self._work.edit(subgroup, view) as arrays:
                for segment in subgroup.segments:
                    _of(arrays["main_param"], segment).copy_(_part(self._params[segment.shard].detach(), segment))
                    for name in ("exp_avg", "exp_avg_sq", "main_param"):
                        target, source = _of(arrays[name], segment), entries[segment.shard].get(name)
                        if source is not None:
                            target.copy_(_part(source, segment))
                        elif name != "main_param":
                            target.zero_()
        for group, other in zip(self.param_groups, saved):
            group.update({k: v for k, v in other.items() if k != "params"})
        self._steps = [int(entry["step"]) if entry else 0 for entry in entries]
        self._versions = [p._version for p in self._params]

    def _flat_weights(self) -> "list[torch.Tensor]":
        devices = {p.device for p in self._params}
        if len(devices) > 1:
            raise ConfigError(
                f"OffloadedAdamW takes parameters on one device; these are on {sorted(map(str, devices))}"
            )
        for i, p in enumerate(self._params):
            if not p.is_contiguous():
                raise ConfigError(
                    f"parameter {i} of shape {tuple(p.shape)} has strides {p.stride()}; make it contiguous first"
                )
            if p.numel() != self._numels[i]:
                raise ConfigError(
                    f"parameter {i} has {p.numel()} elements now; its state has {self._numels[i]}: make a new optimizer"
                )
        return [p.detach().view(-1) for p in self._params]

    def _stale(self) -> "list[int]":
        """Parameters that other hands changed since the last step; those that were given other memory are followed."""
        moved = [i for i, p in enumerate(self._params) if p.data_ptr() != self._addresses[i]]
        if moved:  # p.data = ..., as in module.to() or vector_to_parameters
            weights = self._flat_weights()
            self._work.bind(weights)
            self._addresses = [weight.data_ptr() for weight in weights]
            for i in moved:
                self._versions[i] = -1
        return [i for i, p in enumerate(self._params) if p._version != self._versions[i]]

    def add_param_group(self, param_group: "dict[str, Any]") -> None:
        """Refused after construction: the state is laid out once, for all parameters."""
        if self._pipeline is not None:
            raise ConfigError(
                "OffloadedAdamW takes all parameters at construction; make a second one with another `name`"
            )
        super().add_param_group(param_group)

    def close(self) -> None:
        """Remove the state files and give the memory back. Also happens at exit; safe to call twice."""
        if hasattr(self, "_close"):
            self._close()
        else:
            _close(self._pipeline, self._kernel)


def _close(pipeline: "StepPipeline | None", kernel: AdamKernel) -> None:
    if pipeline is not None:
        pipeline.close()
    kernel.close()


def _flat_gradient(p: torch.Tensor) -> "torch.Tensor | None":
    if p.grad is None:
        return None
    if p.grad.layout != torch.strided:
        raise ConfigError(f"OffloadedAdamW takes dense gradients; one of shape {tuple(p.shape)} is {p.grad.layout}")
    return p.grad.detach().contiguous().view(-1)


def _part(tensor: torch.Tensor, segment: Segment) -> torch.Tensor:
    return tensor.reshape(-1)[segment.shard_offset : segment.shard_offset + segment.numel]


def _of(array: torch.Tensor, segment: Segment) -> torch.Tensor:
    return array[segment.offset : segment.offset + segment.numel]
