"""Virtual steps: times worked out by hand, and hits and bytes beside those of the same pipeline on real files."""

import subprocess
import sys
from pathlib import Path

import pytest

from mlp_offload.config import OffloadConfig
from mlp_offload.errors import ConfigError
from mlp_offload.pipeline import StepPipeline
from mlp_offload.plan.devices import Rates, device_count, step_seconds
from mlp_offload.simulator import SimulatedPath, simulate
from mlp_offload.telemetry import GPU

NUMEL = 384  # 10 bytes a parameter are one record of 4096 bytes
RECORD_BYTES = 4096


def run(subgroup_count=4, buffers=3, paths=((1, 1),), update=0.5, reserved=0, **options):
    """Steps in units of one record: rates in records/s, ``update`` in seconds a subgroup."""
    return simulate(
        [NUMEL * subgroup_count],
        paths=[
            SimulatedPath(f"/nowhere/{i}", *(r and r * RECORD_BYTES for r in rates[:3]), *rates[3:])
            for i, rates in enumerate(paths)
        ],
        host_memory_bytes=buffers * RECORD_BYTES + reserved,
        subgroup_size=NUMEL,
        adam_parameters_per_second=NUMEL / update,
        **{"compute_seconds": 1.0, "steps": 2} | options,
    )


def spans(record, phase):
    """(subgroup, begin, end) in the order of time; stalls that follow each other are one."""
    found = []
    for e in sorted((e for e in record.events if e.phase == phase), key=lambda e: e.begin):
        if phase == "stall" and found and found[-1][2] == pytest.approx(e.begin):
            found[-1] = (found[-1][0], found[-1][1], e.end)
        else:
            found.append((e.subgroup, e.begin, e.end))
    return found


def near(expected):
    return [(subgroup, pytest.approx(begin), pytest.approx(end)) for subgroup, begin, end in expected]


def test_times_are_those_of_a_schedule_made_by_hand():
    first, second = run()
    assert spans(first, "fetch") == near([(0, 0, 1), (1, 1, 2), (2, 2, 3), (3, 3, 4)])
    assert spans(first, "update") == near([(0, 1, 1.5), (1, 2, 2.5), (2, 3, 3.5), (3, 4, 4.5)])
    assert spans(first, "flush") == near([(0, 1.5, 2.5), (1, 2.5, 3.5), (2, 3.5, 4.5)])  # 3 stays for the next step
    assert [span[1:] for span in spans(first, "stall")] == [(0, 1), (1.5, 2), (2.5, 3), (3.5, 4)]
    assert first.step_seconds == pytest.approx(4.5)
    assert second.started == pytest.approx(5.5), "the step and then the pause"
    assert (second.hit_count, second.fetch_count) == (1, 3)
    assert spans(second, "fetch") == near([(2, 0, 1), (1, 1, 2), (0, 2, 3)])
    assert spans(second, "update") == near([(3, 0, 0.5), (2, 1, 1.5), (1, 2, 2.5), (0, 3, 3.5)])
    assert spans(second, "flush") == near([(3, 0.5, 1.5), (2, 1.5, 2.5), (1, 2.5, 3.5)])


def test_flushes_go_on_while_the_model_computes():
    first, second = run(paths=((1, 0.25),), compute_seconds=20.0)
    assert max(e.end for e in first.events) > first.step_seconds + 1
    assert second.events[0].begin == 0, "nothing is waited for that had the time to land"
    hurried = run(paths=((1, 0.25),), compute_seconds=0.0)[1]
    assert hurried.step_seconds > second.step_seconds + 1, "what is still being written holds its buffer"


def test_the_last_record_has_all_its_flushes():
    # 6 of 20 are resident, and 4 of the 6 staging buffers keep theirs. The one flush to the slow path lands last.
    records = run(20, 12, paths=((1, 0.05), (1, 0.2)), update=0.01, compute_seconds=0.0, steps=3)
    assert [sum(record.bytes_written.values()) for record in records] == [10 * RECORD_BYTES] * 3


def test_one_limit_for_both_directions():
    apart, together = (run(60, 8, paths=[rates], update=0.01, steps=3)[-1] for rates in ((1, 1), (1, 1, 1)))
    assert apart.step_seconds == pytest.approx(54, rel=0.05)
    assert together.step_seconds == pytest.approx(2 * 54, rel=0.05)
    alone = run(1, 1, paths=((4, 4, 1),))  # one buffer is enough for all of the state, and no path is used
    assert alone[0].fetch_count == 0


def test_latency_is_hidden_behind_requests_before():
    first, _ = run(paths=((1, 1, None, 0.25),))
    assert spans(first, "fetch") == near([(0, 0.25, 1.25), (1, 1.25, 2.25), (2, 2.25, 3.25), (3, 3.25, 4.25)])


