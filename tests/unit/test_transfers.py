"""Transfers on a stand-in for CUDA where everything is late: right numbers, no race, and each wait is missed when gone."""

import ast
import ctypes
import itertools
import random
import types
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from cuda_standin import Runtime
from transfer_runs import Piped, Place, Shuffled, train

from mlp_offload import transfers, updates
from mlp_offload.adam.kernel import DTYPE_CODES, AdamKernel
from mlp_offload.plan.subgroups import cut
from mlp_offload.transfers import CudaTransfers, pin_memory

ITEMSIZE = {code: dtype.itemsize for dtype, code in DTYPE_CODES.items()}
ORDERING = {"record", "record_event", "synchronize", "wait", "wait_event", "wait_stream"}
SOURCE = ast.parse(Path(transfers.__file__).read_text())


class WatchedKernel(AdamKernel):
    """The real kernel; what it reads and writes of gradients and weights is noted."""

    def __init__(self, runtime):
        super().__init__(1)
        self._runtime = runtime

    def update(self, address, stride_numel, rows, scalars, main_itemsize=4):
        for _, numel, grad, weight, grad_code, weight_code, _ in rows.tolist():
            if grad:
                self._runtime.host_access("the kernel", grad, numel * ITEMSIZE[grad_code], writes=False)
                self._runtime.host_access("the kernel", weight, numel * ITEMSIZE[weight_code], writes=True)
        super().update(address, stride_numel, rows, scalars, main_itemsize)

    def sum_words(self, addresses, numels):
        for address, numel in zip(addresses.tolist(), numels.tolist()):
            self._runtime.host_access("the kernel", address, 2 * numel, writes=False)
        return super().sum_words(addresses, numels)


@pytest.fixture(scope="module")
def right(tmp_path_factory):
    """The numbers of tensors in host memory, where nothing moves; by itemsize."""
    with AdamKernel(1) as kernel:
        return {n: train(Place(), kernel, n, Piped(tmp_path_factory.mktemp("state"), n)) for n in (2, 4)}


@pytest.fixture(params=["copies", "kernels"])
def run(request, monkeypatch, host_library, right):
    """Trains on a stand-in; gives (runtime, whether the numbers are right).

    All pieces are copies, or all are moved by kernels.
    """
    kernels = request.param == "kernels"

    def go(implementation, states, itemsize, **options):
        monkeypatch.setattr(updates, "transfers_for", implementation)
        monkeypatch.setitem(implementation.begin.__globals__, "_MOST_COPIES", 0)
        runtime = Runtime(library=host_library if kernels else None, **options)
        place = Place(lambda values: runtime.on_device(values.clone()), runtime.trainer)
        with runtime.installed(monkeypatch), WatchedKernel(runtime) as kernel:
            seen = train(place, kernel, itemsize, states(itemsize=itemsize))
        assert len(seen) == len(right[itemsize])
        assert bool(runtime.launches) == (kernels and not runtime.refuse_pinning)
        return runtime, all(map(torch.equal, seen, right[itemsize]))

    return go


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize("kind", ["piped", "shuffled"])
def test_late_and_reordered_copies_change_no_bit(run, tmp_path, kind, late, itemsize):
    for seed in range(1 if late and kind == "piped" else 3):
        states = partial(Piped, tmp_path) if kind == "piped" else partial(Shuffled, seed)
        runtime, equal = run(CudaTransfers, states, itemsize, late=late, seed=seed)
        assert not runtime.races and not runtime.faults and not runtime.pinned
        assert len(runtime.accesses) > 300
        assert equal


def ordering(node):
    """What a statement of transfers.py orders, or in which stream it does the rest; None if it does neither."""
    call = node.items[0].context_expr if isinstance(node, ast.With) else getattr(node, "value", None)
    if isinstance(node, (ast.Expr, ast.With)) and isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
        name = call.func.attr
        if name == "stream" if isinstance(node, ast.With) else name in ORDERING:
            return name
    return None


