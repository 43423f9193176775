import os
import time

from mlp_offload.storage.heartbeat import BEAT_SECONDS, FRESH_SECONDS, Heartbeat
from mlp_offload.storage.jobdir import ScratchFile


def test_a_file_is_touched_until_close(tmp_path):
    file = tmp_path / "file"
    file.touch()
    os.utime(file, (0, 0))
    beat = Heartbeat(file, seconds=0.05)
    deadline = time.monotonic() + 10
    while file.stat().st_mtime == 0:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    beat.close()
    os.utime(file, (0, 0))
    time.sleep(0.2)
    assert file.stat().st_mtime == 0


def test_it_ends_when_the_file_is_gone_and_makes_no_new_one(tmp_path):
    beat = Heartbeat(tmp_path / "file", seconds=0.01)
    beat._thread.join(10)
    assert not beat._thread.is_alive() and not (tmp_path / "file").exists()


def test_scratch_files_have_one_that_ends_with_them(tmp_path):
    import threading

    def count():
        return sum(thread.name == "mlp-offload-heartbeat" for thread in threading.enumerate())

    with ScratchFile.create(tmp_path, job="j", rank=0, name="optimizer"):
        assert count() == 1
    assert count() == 0
    assert FRESH_SECONDS >= 5 * BEAT_SECONDS
