"""What is compared with stock, by number of processes: each group is one launch."""

from __future__ import annotations

from typing import Any

DYNAMIC = {"initial_loss_scale": 2.0**24, "hysteresis": 1}  # overflows fp16 a few times, then settles
RISING = {"initial_loss_scale": 2.0**10, "loss_scale_window": 2}  # doubles at every second step
CONSTANT = {"loss_scale": 1000.0}  # no power of two: unscaling rounds


def _compare(
    steps: int = 5,
    offload: "dict[str, Any] | None" = None,
    needs: str = "",
    stock_may_fail: bool = False,
    **layout: Any,
) -> "dict[str, Any]":
    """``needs``: what must be there, or the comparison means nothing: a package, or "module:name" of Megatron."""
    return {
        "kind": "compare",
        "steps": steps,
        "layout": layout,
        "offload": offload or {},
        "needs": needs,
        "stock_may_fail": stock_may_fail,
    }


def _resume(
    saved_by: str, loaded_by: str, format: str, before: int = 3, after: int = 2, change: bool = False, **layout: Any
) -> "dict[str, Any]":
    """``change``: after loading, learning rate and weight decay are set anew."""
    ways = {"saved_by": saved_by, "loaded_by": loaded_by, "format": format}
    return {"kind": "resume", **ways, "before": before, "after": after, "change": change, "layout": layout}


def _reload(from_state_dict: bool, **layout: Any) -> "dict[str, Any]":
    return {"kind": "reload", "from_state_dict": from_state_dict, "layout": layout}


def _touched(master_weights: str, **layout: Any) -> "dict[str, Any]":
    return {"kind": "touched", "layout": layout, "offload": {"master_weights": master_weights}}


def _unhooked(function: str) -> "dict[str, Any]":
    return {"kind": "unhooked", "function": function, "layout": {"dtype": "fp16", "optimizer": CONSTANT}}


