"""A GPT of a hundred thousand parameters on Megatron-Core alone: built, trained and hashed the same way every time."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import extras as extras_module
import torch
import torch.distributed as dist
from groups import destroy_groups
from megatron.core import dist_checkpointing, num_microbatches_calculator
from megatron.core import parallel_state as ps
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.rerun_state_machine import RerunDataIterator
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig

HIDDEN, SEQUENCE, VOCABULARY, MICRO_BATCH = 64, 32, 128, 2
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
TRAINABLE: "dict[str, Callable[[str], bool]]" = {
    "all": lambda name: True,
    "first stage": lambda name: ps.is_pipeline_first_stage(),
    "one bias": lambda name: name == "decoder.final_layernorm.bias",  # of 64 elements
    "no attention, no embedding": lambda name: "self_attention" not in name and "embedding" not in name,
}


@dataclass(frozen=True)
class Layout:
    """How the model is spread, in which precision it is trained, and what else happens in a step."""

    tp: int = 1
    sequence_parallel: bool = False
    pp: int = 1
    chunks: int = 1  # virtual pipeline stages a rank
    ep: int = 1
    experts: int = 0
    cp: int = 1
    cp_groups: int = 1  # the groups of context parallelism, around attention that knows nothing of them
    instances: int = 1  # of the distributed optimizer
    overlap: bool = False
    dtype: str = "bf16"
    fp32_main_grad: bool = True
    layers: int = 2
    tied: bool = False  # embedding and output layer share their weight
    trainable: str = "all"  # or a key of TRAINABLE
    norm_group: bool = False  # the output layer has a gradient norm of its own, where this Megatron-Core knows such
    tensor_norm: bool = False  # the gradient norm is a tensor, as with Transformer Engine
    micro_batches: "Sequence[int]" = (2,)  # of the steps, in turn
    scheduled: bool = False  # learning rate and weight decay change from step to step
    each_step: "Sequence[str]" = ()  # also done in each step: keys of extras.EXTRAS
    optimizer: "dict[str, Any]" = field(default_factory=dict)

    def initialize(self) -> None:
        """(Re)make Megatron's process groups."""
        ps.destroy_model_parallel()
        destroy_groups()
        ps.initialize_model_parallel(
            tensor_model_parallel_size=self.tp,
            pipeline_model_parallel_size=self.pp,
            virtual_pipeline_model_parallel_size=self.chunks if self.chunks > 1 else None,
            expert_model_parallel_size=self.ep,
            context_parallel_size=self.cp * self.cp_groups,
            num_distributed_optimizer_instances=self.instances,
            create_gloo_process_groups=True,
        )
        data_parallel = ps.get_data_parallel_world_size()
        num_microbatches_calculator.destroy_num_microbatches_calculator()
        num_microbatches_calculator.init_num_microbatches_calculator(
            0, None, MICRO_BATCH * self.micro_batches[0] * data_parallel, MICRO_BATCH, data_parallel
        )


