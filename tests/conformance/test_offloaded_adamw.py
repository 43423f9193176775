"""OffloadedAdamW against torch.optim.AdamW: same bits where the arithmetic is the same, a stated tolerance elsewhere.

Oracle: ``torch.optim.AdamW(fused=True)`` on one thread, in fp32. Its vector body is IEEE arithmetic, so the bits must
agree there; it handles the last ``numel % 16`` elements of a tensor with other roundings, and without ``fused`` it takes
square roots from a vector math library, so those agree within ``(1e-5 * lr + 2 ulp) * steps``.
"""

import copy

import pytest
import torch

from mlp_offload import OffloadedAdamW
from mlp_offload.errors import ConfigError

SIZES = [(0,), (1,), (127,), (4097,), (48, 64), (16,), (3, 5, 7)]
LR = {0: 1e-2, 1: 3e-3}


@pytest.fixture(autouse=True)
def one_torch_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def paths(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    return [str(tmp_path / "a"), str(tmp_path / "b")]


@pytest.fixture
def offloaded(paths):
    """Makes optimizers with a budget so small that nearly all state streams; closes them."""
    made = []

    def make(params, **options):
        settings = {"paths": paths, "subgroup_size": 509, "host_memory": "40KiB", "name": f"optimizer{len(made)}"}
        made.append(OffloadedAdamW(params, **{**settings, **options}))
        return made[-1]

    yield make
    for optimizer in made:
        optimizer.close()


def parameters(dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    return [torch.nn.Parameter(torch.randn(size, generator=generator).to(dtype)) for size in SIZES]


def groups(params):
    return [
        {"params": params[:4], "lr": LR[0]},
        {"params": params[4:], "lr": LR[1], "weight_decay": 0.1, "betas": (0.8, 0.95)},
    ]


def set_gradients(params, step, missing=True):
    generator = torch.Generator().manual_seed(step)
    for i, p in enumerate(params):
        grad = torch.randn(p.shape, generator=generator)
        p.grad = None if missing and (i + step) % 5 == 0 else grad.to(p.dtype)


def tolerance(p, lr, steps):
    ulp = torch.nextafter(p.abs(), torch.tensor(torch.inf)) - p.abs()
    return (1e-5 * lr + 2 * ulp) * steps


@pytest.mark.parametrize("fused", [True, False])
def test_fifty_steps_of_odd_sizes_groups_and_missing_gradients(offloaded, fused):
    ours, theirs = parameters(), parameters()
    optimizer, oracle = offloaded(groups(ours)), torch.optim.AdamW(groups(theirs), fused=fused)
    assert optimizer._pipeline.tiers.residency.buffer_count < len(optimizer._pipeline.tiers.subgroups)
    for step in range(1, 51):
        for opt, params in ((optimizer, ours), (oracle, theirs)):
            set_gradients(params, step)
            for group in opt.param_groups:
                group["lr"] *= 0.99
            opt.step()
    for i, (p, q) in enumerate(zip(ours, theirs)):
        p, q = p.detach().view(-1), q.detach().view(-1)
        body = p.numel() - p.numel() % 16 if fused else 0
        assert torch.equal(p[:body], q[:body])
        assert ((p - q).abs() <= tolerance(q, LR[int(i >= 4)], 50)).all()
        assert not torch.equal(p, parameters()[i].view(-1)) or p.numel() == 0


@pytest.mark.parametrize(
    ("dtype", "kept", "bytes_each"),
    [(torch.bfloat16, "remainder", 10), (torch.bfloat16, "full", 12), (torch.float16, "remainder", 12)],
)
def test_low_precision_parameters_have_fp32_masters(offloaded, dtype, kept, bytes_each):
    ours, masters = parameters(dtype)[4:6], [torch.nn.Parameter(p.float()) for p in parameters(dtype)[4:6]]
    optimizer = offloaded(ours, lr=1e-2, master_weights=kept)
    oracle = torch.optim.AdamW(masters, lr=1e-2, fused=True)
    assert {s.record_bytes // s.stride_numel for s in optimizer._pipeline.tiers.subgroups} == {bytes_each}
    for step in range(1, 11):
        set_gradients(ours, step, missing=False)
        for p, master in zip(ours, masters):
            master.grad = p.grad.float()
        optimizer.step()
        oracle.step()
    state = optimizer.state_dict()["state"]
    for i, (p, master) in enumerate(zip(ours, masters)):
        assert torch.equal(state[i]["main_param"], master)
        assert torch.equal(p, master.to(dtype))


def test_state_moves_to_torch_and_back(offloaded):
    ours = parameters()
    optimizer = offloaded(groups(ours))
    for step in range(1, 4):
        set_gradients(ours, step)
        optimizer.step()
    theirs = copy.deepcopy(ours)
    oracle = torch.optim.AdamW(groups(theirs), fused=True)
    oracle.load_state_dict(optimizer.state_dict())
    for group in oracle.param_groups:
        group["fused"] = True  # torch takes it from the loaded groups, where ours has no such option
    again = copy.deepcopy(ours)
    reloaded = offloaded(groups(again), subgroup_size=1021)
    reloaded.load_state_dict(oracle.state_dict())
    for step in range(4, 8):
        for opt, params in ((optimizer, ours), (oracle, theirs), (reloaded, again)):
            set_gradients(params, step)
            opt.step()
    for p, q, r in zip(ours, theirs, again):
        body = p.numel() - p.numel() % 16
        assert torch.equal(p.view(-1)[:body], q.view(-1)[:body])
        assert torch.equal(p, r)
    before, after = optimizer.state_dict(), reloaded.state_dict()
    assert before["state"].keys() == after["state"].keys()
    for i in before["state"]:
        for key, value in before["state"][i].items():
            assert torch.equal(value, after["state"][i][key]), (i, key)


def test_a_weight_changed_by_other_hands_is_the_truth(offloaded):
    ours, theirs = parameters()[4:6], parameters()[4:6]
    optimizer, oracle = offloaded(ours, lr=1e-2), torch.optim.AdamW(theirs, lr=1e-2, fused=True)
    for step in range(1, 5):
        if step == 3:
            with torch.no_grad():
                for p in (ours[0], theirs[0]):
                    p.mul_(0.5)
        for opt, params in ((optimizer, ours), (oracle, theirs)):
            set_gradients(params, step, missing=False)
            opt.step()
    assert all(torch.equal(p, q) for p, q in zip(ours, theirs))


def test_autograd_sees_that_a_step_changes_parameters(offloaded):
    p = torch.nn.Parameter(torch.ones(16))
    optimizer = offloaded([p])
    product = (p * p).sum()
    p.grad = torch.ones(16)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


@pytest.mark.parametrize(
    "change, message",
    [
        ({"betas": (0.9, 1.0)}, r"betas\[1\]"),
        ({"subgroup_size": 0}, "subgroup_size 0"),
        ({"host_memory": "10KiB"}, "the pipeline needs 3"),
        ({"paths": []}, "needs at least one path"),
        ({"paths": ["/nowhere/at/all"]}, "/nowhere/at/all"),
        ({"iodepht": 1}, "did you mean 'iodepth'"),
    ],
)
def test_bad_options_are_refused_before_any_file_is_made(offloaded, paths, tmp_path, change, message):
    with pytest.raises(ConfigError, match=message):
        offloaded([torch.nn.Parameter(torch.ones(4096))], **change)
    assert not any(file.is_file() for file in tmp_path.rglob("*"))


def test_what_cannot_be_updated_is_refused(offloaded):
    with pytest.raises(ConfigError, match=r"strides \(1, 4\)"):
        offloaded([torch.nn.Parameter(torch.ones(3, 4).t())])
    with pytest.raises(ConfigError, match="float64"):
        offloaded([torch.nn.Parameter(torch.ones(3, dtype=torch.float64))])
    optimizer = offloaded([torch.nn.Parameter(torch.ones(3, 4))])
    with pytest.raises(ConfigError, match="all parameters at construction"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
    with pytest.raises(ConfigError, match="groups of"):
        optimizer.load_state_dict({"state": {}, "param_groups": []})
    optimizer.param_groups[0]["params"][0].grad = torch.ones(3, 4).to_sparse()
    with pytest.raises(ConfigError, match="dense gradients"):
        optimizer.step()


def test_two_optimizers_of_one_process_need_names(offloaded, paths):
    p = [torch.nn.Parameter(torch.ones(4096))]
    offloaded(p, name="same")
    with pytest.raises(Exception, match="same.state"):
        offloaded(p, name="same")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_parameter_that_was_given_other_memory_is_still_the_one_that_is_updated(offloaded, dtype):
    ours, theirs = parameters(dtype)[4:6], parameters(dtype)[4:6]
    optimizer, oracle = offloaded(ours, lr=1e-2), offloaded(theirs, lr=1e-2)
    for step in range(1, 5):
        if step == 3:  # what module.to(), module.half() and vector_to_parameters do
            for p in ours:
                p.data = p.data.clone()
        for opt, params in ((optimizer, ours), (oracle, theirs)):
            set_gradients(params, step, missing=False)
            opt.step()
    assert all(torch.equal(p, q) for p, q in zip(ours, theirs))
    ours[0].data = torch.ones(3, dtype=dtype)
    ours[0].grad = torch.ones(3, dtype=dtype)
    with pytest.raises(ConfigError, match="parameter 0 has 3 elements now; its state has 3072"):
        optimizer.step()


@pytest.mark.parametrize(
    ("kept", "model_first"), [("remainder", True), ("remainder", False), ("full", True), ("full", False)]
)
def test_resumed_masters_are_those_that_were_saved(offloaded, kept, model_first):
    """With full masters the order of the two ``load_state_dict`` calls does not matter; writing the same weights never does."""
    ours = parameters(torch.bfloat16)[4:6]
    optimizer = offloaded(ours, lr=1e-3, master_weights=kept)
    again = [torch.nn.Parameter(p * 2) for p in ours]
    resumed = offloaded(again, lr=1e-3, master_weights=kept)

    def load_model():
        with torch.no_grad():
            for p, q in zip(again, ours):
                p.copy_(q)

    for step in range(1, 6):
        if step == 3:
            if model_first:
                load_model()
            elif kept == "remainder":
                before = resumed.state_dict()["state"]
                with pytest.raises(ConfigError, match="load the model before the optimizer"):
                    resumed.load_state_dict(optimizer.state_dict())
                assert before.keys() == resumed.state_dict()["state"].keys()
                load_model()
            resumed.load_state_dict(optimizer.state_dict())
            load_model()
        for opt, params in ((optimizer, ours), (resumed, again)):
            set_gradients(params, step, missing=False)
            opt.step()
    for i, entry in optimizer.state_dict()["state"].items():
        assert torch.equal(entry["main_param"], resumed.state_dict()["state"][i]["main_param"])


def test_a_changed_weight_is_in_the_state_before_the_next_step(offloaded):
    (p,) = parameters(torch.bfloat16)[4:5]
    optimizer = offloaded([p])
    p.grad = torch.ones_like(p)
    optimizer.step()
    with torch.no_grad():
        p[0].fill_(7.0)
    main_param = optimizer.state_dict()["state"][0]["main_param"]
    assert torch.equal(main_param.to(p.dtype), p) and (main_param != p).any()


@pytest.mark.parametrize("through_data", [False, True])
@pytest.mark.parametrize("load_after", [False, True])
def test_a_changed_bf16_weight_is_its_own_master(offloaded, through_data, load_after):
    """Also when autograd sees no change. Oracle: a fresh optimizer on the changed weights with the same moments."""
    ours = parameters(torch.bfloat16)[4:6]
    optimizer = offloaded(ours, lr=1e-2, subgroup_size=4096)
    for step in (1, 2):
        set_gradients(ours, step, missing=False)
        optimizer.step()
    untouched = optimizer.state_dict()["state"][1]["main_param"]
    assert (untouched.bfloat16() != untouched).any()
    with torch.no_grad():
        (ours[0].data if through_data else ours[0])[3].mul_(1.5)
    state = optimizer.state_dict()
    assert torch.equal(state["state"][0]["main_param"], ours[0].float())
    assert torch.equal(state["state"][1]["main_param"], untouched)  # of another parameter
    if load_after:
        optimizer.load_state_dict(state)
    fresh = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    oracle = offloaded(fresh, lr=1e-2, master_weights="full")
    oracle.load_state_dict(state)
    for step in (3, 4):
        for opt, params in ((optimizer, ours), (oracle, fresh)):
            set_gradients(params, step, missing=False)
            opt.step()
    for i, entry in oracle.state_dict()["state"].items():
        for name, tensor in entry.items():
            assert torch.equal(tensor, optimizer.state_dict()["state"][i][name]), (i, name)


def test_a_negative_second_moment_is_refused_where_its_sign_means_something_else(offloaded):
    (p,) = parameters(torch.bfloat16)[5:6]
    optimizer = offloaded([p])
    set_gradients([p], 1, missing=False)
    optimizer.step()
    state = optimizer.state_dict()
    state["state"][0]["exp_avg_sq"][3] = -1e-9
    with pytest.raises(ConfigError, match="1 of 16 elements of exp_avg_sq are negative"):
        optimizer.load_state_dict(state)


def test_a_loaded_state_shares_nothing_with_where_it_came_from(offloaded):
    first, second = (
        offloaded([torch.nn.Parameter(torch.ones(9))], lr=torch.tensor(0.5)),
        offloaded([torch.nn.Parameter(torch.ones(9))]),
    )
    second.load_state_dict(first.state_dict())
    second.param_groups[0]["lr"].fill_(0.25)
    assert first.param_groups[0]["lr"].item() == 0.5
