"""Which sizes of the batch are symbols of a capture, and the proof that a capture with symbols is right."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import Node

from ..backend.build import BACKENDS
from ..backend.rank_binding import bound_calls
from ..capture.call_structure import put_together
from ..capture.capture import Capture, at_other_sizes
from ..capture.effects import SizesFixedError
from ..capture.fake_inputs import dynamic_dims
from ..distributed.activity import ACTIVITY
from ..distributed.launch import World
from ..errors import PlanError
from ..graph import meta
from ..graph.graph import LocalGraph, Role, TrainGraph
from ..graph.loop import loop_of, with_bodies
from ..graph.meta import meta_of, row_major
from ..graph.sizes_in_graph import at_sizes, planned_at
from ..sizes import evaluator
from ..tuning import TUNING
from .compile_options import StepOptions
from .size_check import Dims
from .step_inputs import StepInputs, batch_shapes

ASYNC = "async tensor parallelism fuses products by their size"
_MOST_TRIED = 33  # a mesh of up to 32 ranks divides one of so many sizes in a row


@dataclass
class SymbolicSizes:
    """The dims of batch tensors of one step that are captured as symbols: those that had two sizes, and with them those
    that are likely to (`_likely`), or those that `dynamic` names; not those whose size a capture has fixed. `log` gets
    why, of a likely dim once it had two sizes.

    What is made with symbols is right only if nothing depends on the sizes that symbols do not show: a program of the
    user that asks `isinstance(n, int)`, say. So what it is for known sizes is compared, to the letter, with what a
    capture for these gives.
    """

    options: StepOptions
    world: World
    log: Callable[[str], None]
    varying: dict[str, set[int]] = field(default_factory=dict[str, set[int]])
    fixed: dict[tuple[str, int], str] = field(default_factory=dict[tuple[str, int], str])
    captures: int = 0
    _guessed: set[tuple[str, int]] = field(default_factory=set[tuple[str, int]])
    _unsaid: dict[tuple[str, int], str] = field(default_factory=dict[tuple[str, int], str])

    def note(self, dims: Dims) -> None:
        """These dims had two sizes."""
        if isinstance(self.options.user.dynamic, bool):
            for name, changed in dims.items():
                self.varying.setdefault(name, set()).update(changed)
                for place in {(name, dim) for dim in changed} & self._unsaid.keys():
                    del self.fixed[place]
                    if where := self._unsaid.pop(place):
                        self._fix(place, where)
                for dim in changed if self.options.user.dynamic and self.why_not else ():
                    self._fix((name, dim), self.why_not)

    @property
    def why_not(self) -> str:
        """Why no size can be a symbol with these options; empty if they can."""
        user = self.options.user
        if user.dynamic is False:
            return "dynamic=False"
        if type(self.options.backend) not in BACKENDS.values():
            return f"backend {self.options.backend.name!r} may read sizes"
        return ASYNC if self.options.strategies.async_axes(self.world.mesh) else ""

    def chosen(self, inputs: StepInputs) -> dict[str, tuple[int, ...]]:
        """The dims to capture as symbols for a call."""
        shapes = batch_shapes(inputs)
        self._check_names(shapes)
        if self.options.user.paddings and self.why_not:
            needed = "sizes that are symbols"
            raise PlanError(f"pad_to: {self.why_not}", needed, "leave out pad_to, or what stands against symbols")
        if self.why_not or self.captures >= TUNING.most_captures:
            return {}
        requested = {name: self._asked(name) for name in shapes}
        free = self._free(inputs, shapes, requested)
        self._guessed = set()
        if not free or not self.varying:
            return free
        pairs = zip(inputs.names, inputs.leaves, strict=True)
        likely = {name: _likely(leaf) | {*requested[name]} for name, leaf in pairs if name in shapes}
        extended = self._free(inputs, shapes, likely)
        self._guessed = {(n, dim) for n, dims in extended.items() for dim in dims if dim not in free.get(n, ())}
        return extended

    def _free(
        self, inputs: StepInputs, shapes: Mapping[str, tuple[int, ...]], requested: Mapping[str, Collection[int]]
    ) -> dict[str, tuple[int, ...]]:
        """Those of the dims that no capture has fixed, and whose size can be a symbol."""
        free: dict[str, tuple[int, ...]] = {}
        for name, leaf in zip(inputs.names, inputs.leaves, strict=True):
            if numbers := requested.get(name):
                shaped = meta.with_shape(meta_of(leaf), shapes[name])
                dims = (dim for dim in sorted(numbers) if dim < len(shaped.shape) and (name, dim) not in self.fixed)
                free[name] = dynamic_dims(shaped, tuple(dims))
        return {name: dims for name, dims in free.items() if dims}

    def _check_names(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise PlanError if `dynamic` names what is no dim of a batch tensor; warn if it is not honoured."""
        dynamic = self.options.user.dynamic
        named: Mapping[str, Sequence[int]] = {} if isinstance(dynamic, bool) else dynamic
        for key, dims in named.items():
            of = [shape for name, shape in shapes.items() if name == key or name.startswith((f"{key}[", f"{key}."))]
            if not of or any(not 0 <= dim < len(shape) for shape in of for dim in dims):
                problem = f"dynamic={{{key!r}: {tuple(dims)}}}"
                tensors = ", ".join(f"{name} of {len(shape)} dims" for name, shape in shapes.items()) or "none"
                raise PlanError(problem, f"dims of tensors that the step is given: {tensors}", "correct it")
            if self.why_not:
                warnings.warn(f"dynamic={{{key!r}: ...}} has no effect: {self.why_not}", stacklevel=2)

    def _asked(self, name: str) -> Collection[int]:
        dynamic = self.options.user.dynamic
        padded = {pad.dims[name] for pad in self.options.user.paddings if name in pad.dims}
        if isinstance(dynamic, bool):
            return padded | self.varying.get(name, set())
        named = (dims for key, dims in dynamic.items() if name == key or name.startswith((f"{key}[", f"{key}.")))
        return padded | set(next(named, ()))

    def left(self, captured: Capture) -> bool:
        """Whether a capture has symbols that vary: sizes that it fixed are captured one by one."""
        text, timeout_s = "compiling a region for other sizes", self.options.user.agree_timeout_s
        captured.sized.record.say, captured.sized.record.busy = self.log, lambda: ACTIVITY.doing(text, timeout_s)
        fixed = captured.sized.fixed()
        for place, where in fixed.items():
            self._fix(place, where)
        return any(place not in fixed and place not in self._guessed for place in captured.sized.record.dims.values())

    def failed(self, dims: Mapping[str, Sequence[int]], error: Exception) -> bool:
        """A capture with these dims as symbols failed. True if it may do with fewer: those of which one size is known
        are left out. Else their sizes are captured one by one.
        """
        if self._guessed:
            left_out = dict.fromkeys(self._guessed, "")
            self.fixed.update(left_out)
            self._unsaid.update(left_out)
            return True
        where = getattr(error, "where", "") or ""
        problem = getattr(error, "found", f"{type(error).__name__}: {error}").splitlines()[0]
        for name, numbers in dims.items():
            for dim in numbers:
                self._fix((name, dim), f"{where}: {problem}" if where else problem)
        return False

    def _fix(self, place: tuple[str, int], where: str) -> None:
        if place not in self.fixed:
            self.fixed[place] = where
            if place in self._guessed:
                self._unsaid[place] = where
            else:
                self.log(f"each size of dim {place[1]} of {place[0]} is captured: {where}")


