"""Streaming without overlap: for each subgroup read, update, write; one path, one buffer, no cache.

This is what forks of Megatron that stream optimizer state from NVMe do today. Here it has long direct requests through
our engine, no checksums, our Adam kernel, and all of the host memory as its one buffer: nothing but the waiting is left.
"""

from __future__ import annotations

import os
import tempfile
from typing import Any

import torch

from benchmarks.systems.worker import System, serve
from mlp_offload.adam.kernel import AdamKernel, adam_scalars
from mlp_offload.plan.subgroups import Subgroup, cut
from mlp_offload.storage.buffers import BufferPool
from mlp_offload.storage.engine import direct_supported, open_engine
from mlp_offload.tiers import StateView
from mlp_offload.updates import AdamWork

ALIGNMENT = 4096


class Sequential(System):
    def __init__(self, settings: "dict[str, Any]"):
        super().__init__(settings)
        # An array of a record may be padded by 15 elements, and the record to a page.
        subgroup_numel = max(1, min(sum(self.numels), (settings["host_memory"] - ALIGNMENT) // 12 - 16))
        self.subgroups = cut(self.numels, subgroup_numel)
        self.slot_bytes = max(self._transfer_bytes(subgroup) for subgroup in self.subgroups)
        self.pool = BufferPool(1, self.slot_bytes)
        self.lease = self.pool.lease()
        self.kernel = AdamKernel(settings["threads"])
        self.work = AdamWork(self.kernel, [p.detach().view(-1) for p in self.parameters], subgroup_numel)
        directory = settings["paths"][0].split(",")[0]
        support = direct_supported(directory)
        descriptor, name = tempfile.mkstemp(prefix="bench-sequential-", dir=directory)
        try:
            os.posix_fallocate(descriptor, 0, self.slot_bytes * len(self.subgroups))
            self.engine = open_engine(
                name, direct=support.supported, alignment=support.alignment, iodepth=8, block_size=2**21
            )
        finally:
            os.close(descriptor)
            os.unlink(name)  # the engine has it open; nobody else needs the name
        self.engine.register_buffers(*self.pool.region, keepalive=self.pool)
        self.steps = 0
        self.lease.array(0, self.lease.nbytes // 4).fill(0)
        for subgroup in self.subgroups:
            view = StateView.of(subgroup, self.lease)
            view.exp_avg.fill(0)
            view.exp_avg_sq.fill(0)
            self.work.load_weights(subgroup, view)
            self._move(self.engine.write, subgroup)

    @torch.no_grad()
    def update(self) -> None:
        self.steps += 1
        settings = self.settings
        scalars = adam_scalars(settings["lr"], settings["betas"], settings["eps"], settings["weight_decay"], self.steps)
        gradients = [parameter.grad.view(-1) for parameter in self.parameters]
        self.work.begin(gradients, [scalars], [0] * len(gradients))
        for subgroup in self.subgroups:
            self._move(self.engine.read, subgroup)
            self.work.prepare(subgroup)
            self.work.update(subgroup, StateView.of(subgroup, self.lease))
            self._move(self.engine.write, subgroup)
        self.work.end()

    def _move(self, operation: Any, subgroup: Subgroup) -> None:
        offset = subgroup.index * self.slot_bytes
        operation(offset, self.lease.address, self._transfer_bytes(subgroup), checksum=False).result()

    @staticmethod
    def _transfer_bytes(subgroup: Subgroup) -> int:
        return -(-subgroup.record_bytes // ALIGNMENT) * ALIGNMENT

    def facts(self) -> "dict[str, Any]":
        return {"buffer_bytes": self.pool.region[1], "subgroup_count": len(self.subgroups)}

    def close(self) -> None:
        self.engine.close()
        self.kernel.close()
        self.lease.release()
        self.pool.close()


if __name__ == "__main__":
    serve(Sequential)
