"""Slots of a state file: allocation, transfers through a real engine, capacity, and that errors remove the file."""

import errno
import re
import subprocess
import sys

import numpy as np
import pytest

from mlp_offload.errors import CapacityError, ConfigError, PathIOError
from mlp_offload.storage.buffers import BufferPool
from mlp_offload.storage.jobdir import ScratchFile
from mlp_offload.storage.statefile import StateFile

MIB = 2**20


def scratch(directory, rank=0, name="optimizer"):
    return ScratchFile.create(directory, job="j", rank=rank, name=name)


def state_file(directory, rank=0, slot_count=4, slot_bytes=MIB, **options):
    return StateFile.create(scratch(directory, rank), slot_count=slot_count, slot_bytes=slot_bytes, **options)


@pytest.fixture
def pool():
    with BufferPool(4, MIB) as buffers:
        yield buffers
        assert buffers.free_count == 4


def fill(lease, seed):
    data = np.random.default_rng(seed).integers(0, 256, lease.nbytes, np.uint8)
    lease.array(0, lease.nbytes, np.uint8)[:] = data
    return data


@pytest.mark.parametrize("kind", ["threads", "auto"])
@pytest.mark.parametrize("direct", [True, False])
def test_each_slot_gives_back_what_was_written_to_it(tmp_path, pool, kind, direct):
    with state_file(tmp_path, kind=kind, direct=direct, slot_count=3) as file:
        slots = [file.allocate() for _ in range(3)]
        assert slots == [0, 1, 2] and file.free_count == 0
        leases = [pool.lease() for _ in slots]
        data = [fill(lease, slot) for slot, lease in zip(slots, leases)]
        futures = [file.write(slot, lease, MIB) for slot, lease in zip(slots, leases)]
        checksums = [future.result() for future in futures]
        assert len(set(checksums)) == 3
        back = pool.lease()
        for slot in reversed(slots):
            assert file.read(slot, back, MIB).result() == checksums[slot]
            assert np.array_equal(back.array(0, MIB, np.uint8), data[slot])
        assert file.read(0, back, 4096, checksum=False).result() is None
        assert np.fromfile(file.path, np.uint8).tobytes() == b"".join(part.tobytes() for part in data)
        for lease in (*leases, back):
            lease.release()


def test_slots_are_given_once_and_come_back(tmp_path):
    with state_file(tmp_path, slot_count=3) as file:
        slots = [file.allocate() for _ in range(3)]
        with pytest.raises(CapacityError, match="all 3 slots are in use"):
            file.allocate()
        file.free(slots[1])
        assert file.free_count == 1 and file.allocate() == slots[1]
        file.free(slots[1])
        with pytest.raises(ValueError, match="slot 1 is not in use"):
            file.free(slots[1])
        assert file.free_count == 1


def test_slots_lie_apart_and_have_aligned_sizes(tmp_path):
    for asked in (1, 4095, 4096, 4097, 3 * MIB + 513):
        with state_file(tmp_path, slot_count=2, slot_bytes=asked) as file:
            assert file.slot_bytes % file.alignment == 0 and asked <= file.slot_bytes < asked + file.alignment
            assert [file.offset(slot) for slot in (0, 1)] == [0, file.slot_bytes]
            assert file.path.stat().st_size == file.nbytes == 2 * file.slot_bytes
            for slot in (-1, 2):
                with pytest.raises(ValueError, match=f"no slot {slot}"):
                    file.offset(slot)


def test_transfers_that_do_not_fit_or_use_a_free_slot_are_refused(tmp_path, pool):
    with state_file(tmp_path, slot_bytes=8192) as file, pool.lease() as lease:
        with pytest.raises(ValueError, match="slot 0 is not in use"):
            file.write(0, lease, 4096)
        slot = file.allocate()
        for start in (file.read, file.write):
            for nbytes in (-4096, 8192 + 4096):
                with pytest.raises(ValueError, match="do not fit a slot of 8192"):
                    start(slot, lease, nbytes)
    with state_file(tmp_path, slot_bytes=2 * MIB) as file, pool.lease() as lease:
        slot = file.allocate()
        with pytest.raises(ValueError, match=f"a buffer of {MIB} bytes"):
            file.write(slot, lease, 2 * MIB)


@pytest.mark.parametrize("kind", ["threads", "auto"])
def test_write_all_slots_writes_every_byte_and_tells_each_once(tmp_path, kind):
    with state_file(tmp_path, kind=kind, slot_count=3, slot_bytes=7 * MIB + 4096) as file:
        told = []
        file.write_all_slots(told.append)
        assert sum(told) == file.nbytes and len(told) == 11 and min(told) > 0
        content = np.fromfile(file.path, np.uint8).reshape(-1, 4096)
        assert len(content) * 4096 == file.nbytes
        assert (np.count_nonzero(content, axis=1) > 4000).all()
        assert file.free_count == 3


