"""Updates on a stand-in for a GPU where everything is late: the CPU's bits, no race, and each wait is missed when gone."""

import ast
import contextlib
import gc
import re
import types
from collections import Counter
from pathlib import Path

import pytest
import torch
from cuda_standin import Runtime
from device_runs import SHARDS, STEPS, SUBGROUP_NUMEL, Run, train
from test_transfers import Misplaced, WatchedKernel, Without, ordering
from transfer_runs import Place

from mlp_offload import OffloadedAdamW, device_updates
from mlp_offload.adam.kernel import AdamKernel, adam_scalars
from mlp_offload.config import OffloadConfig
from mlp_offload.device_updates import GpuMemory, gpu_for_updates
from mlp_offload.errors import CapacityError, ConfigError, OffloadError, WeightsChangedError
from mlp_offload.pipeline import StepPipeline
from mlp_offload.plan.devices import Rates
from mlp_offload.plan.subgroups import cut
from mlp_offload.snapshot import take_snapshot
from mlp_offload.storage.statefile import StateFile
from mlp_offload.telemetry import GPU
from mlp_offload.tiers import Where
from mlp_offload.transfers import pin_memory
from mlp_offload.updates import AdamWork

SUBGROUP_COUNT = len(cut(SHARDS, SUBGROUP_NUMEL))
SOURCE = Path(device_updates.__file__).read_text()
# CPU, GPU and link are as fast as each other: about half of the subgroups pass through the GPU.
EVEN_RATES = Rates(1e6, 1e12, 1.5e7, 1.5e7)
# Options; how many subgroups stay in GPU memory, and how many are updated there (None: some more).
CHOICES = {
    "cuda": ({"update_device": "cuda"}, 0, SUBGROUP_COUNT),
    "cuda with residents": ({"update_device": "cuda", "gpu_memory": 7}, 5, SUBGROUP_COUNT),
    "auto": ({"update_device": "auto", "gpu_memory": 5}, 3, None),
    "auto with residents only": ({"update_device": "auto", "gpu_memory": 3}, 3, 3),
    "auto, all in memory": ({"update_device": "auto", "gpu_memory": 6, "host_memory": 100}, 4, None),
    "all on the GPU": ({"update_device": "auto", "gpu_memory": 100}, SUBGROUP_COUNT, SUBGROUP_COUNT),
}
AUTO = CHOICES["auto"][0]


class Kernel(WatchedKernel):
    """Notes what it does with records, too."""

    def update(self, address, stride_numel, rows, scalars, main_itemsize=4):
        if any(row[2] for row in rows.tolist()):
            self._runtime.host_access("the kernel", address, stride_numel * (main_itemsize + 8), writes=True)
        super().update(address, stride_numel, rows, scalars, main_itemsize)


@pytest.fixture(scope="module")
def right(tmp_path_factory):
    """What runs in host memory see, by itemsize and whether fp32 weights are their own masters."""
    with AdamKernel(1) as kernel:
        return {
            key: train(Run(*key), Place(), kernel, tmp_path_factory.mktemp("state")).seen
            for key in ((2, False), (4, False), (4, True))
        }


@pytest.fixture
def go(monkeypatch, tmp_path, right, host_library):
    """Trains on a stand-in; gives (run, runtime, whether the numbers are right)."""

    def go(options, itemsize=2, fp32_masters=False, rates=EVEN_RATES, module=device_updates, breaks=False, **settings):
        runtime = Runtime(library=host_library, **settings)
        place = Place(lambda values: runtime.on_device(values.clone()), runtime.trainer)
        with monkeypatch.context() as patch:
            for name in ("read", "write"):
                patch.setattr(StateFile, name, _noted(getattr(StateFile, name), runtime, writes=name == "read"))
            measure = module.GpuMemory.measure
            patch.setattr(module.GpuMemory, "measure", lambda *arguments: measure(*arguments) and rates)
            patch.setattr(device_updates, "GpuMemory", module.GpuMemory)
            run = Run(itemsize, fp32_masters, options, steps=3 if breaks else STEPS)
            broken = contextlib.suppress(OffloadError) if breaks else contextlib.nullcontext()
            with runtime.installed(patch), Kernel(runtime) as kernel:
                with broken:
                    train(run, place, kernel, tmp_path)
                gc.collect()  # staging of a run that broke is given back while there are streams to wait for
        expected = right[itemsize, fp32_masters]
        return run, runtime, len(run.seen) == len(expected) and all(map(torch.equal, run.seen, expected))

    return go


