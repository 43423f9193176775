"""Two minutes of steps, saves, forks and new optimizers: nothing grows, and the numbers stay those of resident state."""

from __future__ import annotations

import gc
import itertools
import os
import time

import psutil
import pytest
import torch
from engine_tools import REAL_KINDS, settles_to, tasks

from mlp_offload import OffloadedAdamW

SECONDS, ROUND_SECONDS = 120, 4
WARM_UP_ROUNDS = 6
ALLOWED_GROWTH_BYTES = 4 * 2**20
SHAPES = [(127, 129), (4097,), (1,), (64, 64)]


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def resident_bytes() -> int:
    gc.collect()
    return psutil.Process().memory_info().rss


def fork() -> int:
    """A child that shares our memory for a few steps and writes to some of it."""
    child = os.fork()
    if child == 0:
        bytearray(2**20)
        time.sleep(0.05)
        os._exit(0)
    return child


def equal(a: "dict", b: "dict") -> bool:
    """Whether two optimizers' ``state_dict()["state"]`` are the same."""
    return a.keys() == b.keys() and all(torch.equal(a[i][k], b[i][k]) for i in a for k in a[i])


@pytest.mark.full
@pytest.mark.timeout(400)
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_two_minutes_of_steps_leak_nothing_and_keep_the_numbers(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
    paths = [str(tmp_path / name) for name in "ab"]
    generator = torch.Generator().manual_seed(5)
    ours = [torch.nn.Parameter(torch.randn(shape, generator=generator).bfloat16()) for shape in SHAPES]
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    twin = OffloadedAdamW(theirs, lr=1e-3, paths=paths, host_memory="4MiB", update_threads=1, name="twin")
    threads, descriptors, steady_bytes, total_steps = tasks(), open_descriptors(), 0, 0
    children, state, deadline = [], None, time.monotonic() + SECONDS
    for number, kind in enumerate(itertools.cycle(REAL_KINDS)):
        optimizer = OffloadedAdamW(
            ours, lr=1e-3, paths=paths, host_memory="64KiB", subgroup_size=257, update_threads=2, engine=kind
        )
        if state is not None:
            optimizer.load_state_dict(state)
        inside = None
        round_end = time.monotonic() + ROUND_SECONDS
        while time.monotonic() < round_end:
            total_steps += 1
            for p, q in zip(ours, theirs):
                p.grad = torch.randn(p.shape, generator=generator).bfloat16()
                q.grad = p.grad
            if total_steps % 5 == 0:
                children.append(fork())
            optimizer.step()
            twin.step()
            if total_steps % 20 == 0:
                assert equal(optimizer.state_dict()["state"], twin.state_dict()["state"]), (total_steps, kind)
                optimizer._pipeline.tiers.settle()
                inside = inside or (tasks(), open_descriptors())
                assert settles_to(inside[0]) and open_descriptors() == inside[1], (total_steps, kind)
                while children:
                    assert os.waitpid(children.pop(), 0)[1] == 0
        assert optimizer.last_record.fetch_count > 5 * optimizer.last_record.hit_count
        state = optimizer.state_dict()
        optimizer.close()
        while children:
            assert os.waitpid(children.pop(), 0)[1] == 0
        assert all(torch.equal(p, q) for p, q in zip(ours, theirs)), (total_steps, kind)
        assert settles_to(threads) and open_descriptors() == descriptors, (total_steps, kind)
        if number == WARM_UP_ROUNDS:
            steady_bytes = resident_bytes()
        if time.monotonic() > deadline:
            break
    twin.close()
    assert number > WARM_UP_ROUNDS
    assert resident_bytes() < steady_bytes + ALLOWED_GROWTH_BYTES
    assert not any(file.is_file() for name in "ab" for file in (tmp_path / name).rglob("*"))
    print(f"{total_steps} steps, {number + 1} optimizers, {(resident_bytes() - steady_bytes) / 2**20:+.1f} MiB")
