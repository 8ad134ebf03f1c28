"""Measured times of kernels in place of predicted ones: of a table, an export of `torch.profiler`, a profiled step."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any, cast

import torch
from torch.fx import Node

from .. import _torch
from ..errors import PlanError
from ..graph import meta
from ..graph.nodes import operands
from ..graph.op_kinds import PRODUCTS, arithmetic, packet_name
from ..typed_json import MalformedError, as_list, as_object, parse, read, write_text, wrong

Shapes = tuple[tuple[int, ...], ...]
_DTYPES = {"c10::BFloat16": "bfloat16", "c10::Half": "float16", "float": "float32", "double": "float64"}
_FORM = '{"kernels": [{"op": "mm", "shapes": [[8192, 4096], [4096, 4096]], "dtype": "bfloat16", "us": 450.0}, ...]}'


@dataclass(frozen=True)
class KernelTime:
    """One kernel.

    Args:
        op: name of the ATen op without overload, as "mm"; "attention" and "attention_backward" for those of any kernel.
        shapes: of its tensors on one rank, in order; of attention, those of queries, keys and values.
        dtype: of the first tensor, without `torch.`.
        us: microseconds.
    """

    op: str
    shapes: Shapes
    dtype: str
    us: float


@dataclass(frozen=True)
class KernelTimes:
    """Measured kernels, which are looked up by op, shapes and dtype; of several measurements the median counts. What
    was not measured takes as many times what is predicted as the measured kernels of its class do: products, attention,
    and all others.

    Args:
        kernels: measured.
        device: how many times the prediction every other kernel takes; 0: what those of its class say.
        host: the same of starting a kernel, where a `Software` starts them one by one.

    Example:
        >>> times = ws.KernelTimes.load("kernels.json")
        >>> print(ws.simulate(local, ws.Hardware.preset("dgx-h100"), profile=times))
    """

    kernels: tuple[KernelTime, ...]
    device: float = 0.0
    host: float = 1.0

    @staticmethod
    def of(times: Sequence[tuple[Node, float]]) -> KernelTimes:
        """The kernels of call nodes whose microseconds were measured; of what is no ATen op there are none.

        Example:
            >>> times = step.profile(model, optimizer, batch).kernels
        """
        keyed = ((_key(node), us) for node, us in times if us > 0)
        return KernelTimes(tuple(KernelTime(*key, us) for key, us in keyed if key is not None))

    def save(self, path: str | Path) -> None:
        """Write the table as JSON, for `load` and `wholestep simulate --profile`; missing folders are created."""
        write_text(path, json.dumps(asdict(self), indent=1) + "\n")

    @staticmethod
    def load(path: str | Path) -> KernelTimes:
        """Read a table of kernels, or a trace that `torch.profiler` exported with `record_shapes=True`.

        Raises:
            PlanError: the file cannot be read, or an entry is malformed; the message names it.
        """
        try:
            body = as_object(parse(Path(path).read_bytes()), "")
            if "traceEvents" in body:
                profile = KernelTimes(tuple(_traced(as_list(body["traceEvents"], "traceEvents"))))
            else:
                profile = cast(KernelTimes, read(KernelTimes, body))
            for i, kernel in enumerate(profile.kernels):
                if not kernel.us > 0:
                    raise wrong(f"kernels[{i}].us", kernel.us, "a number above 0")
            for name, value in (("device", profile.device), ("host", profile.host)):
                if not 0 <= value < float("inf"):
                    raise wrong(name, value, "a number of at least 0")
        except (OSError, ValueError) as error:  # also a path with a null
            raise PlanError(f"profile {str(path)!r} cannot be read: {error}", _FORM) from error
        except MalformedError as error:
            raise PlanError(f"profile {str(path)!r}: {error.found}", error.needed, "correct that entry") from error
        if not (profile.kernels or profile.device):
            needed = f"{_FORM}, or an export of torch.profiler with record_shapes=True on a GPU"
            raise PlanError(f"profile {str(path)!r} has no kernel", needed)
        return profile

    @cached_property
    def _by_key(self) -> Mapping[tuple[str, Shapes, str], float]:
        several: dict[tuple[str, Shapes, str], list[float]] = defaultdict(list)
        for kernel in self.kernels:
            several[kernel.op, kernel.shapes, kernel.dtype].append(kernel.us)
        return {key: median(times) for key, times in several.items()}

    def us(self, node: Node) -> float | None:
        """Microseconds of a call node; None where it was not measured."""
        key = _key(node)
        return None if key is None else self._by_key.get(key)

    def applied(self, times: Mapping[Node, float]) -> dict[Node, float]:
        """Predicted `times`, as far as they were measured, and the others by what that says of their class."""
        measured_us = {node: us for node, took in times.items() if took > 0 and (us := self.us(node)) is not None}
        measured, predicted = defaultdict[str, float](float), defaultdict[str, float](float)
        for node, us in measured_us.items():
            measured[_class(node)] += us
            predicted[_class(node)] += times[node]
        by = {name: us / predicted[name] for name, us in measured.items()}
        rest = {node: us * (self.device or by.get(_class(node), 1.0)) for node, us in times.items()}
        return rest | measured_us


def _class(node: Node) -> str:
    operation = arithmetic(node.target)
    return "product" if node.target in PRODUCTS else "" if operation is None else operation.kind


def _key(node: Node) -> tuple[str, Shapes, str] | None:
    """What a kernel of an ATen op is looked up by."""
    tensors = [m for operand in operands(node) if (m := meta.tensor(operand)) is not None]
    if not tensors:
        return None
    op = packet_name(node.target)
    if node.target in PRODUCTS and not _torch.is_op(node.target):
        op, tensors = "mm", tensors[-2:]  # a product that a pass wrote, into a bucket
    operation = arithmetic(node.target)
    shapes = tuple(tuple(tensor.shape) for tensor in tensors)
    if operation is not None and operation.kind == "attention":
        op, shapes = _attention(operation.backward, shapes)
    return (op.removesuffix("_"), shapes, str(tensors[0].dtype).removeprefix("torch.")) if op else None


def _attention(backward: bool, shapes: Shapes) -> tuple[str, Shapes]:
    """A backward has the gradient of the output first."""
    first = int(backward)
    return "attention_backward" if backward else "attention", shapes[first : first + 3]


def _traced(events: list[Any]) -> Iterator[KernelTime]:
    """An op and its kernels share their "External id". Durations are in microseconds. The format is
    https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
    """
    ops: dict[Any, tuple[str, Shapes, str]] = {}
    took: dict[Any, float] = defaultdict(float)
    for i, entry in enumerate(events):
        event = as_object(entry, f"traceEvents[{i}]")
        arguments = as_object(event.get("args", {}), f"traceEvents[{i}].args")
        kind, number = event.get("cat"), arguments.get("External id")
        if kind == "kernel":
            took[number] += read(float, event.get("dur"), f"traceEvents[{i}].dur")
        elif kind == "cpu_op" and "Input Dims" in arguments:
            where = f"traceEvents[{i}].args['Input Dims']"
            ops[number] = _op(str(event.get("name")), as_list(arguments["Input Dims"], where), arguments, where)
    for number, us in took.items():
        if number in ops and us > 0:
            yield KernelTime(*ops[number], us)


def _op(name: str, dims: list[Any], arguments: Mapping[str, Any], where: str) -> tuple[str, Shapes, str]:
    """Arguments that are no tensors have no dims."""
    shapes = tuple(
        cast("tuple[int, ...]", read(tuple[int, ...], shape, f"{where}[{i}]"))
        for i, shape in enumerate(dims) if isinstance(shape, list) and shape and not isinstance(shape[0], list)
    )  # fmt: skip
    types = as_list(arguments.get("Input type", []), where)
    dtype = next((_DTYPES[type_name] for type_name in types if type_name in _DTYPES), "float32")
    op = name.removeprefix("aten::")
    operation = arithmetic(getattr(getattr(torch.ops.aten, op, None), "default", None))
    if operation is not None and operation.kind == "attention":
        return *_attention(operation.backward, shapes), dtype
    return op.removesuffix("_"), shapes, dtype
