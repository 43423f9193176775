"""The flags of a Megatron command line that decide what fits: read without Megatron, as Megatron means them."""

from __future__ import annotations

import argparse
import ast
import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from .. import flags as options
from ..config import OffloadConfig
from ..errors import ConfigError
from .model import Layout, Model, check
from .refusals import RULES, validate

_NOT_UNDERSTOOD = (
    *("--attention-output-gate", "--encoder-num-layers", "--experimental-attention-variant"),
    *("--heterogeneous-layers-config-path", "--heterogeneous-layers-config-encoded-json", "--hybrid-layer-pattern"),
    *("--hybrid-override-pattern", "--moe-latent-size", "--moe-shared-expert-gate", "--mtp-num-layers"),
    *("--multi-latent-attention", "--num-distributed-optimizer-instances"),
    *("--pipeline-model-parallel-layout", "--spec", "--tensor-parallel-num-weight-shards", "--use-checkpoint-args"),
    "--yaml-cfg",
)
"""Flags that change how many parameters there are, or where, in a way that this reader does not know."""

_FLAG = re.compile(r"--[a-z]")


@dataclass(frozen=True)
class Training:
    """What decides how many bytes a parameter and a token take.

    Attributes:
        dtype: "bf16", "fp16" or "fp32".
        fp32_main_grad: gradients are accumulated and reduced in fp32.
        flash_attention: the scores of attention are never whole in memory.
        recompute: "none", "selective" or "full".
        recompute_method, recompute_layers: of "full"; "uniform" or "block".
        recompute_modules: of "selective".
        cpu_initialization: weights are made in host memory first.
        async_save: checkpoints are written while training goes on.
        save_interval, iterations: between two checkpoints, and of the whole training; 0 = not told.
    """

    micro_batch_size: int
    global_batch_size: int
    dtype: str = "fp32"
    fp32_main_grad: bool = True
    flash_attention: bool = True
    recompute: str = "none"
    recompute_method: str = "uniform"
    recompute_layers: int = 1
    recompute_modules: "tuple[str, ...]" = ("core_attn",)
    distribute_saved_activations: bool = False
    hidden_dropout: bool = True
    cpu_initialization: bool = False
    async_save: bool = False
    save_interval: int = 0
    iterations: int = 0

    @property
    def weight_bytes(self) -> int:
        return 4 if self.dtype == "fp32" else 2

    @property
    def gradient_bytes(self) -> int:
        return 4 if self.fp32_main_grad or self.dtype == "fp32" else 2


@dataclass(frozen=True)
class Job:
    """One training as its command line says it.

    Attributes:
        offload: the options of mlp_offload; None where the command line does not switch offload on.
        used, unused: flags that this reader went by, and those that it does not know (they change nothing here).
    """

    model: Model
    layout: Layout
    training: Training
    offload: "OffloadConfig | None" = None
    used: "tuple[str, ...]" = ()
    unused: "tuple[str, ...]" = ()

    def replace(self, **changes: object) -> "Job":
        return replace(self, **changes)  # type: ignore[arg-type]


