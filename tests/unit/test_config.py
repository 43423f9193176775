"""Options: one declaration; flags, TOML and table agree; bad input names the option and what is right."""

import argparse
import dataclasses

import pytest

from mlp_offload.config import OffloadConfig, PathConfig
from mlp_offload.errors import ConfigError
from mlp_offload.flags import add_arguments, argument_name, flag_name, from_arguments, options_table


def parse(*flags):
    return from_arguments(add_arguments(argparse.ArgumentParser()).parse_args(list(flags)))


def test_a_path_spec_carries_rates_capacity_and_engine():
    path = PathConfig.parse("/nvme,read=5GB/s,write=2.5GB/s,capacity=1TiB,engine=threads")
    assert path == PathConfig("/nvme", 5 * 10**9, 2500 * 10**6, 2**40, "threads")
    assert path.bytes_per_second == 2500 * 10**6


@pytest.mark.parametrize(
    "spec, message",
    [
        ("/a,reed=1GB/s", "unknown key 'reed'; did you mean 'read'.*directory, read, write, capacity, engine"),
        ("/a,read=1 parsec", "read: cannot read '1 parsec' as bytes"),
        ("/a,read", "'read' is not key=value"),
        ("/a,read=0", "read must be above 0"),
        ("/a,read=1,read=2", "given twice"),
        (",read=1", "no directory"),
        ("/a,engine=libaio", "engine 'libaio' is not one of auto, io_uring, threads"),
    ],
)
def test_a_bad_path_spec_says_what_is_right(spec, message):
    with pytest.raises(ConfigError, match=message):
        PathConfig.parse(spec)


def test_variables_are_expanded_where_the_rank_runs(monkeypatch):
    monkeypatch.setenv("SCRATCH_HERE", "/scratch/n7")
    assert PathConfig("$SCRATCH_HERE/x").resolved_directory() == "/scratch/n7/x"
    monkeypatch.delenv("SCRATCH_HERE")
    with pytest.raises(ConfigError, match=r"\$SCRATCH_HERE is not set"):
        PathConfig("$SCRATCH_HERE/x").resolved_directory()


@pytest.mark.parametrize(
    "options, message",
    [
        ({"subgroup_size": 0}, "subgroup_size 0: must be at least 1"),
        ({"subgroup_size": "many"}, "subgroup_size 'many': must be a whole number"),
        ({"threads": "inf"}, "threads 'inf': must be a whole number"),
        ({"host_memory": "64 GiBi"}, "host_memory: cannot read"),
        ({"staging_count": 2}, "staging_count 2: must be at least 3"),
        ({"block_size": 5000}, "multiple of 4096"),
        ({"checksums": "yes"}, "checksums 'yes': must be true or false"),
        ({"iodpeth": 3}, "unknown key 'iodpeth'; did you mean 'iodepth'"),
        ({"timeout_seconds": 5}, "timeout_seconds 5: must be above warn_seconds 30"),
        ({"host_memory_fraction": 1.5}, "host_memory_fraction 1.5"),
        ({"engine": "aio"}, "engine 'aio': must be one of auto, io_uring, threads"),
    ],
)
def test_bad_options_name_the_option(options, message):
    with pytest.raises(ConfigError, match=message):
        OffloadConfig.from_mapping(options)


def test_flags_win_over_the_file_and_every_field_has_a_flag(tmp_path):
    file = tmp_path / "offload.toml"
    file.write_text(
        'host_memory = "2GiB"\niodepth = 3\n[[paths]]\ndirectory = "/a"\nread = "1GB/s"\n[[paths]]\ndirectory = "/b"\n'
    )
    config = parse("--mlp-offload-config", str(file), "--mlp-offload-host-memory", "3GiB", "--no-mlp-offload-checksums")
    assert (config.host_memory, config.iodepth, config.checksums) == (3 * 2**30, 3, False)
    assert config.paths == (PathConfig("/a", read=10**9), PathConfig("/b"))
    assert parse("--mlp-offload-path", "/c", "--mlp-offload-path", "/d").paths == (PathConfig("/c"), PathConfig("/d"))
    defaults = add_arguments(argparse.ArgumentParser()).parse_args([])
    for field in dataclasses.fields(OffloadConfig):
        assert hasattr(defaults, argument_name(field.name))
        assert f"`{flag_name(field.name)}` | `{field.name}`" in options_table()


def test_files_that_cannot_be_read_are_named(tmp_path):
    with pytest.raises(ConfigError, match="nowhere.toml.*No such file"):
        parse("--mlp-offload-config", str(tmp_path / "nowhere.toml"))
    (tmp_path / "bad.toml").write_text("host_memory = = 3")
    with pytest.raises(ConfigError, match="bad.toml.*is not TOML.*line 1"):
        parse("--mlp-offload-config", str(tmp_path / "bad.toml"))


def test_offload_without_a_path_is_refused():
    with pytest.raises(ConfigError, match="needs at least one --mlp-offload-path"):
        parse()
