"""A meter counts whole bursts, keeps to what was written, and gives latencies of single blocks."""

import os

import pytest

from mlp_offload.errors import PathIOError
from mlp_offload.storage.engine import Engine, direct_supported
from mlp_offload.storage.meter import Meter, _rate

SETTINGS = {"kind": "threads", "threads": 2, "iodepth": 2, "block_size": 2**16}


@pytest.fixture
def make(tmp_path):
    meters = []

    def make(size_bytes=2**24, direct=True, **settings):
        file = tmp_path / "file"
        file.write_bytes(bytes(size_bytes))
        meters.append(Meter(file, size_bytes, support=direct_supported(tmp_path), direct=direct, **SETTINGS | settings))
        file.unlink()
        return meters[-1]

    yield make
    for meter in meters:
        meter.close()


@pytest.fixture
def moves(monkeypatch):
    """(direction, offset, bytes) of all requests."""
    seen = []
    for name in ("read", "write"):
        monkeypatch.setattr(Engine, name, _watched(name, getattr(Engine, name), seen))
    return seen


def _watched(name, original, seen):
    def move(self, offset, address, nbytes, **settings):
        seen.append((name, offset, nbytes))
        return original(self, offset, address, nbytes, **settings)

    return move


def test_bursts_are_counted_with_their_pauses():
    ends = [0.1 * (i // 5) for i in range(1, 60)]  # five at a time, each tenth of a second
    for until in (0.62, 0.7, 0.78):
        assert _rate(ends, 1000, 0.0, 0.25, until) == pytest.approx(5 * 1000 / 0.1)


def test_steady_requests_give_the_steady_rate_whatever_the_span():
    ends = [0.01 * i for i in range(1, 100)]
    for counted_from, until in ((0.1, 0.9), (0.105, 0.9049), (0.0, 0.5)):
        assert _rate(ends, 1000, 0.0, counted_from, until) == pytest.approx(1e5)


def test_a_first_burst_that_a_rate_limit_lets_pass_is_not_counted():
    assert _rate([0.001] * 50 + [0.1 * i for i in range(1, 20)], 1000, 0.0, 0.2, 1.5) == pytest.approx(1e4)


def test_where_hardly_anything_ends_within_the_span_all_counts():
    assert _rate([2.0, 4.0], 1000, 0.0, 0.25, 1.25) == pytest.approx(500)
    assert _rate([5.0], 1000, 1.0, 1.25, 2.25) == pytest.approx(250)


@pytest.mark.parametrize("direct", [True, False])
def test_both_directions_use_halves_of_what_was_written(make, moves, direct):
    meter = make(direct=direct)
    assert meter.fill(60.0) == 2**24 == meter.filled_count * meter.request_bytes
    assert [offset for _, offset, _ in moves] == list(range(0, 2**24, 2**20))
    moves.clear()
    moved = meter.measure("mixed", 0.05)
    assert {offset for name, offset, _ in moves if name == "read"} <= set(range(0, 2**23, 2**20))
    assert {offset for name, offset, _ in moves if name == "write"} <= set(range(2**23, 2**24, 2**20))
    for name in ("read", "write"):
        assert moved[name].nbytes == sum(nbytes for other, _, nbytes in moves if other == name) > 0
        assert moved[name].bytes_per_second > 0


def test_what_was_not_filled_in_time_is_not_read(make, moves):
    meter = make()
    nbytes = meter.fill(0.0)
    assert nbytes == meter.request_bytes == 2**20
    moves.clear()
    meter.measure("read", 0.02)
    meter.latencies("read", 0.02)
    assert {offset for _, offset, _ in moves} == {0}


def test_a_latency_is_that_of_one_block_and_one_at_a_time(make, moves):
    meter = make()
    meter.fill(60.0)
    moves.clear()
    for name in ("read", "write"):
        found = meter.latencies(name, 0.05)
        assert len([1 for other, _, nbytes in moves if other == name and nbytes == 2**16]) == len(found) == len(moves)
        assert all(seconds > 0 for seconds in found) and sum(found) < 1.0
        moves.clear()


def test_the_file_is_to_be_filled_first(make):
    meter = make()
    for call in (lambda: meter.measure("read", 0.1), lambda: meter.latencies("write", 0.1)):
        with pytest.raises(ValueError, match="fill"):
            call()


def test_a_failing_request_is_the_error_and_close_gives_all_back(make, tmp_path):
    meter = make()
    meter.fill(60.0)
    os.ftruncate(meter._descriptor, 2**20)
    with pytest.raises(PathIOError, match="the file ended early"):
        meter.measure("read", 0.1)