def _noted(method, runtime, writes):
    """Storage reads and writes host memory from the moment on at which it is asked to."""

    def noted(self, slot, lease, nbytes, **settings):
        runtime.host_access("storage", lease.address, nbytes, writes)
        return method(self, slot, lease, nbytes, **settings)

    return noted


@pytest.mark.parametrize(
    ("choice", "layout"),
    [(choice, layout) for choice in CHOICES for layout in ((2, False), (4, False))]
    + [(choice, (4, True)) for choice in ("auto", "cuda with residents")],
)
def test_the_bits_are_the_cpus_whatever_is_updated_where(go, choice, layout):
    options, resident_count, on_device_count = CHOICES[choice]
    seeds = ((0, True), (1, False))[: 2 if layout[0] == 2 and options.get("gpu_memory") in (5, 7) else 1]
    for seed, late in seeds:
        run, runtime, equal = go(options, *layout, late=late, seed=seed)
        assert not runtime.races and not runtime.faults and not runtime.pinned
        assert equal
    updates = [e for record in run.records for e in record.events if e.phase == "update"]
    on_device = {e.subgroup for e in updates if e.path == GPU}
    on_host = {e.subgroup for e in updates if not e.path}
    assert len(updates) == len(run.records) * SUBGROUP_COUNT and not on_device & on_host
    assert run.wheres.count(Where.DEVICE) == resident_count
    if on_device_count is None:
        assert resident_count + 2 < len(on_device) < SUBGROUP_COUNT - 2
    else:
        assert len(on_device) == on_device_count
    assert {"update", "restart"} <= set(runtime.launches) and ("sum" in runtime.launches) == (layout[0] == 2)


def test_what_storage_holds_up_is_left_to_the_cpu(go):
    slow = Rates(1e30, 1e30, 1e30, 1e30)
    run, runtime, equal = go(AUTO, rates=slow, late=True)
    assert equal and not runtime.races
    on_device = {e.subgroup for record in run.records for e in record.events if e.path == GPU}
    assert len(on_device) == 3 == run.wheres.count(Where.DEVICE)


def test_where_pinning_is_refused_the_numbers_are_the_same(go, caplog):
    _, runtime, equal = go(AUTO, late=True, refuse_pinning=True)
    assert equal and not runtime.races
    assert "of state buffers" in caplog.text and "sums of weights" in caplog.text


# ---------------------------------------------------------------------------- every wait


STATEMENTS = [node for node in ast.walk(ast.parse(SOURCE)) if ordering(node)]
INNER = [node for block in STATEMENTS if isinstance(block, ast.With) for node in block.body if ordering(node)]


def changed(change):
    """The module ``device_updates`` with a change."""
    tree = ast.fix_missing_locations(change.visit(ast.parse(SOURCE)))
    module = types.ModuleType(device_updates.__name__)
    module.__package__ = device_updates.__package__
    module.__dict__["__name__"] = device_updates.__name__
    exec(compile(tree, device_updates.__file__, "exec"), vars(module))
    module.DeviceRecord = device_updates.DeviceRecord
    return module


def each(nodes):
    names = Counter()
    params = []
    for node in nodes:
        title = ast.unparse(node).partition("\n")[0]
        names[title] += 1
        params.append(pytest.param(node, id=f"{title} {names[title]}"))
    return pytest.mark.parametrize("node", params)