HOOKS = (
    "_copy_model_grads_to_main_grads",
    "_unscale_main_grads_and_check_for_nan",
    "grads_for_grad_norm",
    "clip_grad_by_total_norm_fp32",
)
_FP16 = {"dtype": "fp16"}
_SCHEDULED = {"scheduled": True, "optimizer": {"decoupled_lr": 5e-3, "decoupled_min_lr": 1e-3, "min_lr": 1e-4}}
_TENSOR_NORM = "megatron.core.optimizer.clip_grads:multi_tensor_scale_tensor_impl"
_NORM_GROUP = "megatron.core.optimizer.optimizer:SEPARATE_GRAD_NORM_GROUPS"
_NORM_SKIP = "megatron.core.optimizer:OptimizerConfig.grad_norm_skip_threshold"
_PARAMS_NORM = {"each_step": ["params norm"], "needs": "megatron.training.utils:calc_params_l2_norm"}
_INTERLEAVED = {"pp": 2, "chunks": 2, "layers": 4, "micro_batches": [4, 2]}
_EXPERTS = {"ep": 2, "experts": 4}
LAYOUTS: "dict[int, dict[str, dict[str, Any]]]" = {
    1: {
        "bf16": _compare(),
        "bf16, full masters": _compare(offload={"master_weights": "full"}),
        "bf16, bf16 main_grad": _compare(fp32_main_grad=False),
        "bf16, bf16 main_grad, loss scale 1000": _compare(fp32_main_grad=False, optimizer=CONSTANT),
        "fp32": _compare(dtype="fp32"),
        "fp16, overflow": _compare(16, **_FP16, fp32_main_grad=False, optimizer=DYNAMIC),
        "fp16, fp32 main_grad, overflow": _compare(16, **_FP16, optimizer=DYNAMIC),
        "fp16, loss scale 1000": _compare(**_FP16, fp32_main_grad=False, optimizer=CONSTANT),
        "fp16, fp32 main_grad, loss scale 1000": _compare(**_FP16, optimizer=CONSTANT),
        "no clipping": _compare(optimizer={"clip_grad": 0.0}),
        "two norm groups": _compare(norm_group=True, needs=_NORM_GROUP),
        "norm as a tensor": _compare(tensor_norm=True, needs=_TENSOR_NORM),
        "norm as a tensor, fp16, loss scale 1000": _compare(
            tensor_norm=True, needs=_TENSOR_NORM, **_FP16, fp32_main_grad=False, optimizer=CONSTANT
        ),
        "steps with a large norm are left out": _compare(
            12, needs=_NORM_SKIP, optimizer={"grad_norm_skip_threshold": 2.0}
        ),
        "micro-batches 1, 3, 2 in turn": _compare(micro_batches=[1, 3, 2]),
        "decoupled learning rate, schedules": _compare(**_SCHEDULED),
        "tied embeddings": _compare(tied=True),
        "frozen parameters": _compare(trainable="no attention, no embedding"),
        "evaluation between steps": _compare(each_step=["evaluate"]),
        "every pass twice (rerun)": _compare(each_step=["rerun"]),
        "offload_to_cpu and restore_from_cpu": _compare(each_step=["offload and restore"]),
        "params norm": _compare(**_PARAMS_NORM),
        "reload": _reload(from_state_dict=False),
        "reload from state_dict": _reload(from_state_dict=True),
        "reload, one subgroup": _reload(from_state_dict=False, trainable="one bias"),
        "groups of FusedAdam": {"kind": "fused_adam", "layout": _SCHEDULED},
        "state of other weights, full": {"kind": "set_state", "layout": {}, "offload": {"master_weights": "full"}},
        "state of other weights, fp32": {"kind": "set_state", "layout": {"dtype": "fp32"}},
        "two at once": {"kind": "two", "layout": {}},
        "moments by hand": {"kind": "moments", "layout": {"optimizer": {"lr": None}}},
        "touched, remainder": _touched("remainder"),
        "touched, full": _touched("full"),
        "touched, fp32": _touched("remainder", dtype="fp32"),
        **{f"unhooked {function}": _unhooked(function) for function in HOOKS},
    },
    2: {
        "DP2": _compare(),
        "DP2, overlapped": _compare(overlap=True),
        "DP2, bf16 main_grad, overlapped": _compare(overlap=True, fp32_main_grad=False),
        "DP2, fp16, overflow": _compare(16, **_FP16, fp32_main_grad=False, optimizer=DYNAMIC),
        "DP2, overlapped, evaluation, rerun, offload_to_cpu": _compare(
            overlap=True, each_step=["evaluate", "rerun", "offload and restore"], micro_batches=[1, 3]
        ),
        "DP2, frozen parameters, schedules": _compare(trainable="no attention, no embedding", **_SCHEDULED),
        "DP2, params norm": _compare(**_PARAMS_NORM),
        "2 optimizer instances": _compare(instances=2, needs="einops"),
        "TP2": _compare(tp=2),
        "TP2, sequence parallel, tied embeddings": _compare(tp=2, sequence_parallel=True, tied=True),
        "PP2": _compare(pp=2),
        "PP2, tied embeddings, schedules": _compare(pp=2, tied=True, **_SCHEDULED),
        "PP2, params norm": _compare(pp=2, tied=True, **_PARAMS_NORM),
        "PP2, 2 virtual stages": _compare(**_INTERLEAVED),
        "PP2, 2 virtual stages, overlapped, evaluation": _compare(**_INTERLEAVED, overlap=True, each_step=["evaluate"]),
        "EP2": _compare(**_EXPERTS),
        "EP2, overlapped, schedules": _compare(**_EXPERTS, overlap=True, **_SCHEDULED),
        "EP2, params norm": _compare(**_EXPERTS, **_PARAMS_NORM),
        "CP2": _compare(cp=2, stock_may_fail=True),
        "CP2, its groups only": _compare(cp_groups=2),
        "PP2, frozen stage": _compare(pp=2, trainable="first stage"),
        "DP2, a rank owns nothing": _compare(trainable="one bias"),
    },
    4: {
        "TP2 x PP2": _compare(tp=2, pp=2),
        "TP2 x PP2, sequence parallel, tied embeddings, overlapped": _compare(
            tp=2, pp=2, sequence_parallel=True, tied=True, overlap=True
        ),
        "TP2 x DP2, overlapped": _compare(tp=2, overlap=True),
        "TP2 x EP2, sequence parallel": _compare(tp=2, sequence_parallel=True, **_EXPERTS),
        "PP2 x DP2, overlapped": _compare(pp=2, overlap=True),
        "PP2, 2 virtual stages x DP2, overlapped, tied embeddings": _compare(**_INTERLEAVED, overlap=True, tied=True),
        "PP2 x EP2": _compare(pp=2, **_EXPERTS),
        "DP4, overlapped": _compare(overlap=True),
        "DP4, EP2, overlapped": _compare(**_EXPERTS, overlap=True),
        "2 optimizer instances of DP2, overlapped": _compare(instances=2, overlap=True, needs="einops"),
    },
}
CHECKPOINTS: "dict[str, dict[str, Any]]" = {
    "ours to ours": _resume("ours", "ours", "dp_reshardable", before=5, after=5),
    "saved at once": _resume("ours", "ours", "fully_reshardable", before=0),
    "saved at once, ours to stock": _resume("ours", "stock", "dp_reshardable", before=0),
    "after skipped steps": _resume("ours", "ours", "dp_reshardable", before=4, after=8, **_FP16, optimizer=DYNAMIC),
    "after skipped steps, to stock": _resume("ours", "stock", "fully_reshardable", 4, 8, **_FP16, optimizer=DYNAMIC),
    "other rates": _resume("ours", "ours", "dp_reshardable", change=True),
    "ours to ours, overlapped": _resume("ours", "ours", "dp_reshardable", overlap=True),
    "stock to ours": _resume("stock", "ours", "dp_reshardable"),
    "ours to stock": _resume("ours", "stock", "dp_reshardable"),
    "ours to ours, fully_reshardable": _resume("ours", "ours", "fully_reshardable"),
    "ours to ours, fully_reshardable, overlapped": _resume("ours", "ours", "fully_reshardable", overlap=True),
    "ours to stock, fully_reshardable, overlapped": _resume("ours", "stock", "fully_reshardable", overlap=True),
    "stock to ours, fully_reshardable": _resume("stock", "ours", "fully_reshardable"),
    "ours to stock, fully_reshardable": _resume("ours", "stock", "fully_reshardable"),
    "a rank owns nothing": _resume("ours", "ours", "fully_reshardable", trainable="one bias"),
    "experts, ours to ours": _resume("ours", "ours", "dp_reshardable", ep=2, experts=4),
    "fp16 dynamic, ours to ours": _resume("ours", "ours", "dp_reshardable", **_FP16, optimizer=RISING),
    "fp16, ours to stock": _resume("ours", "stock", "dp_reshardable", **_FP16, optimizer=CONSTANT),
}


def _background(format: str, delay_seconds: float = 0.0, persistent: bool = False, **settings: Any) -> "dict[str, Any]":
    kind = {"kind": "background", "format": format, "delay_seconds": delay_seconds, "persistent": persistent}
    return kind | {"layout": {}, "offload": {}} | settings


BACKGROUND: "dict[str, dict[str, Any]]" = {
    "slow": _background("dp_reshardable", 6.0),
    "slow, full masters": _background("fully_reshardable", 6.0, offload={"master_weights": "full"}),
    "persistent worker, experts": _background("fully_reshardable", persistent=True, layout={"ep": 2, "experts": 4}),
    "no room": _background("dp_reshardable", offload={"host_memory": "16MiB"}),
}
