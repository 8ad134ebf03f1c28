"""Records work on a GPU as CUDA graphs, all of them in one pool of memory."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol, cast
from weakref import WeakSet, WeakValueDictionary

import torch
from torch import Tensor

from .. import _torch
from ..graph.gc_control import collector_paused

Work = Callable[[], Sequence[Tensor]]
"""Launches work; returns its results."""


@dataclass(eq=False)
class Recording:
    """Recorded work. After `launch`, `results` hold what it makes, until other work of the same recorder runs.
    `release` gives it back, also when this object or the process ends; `keeps_alive` is what must outlive it.
    """

    results: Sequence[Tensor]
    launch: Callable[[], None]
    undo: Callable[[], None]
    keeps_alive: Any = None
    release: Callable[[], None] = field(init=False)

    def __post_init__(self) -> None:
        self.release = weakref.finalize(self, self.undo)


class Recorder(Protocol):
    """Runs and records work on one device, in one pool of memory."""

    @property
    def device(self) -> str:
        """The device, as `cuda:0`."""
        ...

    @property
    def reserved_bytes(self) -> int:
        """Memory of the pool."""
        ...

    def run(self, work: Work, make_room: bool) -> Sequence[Tensor]:
        """Run `work`. `make_room`: the pool may have to grow for it."""
        ...

    def record(self, work: Work) -> Recording:
        """Record what `work` launches, without running it. Raises what a library says whose work cannot be recorded; no
        recording of this process is to be used after that.
        """
        ...

    def replay(self, recording: Recording) -> Sequence[Tensor]:
        """Run recorded work; returns copies of its results."""
        ...


class CudaRecorder:
    """Records on one GPU, for all steps of the process (`cuda_recorder`).

    Work that is only run takes its memory from the pool as well, on the stream that records: a recording then finds
    the memory that the call before it used. Recordings share it, since one runs at a time and its results are copied
    out before the next. Other threads may use CUDA meanwhile (data loaders that pin memory, NCCL's watchdog). Draws of
    the device's default generator follow that generator's state at each replay, and advance it.
    """

    def __init__(self, device: str) -> None:
        self.device = device
        self._made: tuple[torch.cuda.MemPool, torch.cuda.Stream] | None = None
        self._recordings = WeakSet[Recording]()
        self._lock = threading.Lock()
        self._last: torch.cuda.Stream | None = None

    @property
    def reserved_bytes(self) -> int:
        """See `Recorder`."""
        segments = torch.cuda.memory_snapshot(self._where()[0].id, include_traces=False)
        return sum(int(cast("dict[str, Any]", segment)["total_size"]) for segment in segments)

    def run(self, work: Work, make_room: bool) -> Sequence[Tensor]:
        """See `Recorder`. Results are copied where a recording may overwrite them.

        The allocator does not free what it has cached elsewhere while it serves a pool, not even where memory ends.
        """
        pool, stream = self._where()
        if make_room:
            torch.cuda.empty_cache()
        with self._lock, torch.cuda.device(self.device):
            with self._beside(stream), torch.cuda.use_mem_pool(pool):
                tensors = work()
            return [tensor.clone() for tensor in tensors] if self._recordings else tensors

    def record(self, work: Work) -> Recording:
        """See `Recorder`."""
        pool, stream = self._where()
        graph = torch.cuda.CUDAGraph()
        number: Any = pool.id
        recording = torch.cuda.graph(graph, number, stream, capture_error_mode="thread_local")
        try:
            with self._lock, torch.cuda.device(self.device), self._beside(stream), collector_paused(), recording:
                results = work()
        except Exception as error:
            with torch.cuda.device(self.device):
                _torch.end_failed_capture(pool)
            self._made = None
            _recording_stream.cache_clear()
            if error.__context__ is not None:  # what was not permitted, rather than that the capture failed
                raise error.__context__ from None
            raise
        recorded = Recording(results, graph.replay, graph.reset, pool)
        self._recordings.add(recorded)
        return recorded

    def replay(self, recording: Recording) -> Sequence[Tensor]:
        """See `Recorder`."""
        with self._lock, torch.cuda.device(self.device):
            self._follow()
            recording.launch()
            return [tensor.clone() for tensor in recording.results]

    def _where(self) -> tuple[torch.cuda.MemPool, torch.cuda.Stream]:
        """The pool, and the stream that records."""
        if self._made is None:
            with torch.cuda.device(self.device):
                self._made = torch.cuda.MemPool(), _recording_stream(self.device)
        return self._made

    def _follow(self) -> torch.cuda.Stream:
        """The current stream, which waits for what ran before if that was on another one."""
        current = torch.cuda.current_stream()
        if self._last is not None and self._last != current:
            current.wait_stream(self._last)
        self._last = current
        return current

    @contextmanager
    def _beside(self, stream: torch.cuda.Stream) -> Generator[None]:
        """On `stream`, between what the current stream did before and does next."""
        current = self._follow()
        stream.wait_stream(current)
        try:
            with torch.cuda.stream(stream):
                yield
        finally:
            current.wait_stream(stream)


@cache
def _recording_stream(device: str) -> torch.cuda.Stream:
    """The stream of all recordings on a device: libraries keep work space for each stream that they saw."""
    return torch.cuda.Stream(device)


def cuda_recorder(device: str) -> CudaRecorder:
    """The recorder of a device: its memory is shared by all steps there."""
    if device == "cuda":
        device = f"cuda:{torch.cuda.current_device()}"
    recorder = _recorders.get(device) or CudaRecorder(device)
    _recorders[device] = recorder
    return recorder


_recorders = WeakValueDictionary[str, CudaRecorder]()
