"""Cores and their NUMA nodes, from the kernel's files."""

import os

import pytest

from mlp_offload.storage.numa import format_cpus, nodes_of, parse_cpus


@pytest.mark.parametrize(
    ("text", "cpus"),
    [("", set()), ("0", {0}), ("0-3,8", {0, 1, 2, 3, 8}), ("5,7,9-10", {5, 7, 9, 10}), ("0-63", set(range(64)))],
)
def test_lists_of_cores(text, cpus):
    assert parse_cpus(text + "\n") == cpus
    assert format_cpus(cpus) == text


def test_nodes_of_some_cores(tmp_path):
    for node, cpus in enumerate(("0-15,32-47\n", "16-31,48-63\n", "\n")):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(cpus)
    (tmp_path / "possible").write_text("0-2\n")
    assert nodes_of({0, 47}, tmp_path) == [0]
    assert nodes_of({20}, tmp_path) == [1]
    assert nodes_of(range(64), tmp_path) == [0, 1]
    assert nodes_of({0}, tmp_path / "missing") == []


def test_this_process_runs_somewhere():
    if os.path.exists("/sys/devices/system/node/node0"):
        assert nodes_of()
