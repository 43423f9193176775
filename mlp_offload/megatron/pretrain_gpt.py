"""Pre-train a GPT on ``megatron.training``: an entry point for people who have the megatron-core wheel only.

The same job as ``pretrain_gpt.py`` in Megatron-LM's source tree, with what pre-training needs: Megatron's indexed data
or ``--mock-data``, tensor, pipeline, data and expert parallelism, context parallelism with Transformer Engine. It knows
nothing of offload: ``mlp-offload run pretrain_gpt ...`` adds that, as it does for any other Megatron script.

Layers come from Transformer Engine where it is installed, else from Megatron's own (``--transformer-impl local``).
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.utils import get_attr_wrapped_model, get_batch_on_this_cp_rank, get_batch_on_this_tp_rank
from megatron.training import get_args, get_timers, pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage

BATCH_KEYS = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids")


def get_batch(batches: "Iterator[dict[str, torch.Tensor]] | None", vp_stage: "int | None") -> "dict[str, Any]":
    """The next micro-batch, on the device: (micro_batch_size, seq_length / CP) a key; None on middle pipeline stages.

    Tensor-parallel rank 0 reads it and broadcasts it to its group.
    """
    if not is_first_or_last_pipeline_stage(vp_stage):
        return dict.fromkeys(BATCH_KEYS)
    args = get_args()
    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    batch: "dict[str, Any]" = {}
    if tp_rank == 0:
        read = next(batches)
        batch = {key: None if read.get(key) is None else read[key].cuda(non_blocking=True) for key in BATCH_KEYS}
    batch = get_batch_on_this_tp_rank(
        batch,
        broadcast_src_rank=parallel_state.get_tensor_model_parallel_src_rank(),
        broadcast_group=parallel_state.get_tensor_model_parallel_group(),
        has_cu_seqlens=False,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        cp_size=args.context_parallel_size,
        tp_rank=tp_rank,
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=False,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=parallel_state.is_pipeline_first_stage(),
        is_pipeline_last_stage=parallel_state.is_pipeline_last_stage(),
    )
    if args.context_parallel_size > 1:
        group = parallel_state.get_context_parallel_group()
        batch = get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=group)
    return {key: batch.get(key) for key in BATCH_KEYS}


def loss_of(loss_mask: torch.Tensor, token_losses: torch.Tensor) -> "tuple[torch.Tensor, torch.Tensor, dict[str, Any]]":
    """The summed loss and the token count of a micro-batch, as Megatron's schedules expect them.

    Returns:
        loss: fp32 scalar, summed over the tokens that count.
        token count: int32 scalar.
        report: ``lm loss`` as (loss, token count), which Megatron sums over micro-batches and data-parallel ranks.
    """
    mask = loss_mask.view(-1).float()
    loss = torch.sum(token_losses.view(-1).float() * mask)
    token_count = mask.sum().detach().to(torch.int)
    if get_args().check_for_nan_in_loss_and_grad:
        for rejected, name in ((torch.isnan, "NaN"), (torch.isinf, "Inf")):
            get_rerun_state_machine().validate_result(
                result=loss,
                rejection_func=rejected,
                message=f"found {name} in the loss of a micro-batch",
                tolerance=0.0,
                fatal=True,
            )
    return loss, token_count, {"lm loss": torch.cat([loss.detach().view(1), token_count.view(1)])}


def forward_step(batches: Any, model: Any, return_schedule_plan: bool = False) -> "tuple[Any, Any]":
    """One forward pass of one micro-batch; the signature is Megatron's."""
    timer = get_timers()("batch-generator", log_level=2)
    timer.start()
    batch = get_batch(batches, get_attr_wrapped_model(model, "vp_stage"))
    timer.stop()
    forward = model.build_schedule_plan if return_schedule_plan else model
    output = forward(
        batch["tokens"],
        batch["position_ids"],
        batch["attention_mask"],
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],
    )
    return output, partial(loss_of, batch["loss_mask"])


def build_datasets(sample_counts: "list[int]", vp_stage: "int | None" = None) -> "tuple[Any, Any, Any]":
    """Training, validation and test data; None on ranks that read no batches."""
    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=build_tokenizer(args),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        context_parallel_size=args.context_parallel_size,
        data_parallel_size=args.data_parallel_size,
        sequence_parallel_size=args.tensor_model_parallel_size * args.sequence_parallel,
    )

    def reads_batches() -> bool:
        first_in_group = parallel_state.get_tensor_model_parallel_rank() == 0
        return first_in_group and is_first_or_last_pipeline_stage(vp_stage)

    dataset = MockGPTDataset if args.mock_data else GPTDataset
    return BlendedMegatronDatasetBuilder(dataset, sample_counts, reads_batches, config).build()


def _leave_out_what_is_not_installed(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Without Transformer Engine and Apex: Megatron's own layers, and no kernels that those bring."""
    if importlib.util.find_spec("transformer_engine") is None:
        parser.set_defaults(
            transformer_impl="local",
            gradient_accumulation_fusion=False,
            masked_softmax_fusion=False,
            no_persist_layer_norm=True,
            apply_rope_fusion=False,
        )
    return parser


def main() -> None:
    """Train as the command line says."""
    args = parse_and_validate_args(
        _leave_out_what_is_not_installed, args_defaults={"tokenizer_type": "GPT2BPETokenizer"}
    )
    model_config = gpt_config_from_args(args)
    build_datasets.is_distributed = True  # every rank calls it; it decides there who reads
    pretrain(
        pretrain_cfg_container_from_args(args, model_config),
        build_datasets,
        ModelType.encoder_or_decoder,
        forward_step,
    )


if __name__ == "__main__":
    main()
