"""How long does the forward pass wait for parameter all-gathers, the most that starting them in the update could gain?

    python benchmarks/param_gather.py --capped 400:400 200:200 --json OUT
    python benchmarks/param_gather.py --paths /nvme/scratch /lustre/me

With --overlap-param-gather Megatron starts the all-gather of the first bucket when the forward pass first needs it, and
each other one when the bucket before it has arrived. A bucket's weights are final earlier: when its last subgroup is
updated. Starting all-gathers then could save at most the time that the forward pass waits in ``finish_param_sync``.

How it is measured
  - A GPT of Megatron-Core's, trained on gloo ranks by the offloaded optimizer, once for every bucket size.
  - Between the step and the forward pass the ranks meet, so that waiting for a slower rank is not taken for waiting for
    data; that time is `skew_seconds`. An iteration lasts from meeting to meeting, skew left out.
  - An iteration's numbers are those of the rank that waited longest. The first iterations are dropped.
  - `bound` is the median of wait / iteration. It is an upper bound: all-gathers in the update would take memory bandwidth
    and cores from it.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from benchmarks.capped import CapError, capped, parse_cap  # noqa: E402

WORKER = "PARAM_GATHER_WORKER"  # in the environment of the ranks: the settings
STATE_BYTES = 10
VOCABULARY, HEAD_NUMEL = 4096, 64


# ---------------------------------------------------------------------------------------------- a rank


@dataclasses.dataclass
class Iteration:
    """Seconds of one iteration on one rank."""

    wait_seconds: float  # in finish_param_sync, all buckets
    first_wait_seconds: float  # of it, for the first bucket
    forward_backward_seconds: float
    step_seconds: float
    skew_seconds: float

    @property
    def iteration_seconds(self) -> float:
        return self.forward_backward_seconds + self.step_seconds


class WaitClock:
    """Adds up the time in ``finish_param_sync``."""

    def __init__(self, group_class: Any):
        self.waits: "list[float]" = []
        finish = group_class.finish_param_sync

        def timed(group: Any, *args: Any, **settings: Any) -> None:
            begin = time.perf_counter()
            finish(group, *args, **settings)
            self.waits.append(time.perf_counter() - begin)

        group_class.finish_param_sync = timed


def rank_main(settings: "dict[str, Any]") -> None:
    """Measure every bucket size; rank 0 writes what all ranks measured."""
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.distributed import param_and_grad_buffer
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from mlp_offload.megatron import wheel_gaps

    wheel_gaps.fill()
    torch.set_num_threads(settings["threads"])
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel()
    clock = WaitClock(param_and_grad_buffer._ParamAndGradBucketGroup)
    found = []
    for bucket_size in settings["bucket_sizes"]:
        torch.manual_seed(1)
        model_parallel_cuda_manual_seed(1, force_reset_rng=True)
        mine = measure(settings, bucket_size, clock)
        ranks: "list[Any]" = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, mine)
        found.append({"bucket_size": bucket_size, "ranks": ranks})
    if dist.get_rank() == 0:
        Path(settings["results"]).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def measure(settings: "dict[str, Any]", bucket_size: int, clock: WaitClock) -> "dict[str, Any]":
    import torch
    import torch.distributed as dist
    from megatron.core.distributed import finalize_model_grads

    model, optimizer = build(settings, bucket_size)
    generator = torch.Generator().manual_seed(dist.get_rank())
    mask = torch.tril(torch.ones(1, 1, settings["tokens"], settings["tokens"])) < 0.5
    positions = torch.arange(settings["tokens"]).unsqueeze(0)
    iterations: "list[Iteration]" = []
    for _ in range(settings["drop"] + settings["iterations"]):
        ids = torch.randint(0, VOCABULARY, (1, settings["tokens"] + 1), generator=generator)
        clock.waits.clear()
        begin = time.perf_counter()
        model.zero_grad_buffer()
        optimizer.zero_grad()
        model(ids[:, :-1].contiguous(), positions, mask, labels=ids[:, 1:].contiguous()).float().mean().backward()
        finalize_model_grads([model])
        before_step = time.perf_counter()
        executed, *_ = optimizer.step()
        assert executed
        after_step = time.perf_counter()
        dist.barrier()
        skew = time.perf_counter() - after_step
        waits = clock.waits or [0.0]
        iterations.append(
            Iteration(sum(waits), waits[0], before_step - begin, after_step - before_step, skew_seconds=skew)
        )
    (part,) = optimizer.chained_optimizers
    result = {
        "iterations": [vars(iteration) for iteration in iterations[settings["drop"] :]],
        "bucket_count": sum(len(buffer.buckets) for buffer in model.buffers),
        "parameter_numel": sum(parameter.numel() for parameter in model.parameters()),
    }
    part.close()
    return result


def build(settings: "dict[str, Any]", bucket_size: int) -> "tuple[Any, Any]":
    """A model in DistributedDataParallel with overlapping all-gathers, and its offloaded optimizer."""
    import inspect

    import torch
    import torch.distributed as dist
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.transformer.module import Float16Module
    from megatron.core.transformer.transformer_config import TransformerConfig

    from mlp_offload import OffloadConfig
    from mlp_offload.megatron.install import build_offloaded_optimizer

    config = TransformerConfig(
        num_layers=settings["layers"],
        hidden_size=settings["hidden"],
        num_attention_heads=settings["hidden"] // HEAD_NUMEL,
        use_cpu_initialization=True,
        params_dtype=torch.bfloat16,
        bf16=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=False,
    )
    gpt = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(normalization="LayerNorm"),
        vocab_size=VOCABULARY,
        max_sequence_length=settings["tokens"],
        share_embeddings_and_output_weights=False,
    )
    wrapped = Float16Module(config, gpt)
    parameters = list(wrapped.parameters())
    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        grad_reduce_in_fp32=True,
        bucket_size=bucket_size,
    )
    layout = {}
    if "full_param_layout" in inspect.signature(DistributedDataParallel.__init__).parameters:
        layout["full_param_layout"] = DistributedOptimizer.compute_full_param_layout(
            parameters, bucket_size, dist.get_world_size(), ddp_config, expert_data_parallel_world_size=1
        )
    model = DistributedDataParallel(config, ddp_config, wrapped, **layout)
    optimizer_config = OptimizerConfig(
        optimizer="adam",
        lr=1e-4,
        bf16=True,
        params_dtype=torch.bfloat16,
        use_distributed_optimizer=True,
        overlap_param_gather=True,
    )
    owned_numel = sum(parameter.numel() for parameter in parameters) // dist.get_world_size()
    host_memory = int(settings["host_memory_share"] * STATE_BYTES * owned_numel)
    offload = OffloadConfig(
        paths=settings["paths"],
        host_memory=host_memory,
        subgroup_size=max(4096, host_memory // STATE_BYTES // 16),
        update_threads=settings["threads"],
        job="param-gather",
    )
    return model, build_offloaded_optimizer(offload, get_megatron_optimizer, optimizer_config, [model])


# ---------------------------------------------------------------------------------------------- the whole


def run(options: argparse.Namespace, paths: "list[str]", scratch: Path) -> "dict[str, Any]":
    """Start the ranks; the contents of the JSON file."""
    from mlp_offload.megatron import cpu_device

    results = scratch / "results.json"
    settings = {key: value for key, value in vars(options).items() if key not in ("capped", "json")}
    settings |= {"paths": paths, "results": str(results)}
    environment = os.environ | {WORKER: json.dumps(settings), "OMP_NUM_THREADS": str(options.threads)}
    environment["CUDA_VISIBLE_DEVICES"] = ""  # with NCCL the host does not wait, so its clock would say nothing
    environment["PYTHONWARNINGS"] = "ignore"
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(REPOSITORY), environment.get("PYTHONPATH", "")]))
    cpu_device.activate_in_children(environment)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={options.ranks}"]
    process = subprocess.Popen([*command, __file__], env=environment, stdout=sys.stderr)
    try:
        status = process.wait()
    finally:
        if process.poll() is None:
            process.terminate()  # torchrun ends its ranks
            process.wait()
    if status != 0:
        raise RuntimeError(f"the ranks ended with status {status}; their output is above")
    sizes = [summarize(found) for found in json.loads(results.read_text())]
    return {"settings": settings | {"command": " ".join(sys.argv)}, "bucket_sizes": sizes}


def summarize(found: "dict[str, Any]") -> "dict[str, Any]":
    """Median, least and greatest over iterations, each iteration by the rank that waited longest."""
    by_rank = [[Iteration(**values) for values in rank["iterations"]] for rank in found["ranks"]]
    longest = [max(ranks, key=lambda iteration: iteration.wait_seconds) for ranks in zip(*by_rank)]
    summary: "dict[str, Any]" = {name: found["ranks"][0][name] for name in ("bucket_count", "parameter_numel")}
    summary["bucket_size"] = found["bucket_size"]
    for name in (*(field.name for field in dataclasses.fields(Iteration)), "iteration_seconds"):
        summary[name] = _spread([getattr(iteration, name) for iteration in longest])
    summary["bound"] = _spread([iteration.wait_seconds / iteration.iteration_seconds for iteration in longest])
    return summary


def _spread(values: "list[float]") -> "list[float]":
    return [statistics.median(values), min(values), max(values)]


def show(result: "dict[str, Any]") -> str:
    """The table a person reads: median (least to greatest)."""
    names = ("wait_seconds", "first_wait_seconds", "step_seconds", "iteration_seconds", "skew_seconds")
    first = result["bucket_sizes"][0]
    lines = [
        f"{first['parameter_numel'] / 1e6:.1f} M parameters on {result['settings']['ranks']} ranks",
        "",
        "| bucket size | buckets | waits s | first bucket s | step s | iteration s | skew s | bound |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for size in result["bucket_sizes"]:
        cells = [f"{m:.3f} ({low:.3f}-{high:.3f})" for m, low, high in (size[name] for name in names)]
        bound, low, high = size["bound"]
        cells.append(f"{bound:.1%} ({low:.1%}-{high:.1%})")
        lines.append(f"| {size['bucket_size']:,} | {size['bucket_count']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def parse(arguments: "list[str] | None" = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--paths", nargs="+", metavar="DIR", help="directories for the state")
    where.add_argument(
        "--capped", nargs="+", type=parse_cap, metavar="READ:WRITE", help="make paths of this speed, MB/s"
    )
    parser.add_argument("--ranks", type=int, default=2, help="gloo processes, at least 2 (default: 2)")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--hidden", type=int, default=768, help=f"a multiple of {HEAD_NUMEL} (default: 768)")
    parser.add_argument("--tokens", type=int, default=64, help="of the one sequence of a rank (default: 64)")
    parser.add_argument(
        "--bucket-sizes",
        type=int,
        nargs="+",
        default=[1_000_000, 8_000_000, 40_000_000],
        help="elements, as --ddp-bucket-size; Megatron's own is 40 million (default: 1, 8 and 40 million)",
    )
    parser.add_argument("--host-memory-share", type=float, default=0.3, help="of the state (default: 0.3)")
    parser.add_argument("--iterations", type=int, default=7, help="measured, for each bucket size (default: 7)")
    parser.add_argument("--drop", type=int, default=2, help="iterations before them (default: 2)")
    parser.add_argument("--threads", type=int, default=1, help="of a rank (default: 1)")
    parser.add_argument("--json", metavar="OUT", help="also write everything to this file")
    options = parser.parse_args(arguments)
    if options.ranks < 2:
        parser.error("--ranks must be at least 2: one rank gathers nothing")
    if options.hidden < HEAD_NUMEL or options.hidden % HEAD_NUMEL:
        parser.error(f"--hidden must be a multiple of {HEAD_NUMEL}")
    for name in ("layers", "tokens", "iterations", "threads"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1")
    return options


def main() -> None:
    if WORKER in os.environ:
        rank_main(json.loads(os.environ[WORKER]))
        return
    options = parse()
    # Ended from outside, leave as after Ctrl-C: ranks, mounts and files are taken away on the way out.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    parameter_numel = 12 * options.layers * options.hidden**2 + 2 * VOCABULARY * options.hidden
    try:
        with contextlib.ExitStack() as stack:
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mlp-offload-gather-")))
            if options.capped:
                size_bytes = 2 * STATE_BYTES * parameter_numel + 512 * 2**20
                paths = [path.directory for path in stack.enter_context(capped(options.capped, size_bytes))]
            else:
                paths = [os.path.abspath(path) for path in options.paths]
            result = run(options, paths, scratch)
    except (CapError, RuntimeError) as error:
        sys.exit(f"param_gather: {error}")
    print(show(result))
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