class _Refusing(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        raise ConfigError(f"the Megatron flags: {message}")


def read_flags(arguments: Sequence[str]) -> Job:
    """A job from the flags of a Megatron command line; the last of several alike wins, as in Megatron.

    Raises:
        ConfigError: a needed flag is missing, a value is bad or sizes do not divide, or a flag changes the model in a way that
            is not understood here; names it.
    """
    for flag in arguments:
        if flag.partition("=")[0] in _NOT_UNDERSTOOD:
            raise ConfigError(f"{flag}: plan does not know what this changes, so it would count wrongly")
    parser = _parser()
    args, rest = parser.parse_known_args(list(arguments))
    given = [a.partition("=")[0] for a in arguments if _FLAG.match(a)]
    known = parser._option_string_actions  # no public way to ask
    unused = [flag for flag in given if flag not in known]
    for flag in unused:
        if flag.startswith("--mlp-offload-"):
            close = difflib.get_close_matches(flag, known, n=1)
            raise ConfigError(f"{flag}: no such flag{f'; did you mean {close[0]}?' if close else ''}")
        close = difflib.get_close_matches(flag, known, n=1, cutoff=0.93)
        if close:
            raise ConfigError(f"{flag}: no flag that plan knows; did you mean {close[0]}?")
    for value in rest:
        if not _FLAG.match(value) and not unused:
            raise ConfigError(f"{value!r} is neither a flag nor the value of one")
    if not args.use_distributed_optimizer:
        raise ConfigError(
            "--use-distributed-optimizer is missing: without it nothing of the state is sharded or offloaded"
        )
    validate(args)
    if args.vocab_size is None and args.padded_vocab_size is None:
        raise ConfigError(
            "--vocab-size is missing: Megatron would ask the tokenizer, and plan reads none; add --vocab-size with its size"
        )
    job = Job(_model(args), _layout(args), _training(args), _offload(args))
    check(job.model, job.layout)
    return job.replace(
        used=tuple(dict.fromkeys(flag for flag in given if flag in known)), unused=tuple(dict.fromkeys(unused))
    )


def _parser() -> argparse.ArgumentParser:
    parser = _Refusing(prog="", add_help=False, allow_abbrev=False)
    for flag in (*("--num-layers", "--hidden-size", "--num-attention-heads", "--seq-length", "--micro-batch-size"),):
        parser.add_argument(flag, type=_count, required=True)
    for flag in (
        *("--ffn-hidden-size", "--kv-channels", "--num-query-groups", "--max-position-embeddings"),
        *(
            "--vocab-size",
            "--padded-vocab-size",
            "--num-experts",
            "--moe-ffn-hidden-size",
            "--moe-shared-expert-intermediate-size",
        ),
        *("--expert-tensor-parallel-size", "--num-layers-per-virtual-pipeline-stage", "--global-batch-size"),
        *("--num-virtual-stages-per-pipeline-rank", "--decoder-first-pipeline-num-layers"),
        *("--decoder-last-pipeline-num-layers", "--recompute-num-layers", "--train-iters", "--train-samples"),
        "--save-interval",
    ):
        parser.add_argument(flag, type=_count)
    for flag, default in (
        *(("--make-vocab-size-divisible-by", 128), ("--tensor-model-parallel-size", 1)),
        *(("--pipeline-model-parallel-size", 1), ("--context-parallel-size", 1), ("--expert-model-parallel-size", 1)),
        ("--moe-router-topk", 2),
    ):
        parser.add_argument(flag, type=_count, default=default)
    for flag in (
        *("--group-query-attention", "--swiglu", "--quick-geglu", "--disable-bias-linear", "--add-qkv-bias"),
        *("--qk-layernorm", "--untie-embeddings-and-output-weights", "--sequence-parallel", "--bf16", "--fp16"),
        *("--use-distributed-optimizer", "--grad-reduce-in-bf16", "--accumulate-allreduce-grads-in-fp32"),
        *("--recompute-activations", "--distribute-saved-activations", "--use-cpu-initialization", "--async-save"),
        *("--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split"),
        *("--use-flash-attn", "--no-position-embedding", "--use-rotary-position-embeddings"),
    ):
        parser.add_argument(flag, action="store_true")
    for rule in RULES:  # what is refused has to be known
        flag = f"--{rule.option.replace('_', '-')}"
        if rule.refused is bool and flag not in parser._option_string_actions:
            parser.add_argument(flag, action="store_true")
    parser.add_argument("--optimizer", default="adam")
    parser.add_argument("--non-persistent-ckpt-type")
    parser.add_argument("--position-embedding-type", default="learned_absolute")
    parser.add_argument("--normalization", default="LayerNorm", choices=("LayerNorm", "RMSNorm"))
    parser.add_argument("--transformer-impl", default="transformer_engine")
    parser.add_argument("--recompute-granularity", choices=("full", "selective"))
    parser.add_argument("--recompute-method", default="uniform", choices=("uniform", "block"))
    parser.add_argument("--recompute-modules", nargs="*")
    parser.add_argument("--hidden-dropout", type=float, default=0.1)
    parser.add_argument("--moe-layer-freq", default="1")
    return options.add_arguments(parser)


def _count(text: str) -> int:
    try:
        if int(text) >= 1:
            return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"invalid int value: {text!r}") from None
    raise argparse.ArgumentTypeError(f"{text} must be at least 1")


def _model(args: argparse.Namespace) -> Model:
    gated = args.swiglu or args.quick_geglu
    ffn = args.ffn_hidden_size
    if ffn is None:  # as Megatron chooses it
        ffn = int(args.hidden_size * 8 / 3) // 64 * 64 if args.swiglu else 4 * args.hidden_size
    if args.kv_channels is None and args.hidden_size % args.num_attention_heads:
        raise ConfigError(
            f"--hidden-size {args.hidden_size} is not divisible by --num-attention-heads {args.num_attention_heads}"
        )
    learned = args.position_embedding_type == "learned_absolute" and not args.use_rotary_position_embeddings
    if learned and not args.no_position_embedding and args.max_position_embeddings is None:
        raise ConfigError("--max-position-embeddings is missing (positions are learned)")
    groups = args.num_attention_heads
    if args.group_query_attention:
        groups = args.num_query_groups or groups
    padded = args.padded_vocab_size
    return Model(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        ffn_hidden_size=ffn,
        num_attention_heads=args.num_attention_heads,
        num_query_groups=groups,
        kv_channels=args.kv_channels or args.hidden_size // args.num_attention_heads,
        vocab_size=padded or args.vocab_size,
        seq_length=args.seq_length,
        make_vocab_size_divisible_by=1 if padded else args.make_vocab_size_divisible_by,
        learned_positions=args.max_position_embeddings if learned and not args.no_position_embedding else 0,
        norm_numel=1 if args.normalization == "RMSNorm" else 2,
        gated=gated,
        linear_bias=not args.disable_bias_linear,
        qkv_bias=args.add_qkv_bias,
        qk_layernorm=args.qk_layernorm,
        tied=not args.untie_embeddings_and_output_weights,
        num_experts=args.num_experts or 0,
        moe_ffn_hidden_size=args.moe_ffn_hidden_size or ffn,
        moe_shared_ffn_hidden_size=args.moe_shared_expert_intermediate_size or 0,
        moe_router_topk=args.moe_router_topk,
        moe_layers=_moe_layers(args.moe_layer_freq, args.num_layers) if args.num_experts else (),
    )


