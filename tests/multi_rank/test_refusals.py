"""What is refused before training starts: options that offload does not go with, and an unknown Megatron-Core."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from mlp_offload.config import OffloadConfig
from mlp_offload.errors import ConfigError, SelfCheckError

# Importing Megatron-Core takes seconds and needs no device.
factory_module = pytest.importorskip("megatron.core.optimizer")
from megatron.core.distributed import DistributedDataParallelConfig  # noqa: E402
from megatron.core.optimizer import OptimizerConfig  # noqa: E402
from megatron.core.optimizer import optimizer as stock_module  # noqa: E402
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

from mlp_offload.megatron import install, self_check  # noqa: E402
from mlp_offload.plan.refusals import RULES, validate  # noqa: E402

GOOD = {"use_distributed_optimizer": True, "optimizer": "adam", "decoupled_weight_decay": True}
BAD = {
    "use_distributed_optimizer": False,
    "optimizer": "sgd",
    "decoupled_weight_decay": False,
    "non_persistent_ckpt_type": "local",
}


def test_options_that_work_pass():
    validate(
        SimpleNamespace(**GOOD, log_params_norm=True, use_megatron_fsdp=False),
        OptimizerConfig(use_distributed_optimizer=True),
        DistributedDataParallelConfig(use_distributed_optimizer=True),
    )


@pytest.mark.parametrize(
    "option",
    [
        "use_distributed_optimizer",
        "optimizer",
        "decoupled_weight_decay",
        "use_precision_aware_optimizer",
        "optimizer_cpu_offload",
        "fp8_param_gather",
        "fp4_param_gather",
        "reuse_grad_buf_for_mxfp8_param_ag",
        "use_megatron_fsdp",
        "use_torch_fsdp2",
        "use_custom_fsdp",
        "optimizer_cuda_graph",
        "use_layer_wise_distributed_optimizer",
        "overlap_param_gather_with_optimizer_step",
        "non_persistent_ckpt_type",
        "qk_clip",
    ],
)
def test_each_option_is_refused_by_name_and_says_what_to_change(option):
    arguments = SimpleNamespace(**GOOD | {option: BAD.get(option, True)})
    with pytest.raises(ConfigError) as caught:
        validate(arguments)
    message = str(caught.value)
    assert option in message and "--optimizer-offload mlp" in message
    assert any(verb in message for verb in (": remove --", ": add --", ": set "))


@pytest.mark.parametrize(
    ("source", "option"),
    [
        (OptimizerConfig(use_distributed_optimizer=False), "use_distributed_optimizer"),
        (OptimizerConfig(use_distributed_optimizer=True, optimizer="sgd"), "optimizer"),
        (OptimizerConfig(use_distributed_optimizer=True, decoupled_weight_decay=False), "decoupled_weight_decay"),
        (DistributedDataParallelConfig(use_distributed_optimizer=True, fp8_param_gather=True), "fp8_param_gather"),
        (DistributedDataParallelConfig(use_distributed_optimizer=True, use_megatron_fsdp=True), "use_megatron_fsdp"),
        (TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, qk_clip=True), "qk_clip"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_megatrons_own_configs_are_checked(source, option):
    with pytest.raises(ConfigError, match=option):
        validate(source)


def test_every_option_is_one_that_some_megatron_has():
    """A rule with a misspelt name would never refuse anything."""
    configs = (OptimizerConfig, DistributedDataParallelConfig, TransformerConfig)
    known = {field for config in configs for field in config.__dataclass_fields__}
    only_arguments = {"use_torch_fsdp2", "use_custom_fsdp", "non_persistent_ckpt_type"}
    newer = {"fp4_param_gather", "optimizer_cuda_graph", "use_layer_wise_distributed_optimizer"}
    if newer & known:
        newer = set()  # a release that has one of them has them all
    for rule in RULES:
        assert rule.option in known | only_arguments | newer, rule.option


def test_this_megatron_passes_the_self_check():
    self_check.check_internals()


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (DistributedOptimizer, "_set_main_param_and_optimizer_states"),
        (DistributedOptimizer, "_copy_model_grads_to_main_grads"),
        (stock_module, "clip_grad_by_total_norm_fp32"),
        (stock_module, "param_group_identifier_keys"),
        (factory_module, "_get_megatron_optimizer_based_on_param_groups"),
    ],
)
def test_a_missing_internal_is_named_with_the_version(monkeypatch, owner, name):
    monkeypatch.delattr(owner, name)
    with pytest.raises(SelfCheckError) as caught:
        self_check.check_internals()
    assert name in str(caught.value) and self_check.megatron_version() in str(caught.value)


def test_a_changed_signature_is_named(monkeypatch):
    monkeypatch.setattr(DistributedOptimizer, "_get_main_param_and_optimizer_states", lambda self, shard: {})
    with pytest.raises(SelfCheckError, match="parameter model_param"):
        self_check.check_internals()


def test_a_step_that_clips_by_another_name_is_found(monkeypatch):
    monkeypatch.setattr(stock_module.ChainedOptimizer, "step", lambda self: (True, 0.0, None))
    with pytest.raises(SelfCheckError, match=r"clip_grad_by_total_norm_fp32 in ChainedOptimizer\.step"):
        self_check.check_internals()


@pytest.fixture
def config(tmp_path):
    yield OffloadConfig(paths=[str(tmp_path)])
    install.uninstall()


def test_install_twice_replaces_the_config_and_uninstall_restores(config):
    stock, stock_clip = factory_module.get_megatron_optimizer, stock_module.clip_grad_by_total_norm_fp32
    install.install(config)
    install.install(config.replace(subgroup_size=7))
    installed = factory_module.get_megatron_optimizer
    assert installed.stock is stock and installed.config.subgroup_size == 7
    assert stock_module.clip_grad_by_total_norm_fp32.stock is stock_clip
    install.uninstall()
    assert factory_module.get_megatron_optimizer is stock
    assert stock_module.clip_grad_by_total_norm_fp32 is stock_clip


def test_installed_factory_refuses_before_it_builds(config):
    install.install(config)
    ddp_config = DistributedDataParallelConfig(use_distributed_optimizer=True)
    chunk = SimpleNamespace(ddp_config=ddp_config, config=SimpleNamespace(qk_clip=False))
    with pytest.raises(ConfigError, match="use_distributed_optimizer=False"):
        factory_module.get_megatron_optimizer(OptimizerConfig(use_distributed_optimizer=False), [chunk])
    with pytest.raises(ConfigError, match="not wrapped"):
        factory_module.get_megatron_optimizer(OptimizerConfig(use_distributed_optimizer=True), [SimpleNamespace()])
    chunk.config.qk_clip = True
    with pytest.raises(ConfigError, match="qk_clip=True"):
        factory_module.get_megatron_optimizer(OptimizerConfig(use_distributed_optimizer=True), [chunk])
    assert factory_module.DistributedOptimizer is DistributedOptimizer


def test_parameters_of_others_are_clipped_by_stock(config):
    torch = pytest.importorskip("torch")
    called = []
    hook = install.ClipHook(lambda *arguments: called.append(arguments))
    view = torch.ones(3)
    hook([view], 1.0, 2.0)
    assert called == [([view], 1.0, 2.0, False)]