def test_write_all_slots_never_overwrites_a_slot_in_use(tmp_path):
    with state_file(tmp_path) as file:
        file.allocate()
        with pytest.raises(ValueError, match="1 slots are in use"):
            file.write_all_slots()


def test_an_error_in_progress_closes_and_removes_the_file(tmp_path):
    file = state_file(tmp_path, slot_count=10, slot_bytes=4 * MIB)

    def interrupted(nbytes):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        file.write_all_slots(interrupted)
    assert list(tmp_path.iterdir()) == []
    assert file.close() is True


def test_close_removes_the_file_and_ends_the_engine(tmp_path, pool):
    file = state_file(tmp_path)
    slot = file.allocate()
    assert file.close() is True and file.close() is True
    assert list(tmp_path.iterdir()) == []
    with pool.lease() as lease, pytest.raises(RuntimeError):
        file.read(slot, lease, 4096)


def test_more_than_the_disk_has_is_refused_with_numbers_and_leaves_nothing(tmp_path):
    with pytest.raises(CapacityError) as caught:
        state_file(tmp_path, slot_count=2**20, slot_bytes=2**30, local_rank_count=8)
    text = str(caught.value)
    assert text.startswith(
        f"path '{tmp_path}': 1048576 slots of 1.0 GiB for each of 8 ranks on this node need {2**53} bytes (8192.0 TiB); "
    )
    assert re.search(r"; \d+ bytes \([0-9.]+ [GT]iB\) are free\. Free [0-9.]+ TiB or add a path\.$", text)
    assert list(tmp_path.iterdir()) == []


def test_the_capacity_that_was_set_binds_the_ranks_of_a_node_together(tmp_path):
    state_file(tmp_path, local_rank_count=2, capacity_bytes=8 * MIB).close()
    with pytest.raises(CapacityError, match=rf"need {8 * MIB} bytes .* capacity is set to {8 * MIB - 1} bytes"):
        state_file(tmp_path, local_rank_count=2, capacity_bytes=8 * MIB - 1)
    assert list(tmp_path.iterdir()) == []


def test_neighbours_are_the_same_file_of_other_ranks_of_this_host(tmp_path):
    second = scratch(tmp_path, rank=1, name="second")
    with second, scratch(tmp_path) as mine, state_file(tmp_path, rank=1), state_file(tmp_path, rank=12):
        other_host = mine.path.parent / "elsewhere-rank0003-optimizer.state"
        for path in (mine.path, second.path, other_host):
            path.write_bytes(bytes(MIB))
        assert 8 * MIB <= mine.neighbour_bytes() < 8.5 * MIB
        other_host.unlink()


@pytest.mark.parametrize(
    "options, error",
    [({"slot_count": 0}, ValueError), ({"kind": "floppy"}, ConfigError), ({"iodepth": 0, "threads": 0}, ValueError)],
)
def test_a_file_that_cannot_be_made_leaves_nothing(tmp_path, options, error):
    with pytest.raises(error):
        state_file(tmp_path, **options)
    assert list(tmp_path.iterdir()) == []


def test_a_file_size_limit_is_a_capacity_error():
    code = (
        "import resource, sys, tempfile\n"
        "from mlp_offload.storage.jobdir import ScratchFile\n"
        "from mlp_offload.storage.statefile import StateFile\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))\n"
        "with tempfile.TemporaryDirectory() as directory:\n"
        "    scratch = ScratchFile.create(directory, job='j', rank=0, name='optimizer')\n"
        "    try:\n"
        "        StateFile.create(scratch, slot_count=2, slot_bytes=2**20)\n"
        "    finally:\n"
        "        import os; print(os.listdir(directory))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "[]\n"
    assert re.search(
        r"CapacityError: path '.*': 2 slots of 1\.0 MiB need 2097152 bytes .*File too large \(EFBIG\).*ulimit -f",
        done.stderr,
    )


def test_other_failures_keep_their_errno_and_clean_up_what_they_can(tmp_path, caplog):
    file = scratch(tmp_path)
    file.path.unlink()
    file.path.mkdir()
    with pytest.raises(PathIOError) as caught:
        StateFile.create(file, slot_count=1, slot_bytes=4096)
    assert caught.value.errno == errno.EISDIR
    assert f"cannot remove {file.path}: Is a directory" in caplog.text
    file.path.rmdir()
    scratch(tmp_path).close()  # the lock was given back
    assert list(tmp_path.iterdir()) == []
