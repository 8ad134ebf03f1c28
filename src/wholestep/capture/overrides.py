"""Replaces submodules during a trace, so that the graph contains the replacement's forward."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase

from torch import nn

from .. import _torch
from ..errors import CaptureError
from .call_structure import walk
from .state import StepState


@contextmanager
def overridden(state: StepState, overrides: Mapping[str, nn.Module]) -> Generator[None]:
    """Replace each submodule whose path matches a key (globs allowed) inside this context.

    A replacement refers to the original module or its parameters; it must not add parameters.

    Raises:
        CaptureError: a key matches no submodule, or a replacement has parameters that the model does not have.
    """
    undo: list[tuple[nn.Module, str, nn.Module]] = []
    known = {id(h.tensor) for h in state.params.values()}
    try:
        for pattern, replacement in overrides.items():
            found = _find(state, pattern)
            stray = [n for n, p in replacement.named_parameters() if id(p) not in known]
            if not found or stray:
                raise CaptureError(
                    f"module override {pattern!r} "
                    + (f"has a parameter of its own, {stray[0]!r}" if stray else "matches no submodule"),
                    "a path of the model, and a replacement that works on the model's own parameters",
                    "correct the path, or build the replacement around the module that it replaces",
                )
            for parent, name, original in found:
                _torch.children_of(parent)[name] = replacement
                undo.append((parent, name, original))
        yield
    finally:
        for parent, name, original in reversed(undo):
            _torch.children_of(parent)[name] = original


def _find(state: StepState, pattern: str) -> list[tuple[nn.Module, str, nn.Module]]:
    out: list[tuple[nn.Module, str, nn.Module]] = []
    for path, module in walk(state.modules):
        for name, child in _torch.children_of(module).items():
            full = f"{path}.{name}" if path else name
            if child is not None and fnmatchcase(full, pattern):
                out.append((module, name, child))
    return out
