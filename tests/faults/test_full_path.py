"""Paths that are full, too small, shared or without direct I/O: real small file systems, found before any step."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mlp_offload.errors import CapacityError
from mlp_offload.storage import statefile
from mlp_offload.storage.jobdir import ScratchFile
from mlp_offload.storage.statefile import StateFile, free_bytes

MIB = 2**20

PRELUDE = """
import os, sys
from mlp_offload.errors import CapacityError
from mlp_offload.storage.jobdir import ScratchFile
from mlp_offload.storage import statefile
from mlp_offload.storage.statefile import StateFile, free_bytes
directory = sys.argv[1]
def state_file(slot_count, rank=0, **options):
    scratch = ScratchFile.create(directory, job="j", rank=rank, name="optimizer")
    return StateFile.create(scratch, slot_count=slot_count, slot_bytes=2**20, **options)
def refusal(slot_count, **options):
    try:
        state_file(slot_count, **options)
    except CapacityError as error:
        return str(error)
"""


def run_on_tmpfs(directory: Path, code: str) -> None:
    """Run code in a process that sees a tmpfs of 32 MiB on directory. Works without root."""
    script = 'mount -t tmpfs -o size=32m tmpfs "$1" && exec "$2" -c "$3" "$1"'
    command = ["unshare", "-Urm", "sh", "-c", script, "sh", str(directory), sys.executable, PRELUDE + code]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    if done.returncode and done.stderr.startswith(("unshare:", "mount:")):
        pytest.skip(f"no private mounts here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr


@contextmanager
def loop_file_system(place: Path, make: str, options: str = "rw", sector_bytes: int = 512) -> Iterator[Path]:
    """A file system of 32 MiB on a loop device, mounted under place."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a file system from a file")
    image, mounted = place / "image", place / "mounted"
    mounted.mkdir()
    with image.open("wb") as file:
        file.truncate(32 * MIB)
    command = ["losetup", "--find", "--show", "--sector-size", str(sector_bytes), image]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.skip(f"cannot make a loop device here: {made.stderr.strip()}")
    device = made.stdout.strip()
    try:
        subprocess.run([*make.split(), device], check=True, capture_output=True)
        subprocess.run(["mount", "-o", options, device, mounted], check=True)
        try:
            yield mounted
        finally:
            idle = subprocess.run(["umount", mounted], check=False).returncode == 0
            if not idle:
                subprocess.run(["umount", "--lazy", mounted], check=True)
        assert idle, "something still used the file system after close()"
    finally:
        subprocess.run(["losetup", "--detach", device], check=True)
        image.unlink()


def state_file(directory: Path, slot_count: int, slot_bytes: int = MIB, rank: int = 0, **options) -> StateFile:
    scratch = ScratchFile.create(directory, job="j", rank=rank, name="optimizer")
    return StateFile.create(scratch, slot_count=slot_count, slot_bytes=slot_bytes, **options)


def left_behind(directory: Path) -> list:
    return [path for path in directory.iterdir() if path.name != "lost+found"]


def test_a_path_that_is_too_small_is_refused_with_needed_and_free_bytes(tmp_path):
    run_on_tmpfs(
        tmp_path,
        """
text = refusal(33)
assert text == (
    f"path '{directory}': 33 slots of 1.0 MiB need 34603008 bytes (33.0 MiB); 33554432 bytes (32.0 MiB) are free. "
    "Free 1.0 MiB or add a path."
), text
assert os.listdir(directory) == []
assert refusal(32) is None
""",
    )


def test_ranks_that_share_a_path_are_counted_together_but_not_twice(tmp_path):
    run_on_tmpfs(
        tmp_path,
        """
assert "for each of 2 ranks on this node need 35651584 bytes" in refusal(17, local_rank_count=2)
with state_file(15, rank=0, local_rank_count=2) as first, state_file(15, rank=1, local_rank_count=2) as second:
    for file in (first, second):
        file.write_all_slots()
    assert "2097152 bytes (2.0 MiB) are free" in refusal(3, rank=2)
assert os.listdir(directory) == []
""",
    )


