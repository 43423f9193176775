"""How long a training will take, what it writes, and how long it needs to stop: what ``plan`` has counted, put on a clock.

The step is simulated, with the plan of the run itself. Forward and backward are taken as given, or reckoned from FLOPs and an
assumed share of the GPUs' peak; that share is not known before the run, and the result says what was assumed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .config import OffloadConfig, PathConfig
from .errors import ConfigError
from .plan.devices import GPU_ADAM_RATE
from .plan.megatron_flags import Job
from .plan.memory import Need
from .plan.model import matrix_numel_a_token, total_numel
from .simulator import SimulatedPath, simulate
from .units import format_seconds, parse_bytes

DAY_SECONDS = 86400.0
_SUFFIXES = {"adam": "-rate", "copy": "-rate", "gpu_adam": "-rate", "save": "-rate"}  # of the flags of `plan`
_STEPS = 4  # the first has nothing in memory; the others alternate their direction


@dataclass(frozen=True)
class Rates:
    """How fast things are; all but ``tokens_per_second`` and ``compute_seconds`` have a value that is assumed.

    Attributes:
        adam: parameters a second that the CPU updates for one rank, where memory sets the pace.
        copy: bytes a second between a GPU and its host, each way.
        gpu_adam: parameters a second that a GPU updates, where it does.
        gpu_flops: peak of a GPU in the weights' type, FLOP/s.
        mfu: share of it that the FLOPs of the model (recomputation is not work) reach in forward and backward.
        tokens_per_second: of the whole job in forward and backward; else FLOPs and ``mfu`` decide.
        compute_seconds: of one iteration's forward and backward; wins over the others.
        save: bytes a second at which a node writes a checkpoint; None = as fast as it writes to its last path.
    """

    adam: float = 1e9
    copy: float = 20e9
    gpu_adam: float = GPU_ADAM_RATE
    gpu_flops: float = 312e12
    mfu: float = 0.35
    tokens_per_second: "float | None" = None
    compute_seconds: "float | None" = None
    save: "float | None" = None

    def __post_init__(self) -> None:
        for name in ("adam", "copy", "gpu_adam", "gpu_flops", "mfu", "tokens_per_second", "compute_seconds", "save"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ConfigError(
                    f"--{name.replace('_', '-')}{_SUFFIXES.get(name, '')} {value:g}: it must be above 0, and finite"
                )
        if self.mfu > 1:
            raise ConfigError(f"mfu is {self.mfu}: it is a share, at most 1")


@dataclass(frozen=True)
class Endurance:
    """What a drive may be written in its life."""

    directory: str
    nbytes: int

    @classmethod
    def parse(cls, spec: str) -> "Endurance":
        """From ``DIR,tbw=7000TB`` or ``DIR,dwpd=1,size=3.84TB[,years=5]``, as data sheets give it.

        Raises:
            ConfigError: neither of the two, or a bad number; names the text.
        """
        directory, *pairs = spec.split(",")
        items = dict(pair.partition("=")[::2] for pair in pairs)
        try:
            if set(items) == {"tbw"}:
                nbytes = parse_bytes(items["tbw"], "tbw")
            elif {"dwpd", "size"} <= set(items) <= {"dwpd", "size", "years"}:
                days = 365 * float(items.get("years", "5"))
                nbytes = round(float(items["dwpd"]) * parse_bytes(items["size"], "size") * days)
            else:
                raise ValueError("write DIR,tbw=7000TB or DIR,dwpd=1,size=3.84TB (,years=5)")
        except (ValueError, OverflowError) as error:
            raise ConfigError(f"endurance {spec!r}: {error}") from error
        if not directory or nbytes <= 0:
            raise ConfigError(f"endurance {spec!r}: needs a directory, and what its drive may be written")
        return cls(directory, nbytes)


@dataclass(frozen=True)
class PathUse:
    """What a node does to one path; ``worn_out_days`` is None where the drive's endurance is not known."""

    directory: str
    step_read_bytes: int
    step_written_bytes: int
    day_written_bytes: int
    worn_out_days: "float | None"


@dataclass(frozen=True)
class Prediction:
    """Seconds of a steady iteration of the busiest rank, and what follows from them.

    Attributes:
        compute_origin: how ``compute_seconds`` came about.
        fetch_seconds, update_seconds, flush_seconds: in which at least one subgroup was on its way, or updated; they overlap.
        stall_seconds: in which the trainer waited for storage.
        bound_seconds: of the step, if all paths moved its bytes without a pause.
        checkpoint_bytes: of the whole model.
        save_seconds: of a checkpoint before the end, at most; nothing overlaps in it.
        exit_seconds: from a signal to the end: the iteration that runs is ended, then all is saved.
        save_every_seconds, run_seconds: between two checkpoints, and of the whole training; 0 where its flags do not tell.
    """

    compute_seconds: float
    compute_origin: str
    fetch_seconds: float
    update_seconds: float
    flush_seconds: float
    stall_seconds: float
    step_seconds: float
    bound_seconds: float
    hit_rate: float
    iteration_seconds: float
    tokens_per_second: float
    paths: "tuple[PathUse, ...]"
    checkpoint_bytes: int
    save_seconds: float
    exit_seconds: float
    save_every_seconds: float
    run_seconds: float


