"""What holds for the CUDA kernels wherever they run: compiled for the host in tests/unit/cuda, on a GPU in tests/gpu."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

import numpy as np
import torch

from mlp_offload.adam import DTYPE_CODES, AdamKernel, AdamScalars, Segment, adam_scalars
from mlp_offload.adam.reference import fma
from mlp_offload.cuda import NORM_SUMS_NUMEL, CudaKernels, NormTensor, Piece, WordRun

DTYPES = tuple(DTYPE_CODES)
SIZES = (0, 1, 15, 16, 17, 127, 4095, 4096, 4097, 100003)
INTEGER = {4: torch.int32, 2: torch.int16}


@dataclass
class Machine:
    """Kernels, and where their tensors live: "cpu" for the host build."""

    kernels: CudaKernels
    device: str

    @property
    def stream(self) -> int:
        return torch.cuda.current_stream().cuda_stream if self.device != "cpu" else 0


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(INTEGER[x.element_size()])


def assert_same(got: torch.Tensor, expected: torch.Tensor, what: str, allowed: "torch.Tensor | None" = None) -> None:
    """Same bits; any NaN equals any NaN, and where ``allowed`` anything goes."""
    got = got.cpu()
    differ = bits(got) != bits(expected)
    if got.is_floating_point():
        differ &= ~(got.isnan() & expected.isnan())
    if allowed is not None:
        differ &= ~allowed
    if differ.any():
        i = int(differ.nonzero()[0])
        found = f"{got[i].item()!r} for {expected[i].item()!r}"
        raise AssertionError(f"{what}: {int(differ.sum())} of {differ.numel()} differ, first at {i}: {found}")


def any_values(numel: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Shape (numel,): for half of the elements any bits (nan, inf, denormals, huge), the rest of a usual size."""
    integer = INTEGER[dtype.itemsize]
    low, high = torch.iinfo(integer).min, torch.iinfo(integer).max
    wild = torch.randint(low, high + 1, (numel,), generator=generator, dtype=torch.int64).to(integer).view(dtype)
    tame = (torch.randn(numel, generator=generator) * 2.0 ** torch.randint(-12, 4, (numel,), generator=generator)).to(
        dtype
    )
    return torch.where(torch.rand(numel, generator=generator) < 0.5, wild, tame)


