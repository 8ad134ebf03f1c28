"""Says whether a bound graph can be recorded as one CUDA graph, or why not.

A recording launches the same work on the same addresses each time, and reads nothing on the host. What a call brings
(the batch, scheduled numbers, constants of no dim that are in host memory) is copied to the device before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.fx import Graph, Node

from ..graph import meta
from ..graph.graph import Input, Role
from ..graph.nodes import communicates, ends_of, operands
from ..graph.op_kinds import COUNTS_ROWS
from ..graph.region import region_of
from ..partition.host_copies import HOST_COPIES
from ..partition.rank_ops import drawn
from ..rules.registry import is_random
from .tensorize_numbers import as_tensors, following

_COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default, torch.ops.aten.copy.default)


def is_brought(spec: Input, example: Any, kind: str) -> bool:
    """True for an input that each call copies to the device: the other inputs are used where they are."""
    number = isinstance(example, Tensor) and not example.dim() and example.device.type != kind
    return spec.role in (Role.BATCH, Role.HYPER) or (spec.role is Role.CONST and number)


def transport(kind: str) -> str:
    """The library that communicates between devices of `kind`, '' for none."""
    if not dist.is_initialized():
        return ""
    pairs = [pair.partition(":") for pair in str(dist.get_backend_config()).split(",")]
    return next((library for device, _, library in pairs if device == kind), "")


def obstacle(graph: Graph, inputs: Sequence[Input], example_inputs: Sequence[Any], kind: str, library: str) -> str:
    """Why `graph` cannot be recorded on devices of `kind`, or ''. Numbers that it reads into Python become tensors.

    `library` communicates between such devices, '' for none.
    """
    for spec, example in zip(inputs, example_inputs, strict=True):
        if why := _unfit(spec, example, kind):
            return why
    if readers := as_tensors(graph):
        return f"{readers[0]} takes a scheduled number as a Python number"
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    rows = zip(placeholders, inputs, example_inputs, strict=True)
    brought = {
        n for n, i, example in rows if _is_number(n) and (is_brought(i, example, kind) or example.device.type == kind)
    }
    constants = _constants(graph, kind)
    numbers = following(graph, brought | constants) - constants
    for node in graph.nodes:
        if node.op == "call_function" and (why := _unfit_call(node, kind, library, constants, numbers)):
            return f"%{node.name} {why}"
    for node in ends_of(graph):
        if node.op == "call_function" and node in numbers | constants and _elsewhere(node, kind):
            return f"%{node.name} is a result that is computed on the host"
    return ""


def _constants(graph: Graph, kind: str) -> set[Node]:
    """What is made on another device of nothing. Numbers that are copied to the device are made there from now on."""
    constants = [n for n in graph.nodes if n.op == "call_function" and not operands(n) and not is_random(n)]
    constants = [n for n in constants if _elsewhere(n, kind)]
    for node in constants:
        if _is_number(node) and any(n.target in _COPIES for n in following(graph, {node})):
            made_of = meta.tensor(node)
            assert made_of is not None, "a number"
            node.kwargs = {**node.kwargs, "device": torch.device(kind)}
            meta.set_tensors(node, (replace(made_of, device=kind),))
    return following(graph, {n for n in constants if _elsewhere(n, kind)})


def _is_number(node: Node) -> bool:
    """True for a single number, which is brought to the device wherever it is."""
    traced = meta.tensor(node)
    return traced is not None and not traced.shape


def _elsewhere(node: Node, kind: str) -> str:
    """The type of another device on which `node` makes a tensor, or ''."""
    kinds = {tensor.device.partition(":")[0] for tensor in meta.tensors(node) if tensor is not None}
    return min(kinds - {kind, "meta"}, default="")


def _unfit(spec: Input, example: Any, kind: str) -> str:
    if not isinstance(example, Tensor):
        return f"{spec.name!r} is no tensor"
    if not is_brought(spec, example, kind) and example.device.type != kind:
        return f"{spec.name!r} is on {example.device}, and a graph is recorded on {kind}"
    if spec.role is Role.BATCH and any(n > 1 and s == 0 for n, s in zip(example.shape, example.stride(), strict=True)):
        return f"{spec.name!r} is expanded: several of its elements are one in memory"
    return ""


def _unfit_call(node: Node, kind: str, library: str, constants: set[Node], numbers: set[Node]) -> str:
    """Constants of no dim that are elsewhere are part of what is launched; numbers are computed where they came to."""
    if node.target in COUNTS_ROWS:
        return "counts rows, which the host reads"
    if node.kwargs.get("check_errors"):
        return "raises for some matrices, which the host reads"
    if node.target in HOST_COPIES:
        return "moves between host and device"
    if region_of(node):
        return "is of a loop over micro-batches, which was not tried as a graph"
    if node.target is drawn:
        return "draws a piece of a random tensor, from a generator that is set in Python"
    if communicates(node) and library != "nccl":
        return f"communicates over {library or 'no library'}, which a graph cannot hold"
    other = _elsewhere(node, kind)
    if is_random(node) and other:
        return f"draws on {other}"
    if node in numbers:
        device = node.kwargs.get("device")
        return f"copies to {device}" if device is not None and torch.device(str(device)).type != kind else ""
    if node in constants:
        return "" if _is_number(node) else f"computes on {other or kind}"
    if node.target in _COPIES and any(n in constants for n in operands(node)):
        return "copies from the host"
    return f"computes on {other}" if other else ""
