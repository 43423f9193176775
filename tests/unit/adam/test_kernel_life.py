"""Threads, forks, closing and bad input of the native kernel."""

from __future__ import annotations

import mmap
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mlp_offload.adam import AdamKernel, Segment, adam_scalars, adamw_step
from mlp_offload.errors import ConfigError

NUMEL = 40000
SCALARS = adam_scalars(1e-3, (0.9, 0.95), 1e-8, 0.1, step=1)


def make_grad() -> torch.Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(0))


def expected_record(steps: int) -> torch.Tensor:
    record = torch.zeros(3, NUMEL)
    for _ in range(steps):
        adamw_step(*record, make_grad(), None, SCALARS)
    return record


def team_thread_count() -> int:
    """Threads of this process that belong to an Adam team."""
    names = []
    for task in Path("/proc/self/task").iterdir():
        try:
            names.append((task / "comm").read_text())
        except OSError:
            continue  # ended while we looked
    return sum(name.startswith("mlp-adam") for name in names)


def assert_team_thread_count(expected: int) -> None:
    """A joined thread may stay listed for an instant, so wait up to two seconds."""
    deadline = time.monotonic() + 2
    while team_thread_count() != expected and time.monotonic() < deadline:
        time.sleep(0.01)
    assert team_thread_count() == expected


def run_in_fork(work: Callable[[], None]) -> None:
    """Run `work` in a forked child; fail if it raises or takes more than 20 seconds."""
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(20)
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert status == 0, f"the child ended with wait status {status} (14: it hung)"


def test_team_is_named_sleeps_and_is_joined():
    before = team_thread_count()
    kernel = AdamKernel(4)
    record = torch.zeros(3, NUMEL)
    kernel.update(record.data_ptr(), NUMEL, [Segment.of(0, NUMEL, make_grad(), None)], [SCALARS])
    assert_team_thread_count(before + 3)
    kernel.close()
    assert_team_thread_count(before)
    kernel.close()
    with pytest.raises(RuntimeError, match="closed"):
        kernel.update(record.data_ptr(), NUMEL, [], [])
    dropped = AdamKernel(3)
    assert_team_thread_count(before + 2)
    del dropped
    assert_team_thread_count(before)


def test_signals_are_blocked_in_the_team():
    with AdamKernel(2) as kernel:
        # A thread starts with every signal blocked by the C library: look once the worker has done something.
        record = torch.zeros(3, NUMEL)
        kernel.update(record.data_ptr(), NUMEL, [Segment.of(0, NUMEL, make_grad(), None)], [SCALARS])
        masks = []
        for task in Path("/proc/self/task").iterdir():
            if (task / "comm").read_text().startswith("mlp-adam"):
                status = (task / "status").read_text()
                masks.append(int(status.split("SigBlk:")[1].split()[0], 16))
    assert masks and all(mask >> (signal.SIGTERM - 1) & 1 and mask >> (signal.SIGINT - 1) & 1 for mask in masks)


# Forking with threads is what this is about.
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_forked_child_updates_while_the_parent_is_inside_an_update():
    expected, grad = expected_record(steps=1), make_grad()
    segments = [Segment.of(0, NUMEL, grad, None)]
    stop = threading.Event()
    with AdamKernel(3) as kernel:
        record = torch.frombuffer(mmap.mmap(-1, 3 * NUMEL * 4), dtype=torch.float32).view(3, NUMEL)
        own = torch.zeros(3, NUMEL)

        def keep_updating() -> None:
            while not stop.is_set():
                kernel.update(own.data_ptr(), NUMEL, segments, [SCALARS])

        def in_child() -> None:
            kernel.update(record.data_ptr(), NUMEL, segments, [SCALARS])
            kernel.close()

        busy = threading.Thread(target=keep_updating)
        busy.start()
        try:
            for _ in range(20):
                record.zero_()
                run_in_fork(in_child)
                assert torch.equal(record, expected)
        finally:
            stop.set()
            busy.join()
        after = torch.zeros(3, NUMEL)  # the parent's team is as it was
        kernel.update(after.data_ptr(), NUMEL, segments, [SCALARS])
        assert torch.equal(after, expected)


def test_callers_from_several_threads_take_turns():
    steps, grad = 20, make_grad()
    expected = expected_record(steps)
    records = [torch.zeros(3, NUMEL) for _ in range(4)]
    with AdamKernel(2) as kernel:

        def update(record: torch.Tensor) -> None:
            for _ in range(steps):
                kernel.update(record.data_ptr(), NUMEL, [Segment.of(0, NUMEL, grad, None)], [SCALARS])

        callers = [threading.Thread(target=update, args=(record,)) for record in records]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
    assert all(torch.equal(record, expected) for record in records)


GOOD = Segment(0, 16, 1 << 20, 0, 0, 0, 0)


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (GOOD._replace(offset_numel=-1), "outside"),
        (GOOD._replace(numel=-1), "outside"),
        (GOOD._replace(offset_numel=NUMEL - 15), "outside"),
        (GOOD._replace(offset_numel=2**62, numel=2**62), "outside"),
        (GOOD._replace(grad_dtype=3), "dtype"),
        (GOOD._replace(weight_dtype=-1), "dtype"),
        (GOOD._replace(group=1), "no such group"),
        (GOOD._replace(group=-1), "no such group"),
        (GOOD._replace(grad_address=(1 << 20) + 2), "aligned"),
        (GOOD._replace(weight_address=(1 << 20) + 1, weight_dtype=1), "aligned"),
    ],
)
def test_a_bad_segment_is_refused_before_anything_is_written(bad, reason):
    record, grad = torch.zeros(3, NUMEL), make_grad()
    good = Segment.of(0, 16, grad[:16], None)
    with AdamKernel(1) as kernel:
        with pytest.raises(ValueError, match=f"segment 1 .*{reason}"):
            kernel.update(record.data_ptr(), NUMEL, [good, bad], [SCALARS])
        with pytest.raises(ValueError, match="record"):
            kernel.update(record.data_ptr() + 2, NUMEL, [good], [SCALARS])
    assert not record.any()


def test_tensors_that_the_kernel_cannot_use_are_refused_by_name():
    with pytest.raises(ConfigError, match="gradient dtype torch.float64"):
        Segment.of(0, 4, torch.zeros(4, dtype=torch.float64), None)
    with pytest.raises(ConfigError, match="contiguous host tensor of 4"):
        Segment.of(0, 4, torch.zeros(8)[::2], None)
    with pytest.raises(ConfigError, match="weight .*contiguous host tensor of 4"):
        Segment.of(0, 4, torch.zeros(4), torch.zeros(5))
    with pytest.raises(ConfigError, match="on meta"):
        Segment.of(0, 4, torch.zeros(4, device="meta"), None)


def test_impossible_threads_and_variants_are_refused():
    with pytest.raises(ConfigError, match="use 1 or more"):
        AdamKernel(0)
    with pytest.raises(ConfigError, match="'sse9'.*scalar"):
        AdamKernel(1, "sse9")
    with AdamKernel(2) as kernel:
        assert (kernel.variant, kernel.threads) == (AdamKernel.variants()[0], 2)