def predict(need: Need, rates: Rates, endurance: "Mapping[str, Endurance] | None" = None) -> Prediction:
    """Simulate the steps of ``need`` and reckon what follows.

    Args:
        endurance: by directory of a path.

    Raises:
        ConfigError: a path without rates, or endurance of a directory that is no path.
    """
    job, machine = need.job, need.machine
    paths = machine.paths or (job.offload or OffloadConfig()).paths
    for path in paths:
        if path.read is None or path.write is None:
            raise ConfigError(
                f"path {path.directory!r}: its bandwidth is not known; write {path.directory},read=..,write=.."
            )
    endurance = dict(endurance or {})
    for directory in endurance:
        if directory not in [path.directory for path in paths]:
            raise ConfigError(
                f"endurance of {directory!r}: no such path; paths: {', '.join(p.directory for p in paths)}"
            )
    compute_seconds, origin = compute_of(job, machine.gpus, rates)
    config = job.offload or OffloadConfig()
    records = simulate(
        need.shard_numels,
        paths=[SimulatedPath(p.directory, p.read, p.write) for p in paths if p.read and p.write],
        host_memory_bytes=need.rank_budget,
        subgroup_size=config.subgroup_size,
        main_itemsize=need.state_bytes - 8,
        adam_parameters_per_second=rates.adam,
        copy_bytes_per_second=rates.copy,
        compute_seconds=compute_seconds,
        local_rank_count=machine.gpus_per_node,
        staging_count=config.staging_count,
        gpu_memory_bytes=config.gpu_memory,
        update_device=config.update_device,
        gpu_adam_parameters_per_second=rates.gpu_adam,
        steps=_STEPS,
    )
    last = records[-2:]
    mean = {name: sum(r.seconds(name) for r in last) / 2 for name in ("fetch", "update", "flush", "stall")}
    # From the start of one step to the start of the next there are that step and one forward and backward pass.
    step = sum(r.step_seconds for r in last) / 2
    iteration = compute_seconds + step
    uses, bound = [], 0.0
    for path in paths:
        read, written = (
            round(sum(getattr(r, key).get(path.directory, 0) for r in last) / 2) * machine.gpus_per_node
            for key in ("bytes_read", "bytes_written")
        )
        bound = max(bound, read / path.read, written / path.write)  # type: ignore[operator]
        a_day = round(written * DAY_SECONDS / iteration)
        limit = endurance.get(path.directory)
        worn = limit.nbytes / a_day if limit and a_day else None
        uses.append(PathUse(path.directory, read, written, a_day, worn))
    checkpoint = total_numel(job.model, job.layout) * (12 + job.training.weight_bytes)
    if job.training.dtype == "fp32":
        checkpoint = total_numel(job.model, job.layout) * 16
    save = _save_seconds(need, paths, checkpoint, rates)
    tokens = (job.training.global_batch_size or job.training.micro_batch_size * need.dp) * job.model.seq_length
    return Prediction(
        *(compute_seconds, origin, mean["fetch"], mean["update"], mean["flush"], mean["stall"], step, bound),
        *(last[-1].hit_rate, iteration, tokens / iteration, tuple(uses), checkpoint, save, iteration + save),
        *(job.training.save_interval * iteration, job.training.iterations * iteration),
    )


def flops_of(job: Job, sequences: int) -> float:
    """FLOPs of forward and backward of so many sequences; recomputation does not count."""
    model = job.model
    # Forward: 2 FLOPs a matrix element and token, and 2 s q a layer for causal attention; backward twice as many.
    attention = 2 * model.num_layers * model.seq_length * model.query_size
    return 3.0 * sequences * model.seq_length * (2 * matrix_numel_a_token(model, job.layout) + attention)


def compute_of(job: Job, gpus: int, rates: Rates) -> "tuple[float, str]":
    """(seconds of forward and backward of one iteration, where they come from)."""
    training = job.training
    sequences = training.global_batch_size or training.micro_batch_size * (gpus // job.layout.model_parallel)
    tokens = sequences * job.model.seq_length
    if rates.compute_seconds is not None:
        return rates.compute_seconds, "given"
    if rates.tokens_per_second is not None:
        return tokens / rates.tokens_per_second, f"{tokens} tokens at {rates.tokens_per_second:g} a second, as given"
    flops, peak = flops_of(job, sequences), f"{rates.gpu_flops / 1e12:g} TFLOP/s"
    return flops / (gpus * rates.gpu_flops * rates.mfu), (
        f"{flops:.3g} FLOPs on {gpus} GPUs of {peak}, of which {rates.mfu:.0%} are assumed to be reached"
    )


# ------------------------------------------------------------------------------------------ helpers


def _save_seconds(need: Need, paths: "tuple[PathConfig, ...]", checkpoint: int, rates: Rates) -> float:
    """Read what is on the paths, write the node's part of the checkpoint; one after the other, so at most this long."""
    machine = need.machine
    rate = rates.save or (paths[-1].write if paths else None)
    if not rate:
        return 0.0
    slot_bytes = max((s.record_bytes for s in need.subgroups), default=0)
    reading = max(
        (p.subgroups * slot_bytes * machine.gpus_per_node / p.path.read for p in need.paths if p.path.read), default=0.0
    )
    return reading + checkpoint / machine.nodes / rate


def lifetime(use: PathUse) -> str:
    """For people: how long a drive lives with what is written to it."""
    written = f"{use.day_written_bytes / 1e12:.3g} TB written a day"  # as drives are sold
    if use.worn_out_days is None:
        return written
    return f"{written}: worn out after {format_seconds(use.worn_out_days * DAY_SECONDS)}"
