"""What offload does not go together with, refused in one sentence: by `plan`, and before training starts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ..errors import ConfigError


class Rule(NamedTuple):
    """An option of Megatron, by its name in the parsed arguments and in the config dataclasses alike."""

    option: str
    refused: "Callable[[Any], bool]"
    reason: str


RULES = (
    Rule(
        "use_distributed_optimizer",
        lambda on: not on,
        "needs the distributed optimizer: add --use-distributed-optimizer",
    ),
    Rule("optimizer", lambda name: name != "adam", "computes AdamW only: set --optimizer adam"),
    Rule(
        "decoupled_weight_decay",
        lambda on: not on,
        "computes AdamW only: set decoupled_weight_decay to True",
    ),
    Rule(
        "use_precision_aware_optimizer",
        bool,
        "keeps fp32 state itself: remove --use-precision-aware-optimizer",
    ),
    Rule(
        "optimizer_cpu_offload",
        bool,
        "and Megatron's own offload exclude each other: remove --optimizer-cpu-offload",
    ),
    Rule("fp8_param_gather", bool, "writes 16-bit or fp32 weights only: remove --fp8-param-gather"),
    Rule("fp4_param_gather", bool, "writes 16-bit or fp32 weights only: remove --fp4-param-gather"),
    Rule(
        "reuse_grad_buf_for_mxfp8_param_ag",
        bool,
        "writes 16-bit or fp32 weights only: remove --reuse-grad-buf-for-mxfp8-param-ag",
    ),
    Rule("use_megatron_fsdp", bool, "does not work with Megatron FSDP: remove --use-megatron-fsdp"),
    Rule("use_torch_fsdp2", bool, "does not work with torch FSDP2: remove --use-torch-fsdp2"),
    Rule("use_custom_fsdp", bool, "does not work with FSDP: remove --use-custom-fsdp"),
    Rule("optimizer_cuda_graph", bool, "steps on the host, outside any CUDA graph: remove --optimizer-cuda-graph"),
    Rule(
        "use_layer_wise_distributed_optimizer",
        bool,
        "does not work with the layer-wise optimizer: remove --use-layer-wise-distributed-optimizer",
    ),
    Rule(
        "overlap_param_gather_with_optimizer_step",
        bool,
        "updates all chunks before it gathers: remove --overlap-param-gather-with-optimizer-step "
        "(--overlap-param-gather works)",
    ),
    Rule(
        "non_persistent_ckpt_type",
        lambda kind: kind not in (None, "global"),
        "saves and loads its state through torch_dist only: remove --non-persistent-ckpt-type, or set it to global",
    ),
    Rule("qk_clip", bool, "holds no fp32 weights in memory to clip after the step: remove --qk-clip"),
)


def validate(*sources: Any) -> None:
    """Check every option that a source has: parsed arguments, or the config of optimizer, DDP or model; others are skipped.

    Raises:
        ConfigError: names the first option that offload does not go together with, and what to change.
    """
    for source in sources:
        for rule in RULES:
            if hasattr(source, rule.option) and rule.refused(getattr(source, rule.option)):
                value = getattr(source, rule.option)
                raise ConfigError(f"--optimizer-offload mlp with {rule.option}={value}: offload {rule.reason}")