STATEMENTS = [node for node in ast.walk(SOURCE) if ordering(node)]
INNER = [node for block in STATEMENTS if isinstance(block, ast.With) for node in block.body if ordering(node)]


class Without(ast.NodeTransformer):
    """Takes the statement in one line away; of a ``with`` its body stays."""

    def __init__(self, line):
        self.line = line

    def visit_Expr(self, node):
        return ast.Pass() if node.lineno == self.line else node

    def visit_With(self, node):
        self.generic_visit(node)
        return node.body if node.lineno == self.line else node


class Misplaced(Without):
    """Moves the statement in one line: a record to the begin of its block, a wait to the end."""

    def visit_With(self, node):
        moved = [child for child in node.body if child.lineno == self.line]
        rest = [child for child in node.body if child.lineno != self.line]
        node.body = moved + rest if moved and ordering(moved[0]) == "record" else rest + moved
        return node

    def visit_Expr(self, node):
        return node


def changed(change):
    """The module ``transfers`` with a change."""
    tree = ast.fix_missing_locations(change.visit(ast.parse(Path(transfers.__file__).read_text())))
    module = types.ModuleType(transfers.__name__)
    module.__package__ = transfers.__package__
    exec(compile(tree, transfers.__file__, "exec"), vars(module))
    return module


def each(nodes):
    """Each statement and itemsize for which it matters."""
    params = []
    for node in nodes:
        title = ast.unparse(node).partition("\n")[0]
        only_masters = isinstance(node, ast.With) and ".cpu()" in ast.unparse(node)  # remainders are never stale
        params += [pytest.param(node, n, id=f"{title}-{n}") for n in ((4,) if only_masters else (2, 4))]
    return pytest.mark.parametrize("node,itemsize", params)


def test_all_that_orders_transfers_is_found():
    assert Counter(map(ordering, STATEMENTS)) == {
        "wait_stream": 2,
        "wait_event": 1,
        "synchronize": 3,
        "record": 2,
        "stream": 3,
    }, "a wait was added or taken away: say here that it was meant"
    assert Counter(map(ordering, INNER)) == {"record": 2, "wait_event": 1}


@each(STATEMENTS)
def test_every_wait_is_missed_when_it_is_gone(run, tmp_path, node, itemsize):
    runtime, equal = run(changed(Without(node.lineno)).CudaTransfers, partial(Piped, tmp_path), itemsize, late=True)
    assert not equal or runtime.faults, "late copies go right without it"
    assert runtime.races or runtime.faults, "the accesses show no race without it"


@each(INNER)
def test_every_wait_is_missed_when_it_is_in_the_wrong_place(run, tmp_path, node, itemsize):
    runtime, equal = run(changed(Misplaced(node.lineno)).CudaTransfers, partial(Piped, tmp_path), itemsize, late=True)
    assert not equal
    assert runtime.races


# ------------------------------------------------------------------------------- copy engine or kernel


def placed(runtime, numels, gap, dtype, one_storage=True):
    """(device memory as bytes, tensors in it one after another with ``gap`` elements between)."""
    memory = bytearray(random.Random(0).randbytes((sum(numels) + gap * len(numels)) * dtype.itemsize))
    starts = [0, *itertools.accumulate(n + gap for n in numels)]
    whole = runtime.on_device(torch.frombuffer(memory, dtype=dtype))
    tensors = [whole[a : a + n] for a, n in zip(starts, numels)]
    if not one_storage:
        tensors = [
            runtime.on_device(torch.frombuffer(memory, dtype=dtype, offset=a * dtype.itemsize, count=n))
            for a, n in zip(starts, numels)
        ]
    return whole.view(torch.uint8), tensors


