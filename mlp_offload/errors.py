"""Every error that mlp_offload raises on purpose: each names the subject, the numbers and the next step."""

from __future__ import annotations

import errno as _errno
import os


class OffloadError(Exception):
    """Base of all errors below."""


class ConfigError(OffloadError, ValueError):
    """An option is missing, unknown, contradictory or out of range. Raised before any work starts."""


class CapacityError(OffloadError):
    """A path or the host memory cannot hold what is asked of it; names needed and available bytes."""


class PathInUseError(OffloadError):
    """Another living process holds this path's state file."""


class PathIOError(OffloadError, OSError):
    """A read or write on a path failed.

    Attributes:
        path: file, str.
        operation: "read" or "write".
        offset, nbytes: of the whole request, bytes.
        errno: of the failing call; 0 when the file ended early.
    """

    def __init__(self, path: str, operation: str, offset: int, nbytes: int, errno: int, detail: str = ""):
        name = _errno.errorcode.get(errno, "")
        reason = f"{os.strerror(errno)} ({name})" if errno else "the file ended early (0 bytes read)"
        message = f"{operation} {path} offset={offset} bytes={nbytes}: {reason}."
        super().__init__(message + (" " + detail if detail else ""))
        self.path, self.operation, self.offset, self.nbytes = path, operation, offset, nbytes
        self.errno = errno
        self._detail = detail

    def __reduce__(self) -> "tuple[object, ...]":  # a process that writes checkpoints sends it to the one that trains
        return type(self), (self.path, self.operation, self.offset, self.nbytes, self.errno, self._detail)

    def __str__(self) -> str:
        return self.args[0]


class PathTimeoutError(OffloadError, TimeoutError):
    """A storage call did not return within ``timeout_seconds``."""


class ChecksumError(OffloadError):
    """Bytes that came back from a path are not the bytes that were written."""


class WeightsChangedError(OffloadError):
    """Weights and what is kept of their fp32 masters do not belong together: somebody else changed the weights."""


class CudaError(OffloadError, RuntimeError):
    """The CUDA kernels, a driver or a device is missing, or a call of CUDA failed; names the call and CUDA's reason."""


class SelfCheckError(OffloadError):
    """A Megatron-Core internal that we rely on is missing, or a hook was not called."""
