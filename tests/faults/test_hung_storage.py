"""A storage call that does not return: reported, given up on, and close() does not wait for it either."""

import re
import shutil
import subprocess
import sys
import time

import pytest

# Only the sixth and later reads hang, for longer than all time-outs together.
HANG_SECONDS = 12
SCRIPT = """
import logging, sys, time, torch
logging.basicConfig()
from mlp_offload import OffloadedAdamW
from mlp_offload.errors import PathTimeoutError
p = torch.nn.Parameter(torch.randn(40960))
optimizer = OffloadedAdamW(
    [p], paths=sys.argv[1:], host_memory="200KiB", subgroup_size=4096, engine="threads", threads=1,
    warn_seconds=0.3, timeout_seconds=1.0,
)
p.grad = torch.randn(40960)
begin = time.monotonic()
try:
    optimizer.step()
except PathTimeoutError as error:
    print(error)
address = optimizer._pipeline.tiers.pool.region[0]
optimizer.close()
print(f"closed after {time.monotonic() - begin:.1f} s", flush=True)
optimizer._pipeline.close()  # the read may still write to its buffer
starts, ends = zip(*([int(n, 16) for n in line.split()[0].split("-")] for line in open("/proc/self/maps")))
print("still mapped:", any(s <= address < e for s, e in zip(starts, ends)), flush=True)
"""


def run_with_hanging_calls(call, which, script, directory):
    if shutil.which("strace") is None:
        pytest.skip("strace, which delays the system call, is not installed")
    inject = f"inject={call}:delay_enter={HANG_SECONDS}s:when={which}"
    strace = ["strace", "-f", "-qq", "-o", "/dev/null", "-e", f"trace={call}", "-e", inject]
    done = subprocess.run(
        [*strace, sys.executable, "-c", script, str(directory)], capture_output=True, text=True, timeout=120
    )
    if "ptrace" in done.stderr and "not permitted" in done.stderr:
        pytest.skip("tracing is not allowed here")
    return done


def test_a_read_that_hangs_is_reported_then_ends_the_run(tmp_path):
    done = run_with_hanging_calls("pread64", "6+", SCRIPT, tmp_path)
    assert re.search(r"WARNING.*read \S+\.state offset=\d+ bytes=\d+: no answer after \d\.\d s", done.stderr), (
        done.stderr
    )
    assert re.search(
        r"read \S+\.state offset=\d+ bytes=\d+: no answer after \d\.\d s.*Giving up \(timeout 1 s\)", done.stdout
    )
    assert float(re.search(r"closed after ([\d.]+) s", done.stdout).group(1)) < HANG_SECONDS / 2
    assert "still mapped: True" in done.stdout
    deadline = time.monotonic() + 10  # the file goes when the process has gone
    while list(tmp_path.rglob("*.state")) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not list(tmp_path.rglob("*.state"))