def test_a_file_system_that_cannot_reserve_and_fills_up_while_the_slots_are_written(tmp_path):
    # ext2 has no fallocate, and its block lists take room beside the data.
    with loop_file_system(tmp_path, "mkfs.ext2 -q -b 1024 -m 0") as mounted:
        found = os.statvfs(mounted)
        slot_count = found.f_bavail * found.f_frsize // MIB
        assert slot_count >= 20
        file = state_file(mounted, slot_count, slot_bytes=found.f_bavail * found.f_frsize // slot_count // 4096 * 4096)
        assert file.path.stat().st_blocks * 512 < MIB  # nothing is reserved
        told = []
        with pytest.raises(CapacityError) as caught:
            file.write_all_slots(told.append)
        text = str(caught.value)
        assert f"path '{mounted}': {slot_count} slots of" in text and f"need {file.nbytes} bytes" in text
        assert "No space left on device (ENOSPC)" in text and "Free space there or add a path." in text
        assert 0 < sum(told) < file.nbytes
        assert left_behind(mounted) == []
        with state_file(mounted, 4) as smaller:
            smaller.write_all_slots()
            assert smaller.path.stat().st_blocks * 512 >= smaller.nbytes


def test_a_reservation_that_fails_although_the_space_seemed_free(tmp_path):
    # So many fragments of free space that their list does not fit beside the data.
    with loop_file_system(tmp_path, "mkfs.ext4 -q -b 1024 -m 0 -O ^has_journal") as mounted:
        pieces = [mounted / str(number) for number in range(1600)]
        for piece in pieces:
            piece.write_bytes(bytes(8 * 1024))
        os.sync()
        for piece in pieces[::2]:
            piece.unlink()
        scratch = ScratchFile.create(mounted, job="j", rank=0, name="optimizer")
        os.sync()
        found = os.statvfs(mounted)
        slot_bytes = found.f_bavail * found.f_frsize // 4096 * 4096
        with pytest.raises(CapacityError, match=r"stopped at offset 0 of .*\(ENOSPC\)"):
            StateFile.create(scratch, slot_count=1, slot_bytes=slot_bytes)
        assert not scratch.path.parent.exists()


def test_a_file_that_cannot_grow_gives_back_what_it_got(tmp_path, monkeypatch):
    with (
        loop_file_system(tmp_path, "mkfs.ext4 -q -m 0") as mounted,
        state_file(mounted, 1, slot_bytes=65536) as file,
    ):
        os.sync()
        free = free_bytes(mounted)
        assert not file.grow(free // 65536 + 1)  # more than there is
        assert file.path.stat().st_size == file.nbytes and free_bytes(mounted) == free
        monkeypatch.setattr(statefile, "free_bytes", lambda directory: 2 * free)  # until another process took it
        assert not file.grow(free // 65536 + 1)
        os.sync()
        assert file.slot_count == 1 and file.path.stat().st_size == file.nbytes
        assert free - 65536 < free_bytes(mounted) <= free
        assert file.grow(free // 2 // 65536) and file.slot_count == 1 + free // 2 // 65536


def test_no_room_even_for_the_probe(tmp_path):
    run_on_tmpfs(
        tmp_path,
        """
with open(directory + "/filler", "wb") as filler:
    os.posix_fallocate(filler.fileno(), 0, 2**25)
text = refusal(1)
assert f"path '{directory}'" in text and "0 bytes (0 B)" in text, text
assert os.listdir(directory) == ["filler"]
""",
    )


def test_direct_io_that_is_refused_costs_one_warning_and_works_buffered(tmp_path, caplog):
    # A journal for data as well as metadata rules direct I/O out.
    with loop_file_system(tmp_path, "mkfs.ext4 -q", "data=journal") as mounted:
        with state_file(mounted, 2) as file:
            assert file.direct is False
            file.write_all_slots()
        messages = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        assert len(messages) == 1
        assert messages[0].startswith(f"path '{mounted}': direct I/O is refused (") and "page cache" in messages[0]
        caplog.clear()
        state_file(mounted, 2, direct=False).close()
        assert not caplog.records


def test_slots_are_aligned_to_what_the_device_asks_for(tmp_path):
    with (
        loop_file_system(tmp_path, "mkfs.ext4 -q", sector_bytes=4096) as mounted,
        state_file(mounted, 3, slot_bytes=3 * 512) as file,
    ):
        assert (file.direct, file.alignment, file.slot_bytes) == (True, 4096, 4096)
        file.write_all_slots()


def test_space_comes_back_after_a_kill_even_if_an_orphan_holds_the_file_open(tmp_path):
    run_on_tmpfs(
        tmp_path,
        """
import signal, time
def free():
    found = os.statvfs(directory)
    return found.f_bavail * found.f_frsize
before = free()
ready = os.pipe()
owner = os.fork()
if owner == 0:
    file = state_file(24)
    orphan = os.fork()
    if orphan == 0:
        still_open = os.open(file.path, os.O_RDWR)
        os.write(ready[1], b"%d" % os.getpid())
        time.sleep(60)
        os._exit(0)
    time.sleep(60)
    os._exit(0)
orphan = int(os.read(ready[0], 100))
assert free() <= before - 24 * 2**20
os.kill(owner, signal.SIGKILL)
os.waitpid(owner, 0)
try:
    deadline = time.monotonic() + 10
    while free() < before and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(orphan, 0)
    assert free() == before
finally:
    os.kill(orphan, signal.SIGKILL)
""",
    )