@pytest.mark.parametrize(
    "numels,gap,one_storage,moved",
    [
        ([64] * 20, 0, True, {"copy": 1}),
        ([64] * 20, 0, False, {"gather": 1}),
        ([64] * 20, 1, True, {"gather": 1}),
        ([64] * 8, 1, True, {"copy": 8}),
        ([64] * 9, 1, True, {"gather": 1}),
        ([2**19, *[64] * 9, 2**19 - 1, 2**19], 1, True, {"copy": 2, "gather": 1}),  # 1 MiB of bf16 is not small
        ([64] * 500, 1, True, {"gather": 1}),
    ],
)
def test_neighbours_are_one_piece_and_many_small_pieces_one_launch(
    monkeypatch, host_library, numels, gap, one_storage, moved
):
    (subgroup,) = cut(numels, sum(numels))
    with Runtime(late=True, library=host_library).installed(monkeypatch) as runtime:
        weight_memory, weights = placed(runtime, numels, gap, torch.bfloat16, one_storage)
        memory, gradients = placed(runtime, numels, gap, torch.bfloat16, one_storage)
        mover = CudaTransfers(weights, subgroup.numel, reads_weights=True)
        with runtime.trainer():
            mover.begin(gradients)
        before, between = memory.clone(), weight_memory.clone()

        def moves():
            """How many pieces of work there were, by kind."""
            return Counter(what.split()[0] for what in {a.what for a in runtime.accesses if a.timeline != "host"})

        mover.prepare(subgroup)
        assert moves() == {name: 2 * count for name, count in moved.items()}  # gradients, and old weights
        grads, staged = mover.addresses(subgroup)
        for i, n in enumerate(numels):
            for address, tensor in ((grads[i], gradients[i]), (staged[i], weights[i])):
                staged_bytes = torch.frombuffer(bytearray(ctypes.string_at(int(address), 2 * n)), dtype=torch.uint8)
                assert torch.equal(staged_bytes, tensor.view(torch.uint8))
        for i, n in enumerate(numels):
            ctypes.memset(int(staged[i]), i % 256, 2 * n)
        mover.send(subgroup)
        with runtime.trainer():
            mover.end()
            torch.cuda.current_stream().synchronize()
        assert moves() == {name: 3 * count for name, count in moved.items()}
        for i, weight in enumerate(weights):
            start = weight.data_ptr() - weight_memory.data_ptr()
            between[start : start + weight.nbytes] = i % 256
        assert torch.equal(weight_memory, between) and torch.equal(memory, before)
        assert not runtime.races and not runtime.faults


def test_where_pinning_is_refused_one_warning_and_the_same_numbers(run, caplog):
    runtime, equal = run(CudaTransfers, partial(Shuffled, 0), 4, late=True, refuse_pinning=True)
    assert equal and not runtime.races
    assert {record.levelname for record in caplog.records} == {"WARNING"}
    assert len(caplog.records) == 2  # staging was made twice: at the start, and when the weights moved
    message = caplog.records[0].getMessage()
    assert "8.0 KiB of staging" in message and "error 2" in message and "slower" in message


def cudart(answer, calls):
    return SimpleNamespace(
        cudaError=SimpleNamespace(success=0),
        cudaHostRegister=lambda *arguments: calls.append(("register", *arguments)) or answer,
        cudaHostUnregister=lambda *arguments: calls.append(("unregister", *arguments)) or 0,
        cudaGetErrorString=lambda error: f"error {error}",
    )


def test_refused_pinning_costs_one_clear_warning(monkeypatch, caplog):
    calls = []
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart(2, calls))
    assert pin_memory(2**21, 3 * 2**30) is None
    assert calls == [("register", 2**21, 3 * 2**30, 0)]
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "3.0 GiB" in record.getMessage() and "error 2" in record.getMessage()
    assert "copies" in record.getMessage()


def test_pinned_memory_can_be_unpinned(monkeypatch, caplog):
    calls = []
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart(0, calls))
    unpin = pin_memory(2**21, 4096)
    unpin()
    assert calls == [("register", 2**21, 4096, 0), ("unregister", 2**21)]
    assert not caplog.records
