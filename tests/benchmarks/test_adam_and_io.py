"""The Adam and I/O benchmarks, tiny: complete and consistent, never how fast anything is."""

import shutil

import pytest
from bench_tools import NO_CAPS_HERE, deepspeed_is_here, other_errors, run_benchmark


def test_adam(tmp_path):
    status, said, result = run_benchmark(
        "adam", "--params", 0.3, "--rounds", 2, "--threads", 1, 2, json_file=tmp_path / "out.json"
    )
    assert status == 0, said
    ours = {"step", "fp32", "bf16", "fp32 remainder", "bf16 remainder"}
    expected = {"ours": ours, "streams": {"fp32", "bf16"}, "torch": {"step", "fp32"}}
    if deepspeed_is_here():
        expected["deepspeed"] = {"step", "fp32", "bf16"}
    else:
        assert any("deepspeed is left out" in note for note in result["notes"])
    for name, cases in expected.items():
        assert set(result[name]) == {"1", "2"}
        for by_gradient in result[name].values():
            assert set(by_gradient) == cases
            for case in by_gradient.values():
                assert 0 < case["spread"][0] <= case["parameters_per_second"] <= case["spread"][1]
    ours, streams = (result[name]["2"]["bf16"]["parameters_per_second"] for name in ("ours", "streams"))
    assert result["ratios"]["ours_over_streams_bf16_2"] == pytest.approx(ours / streams)
    assert ("ours_over_deepspeed_fp32_1" in result["ratios"]) == deepspeed_is_here()


def test_io(tmp_path):
    small = ("--size", "32MiB", "--block-size", "128KiB", "--ramp", 0.2, "--seconds", 0.8, "--rounds", 1)
    status, said, result = run_benchmark(
        "io", "--capped", "40:20", "--capped-where", tmp_path, *small, json_file=tmp_path / "out.json"
    )
    if result is None:
        assert NO_CAPS_HERE in said or (shutil.which("fio") is None and "fio is not installed" in said)
        return
    assert other_errors(result) == []
    assert (status == 0) == (result["errors"] == [])
    for name in ("ours", "fio"):
        assert set(result[name]) == {"io_uring", "threads"}
        for operations in result[name].values():
            assert set(operations) == {"read", "write", "mixed"}
            # The device's counters say which way the bytes went.
            assert operations["read"]["read_bytes_per_second"] > 10 * operations["read"]["written_bytes_per_second"]
            assert operations["write"]["written_bytes_per_second"] > 10 * operations["write"]["read_bytes_per_second"]
            assert min(operations["mixed"][f"{d}_bytes_per_second"] for d in ("read", "written")) > 0
    for kind, operations in result["ours"].items():
        for operation, mine in operations.items():
            other = result["fio"][kind][operation]
            ratio = mine["bytes_per_second"] / other["bytes_per_second"]
            assert result["ratios"][f"{kind}_{operation}"] == pytest.approx(ratio)
