"""No option that is about speed or place may change a bit: one model, all combinations, one hash."""

import hashlib
import itertools

import pytest
import torch

from mlp_offload import OffloadedAdamW, _native

VARIANTS = _native.adam_variants()
ENGINES = ["threads"] + (["io_uring"] if _native.io_uring_available()[0] else [])
SHAPES = [(65, 33), (1,), (4097,), (64, 16)]


def run(directories, dtype, **options):
    """Hash of parameters and state after three steps; the share of the state that was fetched a step."""
    generator = torch.Generator().manual_seed(3)
    params = [torch.nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in SHAPES]
    optimizer = OffloadedAdamW(params, lr=1e-2, weight_decay=0.1, paths=[str(d) for d in directories], **options)
    try:
        for _ in range(3):
            for p in params:
                p.grad = torch.randn(p.shape, generator=generator).to(dtype)
            optimizer.step()
        record = optimizer.last_record
        state = optimizer.state_dict()["state"]
    finally:
        optimizer.close()
    digest = hashlib.sha256()
    for i, p in enumerate(params):
        for tensor in (p.detach(), *(state[i][k] for k in sorted(state[i]))):
            digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest(), 1 - record.hit_rate


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hash_does_not_depend_on_where_and_how_the_state_is_updated(tmp_path, dtype):
    directories = [tmp_path / name for name in "abc"]
    for directory in directories:
        directory.mkdir()
    everything_resident, _ = run(directories[:1], dtype, host_memory="1MiB", update_threads=1, adam_variant="scalar")
    subgroup_sizes = {97: "32KiB", 509: "40KiB", 1021: "60KiB"}  # with a budget that holds 8, 5 and 5 buffers
    combinations = itertools.product(subgroup_sizes, (1, 3), ("tight", "roomy"), (1, 2), VARIANTS, ENGINES)
    kept = itertools.cycle(
        ("remainder", "full", "full", "remainder", "remainder")
    )  # five: in step with none of the rest
    shares = []
    for (subgroup_size, path_count, budget, threads, variant, engine), master_weights in zip(combinations, kept):
        options = {
            "subgroup_size": subgroup_size,
            "host_memory": subgroup_sizes[subgroup_size] if budget == "tight" else "1MiB",
            "update_threads": threads,
            "adam_variant": variant,
            "engine": engine,
            "master_weights": master_weights,
        }
        digest, share = run(directories[:path_count], dtype, **options)
        assert digest == everything_resident, options
        shares.append(share)
    assert min(shares) == 0 and max(shares) > 0.8  # both extremes were really there


@pytest.mark.parametrize(
    "options", [{"checksums": False}, {"direct": False}, {"block_size": 4096}, {"staging_count": 3}]
)
def test_other_options_change_nothing_either(tmp_path, options):
    reference, _ = run([tmp_path], torch.float32, host_memory="1MiB")
    digest, share = run([tmp_path], torch.float32, host_memory="60KiB", subgroup_size=1021, **options)
    assert digest == reference and share > 0.3
