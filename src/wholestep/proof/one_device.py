"""What each op of a captured step computes on one device, and how far rounding carries.

With batches of their own, ranks are as many devices, whose gradients are added up by hand.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from .. import _torch
from ..errors import PlanError
from ..graph import meta
from ..graph.graph import Role, TrainGraph
from ..graph.nodes import function_of, node_at
from ..graph.ops import COMPLETE, GRAD_READY
from ..graph.text import op_name
from ..typed_json import MalformedError, parse, read, write_text
from .interpret import as_traced, is_random
from .sketch import SUMS, distance, norm_of, sums_of

ROUNDED = 2  # more runs of the first device, in which results are rounded otherwise
_TIMES = 8  # times of what these runs differ by: right plans of nine language models differ by up to 1.1 times
_ROUNDINGS = 8  # of a result, where these runs do not differ


@dataclass(frozen=True)
class OpResult:
    """An output of an op in a call. `sums`: of each device (`sketch`). `rounding`: how far it is from what it would be
    if results were rounded otherwise.
    """

    name: str
    index: int
    phase: str
    module: str
    op: str
    line: str
    shape: tuple[int, ...]
    dtype: str
    sums: tuple[tuple[float, ...], ...]
    norm: float
    rounding: float
    reads: tuple[str, ...]

    def sums_of_device(self, number: int) -> Tensor:
        """The sums of one device."""
        return torch.tensor(self.sums[number], dtype=torch.float64)

    def parts_at(self, far: float) -> bool:
        """Whether a distance is more than rounding explains."""
        dtype = getattr(torch, self.dtype)
        eps = torch.finfo(dtype).eps if dtype.is_floating_point or dtype.is_complex else 1e-13
        return not far <= _TIMES * self.rounding + _ROUNDINGS * eps * self.norm


@dataclass(frozen=True)
class Record:
    """What the ops of a step compute on one device, call by call, and at the end what a call returns and changes."""

    calls: tuple[tuple[OpResult, ...], ...]

    def save(self, path: str) -> None:
        """Write a file. Raises PlanError: it cannot be written."""
        write_text(path, json.dumps(asdict(self)))

    @staticmethod
    def load(path: str) -> Record:
        """Read a file that `save` wrote. Raises PlanError: it is none."""
        try:
            record = read(Record, parse(Path(path).read_bytes()))
        except (OSError, ValueError, MalformedError) as error:
            raise PlanError(f"{path}: {error}", "a file that Comparison.save wrote", "correct the path") from error
        for result in (result for call in record.calls for result in call):
            if not result.sums or {*map(len, result.sums)} != {2 * SUMS} or not hasattr(torch, result.dtype):
                raise PlanError(f"{path}: {result.name} is damaged", f"{2 * SUMS} sums and a dtype", "save it again")
        return record


@dataclass
class Devices:
    """The `inputs` of each device, and of the first once more for each run that is `ROUNDED` otherwise.

    `averages`: gradients are averaged over devices, else added up, in `dtype`. `drawn`: the random numbers of a call.
    """

    graph: TrainGraph
    inputs: list[list[Tensor]]
    averages: bool = True
    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        self.drawn, self.number = dict[str, list[Any]](), len(self.inputs) - ROUNDED

    def call(self) -> tuple[list[OpResult], list[list[Any]]]:
        """Results of ops in a call, and the outputs of each run. Random numbers begin where torch's generator is."""
        nodes = list(self.graph.graph.nodes)
        placeholders = [node for node in nodes if node.op == "placeholder"]
        envs: list[dict[Node, Any]] = [dict(zip(placeholders, row, strict=True)) for row in self.inputs]
        last_reader = {operand: reader for reader in nodes for operand in reader.all_input_nodes}
        noise, begin = torch.Generator().manual_seed(0), torch.get_rng_state()
        streams = [begin] * len(envs)
        results, roles = list[OpResult](), {node: spec.role for spec, node in self.graph.placeholders()}
        update = {node for node, role in roles.items() if role in (Role.STATE, Role.HYPER)}
        for node in nodes[:-1]:
            if node.op == "call_function":
                self._run(node, envs, streams)
            if node.target in COMPLETE or not update.isdisjoint(node.all_input_nodes):
                update.add(node)
            if not _torch.is_getitem(node.target):
                dtype = self.dtype if node.target is GRAD_READY else None
                for env in envs[self.number :]:
                    env[node] = _rounded(env[node], noise, dtype)
                if node.op == "call_function":
                    results += _results(node, envs, self.number, "update" if node in update else "")
            for operand in node.all_input_nodes:
                if last_reader[operand] is node:
                    for env in envs:
                        del env[operand]
        torch.set_rng_state(begin)
        outputs = [[env[n] if isinstance(n, Node) else n for _, n in self.graph.results()] for env in envs]
        for place, (out, node) in enumerate(self.graph.results()):
            values = [row[place] for row in outputs]
            if isinstance(values[0], Tensor):
                is_state, reads = out.kind == "update", _sources([node] if isinstance(node, Node) else [])
                names = (f"{out.kind} {out.target}", 0, "update" if is_state else "forward", out.target, out.kind, "")
                results.append(_result(names, values, self.number, reads))
        return results, outputs

    def _run(self, node: Node, envs: Sequence[dict[Node, Any]], streams: list[Tensor]) -> None:
        if node.target in COMPLETE:
            parts = [env[node.all_input_nodes[0]] for env in envs]
            total = torch.stack(parts[: self.number]).sum(0)
            total = total / self.number if self.averages and node.target is GRAD_READY else total
            for number, env in enumerate(envs):
                env[node] = total if number < self.number else total + (parts[number] - parts[0])
            return
        for number, env in enumerate(envs):
            args, kwargs = map_arg((node.args, node.kwargs), env.__getitem__)
            torch.set_rng_state(streams[number])
            try:
                env[node] = cleared(node, as_traced(node, function_of(node)(*args, **kwargs)))
            except Exception as error:
                problem = f"{op_name(node)} raises {type(error).__name__}: {error}"
                raise PlanError(problem, "a step that runs on one device", "", meta.source_line(node)) from error
            if is_random(node) and not torch.equal(streams[number], after := torch.get_rng_state()):  # attention may
                streams[number] = after
                self.drawn[node.name] = [*self.drawn.get(node.name, ()), env[node]] if number else [env[node]]


