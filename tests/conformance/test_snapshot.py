"""A snapshot is the state at its moment, whatever training does until it is released; training does not notice."""

import pickle
import resource
import subprocess
import sys

import pytest
import torch

from mlp_offload import OffloadedAdamW
from mlp_offload.errors import CapacityError, ChecksumError, OffloadError, PathIOError, WeightsChangedError
from mlp_offload.snapshot import take_snapshot
from mlp_offload.storage import statefile
from mlp_offload.storage.engine import direct_supported
from mlp_offload.tiers import Where

SIZES = [(48, 64), (4097,), (16,), (3, 5, 7), (70, 31)]
LAYOUTS = [(torch.bfloat16, "remainder"), (torch.bfloat16, "full"), (torch.float32, "full")]


@pytest.fixture
def make(tmp_path):
    made = []

    def optimizer(dtype=torch.bfloat16, kept="remainder", **options):
        name = f"optimizer{len(made)}"
        for path in "ab":
            (tmp_path / path).mkdir(exist_ok=True)
        generator = torch.Generator().manual_seed(1)
        params = [torch.nn.Parameter(torch.randn(size, generator=generator).to(dtype)) for size in SIZES]
        settings = {"paths": [str(tmp_path / "a"), str(tmp_path / "b")], "subgroup_size": 509, "host_memory": "80KiB"}
        made.append(OffloadedAdamW(params, lr=1e-2, name=name, master_weights=kept, **{**settings, **options}))
        return made[-1], params

    yield optimizer
    for item in made:
        item.close()


def train(optimizer, params, steps):
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        optimizer.step()


def state(optimizer):
    """Name -> one flat tensor of all parameters, fp32."""
    entries, params = optimizer.state_dict()["state"], optimizer.param_groups[0]["params"]
    masters = {i: entry.get("main_param", params[i].detach()) for i, entry in entries.items()}
    tensors = {name: [entries[i][name].view(-1) for i in entries] for name in ("exp_avg", "exp_avg_sq")}
    tensors["main_param"] = [masters[i].reshape(-1).clone() for i in entries]
    return {name: torch.cat(parts) for name, parts in tensors.items()}


def contents(source, optimizer):
    parts = [source.read("params", s.index) for s in optimizer._pipeline.subgroups["params"]]
    return {name: torch.cat([part[name] for part in parts]) for name in ("main_param", "exp_avg", "exp_avg_sq")}


def assert_equal(got, expected):
    for name, tensor in expected.items():
        assert torch.equal(got[name], tensor), name


def snapshot_of(optimizer):
    return take_snapshot(optimizer._pipeline, {"params": optimizer._work})


@pytest.mark.parametrize(("dtype", "kept"), LAYOUTS)
def test_it_stays_what_it_was_while_training_goes_on(make, dtype, kept):
    optimizer, params = make(dtype, kept)
    undisturbed, same = make(dtype, kept)
    train(optimizer, params, range(3))
    train(undisturbed, same, range(3))
    tiers = optimizer._pipeline.tiers
    assert {entry.where for entry in tiers.table} >= {Where.HOST}
    snapshot = snapshot_of(optimizer)  # with flushes under way
    before = state(optimizer)
    for steps in ((), (3,), (4, 5, 6, 7)):
        train(optimizer, params, steps)
        assert_equal(contents(snapshot.source(), optimizer), before)
    train(undisturbed, same, range(3, 8))
    assert_equal(state(optimizer), state(undisturbed))
    assert not torch.equal(state(optimizer)["exp_avg"], before["exp_avg"])
    snapshot.release()
    snapshot.release()
    tiers.settle()
    stored = sum(entry.where is Where.STORED for entry in tiers.table)
    assert sum(file.slot_count - file.free_count for file in tiers.files) == stored
    train(optimizer, params, range(8, 10))
    again = snapshot_of(optimizer)  # there is room for it now
    assert_equal(contents(again.source(), optimizer), state(optimizer))


def test_another_process_reads_it(make, tmp_path):
    optimizer, params = make()
    train(optimizer, params, range(2))
    before = state(optimizer)
    snapshot = snapshot_of(optimizer)
    train(optimizer, params, range(2, 4))
    (tmp_path / "source").write_bytes(pickle.dumps(snapshot.source()))
    program = (
        "import pickle, sys, torch; source = pickle.load(open(sys.argv[1], 'rb'));"
        "parts = [source.read('params', i)['main_param'] for i in range(int(sys.argv[2]))];"
        "torch.save(torch.cat(parts), sys.argv[3])"
    )
    count = len(optimizer._pipeline.subgroups["params"])
    arguments = [str(tmp_path / "source"), str(count), str(tmp_path / "read")]
    subprocess.run([sys.executable, "-c", program, *arguments], check=True)
    assert torch.equal(torch.load(tmp_path / "read"), before["main_param"])