def _likely(leaf: Any) -> set[int]:
    """The dims of a batch tensor that vary with any other of the batch: rows, and all dims of whole numbers, which are
    texts, classes and counts. What is found fixed costs nothing.
    """
    counts = not leaf.is_floating_point() and not leaf.is_complex() and leaf.dtype is not torch.bool
    return set(range(leaf.dim() if counts else min(leaf.dim(), 1)))


def sizes_at(captured: Capture, other: Capture) -> dict[str, int] | None:
    """The sizes of the symbols of a capture in the batch that another one was made for; None if it is not for that."""
    metas = {spec.name: spec.meta for spec in other.graph.inputs if spec.role is Role.BATCH}
    shapes = {name: tuple(map(int, tensor.shape)) for name, tensor in metas.items()}
    symbolic = {name for name, _ in captured.sized.record.dims.values()}
    if any(metas[name].stride != row_major(metas[name].shape) for name in symbolic):
        return None
    sizes = _sizes_in(captured, shapes)
    return sizes if sizes is not None and captured.sized.hold(sizes) else None


def captured_for(inputs: StepInputs, dims: Dims, earlier: Sequence[Capture]) -> Capture | None:
    """A capture with symbols for these dims that applies to a call, though its program does not; None without one."""
    requested = {(name, dim) for name, tensor_dims in dims.items() for dim in tensor_dims}
    for captured in earlier:
        sizes = None if captured.symbols is None else _sizes_in(captured, batch_shapes(inputs))
        if captured.symbols is not None and sizes is not None and requested <= {*captured.symbols.record.dims.values()}:
            return at_other_sizes(captured, sizes)
    return None


def _sizes_in(captured: Capture, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int] | None:
    """The sizes of the symbols of a capture in a batch of these shapes; None if another size is not that of it."""
    places = captured.sized.record.dims
    of_batch = [spec for spec in captured.graph.inputs if spec.role is Role.BATCH]
    sizes = [(spec.name, dim, int(size)) for spec in of_batch for dim, size in enumerate(spec.meta.shape)]
    if any(shapes[name][dim] != size for name, dim, size in sizes if (name, dim) not in places.values()):
        return None
    return {symbol: shapes[name][dim] for symbol, (name, dim) in places.items()}


