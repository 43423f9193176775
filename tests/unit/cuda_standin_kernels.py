"""The kernels of the stand-in for CUDA."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mlp_offload import cuda
from mlp_offload.adam.kernel import DTYPE_CODES
from mlp_offload.errors import CudaError

if TYPE_CHECKING:
    from cuda_standin import Runtime

ITEMSIZE = {code: dtype.itemsize for dtype, code in DTYPE_CODES.items()}
REAL_KERNELS = cuda.CudaKernels


class Kernels:
    """Stands for ``CudaKernels``: what is asked of it is done later, on the stream that was named.

    The host build checks its arguments when it runs; so what it refuses is a fault, and no ValueError.
    """

    def __init__(self, runtime: "Runtime"):
        if runtime.library is None:
            raise CudaError("this device has no kernels")
        self._runtime, self._kernels = runtime, REAL_KERNELS(library=runtime.library)

    def update(self, state_address, stride_numel, segments, groups, main_itemsize=4, stream=0):
        segments, groups = np.array(segments, np.int64).reshape(-1, 7), np.array(groups, np.float32)
        exp_avg = state_address + stride_numel * main_itemsize
        accesses = []
        for offset, numel, grad, weight, grad_code, weight_code, _ in segments.tolist():
            if not grad:
                continue
            accesses += [
                (state_address + offset * main_itemsize, numel * main_itemsize, True),
                (exp_avg + offset * 4, numel * 4, True),
                (exp_avg + (stride_numel + offset) * 4, numel * 4, True),
                (grad, numel * ITEMSIZE[grad_code], False),
                (weight, numel * ITEMSIZE[weight_code] if weight else 0, True),
            ]
        arguments = state_address, stride_numel, segments, groups, main_itemsize
        self._launch("update", accesses, stream, lambda: self._kernels.update(*arguments))

    def copy(self, pieces, found_address=0, stream=0):
        pieces = np.array(pieces, np.int64).reshape(-1, 5)
        accesses = [(found_address, 4 if found_address else 0, True)]
        for source, target, numel, from_code, to_code in pieces.tolist():
            accesses += [(source, numel * ITEMSIZE[from_code], False), (target, numel * ITEMSIZE[to_code], True)]
        self._launch("gather", accesses, stream, lambda: self._kernels.copy(pieces, found_address))

    def norm(self, tensors, norm_address, sums_address, inverse_scale_address=0, stream=0):
        tensors = np.array(tensors, np.int64).reshape(-1, 3)
        accesses = [(address, numel * ITEMSIZE[code], False) for address, numel, code in tensors.tolist()]
        accesses += [(norm_address, 4, True), (sums_address, 4 * cuda.NORM_SUMS_NUMEL, True)]
        accesses += [(inverse_scale_address, 4 if inverse_scale_address else 0, False)]
        addresses = norm_address, sums_address, inverse_scale_address
        self._launch("norm", accesses, stream, lambda: self._kernels.norm(tensors, *addresses))

    def _launch(self, kind: str, accesses: "list[tuple[int, int, bool]]", handle: int, run) -> None:
        runtime = self._runtime
        stream = next((s for s in runtime.streams if s.cuda_stream == handle), None)
        if stream is None:
            runtime.faults.append(f"a {kind} on stream {handle}, which is none")
            return

        def check(what: str) -> bool:
            missed = [address for address, nbytes, _ in accesses if not runtime.reaches(address, nbytes)]
            runtime.faults.extend(f"{what} uses memory at {address:#x} that no kernel reaches" for address in missed)
            return not missed

        def run_or_fault():
            try:
                run()
            except (ValueError, CudaError) as error:
                runtime.faults.append(f"{kind}: {error}")

        runtime.launches.append(kind)
        runtime.enqueue(stream, kind, accesses, run_or_fault, check)
