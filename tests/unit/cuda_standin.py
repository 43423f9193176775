"""A stand-in for what ``torch.cuda`` shows of the CUDA runtime: streams, events, pinned memory. Host memory, no GPU.

Each stream is a thread that really copies later: with ``late`` at the last moment that the waits allow, else after
random pauses, so that streams overtake each other. What nobody waits for has not happened; a missing wait is a wrong
number. Beside that every access to memory is noted with what is ordered before it (a vector clock a timeline: the host
and each stream), so that two accesses that no wait orders are a race even where the numbers came out right.
Kernels (``mlp_offload.cuda.CudaKernels``) are work of a stream too: their sources, compiled for the host, do it.

What it takes from CUDA's documentation: copies of a stream keep their order, and come after what the host did before it
asked for them; an event is the point of the stream where it was last recorded; a wait for one never recorded is none;
a launch keeps its arguments, and its kernel reaches device memory and pinned memory alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch
from cuda_standin_kernels import Kernels
from torch.overrides import TorchFunctionMode

from mlp_offload import cuda

PATIENCE_SECONDS = 60.0
HOST = "host"
DEVICE = torch.device("cuda", 0)
DEVICE_OF, IS_CUDA_OF = torch.Tensor.device.__get__, torch.Tensor.is_cuda.__get__


@dataclass
class Access:
    """One access to [start, end); ordered before whatever has seen ``count`` of its timeline."""

    what: str
    timeline: str
    count: int
    start: int
    end: int
    writes: bool


class Runtime:
    """Stands for ``torch.cuda`` inside ``with Runtime(...).installed(monkeypatch)``.

    Args:
        library: the kernels, compiled for the host (fixture ``host_library``); None: this device has none.

    Attributes:
        races: pairs of accesses that nothing orders, in words.
        faults: uses of memory that is not pinned, or no longer; work on the caller's stream that is not the trainer's;
            launches on a stream that is none, or that the kernels refuse.
        launches: kernels asked for, by name, in order.
    """

    def __init__(self, late: bool, seed: int = 0, refuse_pinning: bool = False, library: "Path | None" = None):
        self.late, self.refuse_pinning, self.library = late, refuse_pinning, library
        self.random = random.Random(seed)
        self.changed = threading.Condition()
        self.closing = False
        self.host_clock = {HOST: 0}
        self.accesses: "list[Access]" = []
        self.races: "list[str]" = []
        self.faults: "list[str]" = []
        self.launches: "list[str]" = []
        self.pinned: "dict[int, int]" = {}  # address -> bytes
        self.device_storages: "dict[int, torch.Tensor]" = {}  # by address; held, so that no address comes twice
        self.streams: "list[Stream]" = []
        self.trainer_depth = 0
        self.caller = self.current = Stream(self, "caller's stream")

    @contextlib.contextmanager
    def installed(self, monkeypatch):
        names = {
            "Stream": lambda device=None: Stream(self, f"stream {len(self.streams)}"),
            "Event": lambda: Event(self),
            "stream": self.stream,
            "current_stream": lambda device=None: self.current,
            "cudart": self.cudart,
            "synchronize": self._no_device_wide_wait,
        }
        with monkeypatch.context() as patch, Intercepted(self):
            for name, value in names.items():
                patch.setattr(torch.cuda, name, value)
            patch.setattr(cuda, "CudaKernels", lambda device=0: Kernels(self))
            try:
                yield self
                for stream in self.streams:
                    stream.reach(len(stream.work))
            finally:
                with self.changed:
                    self.closing = True
                    self.changed.notify_all()
                for stream in self.streams:
                    stream.thread.join(PATIENCE_SECONDS)
        assert not any(stream.thread.is_alive() for stream in self.streams)

    # ---------------------------------------------------------------------- what the trainer and the kernel do

    def on_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """From now on ``tensor`` is in device memory."""
        self.device_storages[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    @contextlib.contextmanager
    def trainer(self):
        """What is done here the trainer does, on its own stream."""
        self.trainer_depth += 1
        yield
        self.trainer_depth -= 1

    def host_access(self, what: str, address: int, nbytes: int, writes: bool) -> None:
        self.host_clock[HOST] += 1
        self._note(Access(what, HOST, self.host_clock[HOST], address, address + nbytes, writes), self.host_clock)

    # ---------------------------------------------------------------------- what torch.cuda shows

    @contextlib.contextmanager
    def stream(self, stream: "Stream"):
        before, self.current = self.current, stream
        yield
        self.current = before

    def cudart(self):
        return SimpleNamespace(
            cudaError=SimpleNamespace(success=0),
            cudaHostRegister=self._register,
            cudaHostUnregister=self._unregister,
            cudaGetErrorString=lambda error: f"error {error}",
        )

    def _register(self, address: int, nbytes: int, flags: int) -> int:
        if self.refuse_pinning:
            return 2
        self.pinned[address] = nbytes
        return 0

    def _unregister(self, address: int) -> int:
        nbytes = self.pinned.pop(address)
        self.host_access("giving pinned memory back", address, nbytes, writes=True)
        ctypes.memset(address, 0xA5, nbytes)  # it is somebody else's now
        return 0

    def _no_device_wide_wait(self, device=None):
        raise AssertionError("a device-wide synchronize")

    # ---------------------------------------------------------------------- copies and their order

    def copy(self, target: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> None:
        host_side = [t for t in (target, source) if not self.is_on_device(t)]

        def check(what: str) -> bool:
            if non_blocking:
                self._check_pinned(what, host_side)
            return True

        accesses = [(t.data_ptr(), t.nbytes, writes) for t, writes in ((target, True), (source, False))]
        self.enqueue(self.current, "copy", accesses, lambda: target.copy_(source), check)
        if not non_blocking:
            self.current.synchronize()

    def enqueue(self, stream: "Stream", kind: str, accesses: "list[tuple[int, int, bool]]", run, check) -> None:
        """Ask ``stream`` for work.

        Args:
            accesses: (address, bytes, whether it writes).
            check: called with words for the work, now and when it is due; False: it cannot be done.
        """
        if stream is self.caller and not self.trainer_depth:
            self.faults.append(f"a {kind} on the caller's stream that the trainer did not ask for")
        stream.join(self.host_clock)
        stream.clock[stream.name] += 1
        what = f"{kind} {len(stream.work)} of {stream.name}"
        for start, nbytes, writes in accesses:
            self._note(
                Access(what, stream.name, stream.clock[stream.name], start, start + nbytes, writes), stream.clock
            )
        check(what)

        def work():
            if check(what + ", late,"):
                run()

        stream.ask(work)

    def is_on_device(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self.device_storages

    def is_pinned(self, address: int, nbytes: int) -> bool:
        return any(a <= address and address + nbytes <= a + n for a, n in list(self.pinned.items()))

    def reaches(self, address: int, nbytes: int) -> bool:
        """Whether a kernel may use [address, address + nbytes)."""
        storages = [(a, t.untyped_storage().nbytes()) for a, t in list(self.device_storages.items())]
        on_device = any(a <= address and address + nbytes <= a + n for a, n in storages)
        return nbytes == 0 or on_device or self.is_pinned(address, nbytes)

    def _check_pinned(self, what: str, tensors: "list[torch.Tensor]") -> None:
        for t in tensors:
            if t.nbytes and not self.is_pinned(t.data_ptr(), t.nbytes) and not self.refuse_pinning:
                self.faults.append(f"{what} uses memory that is not pinned")

    def _note(self, access: Access, clock: "dict[str, int]") -> None:
        if access.start == access.end:
            return
        for other in self.accesses:
            overlap = access.start < other.end and other.start < access.end
            if overlap and (access.writes or other.writes) and clock.get(other.timeline, 0) < other.count:
                self.races.append(f"{other.what} and {access.what}")
        self.accesses.append(access)


class Stream:
    """Work in order, done by a thread of its own."""

    def __init__(self, runtime: Runtime, name: str):
        self.runtime, self.name = runtime, name
        self.cuda_stream = 1000 + len(runtime.streams)  # 0 would be the default stream, which nobody here uses
        self.clock = {name: 0}
        self.work = []
        self.done = self.wanted = 0
        runtime.streams.append(self)
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    def wait_event(self, event: "Event") -> None:
        if event.stream is None:
            return
        self.join(self.runtime.host_clock)
        self.join(event.clock)
        stream, position = event.stream, event.position
        self.ask(lambda: stream.reach(position))

    def wait_stream(self, stream: "Stream") -> None:
        self.wait_event(stream.record_event())

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = event or Event(self.runtime)
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.record_event().synchronize()

    def join(self, clock: "dict[str, int]") -> None:
        _join(self.clock, clock)

    def ask(self, work) -> None:
        with self.runtime.changed:
            self.work.append(work)
            self.runtime.changed.notify_all()

    def reach(self, position: int) -> None:
        """Wait until the first ``position`` pieces of work are done."""
        changed = self.runtime.changed
        with changed:
            self.wanted = max(self.wanted, position)
            changed.notify_all()
            assert changed.wait_for(lambda: self.done >= position, PATIENCE_SECONDS), f"{self.name} hangs"

    def _run(self) -> None:
        runtime = self.runtime
        while True:
            with runtime.changed:
                runtime.changed.wait_for(
                    lambda: (
                        runtime.closing
                        or self.done < (min(self.wanted, len(self.work)) if runtime.late else len(self.work))
                    )
                )
                if runtime.closing:
                    return
                work, pause = self.work[self.done], runtime.random.choice((0, 0, 0.0005, 0.002))
            if not runtime.late:
                time.sleep(pause)
            work()
            with runtime.changed:
                self.done += 1
                runtime.changed.notify_all()


class Event:
    """A point of a stream."""

    def __init__(self, runtime: Runtime):
        self.runtime = runtime
        self.stream: "Stream | None" = None
        self.position = 0
        self.clock: "dict[str, int]" = {}

    def record(self, stream: "Stream | None" = None) -> None:
        self.stream = stream or self.runtime.current
        self.stream.join(self.runtime.host_clock)
        self.position, self.clock = len(self.stream.work), dict(self.stream.clock)

    def wait(self, stream: "Stream | None" = None) -> None:
        (stream or self.runtime.current).wait_event(self)

    def synchronize(self) -> None:
        if self.stream is self.runtime.caller and not self.runtime.trainer_depth:
            self.runtime.faults.append("the host waits for the caller's stream, and it is not the trainer who asks")
        if self.stream is not None:
            self.stream.reach(self.position)
            _join(self.runtime.host_clock, self.clock)


class Intercepted(TorchFunctionMode):
    """Copies from and to device memory go through the current stream, as on a GPU; tensors there say where they are.

    ``torch.empty`` and ``torch.zeros`` with a CUDA device give device memory; until the current stream has done it,
    there are other numbers in it.
    """

    def __init__(self, runtime: Runtime):
        super().__init__()
        self.runtime = runtime

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.Tensor.copy_ and any(map(self._on_device, args[:2])):
            self.runtime.copy(args[0], args[1], kwargs.get("non_blocking", False))
            return args[0]
        if func is torch.Tensor.cpu and self._on_device(args[0]):
            out = torch.empty(args[0].shape, dtype=args[0].dtype)
            self.runtime.copy(out, args[0], non_blocking=False)
            return out
        if func == DEVICE_OF and self._on_device(args[0]):
            return DEVICE
        if func == IS_CUDA_OF and self._on_device(args[0]):
            return True
        if func in (torch.empty, torch.zeros) and torch.device(kwargs.get("device") or "cpu").type == "cuda":
            tensor = torch.empty(*args, **(kwargs | {"device": "cpu"}))
            tensor.view(torch.uint8).fill_(0xA5)
            self.runtime.on_device(tensor)
            if func is torch.zeros:
                self._fill(tensor, 0)
            return tensor
        if func in (torch.Tensor.fill_, torch.Tensor.zero_) and self._on_device(args[0]):
            self._fill(args[0], args[1] if func is torch.Tensor.fill_ else 0)
            return args[0]
        return func(*args, **kwargs)

    def _fill(self, tensor: torch.Tensor, value: float) -> None:
        accesses = [(tensor.data_ptr(), tensor.nbytes, True)]
        self.runtime.enqueue(self.runtime.current, "fill", accesses, lambda: tensor.fill_(value), lambda what: True)

    def _on_device(self, tensor: torch.Tensor) -> bool:
        return self.runtime.is_on_device(tensor)


def _join(clock: "dict[str, int]", other: "dict[str, int]") -> None:
    for timeline, count in other.items():
        clock[timeline] = max(clock.get(timeline, 0), count)
