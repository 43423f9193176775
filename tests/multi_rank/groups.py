"""Process groups of one layout go before the next is made."""

from __future__ import annotations

import gc

import torch.distributed as dist


def destroy_groups() -> None:
    """Megatron forgets its process groups and torch keeps them: hundreds, and with gloo each has threads that poll."""
    gc.collect()
    for group in list(dist.distributed_c10d._world.pg_map):  # no public way to list them
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
