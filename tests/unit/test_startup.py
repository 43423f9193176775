"""What a person sees at start-up: what was decided, and how far the writing is."""

import io
import re

import pytest

torch = pytest.importorskip("torch")
from mlp_offload import OffloadedAdamW  # noqa: E402
from mlp_offload.startup import progress  # noqa: E402


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_the_optimizer_logs_what_was_decided(tmp_path, caplog):
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        path.mkdir()
    caplog.set_level("INFO", "mlp_offload")
    parameters = [torch.nn.Parameter(torch.zeros(10240))]
    settings = {"paths": list(map(str, paths)), "host_memory": "60KiB", "subgroup_size": 1024, "staging_count": 3}
    optimizer = OffloadedAdamW(parameters, **settings, engine="threads", update_threads=1)
    optimizer.close()
    (text,) = [record.getMessage() for record in caplog.records if "mlp-offload: rank 0" in record.getMessage()]
    assert "  subgroup_size         1024\n" in text
    assert "  state                 120.0 KiB: 10240 parameters of 12 bytes in 10 subgroups\n" in text
    assert "  host memory           60.0 KiB: 2 resident subgroups (20% of the state) and 3 buffers in motion\n" in text
    assert "threads: 1\n" in text
    for path in paths:
        line = rf"  path                  {path}: 4 subgroups, 84.0 KiB with spare slots in mlp-offload-\S+; threads, .*; \S+ \S+ stay free"
        assert re.search(line, text), text


def test_nothing_on_storage_is_said_as_such(tmp_path, caplog):
    caplog.set_level("INFO", "mlp_offload")
    OffloadedAdamW([torch.nn.Parameter(torch.zeros(100))], paths=[str(tmp_path)], host_memory="1MiB").close()
    assert "nothing goes to storage" in caplog.text


def test_progress_is_a_line_now_and_then_where_there_is_no_terminal():
    stream = io.StringIO()
    with progress(stream, every_seconds=0.0) as show:
        show(2**20, 2**21)
        show(2**21, 2**21)
    assert [line.partition(",")[0] for line in stream.getvalue().splitlines()] == [
        "mlp-offload: writing the state: 1.0 MiB of 2.0 MiB",
        "mlp-offload: writing the state: 2.0 MiB of 2.0 MiB",
    ]


def test_short_work_prints_no_line():
    stream = io.StringIO()
    with progress(stream, every_seconds=60.0) as show:
        show(1, 2)
        show(2, 2)
    assert stream.getvalue() == ""


def test_progress_is_a_bar_on_a_terminal():
    stream = Terminal()
    with progress(stream) as show:
        show(2**20, 2**21)
        show(2**21, 2**21)
    assert "writing the state" in stream.getvalue() and "2.1/2.1 MB" not in stream.getvalue()
    assert re.search(r"2\.0/2\.0\s+MiB", stream.getvalue())
