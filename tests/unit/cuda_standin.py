"""A stand-in for what ``torch.cuda`` shows of the CUDA runtime: streams, events, pinned memory. Host memory, no GPU.

Each stream is a thread that really copies later: with ``late`` at the last moment that the waits allow, else after
random pauses, so that streams overtake each other. What nobody waits for has not happened; a missing wait is a wrong
number. Beside that every access to memory is noted with what is ordered before it (a vector clock a timeline: the host
and each stream), so that two accesses that no wait orders are a race even where the numbers came out right.

What it takes from CUDA's documentation: copies of a stream keep their order, and come after what the host did before it
asked for them; an event is the point of the stream where it was last recorded; a wait for one never recorded is none.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
import threading
import time
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch.overrides import TorchFunctionMode

PATIENCE_SECONDS = 60.0
HOST = "host"


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

    Attributes:
        races: pairs of accesses that nothing orders, in words.
        faults: uses of memory that is not pinned, or no longer; work on the caller's stream that is not the trainer's.
    """

    def __init__(self, late: bool, seed: int = 0, refuse_pinning: bool = False):
        self.late, self.refuse_pinning = late, refuse_pinning
        self.random = random.Random(seed)
        self.changed = threading.Condition()
        self.closing = False
        self.host_clock = {HOST: 0}
        self.accesses: "list[Access]" = []
        self.races: "list[str]" = []
        self.faults: "list[str]" = []
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
        stream = self.current
        if stream is self.caller and not self.trainer_depth:
            self.faults.append("a copy on the caller's stream that the trainer did not ask for")
        stream.join(self.host_clock)
        stream.clock[stream.name] += 1
        what = f"copy {len(stream.work)} of {stream.name}"
        host_side = [t for t in (target, source) if t.untyped_storage().data_ptr() not in self.device_storages]
        for tensor, writes in ((target, True), (source, False)):
            start = tensor.data_ptr()
            access = Access(what, stream.name, stream.clock[stream.name], start, start + tensor.nbytes, writes)
            self._note(access, stream.clock)
        if non_blocking:
            self._check_pinned(what, host_side)

        def run():
            if non_blocking:
                self._check_pinned(what + ", late,", host_side)
            target.copy_(source)

        stream.ask(run)
        if not non_blocking:
            stream.synchronize()

    def _check_pinned(self, what: str, tensors: "list[torch.Tensor]") -> None:
        for t in tensors:
            inside = any(a <= t.data_ptr() and t.data_ptr() + t.nbytes <= a + n for a, n in list(self.pinned.items()))
            if t.nbytes and not inside and not self.refuse_pinning:
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
    """Copies from and to device memory go through the current stream, as on a GPU."""

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
        return func(*args, **kwargs)

    def _on_device(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self.runtime.device_storages


def _join(clock: "dict[str, int]", other: "dict[str, int]") -> None:
    for timeline, count in other.items():
        clock[timeline] = max(clock.get(timeline, 0), count)
