"""Counts and bytes, held against published parameter counts and against arithmetic done by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mlp_offload import transfers
from mlp_offload.config import PathConfig
from mlp_offload.errors import ConfigError
from mlp_offload.pipeline import StepPipeline
from mlp_offload.plan.activations import layer_bytes
from mlp_offload.plan.megatron_flags import read_flags
from mlp_offload.plan.memory import GRADIENT_STAGINGS, STAGED_BYTES, Machine, needs_of
from mlp_offload.plan.model import Layout, total_numel
from mlp_offload.plan.refusals import RULES
from mlp_offload.plan.search import changes_that_fit, on_these_nodes, smallest
from mlp_offload.ranks import RankContext
from mlp_offload.recipes import NAMES, load
from mlp_offload.virtual import Clock
from mlp_offload.virtual_updates import Gpu, Link

GIB = 2**30
DISK = PathConfig("nvme", read=5 * 10**9, write=3 * 10**9)
# 4 layers; V 1024 padded; per layer 4h^2 + 8h^2 and two RMSNorms; h 512.
SMALL = (
    "--num-layers 4 --hidden-size 512 --num-attention-heads 8 --seq-length 1024 --vocab-size 1000 --micro-batch-size 2 "
    "--global-batch-size 16 --bf16 --use-distributed-optimizer --disable-bias-linear --normalization RMSNorm "
    "--position-embedding-type rope --hidden-dropout 0 --optimizer-offload mlp"
)
LAYER = 12 * 512 * 512 + 2 * 512


def job_of(more: str = "", flags: str = SMALL):
    return read_flags([*flags.split(), *more.split()])


def unpadded(name: str) -> int:
    """Parameters with a vocabulary padded for one GPU only, as reports count them."""
    return total_numel(read_flags(load(name).flags).model, Layout())


@pytest.mark.parametrize(
    "name, published",
    [
        ("gpt-7b", 6_738_415_616),  # Llama 2, as its checkpoints have it
        ("gpt-13b", 13_015_864_320),
        ("gpt-70b", 68_976_648_192),
        ("gpt-40b", 48.16e9),  # printed in the logs of MLP-Offload's runs
        ("gpt-52b", 44.28e9),
        ("gpt-100b", 105.89e9),
        ("gpt-120b", 106.7e9),
    ],
)
def test_recipes_have_the_parameters_of_the_models_they_are_named_after(name, published):
    assert (
        unpadded(name) == published
        if isinstance(published, int)
        else round(published / 1e9, 1) == round(unpadded(name) / 1e9, 1)
    )


def test_neox_and_gopher_but_for_the_padding_of_their_vocabularies():
    # GPT-NeoX-20B pads 50,257 tokens to 50,432; both have their 20,554,567,680 and 280e9 parameters otherwise.
    neox = read_flags(load("gpt-20b").flags).model
    assert total_numel(replace(neox, vocab_size=50432, make_vocab_size_divisible_by=1), Layout()) == 20_554_567_680
    assert round(unpadded("gpt-280b") / 1e9) == 280


@pytest.mark.parametrize("gigabytes", (40, 80))
@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_is_for_the_fewest_nodes_on_which_it_fits(name, gigabytes):
    recipe = load(name, gigabytes * GIB)
    assert recipe.gpu_memory == gigabytes * GIB
    job = read_flags(recipe.flags)
    machine = Machine(recipe.nodes, recipe.gpus_per_node, recipe.gpu_memory, paths=(DISK,))
    assert needs_of(job, machine).fits
    fewest = smallest(job, machine, offload=True)
    assert fewest.need.machine.nodes == recipe.nodes
    assert fewest.need.job.layout == job.layout


def test_bytes_of_a_small_model_by_hand():
    job = job_of("--untie-embeddings-and-output-weights")
    need = needs_of(job, Machine(1, 4, paths=(DISK,)))
    numel = 4 * LAYER + 2 * 1024 * 512 + 512
    assert total_numel(job.model, job.layout) == numel == 13_636_096
    assert (need.dp, need.micro_batches) == (4, 2)
    gpu = need.gpu
    assert (gpu.weights, gpu.gradients, gpu.state) == (2 * numel, 4 * numel, 0)
    assert gpu.startup == (2 + 2 + 4) * numel
    assert need.shard_numels == (numel // 4,)
    stock = needs_of(job, Machine(1, 4), offload=False).gpu
    assert (stock.weights, stock.gradients, stock.state) == (2 * numel, 4 * numel, 12 * numel // 4)


@pytest.mark.parametrize(
    "more, weights, gradients, state, record",
    [
        ("", 2, 4, 12, 10),
        ("--grad-reduce-in-bf16", 2, 2, 12, 10),
        ("--mlp-offload-master-weights full", 2, 4, 12, 12),
    ],
)
def test_bytes_a_parameter_follow_the_precision(more, weights, gradients, state, record):
    need = needs_of(job_of(more), Machine(1, 4, paths=(DISK,)))
    stock = needs_of(job_of(more), Machine(1, 4), offload=False)
    numel = sum(need.shard_numels) * 4
    assert need.gpu.weights == weights * numel and need.gpu.gradients == gradients * numel
    assert stock.gpu.state == state * numel // 4
    assert stock.gpu.update == (numel if gradients == 2 else 0)  # widened to 4 bytes a parameter of the shard
    assert need.state_bytes == record


@pytest.mark.parametrize("dtype, weights, gradients, record", [("--fp16", 2, 2, 12), ("", 4, 4, 12)])
def test_fp16_keeps_its_gradients_and_fp32_its_masters(dtype, weights, gradients, record):
    need = needs_of(job_of(flags=SMALL.replace("--bf16", dtype)), Machine(1, 4, paths=(DISK,)))
    numel = sum(need.shard_numels) * 4
    assert (need.gpu.weights, need.gpu.gradients, need.state_bytes) == (weights * numel, gradients * numel, record)


def test_activations_of_the_original_gpt_are_those_of_the_paper():
    # s b h (34 + 5 a s / h) a layer without recomputation; s = 1024, b = 2, h = 512, a = 8; LayerNorm or not is the same.
    flags = SMALL.replace("--hidden-dropout 0", "--hidden-dropout 0.1") + " --transformer-impl local"
    job = job_of(flags=flags)
    s, b, h, a = 1024, 2, 512, 8
    assert layer_bytes(job.model, job.layout, job.training, moe=False) == s * b * h * (34 + 5 * a * s / h)
    job = job_of("--recompute-granularity selective", flags=flags)
    assert layer_bytes(job.model, job.layout, job.training, moe=False) == s * b * h * 34
    for more, factor in (("", 10 + 24 / 4), ("--sequence-parallel", 34 / 4)):
        job = job_of(f"--recompute-activations --tensor-model-parallel-size 4 {more}", flags=flags)
        assert layer_bytes(job.model, job.layout, job.training, moe=False) == s * b * h * factor


def test_full_recomputation_keeps_the_input_of_each_layer():
    kept = needs_of(job_of(), Machine(1, 4, paths=(DISK,))).gpu.activations
    job = job_of("--recompute-granularity full")
    full = needs_of(job, Machine(1, 4, paths=(DISK,))).gpu.activations
    one = layer_bytes(job.model, job.layout, job.training, moe=False)
    tokens = 1024 * 2
    assert kept - full == 4 * one - (4 * 2 * tokens * 512 + one)
    # the rest: token ids, the input of the output layer, bf16 logits, softmax and gradient in fp32
    assert kept - 4 * one == tokens * (8 + 2 * 2 * 512 + 1024 * (2 + 4 + 4))


def test_the_first_stage_of_a_pipeline_holds_most_micro_batches():
    job = job_of("--pipeline-model-parallel-size 4 --recompute-granularity full")
    first, second, last = needs_of(job, Machine(4, 4, paths=(DISK,))).stages
    one = layer_bytes(job.model, job.layout, job.training, moe=False)
    checkpoint = 2 * 1024 * 2 * 512
    # DP 4 and 16 samples in micro-batches of two: two are in flight at most, also in the first of four stages
    assert first.activations == 2 * checkpoint + one + 2 * 2048 * 8
    assert second.activations == 2 * checkpoint + one
    alone = needs_of(job, Machine(1, 4, paths=(DISK,))).stages[0]
    assert alone.activations == 4 * checkpoint + one + 4 * 2048 * 8


def test_the_fullest_stage_is_found_wherever_the_experts_are():
    experts = "--num-experts 8 --expert-model-parallel-size 4 --moe-layer-freq ([0]*2+[1]*1+[0]*1) --pipeline-model-parallel-size 4"
    need = needs_of(job_of(experts), Machine(4, 4, paths=(DISK,)))
    assert need.gpu.stage == 2 and need.shard_numels == (-(-(4 * 512**2 + 1024 + 8 * 512) // 4), 2 * 8 * 512**2)


def test_paths_hold_what_host_memory_does_not_and_spare_slots():
    more = "--mlp-offload-subgroup-size 65536 --mlp-offload-host-memory 8MiB"
    need = needs_of(job_of(more), Machine(1, 2, paths=(DISK, replace(DISK, directory="pfs", write=10**9))))
    slot = 10 * 65536
    buffers = (8 * 2**20 - 2 * 65536 * 6) // slot
    assert need.residency.buffer_count == buffers == 11 and need.residency.staging_count == 6
    numel = 4 * LAYER + 1024 * 512 + 512
    streamed = -(-(numel // 2) // 65536) - (buffers - 6)
    assert [p.subgroups for p in need.paths] == [streamed * 3 // 4, streamed - streamed * 3 // 4]
    assert [p.needed for p in need.paths] == [(p.subgroups + 6) * slot * 2 for p in need.paths]
    assert need.host.buffers == 2 * (buffers * slot + 2 * 65536 * 6)
    saved = needs_of(job_of(more + " --async-save"), Machine(1, 2, paths=(DISK,)))
    usual = needs_of(job_of(more), Machine(1, 2, paths=(DISK,)))
    assert saved.paths[0].needed > 1.9 * usual.paths[0].needed


@pytest.mark.parametrize(
    "options",
    [
        "",
        "--async-save",
        "--mlp-offload-gpu-memory 8MiB",
        "--mlp-offload-update-device cuda",
        "--mlp-offload-gpu-memory 8MiB --async-save",
    ],
)
def test_the_run_reserves_what_was_planned(tmp_path, options):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    paths = (replace(DISK, directory=str(tmp_path / "a")), replace(DISK, directory=str(tmp_path / "b"), write=10**9))
    more = "--mlp-offload-subgroup-size 65536 --mlp-offload-host-memory 8MiB"
    need = needs_of(job_of(f"{more} {options}"), Machine(1, 2, paths=paths))
    config = need.job.offload.replace(paths=paths, job="plan", snapshots="--async-save" in options)
    reserved = need.host.buffers // 2 - need.residency.buffer_count * 10 * 65536
    assert (GRADIENT_STAGINGS, STAGED_BYTES) == (transfers.STAGING_COUNT, transfers._GRADIENT_ITEMSIZE)
    spaces = {"dense": list(need.shard_numels)}
    gpu = Gpu(Clock([]), Link(1e9), 1e9, 1e10, 1e9) if "mlp-offload" in options else None
    pipeline = StepPipeline(config, spaces, RankContext(0, 0, 2), reserved_bytes=reserved, main_itemsize=2, gpu=gpu)
    try:
        assert (pipeline.tiers.device.nbytes if gpu else 0) == need.gpu.state
        assert [file.nbytes * 2 for file in pipeline.tiers.files] == [p.needed for p in need.paths]
        assert [pipeline.tiers.homes_on(i) for i in range(2)] == [p.subgroups for p in need.paths]
        assert pipeline.tiers.residency == need.residency
        assert pipeline.tiers.pool.region[1] == need.residency.buffer_count * 10 * 65536
    finally:
        pipeline.close()


def test_gpu_memory_holds_a_part_of_the_state():
    more = "--mlp-offload-subgroup-size 65536 --mlp-offload-host-memory 8MiB"
    slot = 10 * 65536
    usual = needs_of(job_of(more), Machine(1, 2, paths=(DISK,)))
    need = needs_of(job_of(f"{more} --mlp-offload-gpu-memory {20 * slot}"), Machine(1, 2, paths=(DISK,)))
    assert len(need.residency.device_residents) == 18 and need.residency.passing_count == 2
    assert need.gpu.state == 20 * slot and need.gpu.total == usual.gpu.total + 20 * slot
    assert need.paths[0].needed == usual.paths[0].needed - 18 * slot * 2
    all_of_it = needs_of(job_of(f"{more} --mlp-offload-gpu-memory 1GiB"), Machine(1, 2))
    assert all_of_it.all_resident and all_of_it.gpu.state == len(usual.subgroups) * slot
    with pytest.raises(ConfigError, match="gpu_memory 1.0 KiB holds 0 buffers"):
        needs_of(job_of(f"{more} --mlp-offload-gpu-memory 1KiB"), Machine(1, 2))
    full = Machine(1, 2, usual.gpu.total + 5 * slot, gpu_reserve=0, paths=(DISK,))
    changes = changes_that_fit(job_of(f"{more} --mlp-offload-gpu-memory {20 * slot}"), full)
    assert "--mlp-offload-gpu-memory 0" in [fit.change for fit in changes]


def test_a_small_path_takes_what_it_can_and_too_small_ones_are_told_with_the_difference():
    more = "--mlp-offload-subgroup-size 65536 --mlp-offload-host-memory 4MiB"
    small = replace(DISK, capacity=20 * 2 * 655360)
    both = needs_of(job_of(more), Machine(1, 2, paths=(small, replace(DISK, directory="pfs"))))
    assert both.fits and both.paths[0].needed <= small.capacity
    alone = needs_of(job_of(more), Machine(1, 2, paths=(small,)))
    (shortage,) = alone.shortages
    assert shortage.available == small.capacity and shortage.needed == alone.paths[0].needed
    enough = replace(small, capacity=shortage.needed)
    assert needs_of(job_of(more), Machine(1, 2, paths=(enough,))).fits


def test_what_is_said_to_fit_fits_and_one_node_less_does_not():
    job = read_flags(load("gpt-70b").flags)
    for offload in (True, False):
        fit = smallest(job, Machine(1, 4, 80 * GIB, paths=(DISK,)), offload)
        assert needs_of(fit.need.job, fit.need.machine, offload).fits
        fewer = replace(fit.need.machine, nodes=fit.need.machine.nodes - 1)
        assert on_these_nodes(job, fewer, offload) is None
    assert smallest(job, Machine(1, 4, 80 * GIB, paths=(DISK,)), False, most_nodes=3) is None


def test_single_changes_are_told_only_where_they_are_enough():
    flags = " ".join(load("gpt-20b", 80 * GIB).flags)
    tight = Machine(1, 4, 36 * GIB, paths=(DISK,))
    (fit,) = changes_that_fit(read_flags(flags.split()), tight)
    assert fit.change == "--grad-reduce-in-bf16" and needs_of(fit.need.job, tight).fits
    assert changes_that_fit(read_flags(flags.split()), replace(tight, gpu_memory=20 * GIB)) == []


@pytest.mark.parametrize(
    "more, message",
    [
        (
            "--tensor-model-parallel-size 3",
            "--num-attention-heads 8 is not divisible by --tensor-model-parallel-size 3",
        ),
        ("--pipeline-model-parallel-size 3", "4 layers cannot be dealt out evenly among 3"),
        ("--multi-latent-attention", "--multi-latent-attention: plan does not know what this changes"),
        ("--mtp-num-layers=1", "--mtp-num-layers=1: plan does not know"),
        ("--hidden-sizes 4", "did you mean --hidden-size?"),
        ("--optimizer sgd", "--optimizer-offload mlp with optimizer=sgd: offload computes AdamW only"),
        ("--qk-clip", "--optimizer-offload mlp with qk_clip=True: offload holds no fp32 weights"),
        ("--non-persistent-ckpt-type local", "set it to global"),
        ("--mlp-offload-gpu-memry 3", "no such flag; did you mean --mlp-offload-gpu-memory?"),
        ("--seq-length 0", "argument --seq-length: 0 must be at least 1"),
        ("--num-layers four", "invalid int value: 'four'"),
        ("--moe-layer-freq __import__('os') --num-experts 2", "neither a number nor a list"),
        ("--mlp-offload-block-size 5", "block_size 5: must be at least 4096"),
    ],
)
def test_flags_that_cannot_be_right_are_refused_by_name(more, message):
    with pytest.raises(ConfigError) as error:
        job_of(more)
    assert message in str(error.value)


@pytest.mark.parametrize("option", [rule.option for rule in RULES if rule.refused is bool])
def test_what_the_run_refuses_the_plan_refuses(option):
    with pytest.raises(ConfigError, match=f"with {option}=True: offload"):
        job_of(f"--{option.replace('_', '-')}")


def test_no_tokenizer_is_read():
    flags = SMALL.replace("--vocab-size 1000", "--tokenizer-type Llama2Tokenizer --tokenizer-model /x/tokenizer.model")
    with pytest.raises(ConfigError, match="--vocab-size is missing: Megatron would ask the tokenizer"):
        job_of(flags=flags)


def test_without_the_distributed_optimizer_there_is_nothing_to_offload():
    with pytest.raises(ConfigError, match="--use-distributed-optimizer is missing"):
        job_of(flags=SMALL.replace("--use-distributed-optimizer", ""))


def test_flags_that_change_nothing_are_told():
    job = job_of("--lr 3e-4 --log-interval 5")
    assert job.unused == ("--lr", "--log-interval") and "--num-layers" in job.used
