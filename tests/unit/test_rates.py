"""Where the first rates come from: the user, a measurement, or nowhere, which is said and stops nothing."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from mlp_offload import rates as module
from mlp_offload.config import OffloadConfig
from mlp_offload.rates import first_rates
from mlp_offload.storage.probe import Bandwidth

pytestmark = pytest.mark.skipif(
    os.stat("/dev/shm").st_dev == os.stat(tempfile.gettempdir()).st_dev, reason="needs two file systems"
)


@pytest.fixture
def disk(tmp_path, monkeypatch):
    """Two job directories on the disk; the cache is empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("a", "b"):
        (tmp_path / name / "job").mkdir(parents=True)
    return tmp_path


@pytest.fixture
def memory():
    place = Path(tempfile.mkdtemp(prefix="mlp-offload-test-", dir="/dev/shm"))
    (place / "job").mkdir()
    yield place
    shutil.rmtree(place)


def rates_of(*specs, local_rank=0, **options):
    config = OffloadConfig(paths=tuple(map(str, specs)), **options)
    return first_rates(config, [Path(path.directory, "job") for path in config.paths], local_rank)


def never(*arguments, **settings):
    raise AssertionError("must not be measured")


def test_different_devices_are_measured_and_the_next_start_finds_it(disk, memory, monkeypatch, caplog):
    first = rates_of(disk / "a", memory)
    assert [r.origin for r in first] == ["measured now"] * 2
    assert all(r.path.read > 1e6 and r.path.write > 1e6 for r in first)
    monkeypatch.setattr("mlp_offload.storage.probe_cache.probe", never)
    second = rates_of(disk / "b", memory)
    assert [re.sub(r"[0-9]+ s", "N s", r.origin) for r in second] == ["from the cache, measured N s ago"] * 2
    assert [(r.path.read, r.path.write) for r in second] == [(r.path.read, r.path.write) for r in first]
    assert not caplog.records
    assert os.listdir(disk / "a" / "job") == os.listdir(memory / "job") == []


@pytest.mark.parametrize("seconds, shown", [(119, "119 s"), (121, "2 min"), (7100, "118 min"), (3 * 86400, "72 h")])
def test_the_age_of_a_cached_rate_is_shown(disk, memory, monkeypatch, seconds, shown):
    old = Bandwidth("d", 2e9, 1e9, 1, 1, 1.0, 1000.0)
    monkeypatch.setattr(module, "measure_once", lambda *arguments, **settings: (old, True))
    monkeypatch.setattr("time.time", lambda: 1000.0 + seconds)
    assert {str(r) for r in rates_of(disk / "a", memory)} == {
        f"read 2.00 GB/s, write 1.00 GB/s, from the cache, measured {shown} ago"
    }


def test_what_the_user_wrote_is_not_measured(disk, memory, monkeypatch):
    monkeypatch.setattr(module, "measure_once", never)
    rates = rates_of(f"{disk}/a,read=5GB/s,write=3GB/s", f"{memory},write=1GB/s")
    assert list(map(str, rates)) == [
        "read 5.00 GB/s, write 3.00 GB/s, as configured",
        "write 1.00 GB/s, as configured",
    ]


def test_only_what_is_missing_is_measured(disk, memory):
    configured, measured = rates_of(f"{disk}/a,read=5GB/s", memory)
    assert (configured.path.read, configured.path.write, configured.origin) == (5_000_000_000, None, "as configured")
    assert measured.origin == "measured now"


@pytest.mark.parametrize("specs", [["a"], ["a", "b"]])
def test_nothing_is_measured_where_it_decides_nothing(disk, monkeypatch, specs):
    monkeypatch.setattr(module, "measure_once", never)
    assert all("not measured" in r.origin for r in rates_of(*(disk / spec for spec in specs)))


def test_the_option_turns_it_off(disk, memory, monkeypatch):
    monkeypatch.setattr(module, "measure_once", never)
    rates = rates_of(disk / "a", f"{memory},read=1GB/s", probe=False)
    assert [r.path.bytes_per_second for r in rates] == [None, 10**9]
    assert "the option probe is off" in rates[0].origin
    assert all("shares are equal" in r.origin for r in rates)


def test_paths_on_one_device_share_what_it_gives_and_one_rank_says_so(disk, memory, caplog):
    a, b, alone = rates_of(disk / "a", disk / "b", memory)
    (record,) = caplog.records
    assert f"paths '{disk}/a' and '{disk}/b' are on one device" in record.getMessage()
    assert a.path.read == b.path.read and a.origin == b.origin == "measured now, 1/2 of its device"
    (whole, _) = module.measure_once(disk / "a", kind="auto", direct=True, threads=4, iodepth=8, block_size=2**21)
    assert a.path.read == round(whole.read_bytes_per_second / 2)
    caplog.clear()
    rates_of(disk / "a", disk / "b", memory, local_rank=1)
    assert not caplog.records


def test_a_capacity_below_what_measuring_takes_is_kept(disk, memory, caplog):
    rates = rates_of(f"{disk}/a,capacity=64MiB", memory)
    assert "its capacity is below the 128.0 MiB" in caplog.text
    assert rates[0].path.read is None and "could not be measured; shares are equal" in rates[0].origin


FULL = """
import sys
from pathlib import Path
from mlp_offload.config import OffloadConfig
from mlp_offload.rates import first_rates
config = OffloadConfig(paths=tuple(sys.argv[1:]))
print(*first_rates(config, [Path(d, "job") for d in sys.argv[1:]], 0), sep="\\n")
"""


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="mounts need root and unshare")
def test_a_full_path_warns_and_shares_are_equal(disk, memory):
    script = 'mount -t tmpfs -o size=8m small "$1" && mkdir "$1/job" && shift && exec "$@"'
    command = ["unshare", "-m", "sh", "-c", script, "sh", disk / "b", sys.executable, "-c", FULL, disk / "b", memory]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"path '{disk}/b': its bandwidth cannot be measured: [Errno 28] No space left on device" in done.stderr
    full, other = done.stdout.splitlines()
    assert full == "could not be measured; shares are equal, as not all rates are known"
    assert "measured now; shares are equal" in other
