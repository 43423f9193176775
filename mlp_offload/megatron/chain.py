"""The dense and the expert optimizer together, which take over each other's state when the expert-parallel size changes."""

from __future__ import annotations

from typing import Any

from megatron.core.optimizer.optimizer import ChainedOptimizer


class OffloadedChainedOptimizer(ChainedOptimizer):
    """Megatron's ``ChainedOptimizer``, which also loads what was saved with another number of parts.

    With one expert-parallel rank all parameters are in one part, with several those of experts are in a second. In the
    fully_reshardable format state belongs to parameters, so only param groups have to find their part.
    """

    def load_state_dict(self, state_dict: Any) -> None:
        parts = [state_dict] if "optimizer" in state_dict else []
        parts += [state_dict[key] for key in sorted(key for key in state_dict if isinstance(key, int))]
        saved = [part for part in parts if "optimizer" in part]
        count = len(self.chained_optimizers)
        if saved and len(saved) != count:
            groups = [group for part in saved for group in part["optimizer"]["param_groups"]]
            # What was loaded of tensors is where this run asked for it.
            now = [state_dict.get(index, {}) for index in range(count)] if count > 1 else [state_dict]
            merged = [
                saved[0] | {"optimizer": {"param_groups": groups}, "param_state": part.get("param_state")}
                for part in now
            ]
            state_dict = dict(enumerate(merged)) if count > 1 else merged[0]
        super().load_state_dict(state_dict)
