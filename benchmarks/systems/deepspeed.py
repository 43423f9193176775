"""DeepSpeed ZeRO-3 with its optimizer state on NVMe: pinned, read and write pipelined. Runs in an environment of its own.

Where no backward pass runs, the gradients are handed to ``partition_grads``, the function that DeepSpeed's own backward
hooks call: so the gradients are written to storage, and read in the step, as in real training.
"""

from __future__ import annotations

import os
import socket
import tempfile
import zlib
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch

from benchmarks.systems.worker import System, serve

FP32_BYTES = 4
AIO_ALIGNED_NUMEL = 1024 // FP32_BYTES
OPTIONS = {
    "pin_memory": True,
    "pipeline_read": True,
    "pipeline_write": True,
    "buffer_count": 16,
    "block_size": 2**20,
    "queue_depth": 8,
    "thread_count": 1,
}
GRADIENT_BUCKET_NUMEL = 50_000_000  # about what a backward pass hands over at once


class DeepSpeed(System):
    def __init__(self, settings: "dict[str, Any]"):
        super().__init__(settings)
        options = OPTIONS | settings["options"]
        self.sub_group_size = sub_group_size(
            self.numels, settings["host_memory"], options["buffer_count"], options["thread_count"]
        )
        directory = settings["paths"][0].split(",")[0]
        self.folder = tempfile.TemporaryDirectory(prefix="bench-deepspeed-", dir=directory)
        adam = {key: settings[key] for key in ("lr", "betas", "eps", "weight_decay")}
        config = {
            "train_micro_batch_size_per_gpu": settings["batch"],
            "gradient_accumulation_steps": 1,
            "gradient_clipping": 0.0,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": adam},
            "steps_per_print": 2**31,
            "zero_optimization": {
                "stage": 3,
                "sub_group_size": self.sub_group_size,
                "overlap_comm": False,
                "offload_optimizer": {
                    "device": "nvme",
                    "nvme_path": self.folder.name,
                    "pin_memory": options["pin_memory"],
                    "pipeline_read": options["pipeline_read"],
                    "pipeline_write": options["pipeline_write"],
                    "buffer_count": options["buffer_count"],
                    "fast_init": False,
                },
            },
            "aio": {
                "block_size": options["block_size"],
                "queue_depth": options["queue_depth"],
                "intra_op_parallelism": options["thread_count"],
                "single_submit": False,
                "overlap_events": True,
            },
        }
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
        synthetic = [parameter.grad for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        deepspeed.init_distributed("gloo")
        self.engine, self.zero, _, _ = deepspeed.initialize(
            model=self.model, config=config, model_parameters=self.parameters
        )
        self.gradients = [None if gradient is None else gradient.flatten() for gradient in synthetic]

    def zero_grad(self) -> None:
        """DeepSpeed sees to its own gradients."""

    def forward(self) -> None:
        self.loss = self.engine(self.batch)

    def backward(self) -> None:
        self.engine.backward(self.loss)

    def refill(self) -> None:
        # Without synthetic gradients, those of the last backward pass, which DeepSpeed keeps in its partitions.
        kept = self.zero._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition
        self.zero.set_gradient_accumulation_boundary(True)
        bucket: "list[tuple[torch.Tensor, torch.Tensor]]" = []
        for parameter, gradient in zip(self.parameters, self.gradients):
            bucket.append((parameter, kept[parameter.ds_id] if gradient is None else gradient))
            if sum(part.numel() for _, part in bucket) >= GRADIENT_BUCKET_NUMEL or parameter is self.parameters[-1]:
                self.zero.partition_grads(*map(list, zip(*bucket)))
                bucket = []

    def update(self) -> None:
        self.engine.step()

    def weights_crc32(self) -> int:
        crc = 0
        for parameter in self.parameters:
            flat = parameter.ds_tensor.detach().view(-1)[: parameter.ds_numel]
            crc = zlib.crc32(flat.view(torch.int16).numpy(), crc)
        return crc

    def facts(self) -> "dict[str, Any]":
        buffers = self.zero.optimizer_swapper.swap_buffer_manager.all_buffers
        return {
            "buffer_bytes": sum(buffer.numel() * buffer.element_size() for buffer in buffers),
            "buffer_count": len(buffers),
            "sub_group_size": self.sub_group_size,
            "subgroup_count": len(self.zero.fp16_groups),
            "deepspeed": deepspeed.__version__,
            "torch": torch.__version__,
        }

    def close(self) -> None:
        self.folder.cleanup()


def sub_group_size(numels: "list[int]", host_memory: int, buffer_count: int, thread_count: int = 1) -> int:
    """The largest ``sub_group_size`` whose pinned buffers stay within ``host_memory`` bytes.

    DeepSpeed allocates ``buffer_count`` fp32 buffers of its largest group. It closes a group with the parameter that
    makes it reach ``sub_group_size``, so a group may be larger than that.

    Raises:
        RuntimeError: the largest parameter alone takes more.
    """
    alignment = AIO_ALIGNED_NUMEL * thread_count
    most = host_memory // (FP32_BYTES * buffer_count) // alignment * alignment
    for size in range(most, 0, -max(1, most // 256)):
        largest, group = 0, 0
        for numel in numels:
            group += numel
            largest = max(largest, group)
            if group >= size:
                group = 0
        if largest <= most:
            return size
    needed = max(numels) * FP32_BYTES * buffer_count
    raise RuntimeError(
        f"DeepSpeed needs {needed} bytes of buffers for a parameter of {max(numels)} elements with buffer_count="
        f"{buffer_count}; host memory is {host_memory}. Raise --host-memory or --params."
    )


if __name__ == "__main__":
    serve(DeepSpeed)
