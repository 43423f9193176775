"""Which rank this process is: from torchrun, from srun, or alone."""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from .errors import ConfigError

_SET_BY_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_FIRST_PORT, _PORT_COUNT = 20000, 20000


@dataclass(frozen=True)
class RankContext:
    """Who this process is: global rank, and its place among the processes of its node."""

    rank: int = 0
    local_rank: int = 0
    local_rank_count: int = 1


def settle(environment: "MutableMapping[str, str]") -> str:
    """Complete the variables that torch.distributed and Megatron read; what is set already stays.

    torchrun sets them all. A task of an srun step gets them from SLURM_*: rank and size of the step, the step's first
    node as the place to meet, a port made of the job and step number. Any other process is rank 0 of 1.

    Args:
        environment: ``os.environ``; changed in place.
    Returns:
        "torchrun", "srun" or "one process".
    Raises:
        ConfigError: only some of RANK, WORLD_SIZE and LOCAL_RANK are set, or SLURM's variables make no sense.
    """
    rank_variables = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    missing = [name for name in rank_variables if name not in environment]
    if not missing:
        return "torchrun"
    if len(missing) < len(rank_variables):
        given = ", ".join(name for name in rank_variables if name in environment)
        raise ConfigError(
            f"{given} set but not {', '.join(missing)}: start with torchrun or srun, which set all of them"
        )
    in_step = _in_step(environment)
    found = _from_slurm(environment) if in_step else _alone()
    for name in _SET_BY_TORCHRUN:
        environment.setdefault(name, found[name])
    return "srun" if in_step else "one process"


def rank_context(
    environment: "Mapping[str, str]", rank: "int | None" = None, world_size: "int | None" = None
) -> RankContext:
    """This process among the processes of its node, as torchrun's or srun's variables say.

    Args:
        environment: ``os.environ``.
        rank, world_size: in all, where torch.distributed knows them; None = as the environment says.
    Raises:
        ConfigError: several processes, and nothing says which of a node's this is: each would take the memory of all.
    """
    if "LOCAL_RANK" not in environment and _in_step(environment):
        environment = {**_from_slurm(environment), **environment}
    try:
        if rank is None:
            rank = int(environment.get("RANK", 0))
        if world_size is None:
            world_size = int(environment.get("WORLD_SIZE", 1))
        if "LOCAL_RANK" in environment and "LOCAL_WORLD_SIZE" in environment:
            return RankContext(rank, int(environment["LOCAL_RANK"]), int(environment["LOCAL_WORLD_SIZE"]))
    except ValueError as error:
        raise ConfigError(f"{', '.join(_SET_BY_TORCHRUN[:4])} must be integers: {error}") from error
    if world_size == 1:
        return RankContext(rank, 0, 1)
    raise ConfigError(
        f"rank {rank} of {world_size} does not know its place on its node; set LOCAL_RANK and LOCAL_WORLD_SIZE, or start "
        "with torchrun or srun, which do"
    )


def first_host(nodelist: str) -> str:
    """ "gpu007" from SLURM's "gpu[007-009,012],login1".

    Raises:
        ConfigError: not a node list.
    """
    match = re.match(r"([^\[\],\s]+)(?:\[(\d+)[^\]]*\]([^\[\],\s]*))?", nodelist)
    if match is None:
        raise ConfigError(
            f"SLURM_STEP_NODELIST {nodelist!r}: not a node list; set MASTER_ADDR to the first node's name"
        )
    return "".join(part or "" for part in match.groups())


def tasks_on_node(tasks_per_node: str, node: int) -> int:
    """Tasks of the step on its ``node``-th node, from SLURM's "4(x2),3": 4, 4, 3.

    Raises:
        ConfigError: not such a list, or it has no such node.
    """
    counts: "list[int]" = []
    for part in tasks_per_node.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise ConfigError(f"SLURM_STEP_TASKS_PER_NODE {tasks_per_node!r}: {part!r} is not COUNT or COUNT(xNODES)")
        counts += [int(match.group(1))] * int(match.group(2) or 1)
    if not 0 <= node < len(counts):
        raise ConfigError(f"SLURM_STEP_TASKS_PER_NODE {tasks_per_node!r} has no node {node} (SLURM_NODEID)")
    return counts[node]


def _in_step(environment: "Mapping[str, str]") -> bool:
    """The batch script itself has SLURM_PROCID and SLURM_NTASKS too; only a task of a step has the STEP variables."""
    return "SLURM_STEP_NUM_TASKS" in environment


def _from_slurm(environment: "Mapping[str, str]") -> "dict[str, str]":
    try:
        job, step = int(environment["SLURM_JOB_ID"]), int(environment["SLURM_STEP_ID"])
        return {
            "RANK": environment["SLURM_PROCID"],
            "WORLD_SIZE": environment["SLURM_STEP_NUM_TASKS"],
            "LOCAL_RANK": environment["SLURM_LOCALID"],
            "LOCAL_WORLD_SIZE": str(
                tasks_on_node(environment["SLURM_STEP_TASKS_PER_NODE"], int(environment["SLURM_NODEID"]))
            ),
            "MASTER_ADDR": first_host(environment["SLURM_STEP_NODELIST"]),
            "MASTER_PORT": str(_FIRST_PORT + (job * 16 + step) % _PORT_COUNT),
        }
    except (KeyError, ValueError) as error:
        raise ConfigError(
            f"a task of an srun step without usable SLURM variables ({error}); start with torchrun instead"
        ) from error


def _alone() -> "dict[str, str]":
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    values = ("0", "1", "0", "1", "127.0.0.1", str(port))
    return dict(zip(_SET_BY_TORCHRUN, values))
