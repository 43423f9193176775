"""The Python face of the engines; what they do with bytes is in tests/conformance."""

import ctypes
import gc
import logging
import os
import signal
import threading
import time
import weakref
from pathlib import Path

import pytest

from mlp_offload import _native
from mlp_offload.errors import ConfigError
from mlp_offload.storage.engine import FALLBACK_ALIGNMENT, Engine, direct_supported, open_engine, probe_alignment


def buffered(path: Path, kind: str = "threads", **settings) -> Engine:
    path.touch()
    return Engine(path, kind=kind, direct=False, **settings)


def test_null_completes_at_once_and_moves_nothing() -> None:
    data = ctypes.create_string_buffer(b"as it was")
    with Engine("no such file", kind="null", direct=False) as engine:
        future = engine.read(0, ctypes.addressof(data), 9)
        assert future.done() and future.result() is None
        assert engine.write(1 << 40, ctypes.addressof(data), 9).result() is None
        assert engine.inflight() == [] and data.value == b"as it was"
        assert engine.register_buffers(ctypes.addressof(data), 9) is False
    with pytest.raises(RuntimeError, match="closed"):
        engine.read(0, ctypes.addressof(data), 9)
    with Engine("no such file", kind="null", direct=True) as engine, pytest.raises(ValueError, match="alignment 4096"):
        engine.read(1, 4096, 4096)


@pytest.mark.parametrize(
    "settings, word",
    [
        ({"threads": 0}, "threads is 0"),
        ({"iodepth": 0}, "iodepth is 0"),
        ({"block_size": 0}, "block_size is 0"),
        ({"block_size": (1 << 30) + 4096}, "block_size"),
        ({"block_size": 6144, "direct": True}, "multiple of the alignment 4096"),
        ({"alignment": 0}, "alignment is 0"),
        ({"alignment": 3000}, "power of two"),
        ({"kind": "aio"}, "'aio'"),
    ],
)
def test_settings_out_of_range_are_named(tmp_path: Path, settings: dict, word: str) -> None:
    (tmp_path / "state").touch()
    with pytest.raises(ValueError, match=word):
        Engine(tmp_path / "state", **settings)


def test_requests_out_of_range_are_named(tmp_path: Path) -> None:
    with buffered(tmp_path / "state") as engine:
        with pytest.raises(ValueError, match="address is null"):
            engine.read(0, 0, 1)
        with pytest.raises(ValueError, match="largest file offset"):
            engine.write((1 << 63) - 1, 4096, 1)
        assert engine.read(0, 0, 0).result() == 0


def test_unknown_kind_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="auto, io_uring, threads, null"):
        open_engine(tmp_path, kind="posix")


def test_auto_takes_io_uring_where_it_can_be_had(tmp_path: Path) -> None:
    (tmp_path / "state").touch()
    with open_engine(tmp_path / "state", direct=False) as engine:
        assert engine.kind == ("io_uring" if _native.io_uring_available()[0] else "threads")
    with open_engine(tmp_path / "state", kind="threads", direct=False) as engine:
        assert engine.kind == "threads"


def test_times_are_on_the_monotonic_clock_and_in_order(tmp_path: Path) -> None:
    data = ctypes.create_string_buffer(4096)
    with buffered(tmp_path / "state") as engine:
        begin = time.monotonic()
        future = engine.write(0, ctypes.addressof(data), 4096)
        future.result()
        assert begin <= future.submitted_seconds <= future.started_seconds <= future.finished_seconds
        assert future.finished_seconds <= time.monotonic()


@pytest.fixture
def fifo(tmp_path: Path) -> Path:
    """A file whose reads do not return until somebody writes to it: through io_uring a FIFO is that."""
    if not _native.io_uring_available()[0]:
        pytest.skip("io_uring is not available here")
    os.mkfifo(tmp_path / "fifo")
    return tmp_path / "fifo"


def test_keepalive_lives_while_the_request_does_even_without_its_future(fifo: Path) -> None:
    class Buffer:
        def __init__(self) -> None:
            self.data = ctypes.create_string_buffer(4)

    with Engine(fifo, kind="io_uring", direct=False) as engine:
        buffer = Buffer()
        alive = weakref.ref(buffer)
        engine.read(0, ctypes.addressof(buffer.data), 4, keepalive=buffer)
        del buffer
        gc.collect()
        assert engine.inflight() and alive() is not None
        fifo.write_bytes(b"done")
        while engine.inflight():
            time.sleep(0.01)
        engine.write(0, 0, 0).result()
        assert alive() is None


def test_a_signal_handler_runs_while_waiting(fifo: Path) -> None:
    """Ctrl-C ends a wait, not the request."""
    data = ctypes.create_string_buffer(16)
    with Engine(fifo, kind="io_uring", direct=False) as engine:
        future = engine.read(0, ctypes.addressof(data), 2, checksum=False)
        before = signal.signal(signal.SIGUSR1, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        timer = threading.Timer(0.2, signal.pthread_kill, (threading.main_thread().ident, signal.SIGUSR1))
        timer.start()
        try:
            begin = time.monotonic()
            with pytest.raises(KeyboardInterrupt):
                future.result(warn_seconds=20, timeout_seconds=20)
            assert time.monotonic() - begin < 10
        finally:
            timer.join()
            signal.signal(signal.SIGUSR1, before)
        fifo.write_bytes(b"ok")
        future.result(timeout_seconds=10)
        assert data.value == b"ok"


def test_a_slow_request_warns_once_and_then_succeeds(fifo: Path, caplog: pytest.LogCaptureFixture) -> None:
    data, messages = ctypes.create_string_buffer(16), []
    with Engine(fifo, kind="io_uring", direct=False) as engine, caplog.at_level(logging.WARNING):

        def answer(message: str) -> None:
            messages.append(message)
            fifo.write_bytes(b"late")

        engine.read(0, ctypes.addressof(data), 4, checksum=False).result(0.1, 10, answer)
    assert data.value == b"late"
    assert len(messages) == len(caplog.records) == 1
    assert f"read {fifo} offset=0 bytes=4: no answer after" in messages[0]


def test_probe_of_a_directory(tmp_path: Path) -> None:
    support = direct_supported(tmp_path)
    assert support.reason and list(tmp_path.iterdir()) == []
    assert support.alignment in (512, 1024, 2048, FALLBACK_ALIGNMENT) and probe_alignment(tmp_path) == support.alignment
    if support.supported:
        data = ctypes.create_string_buffer(3 * support.alignment)
        address = -(-ctypes.addressof(data) // support.alignment) * support.alignment
        (tmp_path / "state").touch()
        with Engine(tmp_path / "state", alignment=support.alignment) as engine:
            engine.write(support.alignment, address, support.alignment).result()


def test_probe_of_a_directory_that_takes_no_file() -> None:
    with pytest.raises(OSError):
        direct_supported("/proc")
