"""Recipes and ``plan`` beside the real Megatron: its parser takes the flags, and its models have the parameters that are counted."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mlp_offload.plan.megatron_flags import read_flags
from mlp_offload.plan.memory import gpu_needs
from mlp_offload.plan.model import stage_of
from mlp_offload.prediction import flops_of
from mlp_offload.recipes import NAMES, load

REPOSITORY = Path(__file__).resolve().parents[2]
GIB = 2**30
DATA = ("--mock-data", "--tokenizer-type", "NullTokenizer")
CPU = "--transformer-impl local --use-cpu-initialization --no-persist-layer-norm --no-rope-fusion --num-workers 0"
TINY = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --vocab-size 1000 --train-iters 1 --lr 1e-3 "
TINY += "--micro-batch-size 1 --bf16 --use-distributed-optimizer --no-gradient-accumulation-fusion --no-masked-softmax-fusion"

MODELS = {
    "tied, biases, learned positions": (1, "--max-position-embeddings 48"),
    "untied, gated, RMSNorm": (
        1,
        "--max-position-embeddings 32 --untie-embeddings-and-output-weights --swiglu --disable-bias-linear "
        "--normalization RMSNorm --position-embedding-type rope",
    ),
    "TP4, GQA, padded vocabulary": (
        8,
        "--tensor-model-parallel-size 4 --group-query-attention --num-query-groups 2 --position-embedding-type rope "
        "--max-position-embeddings 32 --num-attention-heads 8 --untie-embeddings-and-output-weights",
    ),
    "PP2, tied": (2, "--pipeline-model-parallel-size 2 --max-position-embeddings 32"),
    "PP4, embedding and loss count": (
        4,
        "--num-layers 6 --pipeline-model-parallel-size 4 --account-for-embedding-in-pipeline-split "
        "--account-for-loss-in-pipeline-split --position-embedding-type rope --max-position-embeddings 32 --swiglu",
    ),
    "PP2, uneven, odd FFN": (
        2,
        "--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 1 --ffn-hidden-size 200 "
        "--position-embedding-type rope --max-position-embeddings 32 --kv-channels 24 --add-qkv-bias --disable-bias-linear",
    ),
    "TP2 PP2, virtual stages, LayerNorm of Q and K": (
        4,
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 "
        "--position-embedding-type rope --max-position-embeddings 32 --qk-layernorm --global-batch-size 4",
    ),
    "EP2 TP1, experts in every other layer": (
        4,
        "--num-layers 3 --num-experts 4 --expert-model-parallel-size 2 --moe-layer-freq 2 --moe-ffn-hidden-size 96 --swiglu "
        "--disable-bias-linear --position-embedding-type rope --max-position-embeddings 32 --moe-router-topk 2",
    ),
    "EP2 PP2, a shared expert, layers as a list": (
        4,
        "--num-experts 4 --expert-model-parallel-size 2 --pipeline-model-parallel-size 2 --moe-layer-freq ([0]*1+[1]*3) "
        "--moe-ffn-hidden-size 96 --moe-shared-expert-intermediate-size 64 --disable-bias-linear --swiglu "
        "--position-embedding-type rope --max-position-embeddings 32",
    ),
}


@pytest.fixture(scope="module")
def megatron(tmp_path_factory):
    """What Megatron says of each recipe, by (name, GiB of a GPU), and of each small model, by its name; one process."""
    directory = str(tmp_path_factory.mktemp("path"))
    requests = {}
    for name in NAMES:
        for gigabytes in (40, 80):
            recipe = load(name, gigabytes * GIB)
            flags = [*recipe.flags, *DATA, "--mlp-offload-path", directory]
            world_size = recipe.nodes * recipe.gpus_per_node
            requests[name, gigabytes] = {"flags": flags, "world_size": world_size, "build": False}
    for name, (world_size, flags) in MODELS.items():
        words = [*TINY.split(), *CPU.split(), *DATA, *flags.split()]
        requests[name] = {"flags": words, "world_size": world_size, "build": True}
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("megatron_says.py"))],
        input=json.dumps(list(requests.values())),
        capture_output=True,
        text=True,
        timeout=250,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    return dict(zip(requests, json.loads(done.stdout.splitlines()[-1])))


@pytest.mark.parametrize("gigabytes", (40, 80))
@pytest.mark.parametrize("name", NAMES)
def test_megatron_takes_a_recipe_and_means_what_plan_means(megatron, name, gigabytes):
    told, recipe = megatron[name, gigabytes], load(name, gigabytes * GIB)
    job = read_flags(recipe.flags)
    assert told["optimizer_offload"] == "mlp" and job.offload is not None
    layout, model = job.layout, job.model
    assert told["data_parallel_size"] * layout.model_parallel == recipe.nodes * recipe.gpus_per_node
    assert told["padded_vocab_size"] == model.padded_vocab_size(layout.tp)
    assert (told["ffn_hidden_size"], told["num_layers"]) == (model.ffn_hidden_size, model.num_layers)
    assert (told["tensor_model_parallel_size"], told["pipeline_model_parallel_size"]) == (layout.tp, layout.pp)
    assert told["sequence_parallel"] == layout.sequence_parallel
    assert told["accumulate_allreduce_grads_in_fp32"] == job.training.fp32_main_grad
    assert flops_of(job, job.training.global_batch_size) == pytest.approx(told["flops"], rel=1e-3)


@pytest.mark.parametrize("name", MODELS)
def test_every_stage_has_as_many_parameters_as_megatrons_model(megatron, name):
    told = megatron[name]
    _, flags = MODELS[name]
    job = read_flags([*TINY.split(), *CPU.split(), *DATA, *flags.split()])
    assert told["padded_vocab_size"] == job.model.padded_vocab_size(job.layout.tp)
    # Buffers are padded by a few elements a parameter and bucket; these models are small, so that shows.
    stages = gpu_needs(job, MODELS[name][0], offload=True)
    for need in stages:
        assert 0.99 < told["startup_bytes"][need.stage] / need.startup < 1.06, need
    counted = [stage_of(job.model, job.layout, stage) for stage in range(job.layout.pp)]
    assert [[s.dense_numel, s.expert_numel] for s in counted] == told["stages"]