def _results(node: Node, envs: Sequence[Mapping[Node, Any]], devices: int, phase: str) -> Iterator[OpResult]:
    is_gradient = node.target is GRAD_READY
    phase = "backward" if is_gradient or (meta.is_backward(node) and not phase) else phase or "forward"
    module, line = str(node.args[1]) if is_gradient else meta.module_path(node), meta.source_line(node)
    reads = _sources(node.all_input_nodes)
    for index, values in enumerate(zip(*(flat(env[node]) for env in envs), strict=True)):
        if isinstance(values[0], Tensor):
            yield _result((node.name, index, phase, module, op_name(node), line), values, devices, reads)


def _sources(operands: Iterable[Node]) -> tuple[str, ...]:
    """The names of operands, and of the ops whose outputs these are."""
    items = [operand for operand in operands if _torch.is_getitem(operand.target)]
    return tuple(operand.name for operand in (*operands, *(node_at(item, 0) for item in items)))


def _result(
    names: tuple[str, int, str, str, str, str], values: Sequence[Tensor], devices: int, reads: tuple[str, ...]
) -> OpResult:
    """`names`: the first fields. `values`: of each run."""
    sums, value = [sums_of(each) for each in values], values[0]
    square = sum(distance(sums[0], each) ** 2 for each in sums[devices:]) / ROUNDED
    dtype, numbers = str(value.dtype).removeprefix("torch."), tuple(map(_numbers, sums[:devices]))
    return OpResult(*names, tuple(value.shape), dtype, numbers, norm_of(value), square**0.5, reads)


def _numbers(sums: Tensor) -> tuple[float, ...]:
    return tuple(map(float, sums))


def _rounded(value: Any, noise: torch.Generator, dtype: torch.dtype | None) -> Any:
    """A value whose elements are rounded up or down by chance, as in `dtype`."""
    if isinstance(value, (tuple, list)):
        return type(cast(Any, value))(_rounded(each, noise, dtype) for each in cast("Sequence[Any]", value))
    if not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex()):
        return value
    eps = torch.finfo(dtype or value.dtype).eps
    factor = 1 + eps * (torch.rand(value.shape, generator=noise, dtype=torch.float64) * 2 - 1)
    rounded = torch.empty_like(value).copy_(value * factor.to(value.device))
    return rounded.where(rounded.isfinite(), value)


def cleared(node: Node, value: Any) -> Any:
    """The value of a node; zeros, if it is memory that nothing has written."""
    return value.zero_() if isinstance(value, Tensor) and "empty" in op_name(node) else value


def flat(value: Any) -> list[Any]:
    """The outputs of an op as one list."""
    return [each for item in _opened(value) for each in _opened(item)]


def _opened(item: Any) -> Sequence[Any]:
    return cast("Sequence[Any]", item) if isinstance(item, (tuple, list)) else (item,)