class SequenceParallelNorm(torch.nn.LayerNorm):
    """What Megatron has only with Transformer Engine or Apex: its gradients are summed over tensor-parallel ranks."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: Any):
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = self.bias.sequence_parallel = True


@dataclass
class Step:
    """What a step returned: ``loss`` is the mean over the global batch, on every rank."""

    loss: float
    executed: bool
    grad_norm: "float | None"
    zeros: "int | None"
    extra: "dict[str, float]" = field(default_factory=dict)


class Training:
    """Model, optimizer and data; the same initial weights for the same layout.

    Args:
        factory: ``get_megatron_optimizer``, looked up by the caller.
    """

    def __init__(self, layout: Layout, factory: "Callable[..., Any]"):
        self.layout = layout
        torch.manual_seed(1234)
        model_parallel_cuda_manual_seed(1234, force_reset_rng=True)
        self.config = self._transformer_config()
        self.chunks = [
            self._wrap(self._gpt(stage if layout.chunks > 1 else None), stage) for stage in range(layout.chunks)
        ]
        self.model = self.chunks[0]
        # Clipping is active: the norm of this model's gradients is above 0.5 in every step.
        settings = {"clip_grad": 0.5, "log_num_zeros_in_grad": True, "lr": 1e-2, "weight_decay": 0.1} | layout.optimizer
        optimizer_config = OptimizerConfig(
            optimizer="adam",
            bf16=layout.dtype == "bf16",
            fp16=layout.dtype == "fp16",
            params_dtype=DTYPES[layout.dtype],
            use_distributed_optimizer=True,
            overlap_param_gather=layout.overlap,
            **settings,
        )
        self.optimizer = factory(optimizer_config, self.chunks)
        self.config.finalize_model_grads_func = finalize_model_grads
        self.config.grad_scale_func = self.optimizer.scale_loss
        if layout.overlap:
            self.config.no_sync_func = _single([chunk.no_sync for chunk in self.chunks])
            self.config.grad_sync_func = _single([chunk.start_grad_sync for chunk in self.chunks])
            if layout.chunks > 1:
                self.config.param_sync_func = [chunk.start_param_sync for chunk in self.chunks]
        self.scheduler = self._scheduler() if layout.scheduled else None

    def _transformer_config(self) -> TransformerConfig:
        layout, dtype = self.layout, DTYPES[self.layout.dtype]
        settings: "dict[str, Any]" = {}
        if layout.experts:
            settings = {
                "num_moe_experts": layout.experts,
                "moe_router_topk": 1,
                "moe_router_pre_softmax": True,
                # over tensor-parallel experts, alltoall gathers parts of different sizes, which gloo refuses
                "moe_token_dispatcher_type": "alltoall" if layout.tp == 1 else "allgather",
                "moe_ffn_hidden_size": 2 * HIDDEN,
                "add_bias_linear": False,
                "expert_model_parallel_size": layout.ep,
            }
        return TransformerConfig(
            num_layers=layout.layers,
            hidden_size=HIDDEN,
            num_attention_heads=4,
            ffn_hidden_size=4 * HIDDEN,
            use_cpu_initialization=True,
            params_dtype=dtype,
            pipeline_dtype=dtype,
            bf16=layout.dtype == "bf16",
            fp16=layout.dtype == "fp16",
            tensor_model_parallel_size=layout.tp,
            pipeline_model_parallel_size=layout.pp,
            virtual_pipeline_model_parallel_size=layout.chunks if layout.chunks > 1 else None,
            context_parallel_size=layout.cp,
            sequence_parallel=layout.sequence_parallel,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            bias_dropout_fusion=False,
            gradient_accumulation_fusion=False,
            masked_softmax_fusion=False,
            persist_layer_norm=False,
            apply_rope_fusion=False,
            **settings,
        )

    def _gpt(self, stage: "int | None") -> torch.nn.Module:
        place = {} if stage is None else {"ignore_virtual": False, "vp_stage": stage}
        model = GPTModel(
            config=self.config,
            transformer_layer_spec=self._layers(stage),
            vocab_size=VOCABULARY,
            max_sequence_length=SEQUENCE,
            pre_process=ps.is_pipeline_first_stage(**place),
            post_process=ps.is_pipeline_last_stage(**place),
            share_embeddings_and_output_weights=self.layout.tied,
            # rotary embeddings would be cut for attention over parts of the sequence
            position_embedding_type="rope" if self.layout.cp_groups == 1 else "learned_absolute",
            vp_stage=stage,
        )
        for name, param in model.named_parameters():
            param.requires_grad = TRAINABLE[self.layout.trainable](name)
            if self.layout.norm_group and name == "output_layer.weight":
                param.grad_norm_group = "mtp"
        return model

    def _layers(self, stage: "int | None") -> Any:
        layer = get_gpt_layer_local_spec(
            num_experts=self.layout.experts or None, moe_grouped_gemm=False, normalization="LayerNorm"
        )
        if not self.layout.sequence_parallel:
            return layer
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = SequenceParallelNorm
        count = get_num_layers_to_build(self.config, vp_stage=stage)
        return TransformerBlockSubmodules(layer_specs=[layer] * count, layer_norm=SequenceParallelNorm)

    def _wrap(self, model: torch.nn.Module, stage: int) -> DistributedDataParallel:
        if self.layout.dtype != "fp32":
            model = Float16Module(self.config, model)
        ddp_config = DistributedDataParallelConfig(
            use_distributed_optimizer=True,
            grad_reduce_in_fp32=self.layout.fp32_main_grad,
            overlap_grad_reduce=self.layout.overlap,
            overlap_param_gather=self.layout.overlap,
            bucket_size=20000 if self.layout.overlap else None,
            num_distributed_optimizer_instances=self.layout.instances,
        )
        settings = {}
        if "full_param_layout" in inspect.signature(DistributedDataParallel.__init__).parameters:
            settings["full_param_layout"] = DistributedOptimizer.compute_full_param_layout(
                [p for p in model.parameters() if p.requires_grad],
                ddp_config.bucket_size,
                ps.get_data_parallel_group(with_context_parallel=True, partial_data_parallel=True).size(),
                ddp_config,
                expert_data_parallel_world_size=ps.get_expert_data_parallel_group(
                    partial_expert_data_parallel=True
                ).size(),
            )
        return DistributedDataParallel(self.config, ddp_config, model, disable_bucketing=stage > 0, **settings)

    def _scheduler(self) -> OptimizerParamScheduler:
        return OptimizerParamScheduler(
            self.optimizer,
            **{"init_lr": 1e-3, "max_lr": 1e-2, "min_lr": 1e-4, "lr_warmup_steps": 2, "lr_decay_steps": 8},
            lr_decay_style="cosine",
            **{"start_wd": 0.02, "end_wd": 0.2, "wd_incr_steps": 5, "wd_incr_style": "linear"},
        )

    # ------------------------------------------------------------------------------------ training

    def step(self, number: int) -> Step:
        """Train on batch ``number``."""
        extras = [extras_module.EXTRAS[name] for name in self.layout.each_step]
        values: "dict[str, float]" = {}
        losses: "list[Any]" = []
        micro_batches = self.layout.micro_batches[number % len(self.layout.micro_batches)]
        run_forward_backward = extras_module.once
        for extra in extras:
            values |= extra.before(self) if extra.before else {}
            run_forward_backward = extra.forward_backward or run_forward_backward
        batches = [RerunDataIterator(_batches(number, micro_batches)) for _ in self.chunks]
        for _ in run_forward_backward(_single(batches)):
            for chunk in self.chunks:
                chunk.zero_grad_buffer()
            self.optimizer.zero_grad()
            losses = self.forward(batches, micro_batches, forward_only=False)
        executed, grad_norm, zeros = self.optimizer.step()
        if self.scheduler is not None and executed:
            self.scheduler.step(increment=1)
        for extra in extras:
            values |= extra.after(self) if extra.after else {}
        norm = None if grad_norm is None else float(grad_norm)
        return Step(self._mean(losses), bool(executed), norm, zeros, values)

    def forward(self, batches: "list[Any]", micro_batches: int, forward_only: bool) -> "list[dict[str, torch.Tensor]]":
        """Forward passes, and backward passes, over ``micro_batches``; the losses, on the last pipeline stage only."""
        return get_forward_backward_func()(
            forward_step_func=_forward,
            data_iterator=_single(batches),
            model=_single(self.chunks),
            num_microbatches=micro_batches,
            seq_length=SEQUENCE,
            micro_batch_size=MICRO_BATCH,
            forward_only=forward_only,
        )

    def evaluate(self) -> float:
        """The loss of a batch that is never trained on, as Megatron's training loop takes it between steps."""
        for chunk in self.chunks:
            chunk.eval()
            if self.layout.overlap:
                chunk.disable_forward_pre_hook()
        param_sync, self.config.param_sync_func = self.config.param_sync_func, None
        with torch.no_grad():
            batches = [RerunDataIterator(_batches(999, 2)) for _ in self.chunks]
            losses = self.forward(batches, 2, forward_only=True)
        self.config.param_sync_func = param_sync
        for chunk in self.chunks:
            chunk.train()
            if self.layout.overlap:
                chunk.enable_forward_pre_hook()
        return self._mean(losses)

    def _mean(self, losses: "list[dict[str, torch.Tensor]]") -> float:
        # Only the last pipeline stage knows the loss.
        total = torch.tensor([sum(entry["loss"].item() for entry in losses), float(len(losses))], dtype=torch.float64)
        dist.all_reduce(total)
        return (total[0] / total[1]).item()

    def weights_hash(self) -> str:
        """sha256 of all parameters of this rank, gathered first where the gather overlaps with the forward pass."""
        if self.layout.overlap:
            for chunk in self.chunks:
                chunk.disable_forward_pre_hook()
                chunk.enable_forward_pre_hook()
        return _hash(p.detach() for chunk in self.chunks for p in chunk.parameters())

    def state_hash(self) -> str:
        """sha256 of main_param, exp_avg and exp_avg_sq of every shard of this rank."""
        return _hash(
            tensors[key]
            for part in self.optimizer.chained_optimizers
            for ranges in _param_maps(part)
            for param in ranges
            for tensors in [part._get_main_param_and_optimizer_states(param)]
            for key in ("param", "exp_avg", "exp_avg_sq")
        )

    # ------------------------------------------------------------------------------------ checkpoints

    def save(self, directory: str, kind: str) -> None:
        """Write a torch_dist checkpoint with the optimizer state in format ``kind``."""
        if self.layout.overlap:
            self.model.disable_forward_pre_hook()
            self.model.enable_forward_pre_hook()
        dist_checkpointing.save(self._sharded_state_dict(kind, is_loading=False), directory)

    def save_in_background(self, directory: str, kind: str) -> Any:
        """As ``save``; gives the request that writes it."""
        settings = (
            {"async_strategy": "mcore"}
            if "async_strategy" in inspect.signature(dist_checkpointing.save).parameters
            else {}
        )
        state = self._sharded_state_dict(kind, is_loading=False)
        return dist_checkpointing.save(state, directory, async_sharded_save=True, **settings)

    def load(self, directory: str, kind: str) -> None:
        """Continue from what ``save`` wrote."""
        state = dist_checkpointing.load(self._sharded_state_dict(kind, is_loading=True), directory)
        self.model.load_state_dict(state["model"], strict=False)
        self.optimizer.load_state_dict(state["optimizer"])

    def _sharded_state_dict(self, kind: str, is_loading: bool) -> "dict[str, Any]":
        model = self.model.sharded_state_dict()
        metadata = {
            "distrib_optim_sharding_type": kind,
            "distrib_optim_fully_reshardable_mem_efficient": False,
            "chained_optim_avoid_prefix": True,
        }
        optimizer = self.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=metadata)
        return {"model": model, "optimizer": optimizer}


