"""CUDA kernels: Adam on the device with the CPU kernel's bits, gather and scatter with a cast, and the gradient norm.

They live in a shared library beside this file, which the build makes where it finds nvcc. It is loaded when the first
``CudaKernels`` is made, holds its own CUDA runtime and needs no torch: addresses and streams are integers
(``tensor.data_ptr()``, ``torch.cuda.current_stream().cuda_stream``). Calls only enqueue work; nothing waits.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from .adam.kernel import AdamScalars, Segment
from .errors import ConfigError, CudaError

LIBRARY = Path(__file__).with_name("_cuda.so")
NORM_SUMS_NUMEL = 320
"""fp32 elements of memory that a norm works in."""

_REFUSED = 1
_INTEGERS = {  # arguments after the device: addresses and counts, 64 bits
    "mlp_cuda_adam": 8,
    "mlp_cuda_copy": 4,
    "mlp_cuda_norm": 6,
}


class Piece(NamedTuple):
    """``numel`` elements from one address (bytes) to another; dtypes are values of ``adam.DTYPE_CODES``."""

    from_address: int
    to_address: int
    numel: int
    from_dtype: int
    to_dtype: int


class NormTensor(NamedTuple):
    """A tensor of at least one element; its dtype is a value of ``adam.DTYPE_CODES``."""

    address: int
    numel: int
    dtype: int


def available(device: int = 0) -> "tuple[bool, str]":
    """Whether the kernels run on CUDA device number ``device``, and why not."""
    try:
        CudaKernels(device)
    except CudaError as error:
        return False, str(error)
    return True, ""


class CudaKernels:
    """The kernels on one device.

    All addresses are of memory that the device reaches: its own, or pinned host memory. What they point to must live,
    and stay as it is, until ``stream`` (a cudaStream_t; 0 is the default stream) has done the work.

    Args:
        device: number of the CUDA device; best the one that is current, since CUDA takes memory on every device used.
        library: of the kernels.

    Raises:
        CudaError: the library, a driver or the device is missing, or the device is too old for the kernels.
    """

    def __init__(self, device: int = 0, library: Path = LIBRARY):
        if not library.exists():
            raise CudaError(
                f"no CUDA kernels: {library} was not built, since the build found no nvcc. Install the CUDA toolkit 13.0 "
                "(or the PyPI package nvidia-cuda-nvcc==13.0.*) and build again"
            )
        try:
            self._library = ctypes.CDLL(str(library))
        except OSError as error:
            raise CudaError(f"the CUDA kernels do not load: {error}. Build them again on this machine") from error
        self._device = device
        self._library.mlp_cuda_error.restype = ctypes.c_char_p
        self._library.mlp_cuda_check_device.argtypes = [ctypes.c_int]
        for name, count in _INTEGERS.items():
            getattr(self._library, name).argtypes = [ctypes.c_int] + [ctypes.c_int64] * count
        if self._library.mlp_cuda_check_device(device) != 0:
            raise CudaError(f"CUDA device {device} cannot be used: {self._reason()}")

    def update(
        self,
        state_address: int,
        stride_numel: int,
        segments: Sequence[Segment],
        groups: Sequence[AdamScalars],
        main_itemsize: int = 4,
        stream: int = 0,
    ) -> None:
        """One AdamW step, in place, over the record at ``state_address``; as ``adam.AdamKernel.update``, bit for bit.

        Raises:
            ValueError: what ``AdamKernel.update`` refuses; nothing was launched.
            CudaError: a launch failed.
        """
        rows = _rows(segments, Segment)
        scalars = np.array(groups, dtype=np.float32).reshape(-1, len(AdamScalars._fields))
        self._call(
            "mlp_cuda_adam",
            *(state_address, stride_numel, main_itemsize),
            *(rows.ctypes.data, len(rows), scalars.ctypes.data, len(scalars), stream),
        )

    def copy(self, pieces: Sequence[Piece], found_address: int = 0, stream: int = 0) -> None:
        """Copy pieces of memory to other places, in one launch (about eight hundred pieces fit in one).

        Elements are rounded to nearest even where the target is narrower, and keep their bits where both dtypes are the
        same. Pieces must not overlap where one of them is written.

        Args:
            found_address: of an fp32 that becomes 1.0 when an element read is inf or nan, else stays; 0: nobody looks.

        Raises:
            ValueError: a piece has no memory, an unknown dtype or a misaligned address; nothing was launched.
            CudaError: a launch failed.
        """
        rows = _rows(pieces, Piece)
        self._call("mlp_cuda_copy", rows.ctypes.data, len(rows), found_address, stream)

    def norm(
        self,
        tensors: Sequence[NormTensor],
        norm_address: int,
        sums_address: int,
        inverse_scale_address: int = 0,
        stream: int = 0,
    ) -> None:
        """L2 norm of all elements, each multiplied in fp32 by an inverse loss scale.

        It adds up in the order of Transformer Engine's and Apex's ``multi_tensor_l2norm`` over fp32 copies of the tensors
        (each copy at an address of its own, aligned as torch aligns allocations), scaled before; and makes no copies.
        Every operation is rounded to nearest. Those two are built with ``--use_fast_math``: their square root is
        approximate and denormal numbers count as zero, so the last bits may differ.

        Args:
            norm_address: of the fp32 that receives the norm.
            sums_address: of ``NORM_SUMS_NUMEL`` fp32 to work in.
            inverse_scale_address: of an fp32; 0: 1.0.

        Raises:
            ValueError: a tensor has no elements, an unknown dtype or a misaligned address; nothing was launched.
            CudaError: a launch failed.
        """
        rows = _rows(tensors, NormTensor)
        self._call(
            "mlp_cuda_norm",
            *(rows.ctypes.data, len(rows), inverse_scale_address, sums_address, norm_address, stream),
        )

    def _call(self, name: str, *integers: int) -> None:
        result = getattr(self._library, name)(self._device, *integers)
        if result == _REFUSED:
            raise ValueError(self._reason())
        if result != 0:
            raise CudaError(f"CUDA device {self._device}: {self._reason()}")

    def _reason(self) -> str:
        return self._library.mlp_cuda_error().decode()


def _rows(rows: "Sequence[NamedTuple]", kind: type) -> np.ndarray:
    """Shape (rows, fields of ``kind``), int64."""
    array = np.ascontiguousarray(rows, dtype=np.int64)
    if array.size == 0:
        return np.empty((0, len(kind._fields)), np.int64)
    if array.ndim != 2 or array.shape[1] != len(kind._fields):
        raise ConfigError(f"{kind.__name__} rows have shape {array.shape}; use (rows, {len(kind._fields)})")
    return array
