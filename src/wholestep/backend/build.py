"""Which backend runs a bound graph."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.fx import Graph

from ..graph.graph import Input
from .buffers import Buffers, with_buffers
from .cudagraphs import CudaRecorder, Recorder, cudagraphs
from .eager import NodeClock, Run, eager
from .inductor import inductor

BACKENDS = ("eager", "inductor", "cudagraphs")


@dataclass
class Backend:
    """The backend of one compiled step, called `name`; what keeps it from doing its work is said once."""

    name: str
    clock: NodeClock | None = None
    recorder: Recorder = field(default_factory=CudaRecorder)
    told: set[str] = field(default_factory=set[str])
    buffers: Buffers = field(default_factory=Buffers)

    def run_of(self, graph: Graph, inputs: Sequence[Input], example_inputs: Sequence[Any]) -> Run:
        """`graph` as a function from inputs like `example_inputs`, which `inputs` describe, to outputs.

        Raises:
            BackendError: the backend cannot compile it.
        """
        if self.name == "inductor":
            return inductor(graph, example_inputs, self.clock)
        if self.name == "cudagraphs":
            return cudagraphs(graph, inputs, example_inputs, self.recorder, self._tell, self.clock)
        return eager(with_buffers(graph, self.buffers), self.clock)

    def _tell(self, text: str) -> None:
        if text not in self.told:
            self.told.add(text)
            warnings.warn(text, stacklevel=2)