def other_sizes(captured: Capture, ranks: int, far: bool = False, smaller: bool = False) -> dict[str, int]:
    """Sizes for which the program that was just made is right too, near those of the capture or `far` from them: none
    is what it was made for, where that may be. Where possible the `ranks` of the mesh cannot share any of them equally:
    that is the form of programs for all sizes. `smaller`: a budget of memory may not allow more.
    """
    hints, terms = captured.sized.record.hints, [guard.text for guard in captured.sized.guards()]
    fixed, places = captured.sized.fixed(), captured.sized.record.dims
    holds = evaluator(terms, list(hints))
    free = [symbol for symbol in hints if places[symbol] not in fixed]
    near, multiples = [(1, added) for added in range(1, _MOST_TRIED)], [(times, 0) for times in (2, 3, 4)]
    changes = multiples[::-1] + near[::-1] if far else near + multiples
    less = [(1, -less) for less in range(1, _MOST_TRIED)]
    changes = less + changes if smaller else changes + less
    alike = dict.fromkeys(hints[symbol] for symbol in free)  # rows may be bound where lengths are not
    possible: list[dict[str, int]] = []
    for moved in (free, *([s for s in free if hints[s] == size] for size in alike)):
        for times, added in changes:
            sizes = {**hints, **{symbol: times * hints[symbol] + added for symbol in moved}}
            if min(sizes.values()) > 1 and all(holds(*sizes.values())):
                if all(math.gcd(size, ranks) == 1 for size in sizes.values()):
                    return sizes
                possible.append(sizes)
    if possible:
        return possible[0]
    raise SizesFixedError("what was compared of sizes leaves no others near these")


def with_row_major(inputs: StepInputs, captured: Capture) -> StepInputs:
    """A call with row-major batch tensors where a capture has symbols for their sizes, as its program gets them."""
    names = {name for name, _ in captured.sized.record.dims.values()}
    pairs = zip(inputs.names, inputs.leaves, strict=True)
    leaves = tuple(
        leaf.detach().contiguous().requires_grad_(leaf.requires_grad) if n in names else leaf for n, leaf in pairs
    )
    args, kwargs = put_together(inputs.structure, leaves)
    return replace(inputs, args=args, kwargs=kwargs, leaves=leaves)


def refuse_other_graph(symbolic: TrainGraph, sizes: Mapping[str, int], fixed: TrainGraph) -> None:
    """Raise SizesFixedError unless a graph with symbols is, at these sizes, the graph captured for them."""
    filled = planned_at(symbolic, sizes)
    ours, theirs = (str(graph).splitlines() for graph in (filled, fixed))
    if ours != theirs:
        differing = (line for line in theirs if line not in {*ours} and line.strip().startswith("%"))
        where = meta.line_behind(fixed.graph, next(differing, ""))
        raise SizesFixedError("with symbols for sizes, another graph is captured", where)


@dataclass(frozen=True)
class PlannedFor:
    """The program that is planned for a batch of known sizes, by symbol: what one with symbols has to be there."""

    sizes: dict[str, int]
    local: LocalGraph

    def refuse_other(self, local: LocalGraph, world: World) -> None:
        """Raise SizesFixedError unless a program with symbols is, at these sizes, this one."""
        if _bound_lines(local, self.sizes, world.coordinate) != _bound_lines(self.local, self.sizes, world.coordinate):
            raise SizesFixedError("with symbols for sizes, another program is planned")

    def refuse_other_after(self, finish: Callable[[LocalGraph], LocalGraph], local: LocalGraph, world: World) -> None:
        """Raise SizesFixedError unless the same holds after the passes that `finish` applies, which made `local` of the
        program with symbols. They order ops by prices: an order is not compared.
        """
        mine = _bound_lines(local, self.sizes, world.coordinate)
        if sorted(mine) != sorted(_bound_lines(finish(self.local), self.sizes, world.coordinate)):
            raise SizesFixedError("with symbols for sizes, passes make another program")


def _bound_lines(local: LocalGraph, sizes: Mapping[str, int], coordinate: Mapping[str, int]) -> list[str]:
    """The calls of this rank with their results, at these sizes; those of loops, and of other calls, after them."""
    lines: list[str] = []
    for program in (local, *(local.across or ())):
        graph = bound_calls(program.graph, coordinate)
        at_sizes(graph, sizes)
        lines += [_line(node) for node, _ in with_bodies(graph)]
    return lines


def _line(node: Node) -> str:
    loop = loop_of(node)
    return f"{node.format_node()} {meta.tensors(node)} {loop.pieces if loop else ''}"