def usual_values(numel: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    return (torch.randn(numel, generator=generator) * 0.03).to(dtype)


class Arena:
    """Pieces of memory of one dtype, at odd distances from each other."""

    def __init__(self, dtype: torch.dtype, choice: random.Random):
        self.dtype, self.choice, self.numel = dtype, choice, choice.randrange(8)

    def take(self, numel: int) -> int:
        """Position of the first of ``numel`` elements."""
        start = self.numel
        self.numel += numel + self.choice.choice((0, 0, 1, 2, 3, 5))
        return start


@dataclass
class Case:
    """A segment with scalars of its own."""

    numel: int
    grad_dtype: "torch.dtype | None"
    weight_dtype: "torch.dtype | None"
    scalars: AdamScalars


def random_scalars(choice: random.Random) -> AdamScalars:
    betas = choice.choice(((0.9, 0.999), (0.9, 0.95), (0.5, 0.9), (0.2, 0.99), (0.0, 0.5)))
    return adam_scalars(
        choice.choice((1e-3, 3e-4, 0.7, 0.0)),
        betas,
        choice.choice((1e-8, 1e-15, 0.1)),
        choice.choice((0.0, 0.1, 0.01)),
        choice.randrange(1, 2000),
        choice.choice((1.0, 1 / 1000, 1 / 65536)),
        choice.choice((1.0, 0.37)),
    )


def size_list_cases(main_itemsize: int, seed: int) -> "list[Case]":
    """Every size with every pair of dtypes, three times at different offsets."""
    choice = random.Random(seed)
    weights = (torch.bfloat16,) if main_itemsize == 2 else (*DTYPES, None)
    combinations = itertools.product(SIZES, DTYPES, weights, range(3))
    return [Case(numel, grad, weight, random_scalars(choice)) for numel, grad, weight, _ in combinations]


def random_cases(count: int, main_itemsize: int, seed: int) -> "list[Case]":
    choice = random.Random(seed)
    weights = (torch.bfloat16,) if main_itemsize == 2 else (*DTYPES, None)
    numels = (*range(40), 63, 64, 65, 127, 255, 1023, 1025)
    grads = (*DTYPES, *DTYPES, *DTYPES, None)
    return [
        Case(choice.choice(numels), choice.choice(grads), choice.choice(weights), random_scalars(choice))
        for _ in range(count)
    ]


def check_adam(
    machine: Machine, kernel: AdamKernel, cases: "list[Case]", main_itemsize: int, seed: int, values
) -> None:
    """One step over all cases in one record gives what ``kernel`` gives, and touches nothing else."""
    generator, choice = torch.Generator().manual_seed(seed), random.Random(seed)
    state, grads, weights = Arena(torch.float32, choice), {}, {}
    for dtype in DTYPES:
        grads[dtype], weights[dtype] = Arena(dtype, choice), Arena(dtype, choice)
    places = []
    for case in cases:
        places.append(
            (
                state.take(case.numel),
                grads[case.grad_dtype].take(case.numel) if case.grad_dtype else 0,
                weights[case.weight_dtype].take(case.numel) if case.weight_dtype else 0,
            )
        )
    stride = state.numel + choice.choice((2, 3)) if main_itemsize == 4 else -(-state.numel // 2) * 2
    main_dtype = torch.float32 if main_itemsize == 4 else torch.int16
    if main_itemsize == 4:
        main = values(stride, torch.float32, generator)
    else:
        main = torch.randint(-32768, 32768, (stride,), generator=generator).to(torch.int16)
    record = torch.cat(
        [bits(x).view(torch.uint8) for x in (main, *(values(stride, torch.float32, generator) for _ in "mv"))]
    )
    host = [record, *(values(a.numel + 8, d, generator) for group in (grads, weights) for d, a in group.items())]
    device = [x.clone() if machine.device == "cpu" else x.to(machine.device) for x in host]
    grads_before = [x.clone() for x in host[1:4]]

    def run(update, memory: "list[torch.Tensor]") -> None:
        segments = []
        for i, (case, (offset, grad_at, weight_at)) in enumerate(zip(cases, places)):
            grad = weight = grad_code = weight_code = 0
            if case.grad_dtype:
                grad_code = DTYPE_CODES[case.grad_dtype]
                grad = memory[1 + grad_code].data_ptr() + grad_at * case.grad_dtype.itemsize
            if case.weight_dtype:
                weight_code = DTYPE_CODES[case.weight_dtype]
                weight = memory[4 + weight_code].data_ptr() + weight_at * case.weight_dtype.itemsize
            segments.append(Segment(offset, case.numel, grad, weight, grad_code, weight_code, i))
        update(memory[0].data_ptr(), stride, segments, [c.scalars for c in cases], main_itemsize)

    run(lambda *arguments: machine.kernels.update(*arguments, stream=machine.stream), device)
    run(kernel.update, host)
    device = [x.cpu() for x in device]
    cut = stride * main_itemsize
    remainder_free = None  # of a NaN the lower half is free
    if main_itemsize == 2:
        remainder_free = torch.zeros(stride, dtype=torch.bool)
        for case, (offset, _, at) in zip(cases, places):
            nan = host[4 + DTYPE_CODES[torch.bfloat16]][at : at + case.numel].isnan()
            remainder_free[offset : offset + case.numel] = nan
    assert_same(device[0][:cut].view(main_dtype), host[0][:cut].view(main_dtype), "main_param", remainder_free)
    assert_same(device[0][cut:].view(torch.float32), host[0][cut:].view(torch.float32), "moments")
    for i, dtype in enumerate(DTYPES):
        assert_same(device[4 + i], host[4 + i], f"weights {dtype}")
        assert torch.equal(bits(device[1 + i]), bits(grads_before[i])), f"gradients {dtype}"


# ------------------------------------------------------------------------------------ sums and restarts


def check_sums(machine: Machine, kernel: AdamKernel) -> None:
    """Runs of every size at every alignment have the CPU kernel's sums, also more of them than one launch takes."""
    choice, generator = random.Random(3), torch.Generator().manual_seed(3)
    arena = Arena(torch.int16, choice)
    numels = [n for n in (*SIZES, 65535, 65536, 65537, 4 * 65536 + 3) for _ in range(4)]
    numels += [choice.randrange(20) for _ in range(3000)]
    places = [(arena.take(n), n) for n in numels]
    words = torch.randint(-32768, 32768, (arena.numel + 8,), generator=generator).to(torch.int16)
    there = words.to(machine.device, copy=True)
    sums = torch.full((len(places) + 1,), -1, dtype=torch.int32, device=machine.device)
    machine.kernels.sum_words(
        [WordRun(there.data_ptr() + 2 * at, numel) for at, numel in places], sums.data_ptr(), machine.stream
    )
    rows = np.array([(words.data_ptr() + 2 * at, numel) for at, numel in places], np.int64)
    expected = kernel.sum_words(np.ascontiguousarray(rows[:, 0]), np.ascontiguousarray(rows[:, 1]))
    assert torch.equal(sums[:-1].cpu(), torch.from_numpy(expected.view(np.int32)))
    assert int(sums[-1]) == -1, "memory behind the sums"
    machine.kernels.sum_words([], 0, machine.stream)


def check_restart(machine: Machine, main_itemsize: int) -> None:
    """Masters of some segments start again, by what torch says; nothing else changes."""
    choice, generator = random.Random(5), torch.Generator().manual_seed(5)
    dtypes = DTYPES if main_itemsize == 4 else (torch.bfloat16,)
    state, arenas = Arena(torch.float32, choice), {dtype: Arena(dtype, choice) for dtype in dtypes}
    places = [
        (state.take(numel), arenas[dtype].take(numel), numel, dtype, choice.random() < 0.7)
        for numel, dtype, _ in itertools.product((*SIZES, *range(12), 5000), dtypes, range(3))
    ]
    stride = -(-state.numel // 2) * 2
    main = any_values(stride, torch.float32, generator)
    if main_itemsize == 2:
        main = torch.randint(-32768, 32768, (stride,), generator=generator).to(torch.int16)
    moments = any_values(2 * stride, torch.float32, generator)
    weights = {dtype: any_values(arena.numel + 8, dtype, generator) for dtype, arena in arenas.items()}
    for offset, at, numel, dtype, _ in places:  # some masters belong to their weights
        if main_itemsize == 4:
            own, weight = main[offset : offset + numel], weights[dtype][at : at + numel]
            weight.copy_(torch.where(torch.rand(numel, generator=generator) < 0.5, own.to(dtype), weight))
    record = torch.cat([bits(main).view(torch.uint8), bits(moments).view(torch.uint8)])
    there = record.to(machine.device, copy=True)
    there_weights = {dtype: weight.to(machine.device, copy=True) for dtype, weight in weights.items()}
    rows = [
        Segment(offset, numel, 0, there_weights[dtype].data_ptr() + at * dtype.itemsize, 0, DTYPE_CODES[dtype], 9)
        for offset, at, numel, dtype, chosen in places
        if chosen
    ]
    machine.kernels.restart(there.data_ptr(), stride, rows, main_itemsize, machine.stream)
    for offset, at, numel, dtype, chosen in places:
        own, weight = main[offset : offset + numel], weights[dtype][at : at + numel]
        if chosen and main_itemsize == 4:
            own.copy_(torch.where(own.to(dtype) == weight, own, weight.float()))
        elif chosen:
            own.zero_()
            moments[stride + offset : stride + offset + numel].view(torch.int32).bitwise_and_(0x7FFFFFFF)
    got = there.cpu()
    cut = stride * main_itemsize
    assert_same(got[:cut].view(main.dtype), main, "main_param")
    assert torch.equal(got[cut:].view(torch.int32), bits(moments)), "moments"
    assert all(torch.equal(bits(there_weights[d].cpu()), bits(weights[d])) for d in dtypes), "weights"


# ------------------------------------------------------------------------------------ gather, scatter


def check_copy(machine: Machine, piece_count: int, seed: int) -> None:
    """Random pieces between random dtypes arrive rounded, leave what lies between them, and the flag tells the truth."""
    generator, choice = torch.Generator().manual_seed(seed), random.Random(seed)
    sources, targets = ({d: Arena(d, choice) for d in DTYPES} for _ in range(2))
    numels = (*range(20), 127, 1024, 4095, 4097, 5000)
    pieces = []
    for _ in range(piece_count):
        numel, source, target = choice.choice(numels), choice.choice(DTYPES), choice.choice(DTYPES)
        pieces.append((numel, source, sources[source].take(numel), target, targets[target].take(numel)))
    before = {d: any_values(a.numel + 8, d, generator) for d, a in sources.items()}
    expected = {d: usual_values(a.numel + 8, d, generator) for d, a in targets.items()}
    from_memory = {d: x.to(machine.device, copy=True) for d, x in before.items()}
    to_memory = {d: x.to(machine.device, copy=True) for d, x in expected.items()}
    found = torch.zeros(1, device=machine.device)
    rows, non_finite = [], False
    for numel, source, source_at, target, target_at in pieces:
        values = before[source][source_at : source_at + numel]
        non_finite |= not bool(values.isfinite().all())
        bits(expected[target])[target_at : target_at + numel] = bits(values.to(target))
        rows.append(
            Piece(
                from_memory[source].data_ptr() + source_at * source.itemsize,
                to_memory[target].data_ptr() + target_at * target.itemsize,
                numel,
                DTYPE_CODES[source],
                DTYPE_CODES[target],
            )
        )
    machine.kernels.copy(rows, found.data_ptr(), machine.stream)
    for dtype in DTYPES:
        assert_same(to_memory[dtype], expected[dtype], f"targets {dtype}")
        assert torch.equal(bits(from_memory[dtype].cpu()), bits(before[dtype])), f"sources {dtype}"
    assert found.item() == float(non_finite)


def check_found(machine: Machine, dtype: torch.dtype) -> None:
    """A single inf or nan anywhere is found; the largest finite numbers are none; without a flag nobody looks."""
    numel = 5003
    largest = torch.finfo(dtype).max
    target = torch.zeros(numel, dtype=torch.float32, device=machine.device)

    def found_in(source: torch.Tensor, start: int = 0) -> float:
        found = torch.zeros(1, device=machine.device)
        source = source.to(machine.device)
        address = source.data_ptr() + start * dtype.itemsize
        machine.kernels.copy(
            [Piece(address, target.data_ptr(), numel - start, DTYPE_CODES[dtype], 0)], found.data_ptr(), machine.stream
        )
        return found.item()

    values = torch.full((numel,), largest, dtype=dtype)
    values[::2] = -largest
    assert found_in(values) == 0.0
    for place, bad in itertools.product((0, 1, 4, 4095, 4096, numel - 1), (float("inf"), float("-inf"), float("nan"))):
        spoilt = values.clone()
        spoilt[place] = bad
        assert found_in(spoilt) == 1.0, (place, bad)
        assert found_in(spoilt, start=5) == float(place >= 5), "an element before the piece"
    machine.kernels.copy([Piece(0, 0, 0, 0, 0)], 0, machine.stream)


def check_round_trip(machine: Machine, dtype: torch.dtype) -> None:
    """Every 16-bit pattern gathered and scattered keeps its bits, payloads of NaN too."""
    numel = 2**16
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).to(machine.device)
    staging, back = torch.zeros_like(values), torch.zeros_like(values)
    cuts = (0, 1, 7, 4096, 30001, numel)
    code = DTYPE_CODES[dtype]

    def pieces(source: torch.Tensor, target: torch.Tensor, order) -> "list[Piece]":
        return [Piece(source[a:].data_ptr(), target[a:].data_ptr(), b - a, code, code) for a, b in order]

    order = list(itertools.pairwise(cuts))
    machine.kernels.copy(pieces(values, staging, order), 0, machine.stream)
    machine.kernels.copy(pieces(staging, back, reversed(order)), 0, machine.stream)
    assert torch.equal(bits(back.cpu()), bits(values.cpu()))


# ----------------------------------------------------------------------------------------------- norm


def chunk_sum(chunk: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Sum of squares of up to 65536 fp32 elements, in the order of [Note: order of the norm] (csrc/cuda/norm.h)."""
    padded = torch.zeros(65536)
    padded[: len(chunk)] = chunk
    if interleaved:  # four neighbours a thread
        elements = padded.view(32, 512, 4)
    else:  # a thread's elements are 512 apart
        elements = padded.view(32, 4, 512).transpose(1, 2)
    sums = torch.zeros(512, 4)
    for step in elements[: -(-len(chunk) // 2048)]:
        sums = fma(step, step, sums)
    threads = ((sums[:, 0] + sums[:, 1]) + sums[:, 2]) + sums[:, 3]
    return tree_sum(threads)


def tree_sum(values: torch.Tensor) -> torch.Tensor:
    while len(values) > 1:
        half = len(values) // 2
        values = values[:half] + values[half:]
    return values[0]


def reference_norm(tensors: "list[torch.Tensor]", aligned: "list[bool]", inverse_scale: "float | None") -> torch.Tensor:
    """The norm of fp32 tensors in host memory, round after round; equal tensors are added up once."""
    sums = torch.zeros(512)
    known: "dict[tuple[int, int], torch.Tensor]" = {}
    chunks_in_round = tensors_in_round = 0
    for i, tensor in enumerate(tensors):
        tensors_in_round += 1
        starts = range(0, len(tensor), 65536)
        for start in starts:
            key = tensor.data_ptr(), len(tensor), start
            if key not in known:
                chunk = tensor[start : start + 65536].float()
                chunk = chunk if inverse_scale is None else chunk * torch.tensor(inverse_scale)
                known[key] = chunk_sum(chunk, (len(tensor) - start) % 4 == 0 and aligned[i])
            sums[chunks_in_round] += known[key]
            chunks_in_round += 1
            last = start == starts[-1]
            if chunks_in_round == 320 or (last and tensors_in_round == 110):
                chunks_in_round, tensors_in_round = 0, 0 if last else 1
    return torch.sqrt(tree_sum(sums).double()).float()


def norm_of(machine: Machine, tensors: "list[torch.Tensor]", inverse_scale: "float | None" = None) -> torch.Tensor:
    """Shape (1,), in host memory. Tensors are on the machine's device."""
    sums = torch.full((NORM_SUMS_NUMEL,), 7.0, device=machine.device)
    scale = torch.tensor([inverse_scale or 1.0], device=machine.device)
    norm = torch.full((1,), -1.0, device=machine.device)
    machine.kernels.norm(
        [NormTensor(t.data_ptr(), t.numel(), DTYPE_CODES[t.dtype]) for t in tensors],
        norm.data_ptr(),
        sums.data_ptr(),
        0 if inverse_scale is None else scale.data_ptr(),
        machine.stream,
    )
    return norm.cpu()


def check_norm(machine: Machine, tensors: "list[torch.Tensor]", inverse_scale: "float | None" = None) -> None:
    """Tensors in host memory; repeated ones are passed at one address."""
    copies = {t.data_ptr(): t for t in tensors}
    # Keep each tensor's distance from a 16-byte boundary.
    moved = {}
    for address, t in copies.items():
        shift = address % 64 // t.element_size()
        memory = torch.zeros(t.numel() + shift, dtype=t.dtype, device=machine.device)
        moved[address] = memory[shift:].copy_(t)
    aligned = [t.dtype != torch.float32 or t.data_ptr() % 16 == 0 for t in tensors]
    expected = reference_norm(tensors, aligned, inverse_scale)
    assert_same(norm_of(machine, [moved[t.data_ptr()] for t in tensors], inverse_scale), expected.view(1), "norm")


def norm_lists(seed: int = 0) -> "dict[str, list[torch.Tensor]]":
    """Lists of tensors around the edges of chunks, blocks and rounds."""
    generator = torch.Generator().manual_seed(seed)
    lists = {}
    for dtype in DTYPES:
        numels = (1, 3, 4, 5, 511, 512, 2048, 2052, 4097, 65535, 65536, 65537, 65540, 131076)
        lists[f"sizes {dtype}"] = [usual_values(n, dtype, generator) for n in numels]
    for numel in (2048, 40000, 65536, 70000, 131072):  # one at a time: each decides on the bits of its norm
        lists[f"{numel} elements off the boundary"] = [usual_values(numel + 1, torch.float32, generator)[1:]]
    long = usual_values(131073, torch.bfloat16, generator)
    short = [usual_values(6, torch.bfloat16, generator) * 2.0 ** (i % 7) for i in range(350)]
    lists["a round ends amid a tensor"] = [long] * 107 + short[:120] + [long] * 3
    lists["rounds end with their 110th tensor"] = short
    lists["a round ends with a long 110th tensor"] = [*short[:109], long, *short[109:300]]
    lists["not finite"] = [torch.tensor([1.0, float("inf"), 2.0]), torch.tensor([float("nan")])]
    lists["denormal"] = [usual_values(5000, torch.float32, generator) * 1e-40]
    lists["none"] = []
    return lists
