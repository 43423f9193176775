"""Megatron's distributed optimizer with its fp32 state on the tiers of a ``StepPipeline``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.optimizer import distrib_optimizer
from megatron.core.optimizer import optimizer as stock_module
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from ..adam.kernel import AdamKernel, adam_scalars, check_adam_options
from ..checkpoint.pieces import StoredPiece
from ..errors import ConfigError, SelfCheckError
from ..pipeline import StateView, StepPipeline
from ..plan.subgroups import Subgroup
from ..telemetry import StepRecord
from ..updates import AdamWork
from . import dp_reshardable, fully_reshardable
from .gradients import any_non_finite, norm_inputs
from .moments import Moments
from .self_check import PRECISION_AWARE, megatron_version
from .shard_states import ShardStates
from .shards import Shard, collect_shards
from .streaming import errors_on_all_ranks


class Inner(torch.optim.Optimizer):
    """Stands where Megatron expects the torch optimizer: it owns ``param_groups``, its step is the owner's."""

    def __init__(self, stock: torch.optim.Optimizer, step: "Callable[[], None]"):
        super().__init__([torch.zeros(1)], stock.defaults)
        # Assigned, as stock does: shards are views of the model, which add_param_group would refuse.
        self.param_groups = stock.param_groups
        self._step = step

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the state and the model's weights from the gradients that are ready."""
        self._step()