def test_ranks_share_every_path():
    shared = run(9, 4, paths=((4, 8), (2, 2)), local_rank_count=2)
    alone = run(9, 4, paths=((2, 4), (1, 1)))
    assert [r.events for r in shared] == [r.events for r in alone]


def test_gradients_come_and_weights_leave_beside_the_update():
    # A bring takes 1 s (4 + 2 bytes a parameter), weights leave in 1/3 s; two subgroups may be in staging.
    reserved = 2 * NUMEL * 6
    first, second = run(3, 3, paths=(), reserved=reserved, copy_bytes_per_second=NUMEL * 6)
    assert spans(first, "update") == near([(0, 0, 1.5), (1, 1.5, 2.5), (2, 2.5, 3.5)]), "it waits for its gradients"
    assert second.started == pytest.approx(3.5 + 1 / 3 + 1), "the last weights leave before the model computes"
    with pytest.raises(ConfigError, match="for gradients and weights"):
        run(4, 3, copy_bytes_per_second=NUMEL * 6)


def on_gpu(subgroup_count, buffers, **options):
    """Copies take a second a record, updates on the GPU half of one."""
    rates = {"copy_bytes_per_second": 10 * NUMEL, "gpu_adam_parameters_per_second": 2 * NUMEL}
    return run(subgroup_count, buffers, paths=(), reserved=2 * NUMEL * 6, **rates | options)


def test_records_pass_through_two_buffers_on_the_gpu():
    first, second = on_gpu(4, 4, update_device="cuda")
    # The third and the fourth come in when the first and the second have left.
    assert spans(first, "update") == near([(0, 0, 2.5), (1, 0, 3.5), (2, 0, 5), (3, 0, 6)])
    assert (first.step_seconds, second.started) == (pytest.approx(6), pytest.approx(7))
    assert spans(first, "stall") == near([(0, 0, 6)])


def test_records_in_gpu_memory_are_updated_beside_the_cpus():
    first, second = on_gpu(3, 3, gpu_memory_bytes=RECORD_BYTES)
    # Gradients and old weights of a subgroup come in 0.6 s, an update takes 0.5 s, new weights leave in 0.2 s.
    assert spans(first, "update") == near([(1, 0, 0), (0, 0, 1.1), (2, 1.1, 1.7)])
    assert second.started == pytest.approx(1.7 + 0.2 + 1)
    alone, after = on_gpu(3, 1, gpu_memory_bytes=3 * RECORD_BYTES)
    assert alone.step_seconds == 0 and after.started == pytest.approx(3 * 0.5 + 1), "the model waits for its weights"


def test_the_gpu_gets_as_many_as_shorten_the_step():
    rates = Rates(1e9, 4e10, 2e10, 2e10)
    options = {
        "paths": [],
        "host_memory_bytes": 20 * 10**9,
        "subgroup_size": 10**7,
        "adam_parameters_per_second": rates.host_parameters,
        "copy_bytes_per_second": rates.to_host_bytes,
        "gpu_adam_parameters_per_second": rates.device_parameters,
        "compute_seconds": 0.0,
        "steps": 2,
    }
    count = device_count(96, 10**7, 10**8, rates, 0.0)
    step = simulate([10**9], gpu_memory_bytes=6 * 10**8 + 6 * 4096, **options)[-1]
    assert sum(e.path == GPU for e in step.events) == 4 + count and 0 < count < 96
    assert step.step_seconds == pytest.approx(step_seconds(count, 96, 10**7, 10**8, rates, 0.0), rel=0.1)
    assert step.step_seconds < 0.7 * simulate([10**9], **options)[-1].step_seconds


@pytest.mark.parametrize("numel, host_memory_mb", [(10**9, 100), (10**9, 1000), (10**9, 5000)])
def test_where_storage_limits_a_step_takes_bytes_over_bandwidth(numel, host_memory_mb):
    records = simulate(
        [numel],
        paths=[SimulatedPath("nvme", 4e8, 4e8), SimulatedPath("pfs", 2e8, 2e8)],
        host_memory_bytes=host_memory_mb * 10**6,
        subgroup_size=2 * 10**6,
        adam_parameters_per_second=1e9,
        compute_seconds=1.0,
    )
    for record in records[1:]:
        bound = sum(record.bytes_read.values()) / 6e8
        assert bound <= record.step_seconds < 1.03 * bound
        assert record.bytes_read["nvme"] == pytest.approx(2 * record.bytes_read["pfs"], rel=0.02)


