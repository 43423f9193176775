"""The pytest plugin of ``megatron_unit_tests.py``: one of several ranks that run Megatron's own tests together.

It swaps the optimizer in, records every test's outcome on this rank, and lets the ranks meet after each test.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import importlib.util
import json
import os
import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest
import torch

RESULTS, DONE, PATHS = "UNIT_TESTS_RESULTS", "UNIT_TESTS_DONE", "UNIT_TESTS_PATHS"
OUT_OF_STEP = 3
_DOWNLOAD = "tests.test_utils.python_scripts.download_unit_tests_dataset"

_built: "list[Any]" = []
_phases: "dict[str, list[pytest.TestReport]]" = {}


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Before Megatron's conftest.py, which imports what is swapped here."""
    download = types.ModuleType(_DOWNLOAD)
    download.download_and_extract_asset = lambda **unused: None  # no test here reads data
    sys.modules[_DOWNLOAD] = download

    import megatron.core.optimizer as factory_module

    from mlp_offload.megatron import wheel_gaps

    wheel_gaps.fill()
    if factory_module.USING_PYTORCH_OPTIMIZER:  # neither Transformer Engine nor Apex: see fused_adam.py
        from fused_adam import megatron_with_fused_adam

        adam = contextlib.ExitStack()
        adam.enter_context(megatron_with_fused_adam())
        early_config.add_cleanup(adam.close)
    if importlib.util.find_spec("transformer_engine") is None:
        _local_layers()
    if os.environ.get(PATHS):
        _offload(os.environ[PATHS].split(os.pathsep))


def _local_layers() -> None:
    """Where a test asks for layers of Transformer Engine, it gets Megatron's own: the optimizer is what is tested."""
    from megatron.core.models.gpt import gpt_layer_specs as specs
    from megatron.core.transformer import torch_norm

    def layer(*unused: Any, multi_latent_attention: bool = False, **unused_too: Any) -> Any:
        return specs.get_gpt_layer_local_spec(multi_latent_attention=multi_latent_attention)

    block = specs.get_gpt_decoder_block_spec
    specs.get_gpt_layer_with_transformer_engine_spec = layer
    specs.get_gpt_decoder_block_spec = lambda config, use_transformer_engine, **settings: block(
        config, use_transformer_engine=False, **settings
    )
    # Megatron's own norm is refused with sequence parallelism, for its gradients are not summed; no test here trains.
    make_norm = torch_norm.WrappedTorchNorm.__new__

    def norm(cls: type, config: Any, *args: Any, **settings: Any) -> torch.nn.Module:
        without = copy.copy(config)
        without.sequence_parallel = False
        return make_norm(cls, without, *args, **settings)

    torch_norm.WrappedTorchNorm.__new__ = norm


def pytest_configure(config: pytest.Config) -> None:
    # Megatron's tests parse sys.argv as Megatron's options, and take the ranks' common directory from basetemp's parent.
    del sys.argv[1:]
    basetemp = Path(os.environ[RESULTS]).parent / "temporary" / f"rank{os.environ['RANK']}"
    basetemp.parent.mkdir(exist_ok=True)
    config.option.basetemp = str(basetemp)


def _offload(paths: "list[str]") -> None:
    """Every distributed optimizer that a test builds is ours; without ``use_distributed_optimizer`` it is stock's."""
    import megatron.core.optimizer as factory_module

    from mlp_offload import OffloadConfig
    from mlp_offload.megatron import install
    from mlp_offload.megatron.switch import rebind

    # Full masters: the tests load optimizer state without the model's weights that it belongs to, and the default keeps
    # of a master only what its bf16 weight lacks. Subgroups of a prime size are cut inside parameters; much
    # smaller ones make so many pieces that Megatron itself needs minutes for the list of them.
    options = {"master_weights": "full", "subgroup_size": 997, "host_memory": "96KiB", "update_threads": 1}
    install.install(OffloadConfig(paths=paths, job="unit-tests", **options))
    offloaded = factory_module.get_megatron_optimizer

    @functools.wraps(offloaded.stock)
    def get_megatron_optimizer(config: Any, *args: Any, **settings: Any) -> Any:
        if not config.use_distributed_optimizer:
            return offloaded.stock(config, *args, **settings)
        built = offloaded(config, *args, **settings)
        _built.append(type(built).__name__)
        return built

    rebind(offloaded, get_megatron_optimizer)


@pytest.hookimpl(trylast=True)  # after -k
def pytest_collection_modifyitems(items: "list[pytest.Item]") -> None:
    done = set(json.loads(Path(os.environ[DONE]).read_text()))
    if os.environ["RANK"] == "0":
        names = [item.nodeid for item in items]
        _write(Path(os.environ[RESULTS]) / "tests.json", names)
    items[:] = [item for item in items if item.nodeid not in done]


def pytest_collection_finish() -> None:
    """Some tests count on an earlier one for the process group; after a restart there is none."""
    from tests.unit_tests.test_utilities import Utils

    Utils.initialize_distributed()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _phases.setdefault(report.nodeid, []).append(report)
    if report.failed:  # told before the teardown, which may wait for ranks that wait for this one
        _record(report.nodeid)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item):
    _built.clear()
    yield
    _record(item.nodeid)
    all_ranks = _meet(_directory(item.nodeid))
    failed = any(entry["outcome"] == "failed" for entry in all_ranks)
    if failed and len({entry["reason"] for entry in all_ranks}) > 1:
        # Ranks failed at different places: collectives no longer match. The rest runs in new processes.
        os._exit(OUT_OF_STEP)
    _destroy_groups()


def _destroy_groups() -> None:
    """Megatron forgets its process groups and torch keeps them: hundreds, and with gloo each has threads that poll."""
    gc.collect()
    groups = torch.distributed.distributed_c10d._world.pg_map  # no public way to list them
    for group in list(groups):
        if group is not torch.distributed.group.WORLD:
            torch.distributed.destroy_process_group(group)
    gc.collect()


def _directory(test: str) -> Path:
    return Path(os.environ[RESULTS]) / test.rpartition("::")[2].replace("/", "_")


def _record(test: str) -> None:
    """Write down how a test went on this rank, as far as it has."""
    bad = next((report for report in _phases[test] if report.failed), None)
    skipped = next((report for report in _phases[test] if report.skipped), None)
    mine = {
        "test": test,
        "outcome": "failed" if bad else "skipped" if skipped else "passed",
        "reason": _reason(bad or skipped),
        "report": bad.longreprtext if bad else "",
        "offloaded": len(_built),
    }
    _directory(test).mkdir(exist_ok=True)
    _write(_directory(test) / f"{os.environ['RANK']}.json", mine)


def _meet(directory: Path) -> "list[dict[str, Any]]":
    """Wait until all ranks have recorded a test; the driver ends those that wait in vain."""
    files = [directory / f"{rank}.json" for rank in range(int(os.environ["WORLD_SIZE"]))]
    while not all(file.exists() for file in files):
        time.sleep(0.02)
    return [json.loads(file.read_text()) for file in files]


def _reason(report: "pytest.TestReport | None") -> str:
    if report is None:
        return ""
    if report.skipped:
        return str(report.longrepr[2]) if isinstance(report.longrepr, tuple) else str(report.longrepr)
    crash = getattr(report.longrepr, "reprcrash", None)
    return crash.message if crash is not None else report.longreprtext


def _write(file: Path, content: Any) -> None:
    part = file.with_name(f"{file.name}.part")
    part.write_text(json.dumps(content))
    part.replace(file)
