"""Runs a bound graph through TorchInductor."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule

from .. import _torch
from ..errors import BackendError
from .eager import Run


def inductor(graph: Graph, example_inputs: Sequence[Any]) -> Run:
    """Compile `graph` for inputs like `example_inputs`.

    Raises:
        BackendError: there is no C++ compiler, or Inductor refuses the graph.
    """
    if all(not (isinstance(t, torch.Tensor) and t.is_cuda) for t in example_inputs) and not (
        shutil.which("g++") or shutil.which("clang++")
    ):
        raise BackendError(
            "backend 'inductor' needs a C++ compiler and found none",
            "g++ or clang++ on the PATH",
            'install one, or use backend="eager"',
        )
    try:
        with torch.no_grad():
            compiled = _torch.inductor_compile(GraphModule({}, graph), example_inputs)
    except BackendError:
        raise
    except Exception as error:
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise BackendError(f"Inductor cannot compile this graph: {text}", next_step='use backend="eager"') from error

    def run(inputs: Sequence[Any]) -> list[Any]:
        with torch.no_grad():
            return list(compiled(*inputs))

    return run
