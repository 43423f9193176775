"""Activations of a GPT on one GPU: an estimate, by the counting of Korthikanti et al. (arXiv 2205.05198), table 2.

There, a layer of the original GPT keeps ``s b h (10 + 24/t + 5 a s / (h t))`` bytes; here the same terms are added up one by
one, for gated MLPs, grouped queries, experts and attention that never holds its scores. What the allocator wastes, and what
kernels need for a moment, is not in it.
"""

from __future__ import annotations

from .megatron_flags import Training
from .model import Layout, Model, Stage

FORMULA = "Korthikanti et al. 2022 (arXiv 2205.05198), table 2, term by term"


def activation_bytes(model: Model, layout: Layout, training: Training, stage: Stage, micro_batches: int) -> int:
    """Bytes that a stage holds at its worst moment, with the micro-batches that it has in flight.

    Args:
        micro_batches: of one iteration and data-parallel rank.
    """
    tokens = model.seq_length // layout.cp * training.micro_batch_size
    item = training.weight_bytes
    split = layout.tp if layout.sequence_parallel else 1
    in_flight = _in_flight(layout, stage.index, micro_batches)
    kept_split = layout.tp if training.distribute_saved_activations else split
    checkpoint = tokens * model.hidden_size * item / kept_split
    moe = sum(model.is_moe(layer) for layer in stage.layers)
    count = len(stage.layers)
    whole = layer_bytes(model, layout, training, moe=bool(moe))
    mean = (layer_bytes(model, layout, training, moe=False) * (count - moe) + whole * moe) / count if count else 0.0
    if training.recompute == "full":
        each = training.recompute_layers
        if training.recompute_method == "uniform":  # every `each` layers one input is kept, and `each` layers come back
            total = -(-count // each) * checkpoint * in_flight + each * whole
        else:  # the first `each` layers of a virtual stage are recomputed, the others kept
            again = min(count, each * layout.chunks)
            total = (again * checkpoint + (count - again) * mean) * in_flight + (whole if again else 0)
    else:
        total = count * mean * in_flight
    if stage.index == 0:
        total += tokens * (8 + (model.hidden_size / split if training.hidden_dropout else 0)) * in_flight
    if stage.index == layout.pp - 1:
        # Input of the output layer; logits in the weights' type, their softmax in fp32, and its gradient.
        vocabulary = model.padded_vocab_size(layout.tp) / layout.tp
        total += tokens * (2 * model.hidden_size * item / split + vocabulary * (item + 4 + 4))
    return round(total)


def layer_bytes(model: Model, layout: Layout, training: Training, moe: bool) -> float:
    """Bytes that one layer keeps of one micro-batch for its backward pass, without full recomputation."""
    tokens = model.seq_length // layout.cp * training.micro_batch_size
    item, hidden = training.weight_bytes, model.hidden_size
    split = layout.tp if layout.sequence_parallel else 1
    selective = training.recompute_modules if training.recompute == "selective" else ()
    # Inputs of the two norms and of what follows each; masks of the two dropouts.
    norms = 2 if "layernorm" in selective else 4
    whole = hidden * norms * item + (2 * hidden if training.hidden_dropout else 0)
    # Q, K, V and the input of the projection.
    parted = item * (2 * model.query_size + 2 * model.key_size) / layout.tp
    ffn = model.ffn_hidden_size
    if moe:
        ffn = model.moe_router_topk * model.moe_ffn_hidden_size + model.moe_shared_ffn_hidden_size
        whole += 2 * item * hidden * model.moe_router_topk  # tokens on their way to experts and back
    if ("moe" if moe else "mlp") not in selective:
        parted += item * ffn * (3 if model.gated else 2) / layout.tp
    scores = 0.0
    if not training.flash_attention and "core_attn" not in selective:
        scores = (2 * item + 1) * model.num_attention_heads * model.seq_length / layout.tp
    return tokens * (whole / split + parted + scores)


def _in_flight(layout: Layout, stage: int, micro_batches: int) -> float:
    """Micro-batches whose activations a stage holds at once, counted in all of its layers (1F1B)."""
    if layout.pp == 1:
        return 1.0
    if layout.chunks == 1:
        return float(min(layout.pp - stage, micro_batches))
    # Interleaved: the first stage holds 1 + (p - 1) / (p v) times what it would without.
    chunks_held = (layout.pp - stage - 1) * 2 + (layout.chunks - 1) * layout.pp + 1
    return min(chunks_held, micro_batches * layout.chunks) / layout.chunks


def stages_to_look_at(model: Model, layout: Layout) -> "tuple[int, ...]":
    """The stages among which is the one that needs most: without experts those in the middle are alike, and the earlier holds more."""
    last = layout.pp - 1
    return tuple(range(layout.pp)) if model.moe_layers else tuple(sorted({0, min(1, last), last}))
