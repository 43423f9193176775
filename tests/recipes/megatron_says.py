"""Run in a process of its own: what Megatron makes of command lines, as JSON lines.

Each request is {"flags": [...], "world_size": n, "build": bool}. Megatron's own parser and validation read the flags; with
``build`` the model of every pipeline stage is made, on groups that exist by name only, its parameters are counted, and so are the
bytes that live at the worst moment while Megatron moves its weights into the buffers of data parallelism.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from typing import Any

REPORTED = (
    *("data_parallel_size", "padded_vocab_size", "ffn_hidden_size", "num_layers", "tensor_model_parallel_size"),
    *("pipeline_model_parallel_size", "accumulate_allreduce_grads_in_fp32", "sequence_parallel", "optimizer_offload"),
)


def main() -> None:
    requests = json.load(sys.stdin)
    with contextlib.redirect_stdout(sys.stderr):
        answers = answer(requests)
    print(json.dumps(answers))


def answer(requests: "list[dict[str, Any]]") -> "list[dict[str, Any]]":
    import torch

    from mlp_offload.megatron import cpu_device, wheel_gaps
    from mlp_offload.megatron.launcher import prepare_megatron

    os.environ |= {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "RANK": "0", "LOCAL_RANK": "0"}
    groups = {name: getattr(torch.distributed, name) for name in ("init_process_group", "new_group")}
    cpu_device.activate()
    for name, function in groups.items():  # gloo would look for the other ranks, which there are none of
        setattr(torch.distributed, name, function)
    prepare_megatron(allow_no_cuda=True)
    wheel_gaps.fill()
    import megatron.training.arguments as arguments
    from megatron.core.tokenizers.utils.build_tokenizer import vocab_size_with_padding
    from megatron.training.training import num_floating_point_operations

    answers = []
    for request in requests:
        os.environ["WORLD_SIZE"] = str(request["world_size"])
        sys.argv = ["pretrain_gpt", *request["flags"]]
        args = arguments.parse_args()
        arguments.validate_args(args, {})
        args.padded_vocab_size = vocab_size_with_padding(args.vocab_size, args)
        told = {name: getattr(args, name) for name in REPORTED}
        told["flops"] = num_floating_point_operations(args, args.global_batch_size)
        if request["build"]:
            stages = [build(args, stage) for stage in range(args.pipeline_model_parallel_size)]
            told["stages"], told["startup_bytes"] = [s[0] for s in stages], [s[1] for s in stages]
        answers.append(told)
    return answers


def build(args: Any, stage: int) -> "tuple[list[int], int]":
    """([parameters of all data-parallel ranks, parameters of experts], bytes at start-up) of one rank of a pipeline stage."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.training.arguments import core_transformer_config_from_args
    from torch.testing._internal.distributed.fake_pg import FakeStore

    rank = stage * args.world_size // args.pipeline_model_parallel_size
    torch.distributed.init_process_group("fake", rank=rank, world_size=args.world_size, store=FakeStore())
    try:
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=args.tensor_model_parallel_size,
            pipeline_model_parallel_size=args.pipeline_model_parallel_size,
            virtual_pipeline_model_parallel_size=args.virtual_pipeline_model_parallel_size,
            expert_model_parallel_size=args.expert_model_parallel_size,
            expert_tensor_parallel_size=args.expert_tensor_parallel_size,
            create_gloo_process_groups=False,
        )
        model_parallel_cuda_manual_seed(1)
        config = core_transformer_config_from_args(args)
        chunks = args.virtual_pipeline_model_parallel_size or 1
        totals, models = [0, 0], []
        for chunk in range(chunks):
            vp_stage = chunk if chunks > 1 else None
            model = GPTModel(
                config,
                get_gpt_decoder_block_spec(config, use_transformer_engine=False, vp_stage=vp_stage),
                args.padded_vocab_size,
                args.max_position_embeddings,
                pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
                post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
                share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
                position_embedding_type=args.position_embedding_type,
                vp_stage=vp_stage,
            )
            for parameter in model.parameters():
                totals[not getattr(parameter, "allreduce", True)] += parameter.numel()
            models.append(model)
        return totals, startup_bytes(args, models)
    finally:
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()


def startup_bytes(args: Any, models: "list[Any]") -> int:
    """The most bytes of weights and buffers that live at once while the models are wrapped for data parallelism."""
    import torch
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=args.accumulate_allreduce_grads_in_fp32, use_distributed_optimizer=True
    )
    buffers: "list[torch.Tensor]" = []
    most, torch_zeros = 0, torch.zeros

    def zeros(*size: Any, **settings: Any) -> torch.Tensor:
        nonlocal most
        made = torch_zeros(*size, **settings)
        buffers.append(made)
        tensors = [*buffers, *(parameter.data for model in models for parameter in model.parameters())]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        most = max(most, sum(storages.values()))
        return made

    torch.zeros = zeros
    try:
        wrapped = [DistributedDataParallel(model.config, config, model) for model in models]
    finally:
        torch.zeros = torch_zeros
    ends = {buffer.untyped_storage().data_ptr() for buffer in buffers}
    assert all(p.untyped_storage().data_ptr() in ends for model in wrapped for p in model.parameters())
    return most


if __name__ == "__main__":
    main()