def test_all_that_orders_updates_is_found():
    assert Counter(map(ordering, STATEMENTS)) == {
        "wait_stream": 3,
        "wait_event": 3,
        "synchronize": 4,
        "record": 4,
        "stream": 8,
    }, "a wait was added or taken away: say here that it was meant"
    assert Counter(map(ordering, INNER)) == {"record": 3, "wait_event": 2}


@each(STATEMENTS)
def test_every_wait_is_missed_when_it_is_gone(go, node):
    missed = []
    # For what passes through, and for measurements and sums, the host waits as well.
    others = [(CHOICES["auto with residents only"][0], 2), (CHOICES["cuda"][0], 4)]
    for options, itemsize in [(AUTO, 2), *others]:
        _, runtime, _ = go(options, itemsize, module=changed(Without(node.lineno)), breaks=True, late=True)
        missed += runtime.races + runtime.faults
        if missed:
            return
    raise AssertionError("the accesses show no race without it")


@each(INNER)
def test_every_wait_is_missed_when_it_is_in_the_wrong_place(go, node):
    _, runtime, _ = go(AUTO, module=changed(Misplaced(node.lineno)), breaks=True, late=True)
    assert runtime.races


def test_who_does_not_ask_whether_a_record_is_back_is_seen(go, monkeypatch):
    monkeypatch.setattr(device_updates.DeviceFuture, "done", lambda self: True)
    _, runtime, equal = go(CHOICES["cuda"][0], breaks=True, late=True)
    assert runtime.races and not equal


# ---------------------------------------------------------------------------- what cannot be done


def config_of(tmp_path, **options):
    return OffloadConfig(paths=[str(tmp_path)], subgroup_size=300, host_memory=6 * 4096, **options)


def test_without_a_gpu_cuda_is_refused_and_auto_is_the_cpu(tmp_path, monkeypatch, host_library):
    here = [torch.zeros(600, dtype=torch.bfloat16)]
    for device, gpu_memory, reason in (
        ("cpu", 0, "update_device is cpu"),
        ("auto", 0, "gpu_memory is 0"),
        ("auto", 2**20, "the weights are in host memory"),
    ):
        options = {"update_device": device, "gpu_memory": gpu_memory}
        assert gpu_for_updates(config_of(tmp_path, **options), here, None) == (None, reason)
    with pytest.raises(ConfigError, match="update_device cuda is not possible: the weights are in host memory. Set"):
        gpu_for_updates(config_of(tmp_path, update_device="cuda"), here, None)
    with pytest.raises(ConfigError, match="gpu_memory 1.0 MiB: .* update_device is cpu"):
        config_of(tmp_path, update_device="cpu", gpu_memory="1MiB")
    runtime = Runtime(late=True)
    with runtime.installed(monkeypatch):
        there = [runtime.on_device(here[0].clone())]
        assert gpu_for_updates(config_of(tmp_path, gpu_memory="1MiB"), there, None) == (
            None,
            "this device has no kernels",
        )
        with pytest.raises(ConfigError, match="not possible: this device has no kernels"):
            gpu_for_updates(config_of(tmp_path, update_device="cuda"), there, None)


# ---------------------------------------------------------------------------- around the steps


@pytest.fixture
def standin(monkeypatch, host_library):
    runtime = Runtime(late=True, library=host_library)
    with runtime.installed(monkeypatch), AdamKernel(1) as kernel:
        yield runtime, kernel


