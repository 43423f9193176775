"""Capped paths hold their caps, and nothing of them is left, however their process ends."""

import json
import mmap
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from bench_tools import NO_CAPS_HERE, REPOSITORY

from benchmarks.capped import CapError, _throttle_file, capped, parse_cap

SIZE = 64 * 2**20


def write_direct(directory, nbytes):
    """Seconds that a direct write takes."""
    with mmap.mmap(-1, nbytes) as memory:
        descriptor = os.open(os.path.join(directory, "data"), os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
        try:
            begin = time.monotonic()
            done = os.pwrite(descriptor, memory, 0)
            return done, time.monotonic() - begin
        finally:
            os.close(descriptor)


def traces(directory, device):
    """What is left of a capped path."""
    left = [line for line in Path("/proc/self/mounts").read_text().splitlines() if directory in line]
    for direction in ("read", "write"):
        left += [line for line in _throttle_file(direction).read_text().splitlines() if line.split()[0] == device]
    left += [str(path) for path in (Path(directory).parent,) if path.exists()]
    return left


def test_caps_hold_can_be_changed_and_vanish_even_after_an_exception(tmp_path):
    seen = []
    try:
        with capped([(8e6, 8e6), (64e6, 64e6)], SIZE, str(tmp_path)) as paths:
            seen = [(path.directory, path.device) for path in paths]
            nbytes, seconds = write_direct(paths[0].directory, 8 * 2**20)
            assert nbytes == 8 * 2**20
            assert seconds > 0.8
            paths[0].set_caps(80e6, 40e6)
            assert (paths[0].read, paths[0].write) == (80_000_000, 40_000_000)
            assert f"{paths[0].device} 40000000" in _throttle_file("write").read_text().splitlines()
            assert f"{paths[0].device} 80000000" in _throttle_file("read").read_text().splitlines()
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        assert [traces(*path) for path in seen] == [[], []]
    except CapError as error:
        assert str(error).startswith(NO_CAPS_HERE)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_killed_process_leaves_nothing_behind(tmp_path, number):
    program = (
        "import json, sys, time; sys.path.insert(0, sys.argv[1])\n"
        "from benchmarks.capped import CapError, capped\n"
        "try:\n"
        "    with capped([(50e6, 50e6)], 67108864, sys.argv[2]) as paths:\n"
        "        print(json.dumps([paths[0].directory, paths[0].device]), flush=True)\n"
        "        time.sleep(60)\n"
        "except CapError as error:\n"
        "    print(json.dumps(str(error)), flush=True)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(REPOSITORY), str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    answer = json.loads(process.stdout.readline())
    if isinstance(answer, str):
        assert answer.startswith(NO_CAPS_HERE)
        return
    assert len(traces(*answer)) == 4
    process.send_signal(number)
    process.wait(10)
    deadline = time.monotonic() + 30
    while traces(*answer) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert traces(*answer) == []


def test_too_little_room_is_an_error_before_anything_is_made(tmp_path):
    with pytest.raises(CapError), capped([(1e6, 1e6)], 2**60, str(tmp_path)):
        raise AssertionError("unreachable")
    assert list(tmp_path.iterdir()) == []


def test_caps_are_read_as_megabytes():
    assert parse_cap("400:200.5") == (400_000_000, 200_500_000)
    for text in ("400", "400:0", "a:b", "1:2:3"):
        with pytest.raises(Exception, match="READ:WRITE"):
            parse_cap(text)
