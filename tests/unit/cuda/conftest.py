"""The CUDA kernels' sources, compiled as plain C++."""

from __future__ import annotations

import pytest
from cuda_checks import Machine

from mlp_offload.adam import AdamKernel
from mlp_offload.cuda import CudaKernels


@pytest.fixture(scope="session")
def machine(host_library):
    return Machine(CudaKernels(library=host_library), "cpu")


@pytest.fixture(scope="session")
def cpu_kernel():
    with AdamKernel(1) as kernel:
        yield kernel
