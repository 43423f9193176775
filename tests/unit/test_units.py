import pytest

from mlp_offload.errors import ConfigError
from mlp_offload.units import format_bytes, format_rate, format_seconds, parse_bytes


@pytest.mark.parametrize(
    "text, nbytes",
    [
        ("64GiB", 64 * 2**30),
        ("5.5GB/s", 5.5e9),
        ("1e9", 10**9),
        (4096, 4096),
        ("2 mib", 2**21),
        ("3k", 3072),
        ("0", 0),
        ("7B", 7),
    ],
)
def test_sizes_are_read_as_people_write_them(text, nbytes):
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "GiB", "-3GiB", "1.2.3", "3 parsec", float("nan"), float("inf"), -1])
def test_what_is_not_a_size_is_refused(text):
    with pytest.raises(ConfigError):
        parse_bytes(text)


def test_sizes_are_shown_as_people_read_them():
    assert [format_bytes(n) for n in (0, 1023, 1536, 3 * 2**40, 2**51)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "3.0 TiB",
        "2048.0 TiB",
    ]
    assert [format_rate(n) for n in (5, 2500, 1.2e9)] == ["5 B/s", "2.50 kB/s", "1.20 GB/s"]


@pytest.mark.parametrize(
    "seconds, text",
    [
        (3.264, "3.26 s"),
        (838.4, "838 s"),
        (9000, "2.5 h"),
        (12.1 * 86400, "12.1 days"),
        (33 * 365 * 86400, "33.0 years"),
    ],
)
def test_seconds_for_people(seconds, text):
    assert format_seconds(seconds) == text