def test_not_of_a_state_whose_flush_has_failed(make, tmp_path):
    optimizer, params = make(paths=[str(tmp_path / "a")], engine="threads")
    train(optimizer, params, range(2))
    tiers = optimizer._pipeline.tiers
    tiers.settle()
    index, entry = next(
        (i, e) for i, e in enumerate(tiers.table) if e.where is Where.HOST and tiers.residency.streams(i)
    )
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))  # the next write fails
    try:
        tiers.start_flush(index, entry.lease, 0, 2)
        with pytest.raises(PathIOError, match="is safe in memory"):
            snapshot_of(optimizer)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    for use in (lambda: snapshot_of(optimizer), lambda: train(optimizer, params, [2])):
        with pytest.raises(
            OffloadError, match="can no longer be used: the last flushes of a step ended with PathIOError"
        ):
            use()


@pytest.mark.parametrize("dtype, kept", LAYOUTS)
def test_paths_may_ask_for_different_alignments(make, monkeypatch, dtype, kept):
    def probe(directory):
        found = direct_supported(directory)
        return found._replace(alignment=16384) if directory.parent.name == "b" else found

    monkeypatch.setattr(statefile, "direct_supported", probe)
    optimizer, params = make(dtype, kept)
    aligned = [file.alignment for file in optimizer._pipeline.tiers.files]
    assert aligned[1] == 16384 > aligned[0]
    train(optimizer, params, range(3))
    before = state(optimizer)
    snapshot = snapshot_of(optimizer)
    train(optimizer, params, range(3, 5))
    assert_equal(contents(snapshot.source(), optimizer), before)


def test_without_room_nothing_is_held_and_training_goes_on(make, tmp_path):
    limited = [{"directory": str(tmp_path / path), "capacity": "124KiB"} for path in "ab"]
    optimizer, params = make(paths=limited)
    undisturbed, same = make()
    train(optimizer, params, range(2))
    with pytest.raises(CapacityError, match="more slots"):
        snapshot_of(optimizer)
    assert not optimizer._pipeline.tiers.pinned
    train(optimizer, params, range(2, 4))
    train(undisturbed, same, range(4))
    assert_equal(state(optimizer), state(undisturbed))


def test_room_that_was_reserved_at_the_start_is_enough(make):
    optimizer, params = make(snapshots=True)
    slots = [file.slot_count for file in optimizer._pipeline.tiers.files]
    train(optimizer, params, range(3))
    snapshot = snapshot_of(optimizer)
    train(optimizer, params, range(3, 7))
    snapshot.release()
    snapshot_of(optimizer)
    assert [file.slot_count for file in optimizer._pipeline.tiers.files] == slots


@pytest.mark.parametrize("first_out", [0, 1])
def test_several_at_once(make, first_out):
    optimizer, params = make()
    held, expected = [], []
    for step in range(3):
        train(optimizer, params, [2 * step])
        for _ in range(1 + (step == 1)):  # twice of one moment
            held.append(snapshot_of(optimizer))
            expected.append(state(optimizer))
    train(optimizer, params, [10, 11])
    while held:
        for snapshot, before in zip(held, expected):
            assert_equal(contents(snapshot.source(), optimizer), before)
        where = first_out * (len(held) - 1)
        held.pop(where).release()
        expected.pop(where)
        train(optimizer, params, [12])
    tiers = optimizer._pipeline.tiers
    tiers.settle()
    assert not tiers.pinned and not tiers.retired
    stored = sum(entry.where is Where.STORED for entry in tiers.table)
    assert sum(file.slot_count - file.free_count for file in tiers.files) == stored


def test_not_of_weights_that_were_touched(make):
    optimizer, params = make()
    train(optimizer, params, range(2))
    params[1].data[4000] += 1
    with pytest.raises(WeightsChangedError):
        snapshot_of(optimizer)
    assert not optimizer._pipeline.tiers.pinned


def test_bytes_that_were_changed_on_the_path_are_noticed(make):
    optimizer, params = make()
    train(optimizer, params, range(2))
    source = snapshot_of(optimizer).source()
    item = source.stored["params", 3]
    for stored in (item.record, item.weights):
        with open(stored.file, "r+b") as file:
            file.seek(stored.offset + 100)
            file.write(b"\xff\x00\xff")
        with pytest.raises(ChecksumError, match="not the bytes"):
            source.read("params", 3)
        with open(stored.file, "r+b") as file:
            file.seek(stored.offset + 100)
            file.write(b"\x00" * 3)
