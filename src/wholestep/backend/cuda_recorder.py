"""Records work on a GPU as CUDA graphs, all of them in one pool of memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from .. import _torch
from ..graph.gc_control import collector_paused

Work = Callable[[], Sequence[Tensor]]
"""Launches work; returns its results."""


@dataclass(eq=False)
class Recording:
    """Recorded work. After `replay`, `results` hold what it makes, until a recording of the same recorder is replayed.
    `release` gives it back, also when this object or the process ends; `held` is what must outlive it.
    """

    results: Sequence[Tensor]
    replay: Callable[[], None]
    undo: Callable[[], None]
    held: Any = None
    release: Callable[[], None] = field(init=False)

    def __post_init__(self) -> None:
        self.release = weakref.finalize(self, self.undo)


class Recorder(Protocol):
    """Runs and records work on devices of one `kind`."""

    @property
    def kind(self) -> str:
        """The type of the devices."""
        ...

    @property
    def reserved_bytes(self) -> int:
        """Memory of the pool."""
        ...

    def run(self, work: Work, copy: bool) -> Sequence[Tensor]:
        """Run `work` in the memory of the recordings. `copy` its results: there is a recording, which may overwrite
        them.
        """
        ...

    def record(self, work: Work) -> Recording:
        """Record what `work` launches, without running it. Raises whatever a library says that cannot be recorded; no
        recording of this process is to be used after that.
        """
        ...


class CudaRecorder:
    """Records on the current GPU.

    Work that is only run takes its memory from the pool as well, on the stream that records: a recording then finds
    the memory that the calls before it used. Recordings share it, since one runs at a time and its results are copied
    out before the next. Other threads may use CUDA meanwhile (data loaders that pin memory, NCCL's watchdog). Draws of
    the device's default generator follow that generator's state at each replay, and advance it.
    """

    kind = "cuda"

    def __init__(self) -> None:
        self._made: tuple[torch.cuda.MemPool, torch.cuda.Stream] | None = None

    def _where(self) -> tuple[torch.cuda.MemPool, torch.cuda.Stream]:
        """The pool, and the stream that records."""
        if self._made is None:
            self._made = torch.cuda.MemPool(), torch.cuda.Stream()
        return self._made

    @property
    def reserved_bytes(self) -> int:
        """See `Recorder`."""
        segments = torch.cuda.memory_snapshot(self._where()[0].id, include_traces=False)
        return sum(int(cast("dict[str, Any]", one)["total_size"]) for one in segments)

    def run(self, work: Work, copy: bool) -> Sequence[Tensor]:
        """See `Recorder`."""
        pool, stream = self._where()
        with _beside(stream), torch.cuda.use_mem_pool(pool):
            made = work()
        return [one.clone() for one in made] if copy else made

    def record(self, work: Work) -> Recording:
        """See `Recorder`."""
        graph, (pool, stream) = torch.cuda.CUDAGraph(), self._where()
        number: Any = pool.id
        recording = torch.cuda.graph(graph, number, stream, capture_error_mode="thread_local")
        try:
            with _beside(stream), collector_paused(), recording:
                made = work()
        except Exception as error:
            _torch.end_failed_capture(pool)
            self._made = None
            if error.__context__ is not None:  # what was not permitted, rather than that the capture failed
                raise error.__context__ from None
            raise
        return Recording(made, graph.replay, graph.reset, pool)


@contextmanager
def _beside(stream: torch.cuda.Stream) -> Generator[None]:
    """On `stream`, between what the current stream did before and does next."""
    current = torch.cuda.current_stream()
    stream.wait_stream(current)
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        current.wait_stream(stream)
