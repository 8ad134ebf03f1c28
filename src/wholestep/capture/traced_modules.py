"""Modules during a trace: submodules are replaced, nodes are annotated, and parameters and inputs are cast."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Mapping
from fnmatch import fnmatchcase
from typing import Any, cast

import torch
from torch import nn

from .. import _torch
from ..errors import CaptureError
from ..precision import MixedPrecision
from .call_structure import walk
from .state import StepState


@contextlib.contextmanager
def modules_seen(roots: dict[str, nn.Module], precision: MixedPrecision | None) -> Generator[None]:
    """Annotate traced nodes with their module's path; with `precision`, modules compute in its dtype.

    As in FSDP2, optimizers see the original parameters: these are cast when the outermost module of a tree is entered
    and restored when it returns. A module that is entered in the backward recomputes, with the casts of its forward.
    """
    paths = {id(m): path for path, m in walk(roots)}
    owner = {id(m): root for root in roots.values() for m in root.modules()}
    dtype = precision.param if precision else None
    running: list[nn.Module] = []  # the trees whose modules are running
    casts: dict[int, torch.Tensor] = {}

    def in_dtype(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    def call(original: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if id(module) not in paths:
            return original(module, *args, **kwargs)
        root, before = owner[id(module)], _torch.noted("module")
        changed = list[tuple[dict[str, Any], str, Any]]()
        if dtype and root not in running:
            if not _torch.noted("backward"):
                casts.clear()
            changed = _cast_tree(root, dtype, casts)
        running.append(root)
        _torch.note_on_nodes(module=paths[id(module)])
        try:
            inputs = _torch.tree_map_only(torch.Tensor, in_dtype, args) if dtype and changed else args
            return original(module, *inputs, **kwargs)
        finally:  # also where the recomputation of a checkpoint stops, which is an exception
            running.pop()
            for container, key, param in changed:
                container[key] = param
            _torch.note_on_nodes(module=before)

    with _torch.forms_set([(nn.Module, "__call__", call)]):
        yield


def _cast_tree(
    root: nn.Module, dtype: torch.dtype, casts: dict[int, torch.Tensor]
) -> list[tuple[dict[str, Any], str, Any]]:
    """Put the cast of each parameter into its place: of `casts`, by id of the parameter, else a new one."""
    replaced: list[tuple[dict[str, Any], str, Any]] = []
    for module in root.modules():
        parameters = cast(dict[str, Any], _torch.parameters_of(module))
        for key, param in parameters.items():
            if param is not None and param.is_floating_point() and param.dtype != dtype:
                if id(param) not in casts:
                    casts[id(param)] = param.to(dtype)
                replaced.append((parameters, key, param))
                parameters[key] = casts[id(param)]
    return replaced


@contextlib.contextmanager
def overridden(state: StepState, overrides: Mapping[str, nn.Module]) -> Generator[None]:
    """Replace each submodule whose path matches a key (globs allowed) inside this context.

    A replacement refers to the original module or its parameters. Others are refused, and keys that match nothing.
    """
    param_ids = {id(h.tensor) for h in state.params.values()}
    with _torch.undone():
        for pattern, replacement in overrides.items():
            matches = _find(state, pattern)
            stray = [n for n, p in replacement.named_parameters() if id(p) not in param_ids]
            if not matches or stray:
                raise CaptureError(
                    f"module override {pattern!r} "
                    + (f"has a parameter of its own, {stray[0]!r}" if stray else "matches no submodule"),
                    "a path of the model, and a replacement that works on the model's own parameters",
                    "correct the path, or build the replacement around the module that it replaces",
                )
            for parent, name, original in matches:
                _torch.undo(_torch.children_of(parent).__setitem__, name, original)
                _torch.children_of(parent)[name] = replacement
        yield


def _find(state: StepState, pattern: str) -> list[tuple[nn.Module, str, nn.Module]]:
    out: list[tuple[nn.Module, str, nn.Module]] = []
    for path, module in walk(state.modules):
        for name, child in _torch.children_of(module).items():
            full = f"{path}.{name}" if path else name
            if child is not None and fnmatchcase(full, pattern):
                out.append((module, name, child))
    return out