class Trainer:
    """An optimizer on the stand-in; what it does to parameters is the trainer's."""

    def __init__(self, runtime, tmp_path, dtype=torch.bfloat16, **options):
        self.runtime = runtime
        generator = torch.Generator().manual_seed(1)
        values = [torch.randn(n, generator=generator).to(dtype) for n in SHARDS if n]
        self.params = [torch.nn.Parameter(runtime.on_device(x) if runtime else x) for x in values]
        (tmp_path / str(bool(runtime))).mkdir()
        paths = [str(tmp_path / str(bool(runtime)))]
        settings = {"paths": paths, "subgroup_size": SUBGROUP_NUMEL, "host_memory": 8 * 4096 + 300 * 16} | options
        with self.doing():
            self.optimizer = OffloadedAdamW(self.params, lr=1e-2, update_threads=1, **settings)

    def doing(self):
        return self.runtime.trainer() if self.runtime else contextlib.nullcontext()

    def step(self, count=1):
        for _ in range(count):
            generator = torch.Generator().manual_seed(2)
            for p in self.params:
                gradient = torch.randn(p.shape, generator=generator).to(p.dtype)
                p.grad = self.runtime.on_device(gradient) if self.runtime else gradient
            self.optimizer.step()

    def state(self):
        """All that a checkpoint has, as one flat fp32 tensor."""
        with self.doing():
            entries = self.optimizer.state_dict()["state"].values()
            weights = [p.detach().cpu().float() for p in self.params]
        return torch.cat([*(x.float().view(-1) for entry in entries for x in entry.values()), *weights])


@pytest.fixture
def trainers(standin, tmp_path, monkeypatch):
    """Two that do the same: on the stand-in, with subgroups in all places, and in host memory."""
    made = []

    def make(dtype=torch.bfloat16, **options):
        measure = GpuMemory.measure
        monkeypatch.setattr(GpuMemory, "measure", lambda *arguments: measure(*arguments) and EVEN_RATES)
        there = {"gpu_memory": 5 * 4096} | options
        made.append(Trainer(standin[0], tmp_path, dtype, **there))
        made.append(Trainer(None, tmp_path, dtype, **(options | {"host_memory": 8 * 4096, "update_device": "cpu"})))
        return made

    yield make
    for trainer in made:
        trainer.optimizer.close()


def test_a_state_dict_is_read_and_loaded_wherever_the_state_is(trainers, standin):
    on_gpu, in_host_memory = trainers(torch.float16)
    for trainer in (on_gpu, in_host_memory):
        trainer.step(2)
        saved = trainer.optimizer.state_dict() if trainer is in_host_memory else None
        trainer.step(1)
    assert torch.equal(on_gpu.state(), in_host_memory.state())
    with on_gpu.doing():
        for p, q in zip(on_gpu.params, in_host_memory.params):
            p.copy_(q) if not p.requires_grad else p.data.copy_(q.data)
        on_gpu.optimizer.load_state_dict(saved)
    in_host_memory.optimizer.load_state_dict(saved)
    for trainer in (on_gpu, in_host_memory):
        trainer.step(2)
    assert torch.equal(on_gpu.state(), in_host_memory.state())
    assert not standin[0].races and not standin[0].faults


def test_a_snapshot_holds_what_is_in_gpu_memory_too(trainers, standin):
    on_gpu, in_host_memory = trainers(snapshots=True)
    on_gpu.step(3)
    tiers = on_gpu.optimizer._pipeline.tiers
    assert {entry.where for entry in tiers.table} >= {Where.DEVICE, Where.HOST}
    with on_gpu.doing():
        snapshot = take_snapshot(on_gpu.optimizer._pipeline, {"params": on_gpu.optimizer._work})
    on_gpu.step(2)
    in_host_memory.step(3)
    expected = in_host_memory.optimizer._pipeline
    for subgroup in expected.subgroups["params"]:
        with expected.read("params", subgroup) as view:
            wanted = in_host_memory.optimizer._work.read(subgroup, view)
            for name, tensor in snapshot.source().read("params", subgroup.index).items():
                assert torch.equal(tensor, wanted[name]), name
    snapshot.release()
    in_host_memory.step(2)
    assert torch.equal(on_gpu.state(), in_host_memory.state())


