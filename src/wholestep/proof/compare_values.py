"""`wholestep.compare`: one device beside a plan, or beside another step, and the first tensors at which they part."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..backend.default_passes import default_passes
from ..capture.call_structure import leaf_names, take_apart
from ..capture.capture import Capture, capture_step
from ..capture.capture_options import CaptureOptions
from ..errors import PlanError
from ..graph.graph import Input, Role
from ..mesh import Mesh
from ..passes.base import Pass, run_passes
from ..passes.order_stages import partition
from ..plan.plan import Plan
from ..plan.strategy import Strategy
from ..planner.resolve import plan as make_plan
from ..runtime.placement import Primed, find_input
from ..runtime.step import CompiledStep
from .on_ranks import Far, Key, PlanOnRanks, put_state
from .one_device import ROUNDED, Devices, OpResult, Record
from .sketch import distance

_SHOWN = 5


@dataclass(frozen=True)
class Parted:
    """A tensor that differs by more than rounding, though nothing that it is computed from does. `difference` and
    `rounding` are shares of its norm.

    Example:
        >>> for parted in ws.compare(train_step, (model, optimizer, batch), "dp=4").parted:
        ...     print(parted.module, parted.line)
    """

    call: int
    phase: str
    module: str
    op: str
    name: str
    line: str
    difference: float
    rounding: float
    where: str

    def __str__(self) -> str:
        place = "  ".join(filter(None, (self.module, self.op, self.name and f"%{self.name}", self.where)))
        numbers = f"differs by {self.difference:.1e}, rounding is {self.rounding:.1e}" if self.name else ""
        return "\n    ".join(filter(None, (f"{self.phase} of call {self.call}: {place}", numbers, self.line)))


@dataclass(frozen=True)
class Comparison:
    """What `compare` returns: `compared` of `tensors` tensors were compared, and `parted` is empty if they are equal.

    Example:
        >>> comparison = ws.compare(train_step, (model, optimizer, batch), "dp=4")
        >>> assert comparison.equal, comparison
    """

    title: str
    parted: tuple[Parted, ...]
    compared: int
    tensors: int
    record: Record = field(repr=False)
    has_plan: bool = field(default=False, repr=False)

    @property
    def equal(self) -> bool:
        """True if no tensor differs by more than rounding."""
        return not self.parted

    def save(self, path: str) -> None:
        """Write what one device computes, for `compare(..., against=path)`. Raises PlanError: it cannot be written, or
        is beside a plan.
        """
        if self.has_plan:
            raise PlanError("a comparison with a plan", "what one device computes", "save one without a mesh")
        self.record.save(path)

    def __str__(self) -> str:
        calls, count = len(self.record.calls), f"{self.tensors} tensors"
        count = f"{self.compared} of {count} compared" if self.compared else count
        head = f"{self.title}, {calls} call{'s' if calls > 1 else ''}: {count}"
        if self.equal:
            return f"{head}, equal but for rounding" if self.compared else head
        lines = [f"{head}; they part at", *map(str, self.parted[:_SHOWN])]
        return "\n  ".join([*lines, *([f"and {len(self.parted) - _SHOWN} more"] if len(self.parted) > _SHOWN else [])])


def compare(
    train_step: Callable[..., Any], args: Sequence[Any], mesh: Mesh | str | None = None,
    parallel: Strategy | Sequence[Strategy] | None = None, *, against: Callable[..., Any] | str | None = None,
    batches: Sequence[Sequence[Any]] = (), calls: int = 2, options: CaptureOptions | None = None,
    passes: Sequence[Pass] | None = None,
) -> Comparison:  # fmt: skip
    """Compare a step on one device with its plan, or with another step, op by op: the first tensors that differ by more
    than rounding.

    All ranks run in this process. Nothing of the user's changes. How far rounding carries is measured: one device runs
    again with results that are rounded otherwise. Ranks have the random numbers of one device.

    Args:
        train_step: the step.
        args: its arguments: those of one rank with `per_rank` semantics, of all ranks together with `global`.
        mesh: as in `plan`; None for no plan.
        parallel: as in `plan`.
        against: another step that takes `args`, or a file that `Comparison.save` wrote.
        batches: `args` of each other rank that has a batch of its own. By default they draw rows of the first.
        calls: how many calls are compared, all with the same arguments.
        options: how the step is captured.
        passes: what the program of a rank goes through; by default what it does in `compile`.

    Raises:
        CaptureError, PlanError: the step or the plan is refused; it has stages, or counts rows while it runs.

    Example:
        >>> print(ws.compare(train_step, (model, optimizer, batch), "dp=4", ws.DataParallel("fully_shard")))
        >>> ws.compare(train_step, (model, optimizer, batch)).save("today.json")
        >>> print(ws.compare(train_step, (model, optimizer, batch), against="today.json"))
    """
    if mesh is None and parallel is not None:
        raise PlanError("parallel= without a mesh", "both or none", 'give a mesh, such as "dp=4"')
    if calls < 1:
        raise PlanError(f"calls={calls}", "one or more")
    run = _Run(train_step, tuple(args), options)
    plan = None if mesh is None else make_plan(run.capture.graph, mesh, parallel)
    comparison = run.compare(plan, [*batches], calls, passes)
    if against is None or not comparison.equal:
        return comparison
    record = run.compare(None, [], calls, None).record if plan else comparison.record
    if isinstance(against, str):
        return _beside(record, Record.load(against), against)
    other = _Run(against, tuple(args), options).compare(None, [], calls, None).record
    return _beside(record, other, getattr(against, "__name__", "another step"))


class _Run:
    """A step that is captured, with its arguments."""

    def __init__(self, step: Callable[..., Any], args: tuple[Any, ...], options: CaptureOptions | None) -> None:
        if isinstance(step, CompiledStep):
            raise PlanError("the step is compiled", "the function itself", "compare what was given to compile")
        self.step, self.args = step, args
        self.capture: Capture = capture_step(step, args, {}, options)
        if self.capture.counts is not None:
            raise PlanError("the step counts rows while it runs", "sizes that are known", "compare what is before it")

    def compare(
        self, plan: Plan | None, batches: Sequence[Sequence[Any]], calls: int, passes: Sequence[Pass] | None
    ) -> Comparison:
        """Call it until tensors part. State that a call creates ends it too: another program follows."""
        with torch.random.fork_rng():
            return self._compare(plan, batches, calls, passes)

    def _compare(
        self, plan: Plan | None, batches: Sequence[Sequence[Any]], calls: int, passes: Sequence[Pass] | None
    ) -> Comparison:
        graph, axes, title = self.capture.graph, list[str](), "one device"
        averages = plan is None or plan.strategies is None or plan.strategies.options.reduce == "mean"
        dtype = getattr(torch, plan.options.reduce_dtype) if plan and plan.options.reduce_dtype else None
        if plan is not None:
            if plan.owners:
                raise PlanError("the plan has stages", "one program for all ranks", "compare it without Pipeline")
            graph, title = plan.decompose(graph), f"{plan.mesh} by {plan.strategy} beside one device"
            axes = [axis for axis in plan.mesh.names if any(axis in plan.storage[i.name].varies for i in graph.inputs)]
        count = prod(plan.mesh.axis_size(axis) for axis in axes) if plan else 1
        inputs = [self._inputs(graph.inputs, batch) for batch in self._batches(batches, count)]
        again = [[value.clone() for value in inputs[0]] for _ in range(ROUNDED)]
        devices, ranks = Devices(graph, [*inputs, *again], averages, dtype), None
        if plan is not None:
            passes = default_passes(plan.hardware) if passes is None else passes
            ranks = PlanOnRanks(plan, run_passes(partition(self.capture.graph, plan), passes), axes, inputs)
        record, parted, compared = list[tuple[OpResult, ...]](), list[Parted](), 0
        while len(record) < calls and not parted:
            results, outputs = devices.call()
            if ranks is not None:
                distances = ranks.call(results, devices.drawn)
                parted, compared = _first(len(record), results, distances), compared + len(distances)
            record.append(tuple(results))
            if not {out.target for out in graph.outputs if out.kind == "update"} <= {i.name for i in graph.inputs}:
                break
            put_state(devices.inputs, graph, outputs)
        tensors = sum(map(len, record))
        return Comparison(title, tuple(parted), compared, tensors, Record(tuple(record)), plan is not None)

    def _batches(self, batches: Sequence[Sequence[Any]], count: int) -> list[dict[str, Tensor]]:
        """Tensors of the arguments of each device, by name."""
        each: list[dict[str, Tensor]] = []
        for args in (self.args, *batches):
            call = take_apart((tuple(args), {}))
            named = zip(leaf_names(self.step, call.structure), call.leaves, strict=True)
            each.append({name: value.detach() for name, value in named if isinstance(value, Tensor)})
        forms = [{name: (value.shape, value.dtype) for name, value in batch.items()} for batch in each]
        if any(form != forms[0] for form in forms):
            raise PlanError("batches= has other tensors than args", "the same names, shapes and dtypes", "correct it")
        if len(each) not in (1, count):
            needed = f"{count - 1}: the arguments of each other rank that has a batch of its own"
            raise PlanError(f"batches= has {len(batches)} entries", needed, "correct it, or leave it out")
        for number in range(len(each), count):
            rows, generator = dict[int, Tensor](), torch.Generator().manual_seed(number)
            for size in {len(value) for value in each[0].values() if value.dim() and len(value)}:
                rows[size] = torch.randint(size, (size,), generator=generator)
                rows[size][-1] = rows[size][0]  # all rows in another order have the same mean
            values = each[0].items()
            each.append({n: v[rows[len(v)].to(v.device)] if v.dim() and len(v) else v for n, v in values})
        return each

    def _inputs(self, specs: Sequence[Input], batch: Mapping[str, Tensor]) -> list[Tensor]:
        """What the first call has for each input."""
        state, optimizers = self.capture.state, list(self.capture.state.optimizers.values())
        with Primed() as primed:
            for number, owner in {(i.optimizer, i.owner): i for i in specs if i.role is Role.STATE}:
                param, groups = state.params[owner].tensor, optimizers[number or 0].param_groups
                group = next(g for g, group in enumerate(groups) if any(p is param for p in group["params"]))
                primed.add(optimizers[number or 0], param, group, "cpu")
            return [torch.as_tensor(self._input(i, batch), dtype=i.meta.dtype).detach().clone() for i in specs]

    def _input(self, spec: Input, batch: Mapping[str, Tensor]) -> Any:
        state = self.capture.state
        if spec.role in (Role.BATCH, Role.CONST):
            return batch[spec.name] if spec.role is Role.BATCH else self.capture.graph.constants[spec.name]
        if spec.role is Role.GRAD:
            gradient = state.params[spec.owner].tensor.grad
            return torch.zeros(spec.meta.shape) if gradient is None else gradient
        if spec.role is Role.HYPER:
            hyper = next(h for h in self.capture.hypers if h.name == spec.name)
            option = list(state.optimizers.values())[hyper.optimizer].param_groups[hyper.group][hyper.key]
            return option if hyper.index is None else option[hyper.index]
        container, key = find_input(spec, state)
        return container[key]


def _parted(call: int, op: OpResult, far: Far) -> Parted:
    norm = op.norm or 1.0
    return Parted(call, op.phase, op.module, op.op, op.name, op.line, far[0] / norm, op.rounding / norm, far[1])


def _first(call: int, results: Sequence[OpResult], distances: Mapping[Key, Far]) -> list[Parted]:
    """The results that part though nothing before them does, in the order of the step."""
    behind, parted = set[str](), list[Parted]()
    for op in results:
        key, follows = (op.name, op.index), not behind.isdisjoint(op.reads)
        if key in distances and op.parts_at(distances[key][0]):
            parted += [] if follows else [_parted(call, op, distances[key])]
            follows = True
        behind.update([op.name] if follows else [])
    return parted


def _beside(record: Record, other: Record, name: str) -> Comparison:
    """Compare two captures, whose ops are matched by module, op and shape in the order of the step."""
    compared, parted, calls = 0, list[Parted](), list(zip(record.calls, other.calls, strict=False))
    for call, (ops, before) in enumerate(calls):
        distances, precise = dict[Key, Far](), {(op.name, op.index): op for op in ops}
        keys = ([(op.phase, op.module, op.op, op.shape, op.index) for op in each] for each in (ops, before))
        for block in SequenceMatcher(None, *keys, autojunk=False).get_matching_blocks():
            for op, was in zip(ops[block.a :][: block.size], before[block.b :][: block.size], strict=True):
                far = distance(op.sums_of_device(0), was.sums_of_device(0))
                dtypes = f"({op.dtype}, {was.dtype} in {name})" if op.dtype != was.dtype else ""
                distances[op.name, op.index] = far, dtypes
                precise[op.name, op.index] = replace(op, rounding=min(op.rounding, was.rounding))
        compared, parted = compared + len(distances), _first(call, list(precise.values()), distances)
        parted += _only(call, ops, before, f"not in {name}") + _only(call, before, ops, f"in {name} alone")
        if parted:
            break
    tensors = sum(len(ops) for ops, _ in calls)
    return Comparison(f"one device beside {name}", tuple(parted), compared, tensors, record)


def _only(call: int, ops: Sequence[OpResult], others: Sequence[OpResult], where: str) -> list[Parted]:
    """What a step returns or changes and the other does not, or in another shape."""
    ends = {(op.name, op.shape) for op in others if op.op in ("result", "update")}
    missing = [op for op in ops if op.op in ("result", "update") and (op.name, op.shape) not in ends]
    return [Parted(call, op.phase, op.module, op.op, "", "", float("inf"), 0.0, where) for op in missing]