def _moe_layers(frequency: str, num_layers: int) -> "tuple[bool, ...]":
    """Which layers have experts: every n-th from layer 0 on, or a list like ``([0]*1+[1]*23)``."""
    try:
        if frequency.strip().isdigit():
            return tuple(layer % int(frequency) == 0 for layer in range(num_layers))
        tree = ast.parse(frequency, mode="eval").body
        pattern = [bool(value) for value in _pattern(tree)]
    except (SyntaxError, ValueError, ZeroDivisionError) as error:
        raise ConfigError(
            f"--moe-layer-freq {frequency!r}: neither a number nor a list like ([0]*1+[1]*23): {error}"
        ) from error
    if len(pattern) != num_layers:
        raise ConfigError(f"--moe-layer-freq {frequency!r} is for {len(pattern)} layers, not --num-layers {num_layers}")
    return tuple(pattern)


def _pattern(node: ast.AST) -> "list[int]":
    """The list that an expression of lists, + and * makes; nothing else is evaluated."""
    if isinstance(node, ast.List):
        return [ast.literal_eval(element) for element in node.elts]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _pattern(node.left) + _pattern(node.right)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        return _pattern(node.left) * int(ast.literal_eval(node.right))
    raise ValueError("only lists, + and * are understood")


def _layout(args: argparse.Namespace) -> Layout:
    pp, chunks = args.pipeline_model_parallel_size, args.num_virtual_stages_per_pipeline_rank or 1
    if args.num_layers_per_virtual_pipeline_stage:
        layers = (
            args.num_layers + args.account_for_embedding_in_pipeline_split + args.account_for_loss_in_pipeline_split
        )
        each = args.num_layers_per_virtual_pipeline_stage * pp
        if layers % each:
            raise ConfigError(
                f"--num-layers-per-virtual-pipeline-stage {each // pp} does not divide the layers of a stage"
            )
        chunks = layers // each
    return Layout(
        tp=args.tensor_model_parallel_size,
        pp=pp,
        cp=args.context_parallel_size,
        ep=args.expert_model_parallel_size,
        etp=args.expert_tensor_parallel_size or args.tensor_model_parallel_size,
        chunks=chunks if pp > 1 else 1,
        sequence_parallel=args.sequence_parallel and args.tensor_model_parallel_size > 1,
        first_layers=args.decoder_first_pipeline_num_layers,
        last_layers=args.decoder_last_pipeline_num_layers,
        embedding_counts=args.account_for_embedding_in_pipeline_split,
        loss_counts=args.account_for_loss_in_pipeline_split,
    )


def _training(args: argparse.Namespace) -> Training:
    if args.bf16 and args.fp16:
        raise ConfigError("--bf16 and --fp16 exclude each other")
    dtype = "bf16" if args.bf16 else "fp16" if args.fp16 else "fp32"
    recompute = "selective" if args.recompute_activations else args.recompute_granularity or "none"
    # Megatron turns fp32 on with bf16, unless it is told otherwise, and leaves it off with fp16.
    fp32 = args.accumulate_allreduce_grads_in_fp32 or (dtype != "fp16" and not args.grad_reduce_in_bf16)
    return Training(
        micro_batch_size=args.micro_batch_size,
        global_batch_size=args.global_batch_size or 0,
        dtype=dtype,
        fp32_main_grad=fp32 and not (dtype == "bf16" and args.grad_reduce_in_bf16),
        flash_attention=args.transformer_impl != "local" or args.use_flash_attn,
        recompute=recompute,
        recompute_method=args.recompute_method,
        recompute_layers=args.recompute_num_layers or 1,
        recompute_modules=tuple(args.recompute_modules or ("core_attn",)),
        distribute_saved_activations=args.distribute_saved_activations,
        hidden_dropout=args.hidden_dropout > 0,
        cpu_initialization=args.use_cpu_initialization,
        async_save=args.async_save,
        save_interval=args.save_interval or 0,
        iterations=args.train_iters or (args.train_samples or 0) // (args.global_batch_size or args.micro_batch_size),
    )


def _offload(args: argparse.Namespace) -> "OffloadConfig | None":
    """The options of mlp_offload; paths may come from elsewhere, so none is needed here."""
    if args.optimizer_offload == "none":
        return None
    if args.optimizer_offload != "mlp":
        raise ConfigError(f"--optimizer-offload {args.optimizer_offload!r}: must be none or mlp")
    if not args.mlp_offload_path:
        args.mlp_offload_path = ["."]
        return options.from_arguments(args).replace(paths=())
    return options.from_arguments(args)
