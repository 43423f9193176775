"""What is compared with stock, by number of processes: each group is one launch."""

from __future__ import annotations

from typing import Any

DYNAMIC = {"initial_loss_scale": 2.0**24, "hysteresis": 1}  # overflows fp16 a few times, then settles
RISING = {"initial_loss_scale": 2.0**10, "loss_scale_window": 2}  # doubles at every second step
CONSTANT = {"loss_scale": 1000.0}  # no power of two: unscaling rounds


def _compare(steps: int = 5, offload: "dict[str, Any] | None" = None, **layout: Any) -> "dict[str, Any]":
    return {"kind": "compare", "steps": steps, "layout": layout, "offload": offload or {}}


def _resume(
    saved_by: str, loaded_by: str, format: str, before: int = 3, after: int = 2, change: bool = False, **layout: Any
) -> "dict[str, Any]":
    """``change``: after loading, learning rate and weight decay are set anew."""
    ways = {"saved_by": saved_by, "loaded_by": loaded_by, "format": format}
    return {"kind": "resume", **ways, "before": before, "after": after, "change": change, "layout": layout}


def _reload(from_state_dict: bool, **layout: Any) -> "dict[str, Any]":
    return {"kind": "reload", "from_state_dict": from_state_dict, "layout": layout}


def _touched(master_weights: str) -> "dict[str, Any]":
    return {"kind": "touched", "layout": {}, "offload": {"master_weights": master_weights}}


def _unhooked(function: str) -> "dict[str, Any]":
    return {"kind": "unhooked", "function": function, "layout": {"dtype": "fp16", "optimizer": CONSTANT}}


HOOKS = (
    "_copy_model_grads_to_main_grads",
    "_unscale_main_grads_and_check_for_nan",
    "grads_for_grad_norm",
    "clip_grad_by_total_norm_fp32",
)
_FP16 = {"dtype": "fp16"}
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
        "two norm groups": _compare(norm_group=True),
        "reload": _reload(from_state_dict=False),
        "reload from state_dict": _reload(from_state_dict=True),
        "reload, one subgroup": _reload(from_state_dict=False, trainable="one bias"),
        "touched, remainder": _touched("remainder"),
        "touched, full": _touched("full"),
        **{f"unhooked {function}": _unhooked(function) for function in HOOKS},
    },
    2: {
        "DP2": _compare(),
        "DP2, overlapped": _compare(overlap=True),
        "DP2, bf16 main_grad, overlapped": _compare(overlap=True, fp32_main_grad=False),
        "DP2, fp16, overflow": _compare(16, **_FP16, fp32_main_grad=False, optimizer=DYNAMIC),
        "TP2": _compare(tp=2),
        "PP2": _compare(pp=2),
        "EP2": _compare(ep=2, experts=4),
        "PP2, frozen stage": _compare(pp=2, trainable="first stage"),
        "DP2, a rank owns nothing": _compare(trainable="one bias"),
    },
    4: {"TP2 x PP2": _compare(tp=2, pp=2)},
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
