"""A GPT as Megatron-Core builds it: how many parameters each pipeline stage of it puts on a rank, exactly."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from ..errors import ConfigError


@dataclass(frozen=True)
class Model:
    """The shape of a GPT; the names are Megatron's.

    Attributes:
        vocab_size: tokens, before padding to ``make_vocab_size_divisible_by`` times TP.
        learned_positions: rows of the table of learned positions; 0 without one.
        norm_numel: parameters of a norm per element: 1 = RMSNorm, 2 = LayerNorm.
        gated: the MLP has a gate (SwiGLU), so its first matrix is twice as large.
        moe_layers: for each layer, whether its MLP is one of experts; empty without experts.
    """

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    vocab_size: int
    seq_length: int
    make_vocab_size_divisible_by: int = 128
    learned_positions: int = 0
    norm_numel: int = 2
    gated: bool = False
    linear_bias: bool = True
    qkv_bias: bool = False
    qk_layernorm: bool = False
    tied: bool = True
    num_experts: int = 0
    moe_ffn_hidden_size: int = 0
    moe_shared_ffn_hidden_size: int = 0
    moe_router_topk: int = 2
    moe_layers: "tuple[bool, ...]" = ()

    @property
    def query_size(self) -> int:
        return self.kv_channels * self.num_attention_heads

    @property
    def key_size(self) -> int:
        return self.kv_channels * self.num_query_groups

    def padded_vocab_size(self, tp: int) -> int:
        """Rows of the embedding, as Megatron pads it."""
        multiple = self.make_vocab_size_divisible_by * tp
        return -(-self.vocab_size // multiple) * multiple

    def is_moe(self, layer: int) -> bool:
        return bool(self.moe_layers) and self.moe_layers[layer]


@dataclass(frozen=True)
class Layout:
    """How the model is cut; DP follows from the number of GPUs.

    Attributes:
        chunks: virtual pipeline stages a rank.
        first_layers, last_layers: layers of the first and last stage where they differ from the others; None = as the others.
        loss_counts, embedding_counts: the output layer (the embedding) counts as a layer when layers are dealt out.
    """

    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    chunks: int = 1
    sequence_parallel: bool = False
    first_layers: "int | None" = None
    last_layers: "int | None" = None
    embedding_counts: bool = False
    loss_counts: bool = False

    @property
    def model_parallel(self) -> int:
        """GPUs that hold one copy of the model, with its sequence cut by CP."""
        return self.tp * self.pp * self.cp


@dataclass(frozen=True)
class Stage:
    """What one pipeline stage puts on one rank.

    Attributes:
        layers: indices of its layers.
        chunks: of each virtual stage (dense, expert) parameters.
    """

    index: int
    layers: "tuple[int, ...]"
    chunks: "tuple[tuple[int, int], ...]"

    @property
    def dense_numel(self) -> int:
        """Parameters that all data-parallel ranks hold alike, sharded among DP x CP by the optimizer."""
        return sum(dense for dense, _ in self.chunks)

    @property
    def expert_numel(self) -> int:
        """Parameters of experts, sharded among the ranks that hold the same experts."""
        return sum(expert for _, expert in self.chunks)

    @property
    def numel(self) -> int:
        return self.dense_numel + self.expert_numel


def check(model: Model, layout: Layout) -> None:
    """Refuse what Megatron would refuse.

    Raises:
        ConfigError: names the sizes that do not divide.
    """
    if model.hidden_size < 1 or model.num_layers < 1 or model.vocab_size < 1:
        raise ConfigError("--num-layers, --hidden-size and --vocab-size must be above 0")
    for size, name in (
        (model.num_attention_heads, "--num-attention-heads"),
        (model.ffn_hidden_size, "--ffn-hidden-size"),
        (model.hidden_size if layout.sequence_parallel else layout.tp, "--hidden-size"),
    ):
        if size % layout.tp:
            raise ConfigError(f"{name} {size} is not divisible by --tensor-model-parallel-size {layout.tp}")
    if model.num_attention_heads % model.num_query_groups:
        raise ConfigError(
            f"--num-attention-heads {model.num_attention_heads} is not divisible by --num-query-groups {model.num_query_groups}"
        )
    if model.num_query_groups % layout.tp and layout.tp % model.num_query_groups:
        raise ConfigError(
            f"--num-query-groups {model.num_query_groups} and --tensor-model-parallel-size {layout.tp} do not divide each other"
        )
    if model.num_experts % layout.ep:
        raise ConfigError(
            f"--num-experts {model.num_experts} is not divisible by --expert-model-parallel-size {layout.ep}"
        )
    for stage in range(min(layout.pp, 2)):
        layers_of_chunk(model.num_layers, layout, stage)


def layers_of_chunk(num_layers: int, layout: Layout, stage: int, chunk: int = 0) -> int:
    """How many layers one virtual stage of a pipeline stage has.

    Raises:
        ConfigError: the layers cannot be dealt out evenly.
    """
    rest, stages = num_layers + layout.embedding_counts + layout.loss_counts, layout.pp
    for given in (layout.first_layers, layout.last_layers):
        if given is not None:
            rest, stages = rest - given, stages - 1
    if rest < 0 or (stages > 0 and rest % stages):
        raise ConfigError(
            f"--num-layers {num_layers}: {rest} layers cannot be dealt out evenly among {stages} of "
            f"{layout.pp} pipeline stages (--pipeline-model-parallel-size)"
        )
    count = rest // stages if stages > 0 else 0
    first, last = stage == 0, stage == layout.pp - 1
    if first and layout.first_layers is not None:
        count = layout.first_layers
    if last and layout.last_layers is not None:
        count = layout.last_layers
    if count % layout.chunks:
        raise ConfigError(f"{count} layers of a pipeline stage are not divisible by its {layout.chunks} virtual stages")
    takes_first = layout.embedding_counts and first and chunk == 0
    takes_last = layout.loss_counts and last and chunk == layout.chunks - 1
    return count // layout.chunks - takes_first - takes_last


@functools.lru_cache(maxsize=4096)
def stage_of(model: Model, layout: Layout, index: int) -> Stage:
    """The parameters of one pipeline stage on one of its tensor-parallel ranks."""
    embedding = model.padded_vocab_size(layout.tp) // layout.tp * model.hidden_size
    runs = _layers(model, layout, index)
    chunks = []
    for chunk, layers in enumerate(runs):
        moe = sum(model.is_moe(layer) for layer in layers)
        dense = len(layers) * _attention(model, layout.tp) + (len(layers) - moe) * _dense_mlp(model, layout.tp)
        dense += moe * _router_and_shared(model, layout.tp)
        expert = moe * (model.num_experts // layout.ep) * _mlp(model, model.moe_ffn_hidden_size, layout.etp)
        if index == 0 and chunk == 0:
            dense += embedding + model.learned_positions * model.hidden_size
        if index == layout.pp - 1 and chunk == layout.chunks - 1:
            dense += model.norm_numel * model.hidden_size
            dense += 0 if model.tied and layout.pp == 1 else embedding  # a tied last stage has a copy of the embedding
        chunks.append((dense, expert))
    return Stage(index, tuple(layer for layers in runs for layer in layers), tuple(chunks))


def total_numel(model: Model, layout: Layout) -> int:
    """Parameters of the whole model, each counted once, with the padding of the vocabulary."""
    dense = model.num_layers * _attention(model, 1)
    for layer in range(model.num_layers):
        if model.is_moe(layer):
            dense += _router_and_shared(model, 1) + model.num_experts * _mlp(model, model.moe_ffn_hidden_size, 1)
        else:
            dense += _dense_mlp(model, 1)
    embedding = model.padded_vocab_size(layout.tp) * model.hidden_size
    return (
        dense + embedding * (1 if model.tied else 2) + (model.learned_positions + model.norm_numel) * model.hidden_size
    )


def matrix_numel_a_token(model: Model, layout: Layout) -> int:
    """Parameters of the matrices that one token is multiplied with: what compute grows with."""
    attention = model.hidden_size * (2 * model.query_size + 2 * model.key_size)
    each = 3 if model.gated else 2
    total = 0
    for layer in range(model.num_layers):
        ffn = model.ffn_hidden_size
        if model.is_moe(layer):
            ffn = model.moe_router_topk * model.moe_ffn_hidden_size + model.moe_shared_ffn_hidden_size
            total += model.hidden_size * model.num_experts
        total += attention + each * model.hidden_size * ffn
    return total + model.padded_vocab_size(layout.tp) * model.hidden_size


# ------------------------------------------------------------------------------------------ helpers


def _layers(model: Model, layout: Layout, index: int) -> "list[range]":
    """Indices of a stage's layers, a run for each of its virtual stages; runs are dealt out in rounds over all stages."""
    runs = []
    begin = 0
    for chunk in range(layout.chunks):
        for stage in range(layout.pp):
            count = layers_of_chunk(model.num_layers, layout, stage, chunk)
            if stage == index:
                runs.append(range(begin, begin + count))
            begin += count
    return runs


def _attention(model: Model, tp: int) -> int:
    """Two norms, QKV, projection."""
    qkv = model.query_size + 2 * model.key_size
    numel = qkv // tp * model.hidden_size + model.query_size // tp * model.hidden_size
    if model.linear_bias or model.qkv_bias:
        numel += qkv // tp
    if model.linear_bias:
        numel += model.hidden_size
    if model.qk_layernorm:
        numel += 2 * model.norm_numel * model.kv_channels
    return numel + 2 * model.norm_numel * model.hidden_size


def _mlp(model: Model, ffn: int, tp: int) -> int:
    gates = 2 if model.gated else 1
    numel = (gates + 1) * model.hidden_size * (ffn // tp)
    return numel + (gates * (ffn // tp) + model.hidden_size if model.linear_bias else 0)


def _dense_mlp(model: Model, tp: int) -> int:
    return _mlp(model, model.ffn_hidden_size, tp)


def _router_and_shared(model: Model, tp: int) -> int:
    router = model.num_experts * (model.hidden_size + (1 if model.linear_bias else 0))
    shared = _mlp(model, model.moe_shared_ffn_hidden_size, tp) if model.moe_shared_ffn_hidden_size else 0
    return router + shared
