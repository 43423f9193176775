"""The flags in a parser: what is misspelt or cannot work is told in one sentence, before anything is built."""

import argparse
import sys
from types import SimpleNamespace

import pytest

from mlp_offload.errors import ConfigError
from mlp_offload.megatron import switch

GOOD = {"use_distributed_optimizer": True, "optimizer": "adam"}


def parse(monkeypatch, *argv):
    """As a script does that skips unknown flags."""
    monkeypatch.setattr(sys, "argv", ["script.py", *argv])
    arguments, _ = switch.add_flags(switch.add_flags(argparse.ArgumentParser(allow_abbrev=False))).parse_known_args()
    return SimpleNamespace(**GOOD, **vars(arguments))


@pytest.mark.parametrize(
    "flag, meant",
    [
        ("--mlp-offload-hots-memory", "did you mean --mlp-offload-host-memory?"),
        ("--mlp-offload-pth=/x", "did you mean --mlp-offload-path?"),
        ("--no-mlp-offload-checksum", "did you mean --no-mlp-offload-checksums?"),
        ("--mlp-offload-zzzzzzzzzzzzzzzzzzzzzzzzzzz", "known flags: --mlp-offload-config, --mlp-offload-path"),
    ],
)
def test_a_misspelt_flag_is_refused_even_by_a_parser_that_skips_it(monkeypatch, flag, meant):
    with pytest.raises(ConfigError) as caught:
        parse(monkeypatch, "--other", "1", flag, "3")
    assert str(caught.value).startswith(f"unknown flag {flag.partition('=')[0]}: {meant}")


def test_flags_of_others_are_not_looked_at(monkeypatch):
    assert switch.check(parse(monkeypatch, "--optimizer-offload-fraction", "0.5", "--whatever")) is None


@pytest.mark.parametrize("flag", ["--optimizer-offload", "--mlp-offload-path"])
def test_flags_beside_a_yaml_file_would_be_ignored_and_are_refused(monkeypatch, flag):
    with pytest.raises(ConfigError, match=f"--yaml-cfg makes Megatron ignore all flags, {flag} too"):
        parse(monkeypatch, "--yaml-cfg=x.yaml", flag, "mlp")
    parse(monkeypatch, "--yaml-cfg", "x.yaml", "--optimizer-offload-fraction", "0.5")


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--mlp-offload-engine", "uring"], "engine 'uring': must be one of auto, io_uring, threads"),
        (["--mlp-offload-subgroup-size", "0"], "subgroup_size 0: must be at least 1"),
        (["--mlp-offload-path", "/no/such/place"], "path '/no/such/place': No such file or directory"),
        (["--mlp-offload-path", "$NO_SUCH_VARIABLE/x"], "NO_SUCH_VARIABLE is not set"),
        (["--mlp-offload-config", "/no/such.toml"], "config file '/no/such.toml': No such file"),
    ],
)
def test_options_and_paths_are_checked_with_the_arguments(monkeypatch, tmp_path, flags, message):
    good = ["--optimizer-offload", "mlp", f"--mlp-offload-path={tmp_path}"]
    assert switch.check(parse(monkeypatch, *good)).paths[0].directory == str(tmp_path)
    with pytest.raises(ConfigError) as caught:
        switch.check(parse(monkeypatch, *good, *flags))
    assert message in str(caught.value)


def test_a_value_in_a_file_is_told_with_the_file(monkeypatch, tmp_path):
    file = tmp_path / "offload.toml"
    file.write_text('host_memory = "3 bananas"')
    arguments = parse(monkeypatch, "--optimizer-offload", "mlp", "--mlp-offload-config", str(file))
    with pytest.raises(ConfigError, match=f"config file '{file}': host_memory: cannot read '3 bananas'"):
        switch.check(arguments)


def test_a_mode_that_does_not_exist_is_told_with_those_that_do(monkeypatch):
    with pytest.raises(ConfigError, match="--optimizer-offload 'on': must be one of none, mlp"):
        switch.check(parse(monkeypatch, "--optimizer-offload", "on"))


def test_saving_in_the_background_reserves_room_and_needs_the_writer_that_reads_storage(monkeypatch, tmp_path):
    args = parse(monkeypatch, "--optimizer-offload", "mlp", f"--mlp-offload-path={tmp_path}")
    assert not switch.check(args).snapshots
    args.async_save, args.async_strategy = True, "mcore"
    assert switch.check(args).snapshots
    args.async_strategy = "nvrx"
    with pytest.raises(ConfigError, match="add --async-strategy mcore"):
        switch.check(args)