class MLPDistributedOptimizer(DistributedOptimizer):
    """Steps like ``DistributedOptimizer`` with AdamW, bit for bit, but holds no fp32 state in (GPU) memory.

    It takes stock's path for an optimizer that keeps its own masters ([Note: precision-aware path]), so stock never
    allocates fp32 weights and leaves the gradients where DDP reduced them. Build it with
    ``install.build_offloaded_optimizer``, which also calls ``start``.

    Attributes:
        shards: the parts of parameters that this rank owns.
        last_record: what the pipeline did in the last executed step; None before it.
    """

    # [Note: precision-aware path] An attribute that OptimizerConfig derives, not a field of it: set here it selects the
    # code path without the option (which would ask for Transformer Engine). self_check proves that it is still read.

    @classmethod
    def _build_model_and_main_param_groups(cls, gbuf_ranges, param_gbuf_map, opt_group_ranges, config):
        setattr(config, PRECISION_AWARE, True)
        return super()._build_model_and_main_param_groups(gbuf_ranges, param_gbuf_map, opt_group_ranges, config)

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.shards: "tuple[Shard, ...]" = ()
        self._index_of_view: "dict[int, int]" = {}
        self._inverse_scale: "torch.Tensor | None" = None
        self._clip_coefficients: "list[float]" = []
        self._hooks_called: "set[str]" = set()
        self._pipeline: "StepPipeline | None" = None
        self._states: "ShardStates | None" = None
        self._work: "AdamWork | None" = None
        self._loading = False  # while true, shards are staged and then written by subgroup, once each
        self.last_record: "StepRecord | None" = None
        if self.is_stub_optimizer:
            return
        for group in self.optimizer.param_groups:
            # lr is None where OptimizerConfig has none: it must be in the groups by the first step
            options = {name: value for name, value in group.items() if name != "params" and value is not None}
            check_adam_options(**options)
        self.optimizer = Inner(self.optimizer, self._step_state)
        self.shards = collect_shards(self)
        self._index_of_view = {id(shard.view): index for index, shard in enumerate(self.shards)}
        self._clip_coefficients = [1.0] * len(self.shards)
        self._index_of_param = {shard.model_param: index for index, shard in enumerate(self.shards)}

    # ------------------------------------------------------------------------------------ state

    def start(self, pipeline: StepPipeline, space: str, kernel: AdamKernel, resources: Any) -> None:
        """Let the state live in ``space`` of ``pipeline``; its shards are ``self.shards``, in order.

        Args:
            resources: owns pipeline and kernel; closed by ``close``, kept alive by this optimizer.
        """
        self._pipeline, self._space, self._resources = pipeline, space, resources
        largest = max(pipeline.subgroups[space], key=lambda subgroup: subgroup.numel)
        weights = [shard.weight for shard in self.shards]
        # Stock has no copy of fp32 weights, and Megatron does not tell it when it loads them without optimizer state.
        self._work = AdamWork(
            kernel, weights, largest.numel, largest.main_itemsize, fp32_masters=True, gpu=pipeline.tiers.device
        )
        self._states = ShardStates(pipeline, space, self._work)
        self.optimizer.state = Moments(
            self.shards, self._states, lambda index: self.step_count > 0 or index in self._states.replaced
        )

    def fill(self, subgroup: Subgroup, view: StateView) -> None:
        """Write the first ``main_param`` of a subgroup: the model's weights, widened."""
        self._work.load_weights(subgroup, view)

    def close(self) -> None:
        """Give back memory, threads and scratch files of all parts built together; safe to call twice.

        It happens by itself when the process ends.
        """
        if self._pipeline is not None:
            self._resources.close()

    @property
    def pipeline(self) -> "StepPipeline | None":
        """Where the state lives, shared by all parts built together; None before ``start`` and without shards."""
        return self._pipeline

    @property
    def states(self) -> "ShardStates | None":
        """The state for checkpoints; None without shards."""
        return self._states

    @property
    def step_count(self) -> int:
        """Executed steps, t of Adam; it lives in ``param_groups``, where Megatron saves and synchronizes it."""
        return max((int(group.get("step") or 0) for group in self.param_groups), default=0)

    # ------------------------------------------------------------------------------------ gradients

    def _copy_model_grads_to_main_grads(self):
        super()._copy_model_grads_to_main_grads()  # attaches views, copies nothing
        self._inverse_scale = None
        self._clip_coefficients = [1.0] * len(self.shards)
        self._hooks_called = {"_copy_model_grads_to_main_grads"}

    def _unscale_main_grads_and_check_for_nan(self):
        """Whether a gradient of any rank is inf or nan. The gradients stay scaled; the Adam kernel unscales."""
        self._hooks_called.add("_unscale_main_grads_and_check_for_nan")
        self._inverse_scale = self.grad_scaler.inv_scale
        self.found_inf.fill_(0.0)
        any_non_finite((s.gradient for s in self.shards if s.gradient is not None), self.found_inf)
        torch.distributed.all_reduce(
            self.found_inf, op=torch.distributed.ReduceOp.MAX, group=self.get_grad_stats_parallel_group()
        )
        return self.found_inf.item() > 0

    def get_main_grads_for_grad_norm(self):  # up to Megatron-Core 0.18
        self._hooks_called.add("grads_for_grad_norm")
        return norm_inputs(super().get_main_grads_for_grad_norm(), self._inverse_scale)

    def get_grads_for_grad_norm(self, *args: Any, **kwargs: Any):  # from 0.19
        self._hooks_called.add("grads_for_grad_norm")
        return norm_inputs(super().get_grads_for_grad_norm(*args, **kwargs), self._inverse_scale)

    def owns(self, view: torch.Tensor) -> bool:
        """Whether ``view`` is one of this optimizer's shards."""
        return id(view) in self._index_of_view

    def remember_clip(self, views: "Sequence[torch.Tensor]", coefficient: float) -> None:
        """Called in place of scaling the gradients of ``views``: the Adam kernel multiplies by ``coefficient``."""
        self._hooks_called.add("clip_grad_by_total_norm_fp32")
        for view in views:
            self._clip_coefficients[self._index_of_view[id(view)]] = coefficient

    # ------------------------------------------------------------------------------------ step

    def _step_state(self) -> None:
        if not self.shards:  # more ranks than parameters: a step without work
            self._count_step()
            return
        if self._pipeline is None:
            raise SelfCheckError(
                "the offloaded optimizer was stepped before start(); build it with get_megatron_optimizer"
            )
        self._check_hooks()
        step = self.step_count + 1
        inverse_scale = 1.0 if self._inverse_scale is None else self._inverse_scale.item()
        rows: "dict[tuple[int, float], int]" = {}
        row_of_shard = [
            rows.setdefault((shard.group, coefficient), len(rows))
            for shard, coefficient in zip(self.shards, self._clip_coefficients)
        ]
        scalars = []
        for group_index, coefficient in rows:
            group = self.param_groups[group_index]
            scalars.append(
                adam_scalars(
                    lr=group["lr"],
                    betas=group["betas"],
                    eps=group["eps"],
                    weight_decay=group["weight_decay"],
                    step=step,
                    inverse_scale=inverse_scale,
                    clip_coefficient=coefficient,
                )
            )
        self._states.forget()
        self._work.begin([shard.gradient for shard in self.shards], scalars, row_of_shard)
        self.last_record = self._pipeline.step(self._space, self._work)
        self._work.end()
        self._count_step()

    def _count_step(self) -> None:
        step = self.step_count + 1
        for group in self.param_groups:
            group["step"] = step

    def _check_hooks(self) -> None:
        """At every step, before a weight changes: was everything called that stock's own code replaces?

        Raises:
            SelfCheckError: names what was not called.
        """
        needed = {"_copy_model_grads_to_main_grads"}
        if self.grad_scaler:
            needed.add("_unscale_main_grads_and_check_for_nan")
        if self.config.clip_grad > 0.0:
            needed |= {"grads_for_grad_norm", "clip_grad_by_total_norm_fp32"} if self.shards else set()
        missing = sorted(needed - self._hooks_called)
        self._hooks_called = set()
        if missing:
            raise SelfCheckError(
                f"for step {self.step_count + 1}, Megatron-Core {megatron_version()} did not call {', '.join(missing)} of the "
                "offloaded optimizer, so its numbers would differ from stock's; no weight was changed by it. Use a supported "
                "version (0.16.1 to 0.19.2) or --optimizer-offload none"
            )

    def offload_to_cpu(self) -> None:
        """Nothing to do: no state is in GPU memory, and the inner parameters are views of the model."""

    def restore_from_cpu(self) -> None:
        """Nothing to do, see ``offload_to_cpu``."""

    @contextlib.contextmanager
    def main_params_for_norm(self) -> "Iterator[None]":
        """While it lasts, model parameters show what ``calc_params_l2_norm`` looks for: the norms of bf16 shards' masters.

        One shard at a time is read from the tiers. [Note: norm of norms] in ``gradients``: with Megatron-Core's own
        reduction a norm stands for its tensor without a change of bits; the kernels of Transformer Engine and Apex reduce
        whole tensors in another order, so the last bits may differ from stock's there.
        """
        shown = [
            (index, shard)
            for index, shard in enumerate(self.shards)
            if self._states is not None and shard.weight.dtype == torch.bfloat16
        ]
        for index, shard in shown:
            main_param = self._states.read(index)["param"].to(shard.weight.device)
            shard.model_param.main_param = torch.norm(main_param)
        if shown:
            self._states.forget()
        try:
            yield
        finally:
            for _, shard in shown:
                shard.model_param.main_param = None

    # ------------------------------------------------------------------------------------ checkpoints

    def _get_main_param_and_optimizer_states(self, model_param):
        return self._states.read(self._index_of_param[model_param])

    def _set_main_param_and_optimizer_states(self, model_param, tensors):
        index = self._index_of_param[model_param]
        self._states.stage(index, tensors, self.shards[index].numel)
        if not self._loading:
            self._states.flush()

    def sharded_state_dict(self, *args: Any, **kwargs: Any):
        try:
            return super().sharded_state_dict(*args, **kwargs)
        finally:
            if self._states is not None:
                self._states.forget()

    def sharded_param_state_fully_reshardable(self, model_sharded_state_dict, is_loading=False, metadata=None):
        return fully_reshardable.sharded_pieces(
            self.shards, self._states, model_sharded_state_dict, self.distributed_optimizer_instance_id, is_loading
        )

    def sharded_param_state_dp_reshardable(self, model_sharded_state_dict, is_loading=False, metadata=None):
        return dp_reshardable.sharded_buckets(self, is_loading)

    def state_dict(self) -> "dict[str, Any]":
        """Param groups with ``step``, and the grad scaler: the keys that stock with a fused Adam saves.

        ``bias_correction`` is what FusedAdam of Transformer Engine and Apex reads in every group; where this process has
        neither, its groups came from torch's AdamW, which has no such key. And only there is ``step`` needed before the
        first step: with FusedAdam, Megatron compares the steps of chained optimizers that have one.
        """
        counted = self.step_count > 0 or not distrib_optimizer.HAVE_APEX_OR_TE
        step = {"step": self.step_count} if counted else {}
        groups = [
            {"bias_correction": True, **{key: value for key, value in group.items() if key != "params"}} | step
            for group in self.param_groups
        ]
        state_dict: "dict[str, Any]" = {"optimizer": {"param_groups": groups}}
        if self.grad_scaler:
            state_dict["grad_scaler"] = self.grad_scaler.state_dict()
        return state_dict

    def load_state_dict(self, state_dict: "dict[str, Any]") -> None:
        """Load what ``state_dict`` or stock's saved; groups are matched by what they mean, not by their order.

        Up to Megatron-Core 0.16 the groups of ``--decoupled-lr`` mean the same; those are matched by their order.

        Raises:
            ConfigError: a param group, or a shard's state, is not in the checkpoint.
        """
        groups = state_dict["optimizer"]["param_groups"]
        saved: "dict[tuple[Any, ...], list[dict[str, Any]]]" = {}
        # Parameters of experts are told apart only where they are spread, with an expert-parallel size above 1.
        elsewhere: "dict[tuple[Any, ...], dict[str, Any]]" = {}
        for group in groups:
            saved.setdefault(_identity(group), []).append(group)
            elsewhere[_identity(group, ("is_expert_parallel",))] = group
        steps = {int(group["step"]) for group in groups if group.get("step") is not None}
        if len(steps) > 1:
            raise ConfigError(
                f"checkpoint: param groups are at different steps {sorted(steps)}; load with --no-load-optim"
            )
        for group in self.param_groups:
            alike = saved.get(_identity(group), [])
            found = alike[0] if alike else elsewhere.get(_identity(group, ("is_expert_parallel",)))
            if found is None:
                raise ConfigError(
                    f"checkpoint: no param group with {_identity(group)} (of {_identity_keys()}); it has "
                    f"{list(saved)}. Use the options of the saved run or load with --no-load-optim"
                )
            if len(alike) > 1:
                alike.pop(0)
            kept = {"params": group["params"], "is_expert_parallel": group.get("is_expert_parallel", False)}
            group.update(found | kept)
            if steps:
                group["step"] = max(steps)
            else:
                group.pop("step", None)
        if self.grad_scaler and "grad_scaler" in state_dict:
            self.grad_scaler.load_state_dict(state_dict["grad_scaler"])
        if "param_state_sharding_type" in state_dict and not self.is_stub_optimizer:
            self._load_param_state(state_dict.get("param_state"), state_dict["param_state_sharding_type"])

    def _load_param_state(self, param_state: Any, sharding_type: str) -> None:
        if sharding_type in ("dp_reshardable", "fully_reshardable"):
            with errors_on_all_ranks(self.data_parallel_group):
                self._load_pieces(param_state or {})
        elif sharding_type == "dp_zero_gather_scatter":
            self._loading = True
            try:
                self.load_parameter_state_from_dp_zero(param_state)
                if self._states is not None:  # this rank owns shards
                    self._states.flush()
            finally:
                self._loading = False
        else:
            raise ConfigError(
                f"checkpoint: the optimizer's state is in format {sharding_type!r}, which is not one of dp_reshardable, "
                "fully_reshardable and dp_zero_gather_scatter"
            )

    def _load_pieces(self, param_state: "dict[str, Any]") -> None:
        dp_reshardable.check_sizes(self, param_state)
        pieces = list(nested_values(param_state))
        stored = [piece for piece in pieces if isinstance(piece, StoredPiece)]
        if self._states is not None:
            self._states.load(stored)
        for tensors in {id(piece.tensors): piece.tensors for piece in stored}.values():
            tensors.close()

    def load_parameter_state_from_dp_zero_legacy(self, state_dict):
        raise ConfigError(
            "checkpoint: --ckpt-convert-update-legacy-dist-opt-format does not work with offload; convert the "
            "checkpoint once with --optimizer-offload none"
        )

    def _copy_model_params_to_main_params(self, state_dict: "dict[str, Any] | None" = None) -> None:
        """Set every ``main_param`` from the model's weights, or from ``state_dict``'s, which may be more precise."""
        if not self.shards:
            return
        whole = {shard.model_param: shard.model_param for shard in self.shards}
        if state_dict is not None:
            whole = self._build_model_param_to_state_dict_param_map(state_dict)
        self._states.set_main_params([shard.slice_of(whole[shard.model_param]) for shard in self.shards])


def _identity_keys() -> "tuple[str, ...]":
    return tuple(stock_module.param_group_identifier_keys)


def _identity(group: "dict[str, Any]", without: "tuple[str, ...]" = ()) -> "tuple[Any, ...]":
    """What a param group is matched by; NeMo prefixes some keys with ``pre_``."""
    return tuple(group.get(key, group.get(f"pre_{key}")) for key in _identity_keys() if key not in without)