def test_the_start_says_how_many_subgroups_are_where(trainers, caplog):
    caplog.set_level("INFO", "mlp_offload")
    trainers()
    texts = [record.getMessage() for record in caplog.records if "mlp-offload: rank 0" in record.getMessage()]
    there, here = (next(line for line in text.splitlines() if line.startswith("  updates")) for text in texts)
    assert re.fullmatch(
        r"  updates +3 subgroups stay and (\d+) pass through on the GPU, in 20.0 KiB of its memory; \d+ on the CPU",
        there,
    )
    assert here == "  updates               all on the CPU (update_device is cpu)"


@pytest.mark.parametrize("gpu_memory", [0, 100])
def test_changed_weights_are_refused_before_anything_is_updated(tmp_path, standin, gpu_memory):
    """Where nobody may change them, by records that pass through and by those that stay."""
    runtime, kernel = standin
    place = Place(lambda values: runtime.on_device(values.clone()), runtime.trainer)
    config = config_of(tmp_path, update_device="cuda", gpu_memory=gpu_memory * 4096)
    weights = [place.put(torch.randn(n).bfloat16()) for n in SHARDS]
    gradients = [place.put(torch.randn(n).bfloat16()) for n in SHARDS]
    gpu, _ = gpu_for_updates(config, weights, kernel)
    with runtime.trainer():
        pipeline = StepPipeline(config, {"params": SHARDS}, main_itemsize=2, pin=pin_memory, gpu=gpu)
        work = AdamWork(kernel, weights, SUBGROUP_NUMEL, 2, gpu=pipeline.tiers.device)
        pipeline.initialize(lambda space, subgroup, view: work.load_weights(subgroup, view))
        for step in range(1, 3):
            work.begin(gradients, [adam_scalars(0.1, (0.9, 0.99), 1e-8, 0.1, step)], [0] * len(SHARDS))
            pipeline.step("params", work)
            work.end()
        weights[0][17:18].copy_(place.put(torch.ones(1).bfloat16()))
        work.begin(gradients, [adam_scalars(0.1, (0.9, 0.99), 1e-8, 0.1, 3)], [0] * len(SHARDS))
        before = [weight.cpu() for weight in weights]
        with pytest.raises(WeightsChangedError, match="subgroup 0: the weights of 1 of its 1 parts .* by other hands"):
            pipeline.step("params", work)
        work.end()
        assert torch.equal(weights[0].cpu(), before[0])
        pipeline.close()
    assert not runtime.races and not runtime.faults


def test_weights_that_leave_the_gpu_are_refused(trainers):
    on_gpu, _ = trainers()
    on_gpu.step()
    for p in on_gpu.params:
        p.data = torch.zeros(p.shape, dtype=p.dtype)
    with pytest.raises(ConfigError, match="weights moved from the GPU to host memory"):
        on_gpu.step()


def test_gpu_memory_that_is_not_there_is_an_error_that_leaves_nothing_behind(tmp_path, standin, monkeypatch):
    runtime, kernel = standin
    weights = [runtime.on_device(torch.zeros(3000))]
    config = config_of(tmp_path, gpu_memory=4 * 4096)
    gpu, _ = gpu_for_updates(config, weights, kernel)

    def no_memory(*arguments, **settings):
        raise torch.cuda.OutOfMemoryError

    monkeypatch.setattr(device_updates.torch, "empty", no_memory)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**20, 2**30))
    message = "does not give 16.0 KiB for 2 subgroups that stay and 2 that pass through; 1.0 MiB of 1.0 GiB are free"
    with pytest.raises(CapacityError, match=message):
        StepPipeline(config, {"params": [3000]}, gpu=gpu)
    assert not list(tmp_path.rglob("*.state"))


def test_an_update_that_does_not_end_is_given_up(standin):
    stream = torch.cuda.Stream()
    event = torch.cuda.Event()
    event.record(stream)
    event.query = lambda: False
    future = device_updates.DeviceFuture(event)
    assert not future.wait(0.01)
    assert "update on the GPU has not ended" in str(future.given_up(0.0, 5.0))
    assert "timeout 5 s" in str(future.given_up(0.0, 5.0))
