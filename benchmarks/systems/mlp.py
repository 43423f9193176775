"""``OffloadedAdamW`` on one path or several."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.systems.worker import System, serve
from mlp_offload import OffloadConfig, OffloadedAdamW
from mlp_offload.ranks import RankContext


class MLPOffload(System):
    def __init__(self, settings: "dict[str, Any]"):
        super().__init__(settings)
        self.adam_rates: "list[float]" = []  # of each step since they were asked for
        rank, count = settings["rank"], settings["rank_count"]
        options = {
            "paths": settings["paths"],
            "host_memory": settings["host_memory"] // count,
            "subgroup_size": settings["subgroup_size"],
            "update_threads": settings["threads"],
            "job": f"bench-{settings['parent']}-{settings['name']}",
        }
        self.optimizer = OffloadedAdamW(
            self.parameters,
            lr=settings["lr"],
            betas=tuple(settings["betas"]),
            eps=settings["eps"],
            weight_decay=settings["weight_decay"],
            config=OffloadConfig.from_mapping(options | settings["options"]),
            rank=RankContext(rank, rank, count),
        )

    def update(self) -> None:
        self.optimizer.step()
        spans = [e.end - e.begin for e in self.optimizer.last_record.events if e.phase == "update"]
        self.adam_rates.append(sum(self.numels) / sum(spans))

    def settle(self) -> None:
        self.optimizer._pipeline.tiers.settle()

    def measured(self) -> "dict[str, float]":
        rates, self.adam_rates = self.adam_rates, []
        return {"adam_parameters_per_second": statistics.median(rates)}

    def facts(self) -> "dict[str, Any]":
        tiers = self.optimizer._pipeline.tiers
        return {
            "buffer_bytes": tiers.pool.region[1],
            "subgroup_size": tiers.subgroups[0].numel,
            "subgroup_count": len(tiers.subgroups),
            "main_itemsize": tiers.subgroups[0].main_itemsize,
            "resident_count": len(tiers.residency.residents),
            "staging_count": tiers.residency.staging_count,
            "paths": [str(path) for path in tiers.config.paths],
        }

    def close(self) -> None:
        self.optimizer.close()


if __name__ == "__main__":
    serve(MLPOffload)
