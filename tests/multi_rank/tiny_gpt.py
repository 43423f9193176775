"""A GPT of a hundred thousand parameters on Megatron-Core alone: built, trained and hashed the same way every time."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
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
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

HIDDEN, SEQUENCE, VOCABULARY, MICRO_BATCH, MICRO_BATCHES = 64, 32, 128, 2, 2
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Layout:
    """How the model is spread and in which precision it is trained."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    experts: int = 0
    overlap: bool = False
    dtype: str = "bf16"
    fp32_main_grad: bool = True
    trainable: str = "all"  # or "first stage" of the pipeline, or "one bias": of 64 elements, of the final norm
    norm_group: bool = False  # the output layer has a gradient norm of its own, where this Megatron-Core knows such
    optimizer: "dict[str, Any]" = field(default_factory=dict)

    def initialize(self) -> None:
        """(Re)make Megatron's process groups."""
        ps.destroy_model_parallel()
        ps.initialize_model_parallel(
            tensor_model_parallel_size=self.tp,
            pipeline_model_parallel_size=self.pp,
            expert_model_parallel_size=self.ep,
            create_gloo_process_groups=True,
        )
        data_parallel = ps.get_data_parallel_world_size()
        num_microbatches_calculator.destroy_num_microbatches_calculator()
        num_microbatches_calculator.init_num_microbatches_calculator(
            0, None, MICRO_BATCH * MICRO_BATCHES * data_parallel, MICRO_BATCH, data_parallel
        )


@dataclass
class Step:
    """What a step returned: ``loss`` is the mean over the global batch, on every rank."""

    loss: float
    executed: bool
    grad_norm: "float | None"
    zeros: "int | None"


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
        self.model = self._wrap(self._gpt())
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
        self.optimizer = factory(optimizer_config, [self.model])
        self.config.finalize_model_grads_func = finalize_model_grads
        self.config.grad_scale_func = self.optimizer.scale_loss
        if layout.overlap:
            self.config.no_sync_func = self.model.no_sync
            self.config.grad_sync_func = self.model.start_grad_sync

    def _transformer_config(self) -> TransformerConfig:
        layout, dtype = self.layout, DTYPES[self.layout.dtype]
        settings: "dict[str, Any]" = {}
        if layout.experts:
            settings = {
                "num_moe_experts": layout.experts,
                "moe_router_topk": 1,
                "moe_router_pre_softmax": True,
                "moe_token_dispatcher_type": "alltoall",
                "moe_ffn_hidden_size": 2 * HIDDEN,
                "add_bias_linear": False,
                "expert_model_parallel_size": layout.ep,
            }
        return TransformerConfig(
            num_layers=2,
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
            hidden_dropout=0.0,
            attention_dropout=0.0,
            bias_dropout_fusion=False,
            gradient_accumulation_fusion=False,
            masked_softmax_fusion=False,
            persist_layer_norm=False,
            apply_rope_fusion=False,
            **settings,
        )

    def _gpt(self) -> torch.nn.Module:
        model = GPTModel(
            config=self.config,
            transformer_layer_spec=get_gpt_layer_local_spec(
                num_experts=self.layout.experts or None, moe_grouped_gemm=False, normalization="LayerNorm"
            ),
            vocab_size=VOCABULARY,
            max_sequence_length=SEQUENCE,
            pre_process=ps.is_pipeline_first_stage(),
            post_process=ps.is_pipeline_last_stage(),
            share_embeddings_and_output_weights=False,
            position_embedding_type="rope",
        )
        for name, param in model.named_parameters():
            if self.layout.trainable == "first stage":
                param.requires_grad = ps.is_pipeline_first_stage()
            elif self.layout.trainable == "one bias":
                param.requires_grad = name == "decoder.final_layernorm.bias"
            if self.layout.norm_group and name == "output_layer.weight":
                param.grad_norm_group = "mtp"
        return model

    def _wrap(self, model: torch.nn.Module) -> DistributedDataParallel:
        if self.layout.dtype != "fp32":
            model = Float16Module(self.config, model)
        ddp_config = DistributedDataParallelConfig(
            use_distributed_optimizer=True,
            grad_reduce_in_fp32=self.layout.fp32_main_grad,
            overlap_grad_reduce=self.layout.overlap,
            overlap_param_gather=self.layout.overlap,
            bucket_size=20000 if self.layout.overlap else None,
        )
        settings = {}
        if "full_param_layout" in inspect.signature(DistributedDataParallel.__init__).parameters:
            settings["full_param_layout"] = DistributedOptimizer.compute_full_param_layout(
                [p for p in model.parameters() if p.requires_grad],
                ddp_config.bucket_size,
                ps.get_data_parallel_world_size(with_context_parallel=True),
                ddp_config,
                expert_data_parallel_world_size=ps.get_expert_data_parallel_world_size(),
            )
        return DistributedDataParallel(self.config, ddp_config, model, **settings)

    # ------------------------------------------------------------------------------------ training

    def step(self, number: int) -> Step:
        """Train on batch ``number``."""
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        losses = get_forward_backward_func()(
            forward_step_func=_forward,
            data_iterator=_batches(number),
            model=[self.model],
            num_microbatches=MICRO_BATCHES,
            seq_length=SEQUENCE,
            micro_batch_size=MICRO_BATCH,
            forward_only=False,
        )
        executed, grad_norm, zeros = self.optimizer.step()
        # Only the last pipeline stage knows the loss.
        total = torch.tensor([sum(entry["loss"].item() for entry in losses), float(len(losses))], dtype=torch.float64)
        dist.all_reduce(total)
        loss = (total[0] / total[1]).item()
        return Step(loss, bool(executed), None if grad_norm is None else float(grad_norm), zeros)

    def weights_hash(self) -> str:
        """sha256 of all parameters of this rank, gathered first where the gather overlaps with the forward pass."""
        if self.layout.overlap:
            self.model.disable_forward_pre_hook()
            self.model.enable_forward_pre_hook()
        return _hash(p.detach() for p in self.model.parameters())

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


def _batches(number: int) -> "Iterator[torch.Tensor]":
    """Micro-batches of step ``number`` for this data-parallel rank; some of the vocabulary never occurs."""
    generator = torch.Generator().manual_seed(1000 * number + ps.get_data_parallel_rank())
    for _ in range(MICRO_BATCHES):
        yield torch.randint(0, VOCABULARY - 16, (MICRO_BATCH, SEQUENCE + 1), generator=generator)


def _forward(batches: "Iterator[torch.Tensor]", model: torch.nn.Module):
    batch = next(batches)
    tokens, labels = batch[:, :-1].contiguous(), batch[:, 1:].contiguous()
    positions = torch.arange(SEQUENCE).unsqueeze(0).expand_as(tokens)
    mask = torch.tril(torch.ones(1, 1, SEQUENCE, SEQUENCE)) < 0.5
    output = model(tokens, positions, mask, labels=labels)

    def loss_of(output: torch.Tensor):
        loss = output.float().mean()
        return loss, {"loss": loss.detach().clone()}

    return output, loss_of