def test_subgroups_leave_a_path_that_gives_less_than_it_promises():
    records = simulate(
        [10**8],
        paths=[SimulatedPath("a", 4e8, 4e8, both_bytes_per_second=4e8), SimulatedPath("b", 2e8, 2e8)],
        host_memory_bytes=10**8,
        subgroup_size=10**6,
        adam_parameters_per_second=1e9,
        compute_seconds=1.0,
        steps=12,
    )
    first, last = records[0], records[-1]
    assert first.bytes_read["a"] == pytest.approx(2 * first.bytes_read["b"], rel=0.1)
    assert last.bytes_read["a"] == pytest.approx(last.bytes_read["b"], rel=0.15)
    assert last.step_seconds < 0.85 * records[1].step_seconds


class Nothing:
    def prepare(self, subgroup):
        pass

    def update(self, subgroup, state):
        pass


@pytest.mark.parametrize("main_itemsize", [2, 4])
@pytest.mark.parametrize(
    "path_count, buffers, staging", [(1, 3, 0), (1, 9, 0), (2, 5, 3), (2, 16, 0), (3, 20, 12), (2, 99, 0)]
)
def test_hits_and_bytes_are_those_of_a_real_run(tmp_path, path_count, buffers, staging, main_itemsize):
    directories = [tmp_path / str(i) for i in range(path_count)]
    for directory in directories:
        directory.mkdir()
    numels, record_bytes = [1000, 0, 5, 7777], {2: 4096, 4: 8192}[main_itemsize]
    rates = [(6_000_000, 4_000_000), (2_000_000, 5_000_000), (7_000_000, 1_000_000)][:path_count]
    config = OffloadConfig.from_mapping(
        {
            "paths": [{"directory": str(d), "read": r, "write": w} for d, (r, w) in zip(directories, rates)],
            "subgroup_size": NUMEL,
            "host_memory": buffers * record_bytes,
            "staging_count": staging,
        }
    )
    pipeline = StepPipeline(config, {"all": numels}, main_itemsize=main_itemsize)
    try:
        pipeline.initialize(lambda *_: None)
        real = [pipeline.step("all", Nothing()) for _ in range(4)]
        pipeline.tiers.settle()
    finally:
        pipeline.close()
    virtual = simulate(
        numels,
        paths=[SimulatedPath(str(d), *r) for d, r in zip(directories, rates)],
        host_memory_bytes=buffers * record_bytes,
        subgroup_size=NUMEL,
        main_itemsize=main_itemsize,
        adam_parameters_per_second=1e9,
        compute_seconds=0.001,
        staging_count=staging,
        steps=4,
    )
    for a, b in zip(real, virtual):
        for name in ("step", "hit_count", "fetch_count", "bytes_read", "bytes_written", "host_memory_bytes"):
            assert getattr(a, name) == getattr(b, name), name
        for phase in ("fetch", "update", "flush"):
            moved = [sorted((e.subgroup, e.path) for e in r.events if e.phase == phase) for r in (a, b)]
            assert moved[0] == moved[1], phase
    assert not list(tmp_path.rglob("*.state"))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"buffers": 2}, "needs 3"),
        ({"paths": ()}, "there is no path"),
        ({"paths": ((0, 1),)}, "read is 0"),
        ({"paths": ((1, -1),)}, "write is -4096"),
        ({"paths": ((1, 1, 0),)}, "both is 0"),
        ({"paths": ((1, float("inf")),)}, "must be above 0 and finite"),
        ({"paths": ((1, 1, None, -0.1),)}, "latency is -0.1"),
        ({"steps": 0}, "steps is 0; it must be at least 1"),
        ({"local_rank_count": 0}, "local_rank_count is 0"),
        ({"compute_seconds": -1.0}, "compute_seconds is -1.0"),
        ({"update": float("inf")}, "adam_parameters_per_second is 0.0"),
        ({"copy_bytes_per_second": float("nan")}, "copy_bytes_per_second is nan"),
    ],
)
def test_bad_numbers_are_refused_by_name(change, message):
    with pytest.raises(ConfigError, match=message):
        run(**change)


def test_two_paths_of_one_name_are_refused():
    with pytest.raises(ConfigError, match="a name of its own"):
        simulate(
            [10],
            paths=[SimulatedPath("a", 1, 1)] * 2,
            host_memory_bytes=10**6,
            subgroup_size=10,
            adam_parameters_per_second=1,
            compute_seconds=0,
        )


def test_it_needs_no_torch_and_touches_no_file():
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "sys.addaudithook(lambda name, args: name == 'open' and '/nowhere' in str(args[0]) and sys.exit('opened ' + str(args[0])))\n"
        "from mlp_offload.simulator import *\n"
        "print(simulate([10**6], paths=[SimulatedPath('/nowhere', 1e6, 1e6)], host_memory_bytes=10**6, subgroup_size=10**4,"
        " adam_parameters_per_second=1e6, compute_seconds=0)[-1].fetch_count)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 0