def _param_maps(part: DistributedOptimizer) -> "Iterator[dict[Any, Any]]":
    for dtypes in () if part.is_stub_optimizer else part.gbuf_ranges:
        for buckets in dtypes.values():
            for bucket in buckets:
                yield bucket["param_map"]


def _hash(tensors: "Iterator[torch.Tensor]") -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().contiguous().cpu().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _single(items: "list[Any]") -> Any:
    """As Megatron's schedules expect it: a list only where a rank has several model chunks."""
    return items[0] if len(items) == 1 else items


def _batches(number: int, micro_batches: int) -> "Iterator[torch.Tensor]":
    """Micro-batches of step ``number`` for this data-parallel rank; some of the vocabulary never occurs."""
    rank = ps.get_data_parallel_rank(with_context_parallel=True)
    generator = torch.Generator().manual_seed(1000 * number + rank)
    for _ in range(micro_batches):
        yield torch.randint(0, VOCABULARY - 16, (MICRO_BATCH, SEQUENCE + 1), generator=generator)


def _forward(batches: "Iterator[torch.Tensor]", model: torch.nn.Module):
    batch = next(batches)
    tokens, labels = batch[:, :-1].contiguous(), batch[:, 1:].contiguous()
    positions = torch.arange(SEQUENCE).unsqueeze(0).expand_as(tokens)
    mask = torch.tril(torch.ones(1, 1, SEQUENCE, SEQUENCE)) < 0.5
    output = model(tokens, positions, mask, labels=labels)

    def loss_of(output: torch.Tensor):
        loss = extras_module.validated(output.float().mean())
        return loss, {"loss": loss.detach().clone()}

    return output, loss_of
