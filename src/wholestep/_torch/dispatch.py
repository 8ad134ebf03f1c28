"""A fast path for recording ops in a trace: `ProxyTorchDispatchMode` takes twice the time of the op itself.

Plain ops take the fast path. Constants, decomposed ops, reads of values and in-place views take torch's path. The
graphs are equal, node for node.
"""

# pyright: reportPrivateUsage=false
from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import cache, partial
from typing import Any, NamedTuple, cast

import torch
import torch.fx.traceback as fx_traceback
from torch._subclasses import fake_tensor
from torch.fx.experimental import proxy_tensor, sym_node

from .attributes import Form, forms_set
from .fake_results import fake_input, fake_result, is_plain, other_fake, snapshot
from .op_schemas import identity, is_op, set_operands
from .symbols import REMEMBERED, SYMBOLIC, is_size, quotient_in_cpp, remembered
from .types_shown import FAKE_TYPES

_DEVICE = torch.ops.prim.device.default
_SPECIAL = {
    _DEVICE,
    torch.ops.aten.lift_fresh.default,
    torch.ops.aten.is_nonzero.default,
    torch.ops.aten.size.default,
    torch.ops.aten.stride.default,
    torch.ops.aten.storage_offset.default,
}
_SPECIAL_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view}
_SEQUENCES: set[Any] = {tuple, list}
_VALUES = {int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}
_proxies: Any = proxy_tensor
_kind: Callable[[Any], Any] = type
_TAKES_NUMBERS = "should_allow_numbers_as_tensors"
TAPE = "wholestep_tape"  # an attribute of the mode of a trace: where it lists the ops that it records, or None
TapedOp = tuple[Any, tuple[Any, ...], Any, torch.fx.Node]
"""An op that was recorded, its positional arguments, its result, and its node."""
_SLOTS = "WeakTensorKeyDictionary"
_NEEDED = ("_ProxyTensor", "extract_val", "track_tensor_tree", "fetch_sym_proxy", "PythonKeyTracer", "set_meta", _SLOTS)


class _SlowPathError(Exception):
    """The op needs torch's dispatch."""


def quick_dispatch(
    forms: Mapping[Any, Any], at_op: Callable[[Any, Any, Any], tuple[Any, Any]]
) -> AbstractContextManager[None]:
    """Use the fast path of make_fx inside this context.

    Replaces `__torch_dispatch__` of its mode. `forms` are the decomposed ops; `at_op` exchanges real tensors in the
    arguments of an op. No fast path in a torch without the names that it needs.
    """
    place = proxy_tensor.ProxyTorchDispatchMode, "__torch_dispatch__"
    if not all(hasattr(_proxies, needed) for needed in _NEEDED):
        return forms_set([(*place, _without_real_tensors(at_op))])
    quick: list[tuple[Any, str, Form]] = [(*place, _fast_dispatch(forms, at_op)), *_with_sizes()]
    quick.append((fake_tensor.FakeTensorMode, "from_tensor", fake_input))
    quick += [(proxy_tensor, _SLOTS, _Slots), (proxy_tensor, "set_meta", _note_value)]
    if hasattr(fake_tensor, _TAKES_NUMBERS):
        quick.append((fake_tensor, _TAKES_NUMBERS, _takes_numbers))
    return forms_set(quick)


def _note_value(original: Form, proxy: Any, value: Any) -> Any:
    """Note the value of an input, without torch's other metadata."""
    if _kind(value) not in FAKE_TYPES or not is_plain(value):
        return original(proxy, value)
    proxy.node.meta["val"] = snapshot(value)
    return proxy


class _Slots:
    """The slots of a trace by the identity of tensors: torch's table makes and compares a weak reference each time."""

    def __init__(self, original: object) -> None:
        self._slots = dict[int, tuple[Any, Any]]()

    def get(self, tensor: Any, default: Any = None) -> Any:
        return self._slots.get(identity(tensor), (default,))[0]

    def __getitem__(self, tensor: Any) -> Any:
        return self._slots[identity(tensor)][0]

    def __contains__(self, tensor: Any) -> bool:
        return identity(tensor) in self._slots

    def __setitem__(self, tensor: Any, slot: Any) -> None:
        key = identity(tensor)
        self._slots[key] = slot, weakref.ref(tensor, lambda _: self._slots.pop(key))


def _without_real_tensors(at_op: Callable[[Any, Any, Any], tuple[Any, Any]]) -> Form:
    def dispatch(slow: Any, mode: Any, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        return slow(mode, op, types, *at_op(op, args, kwargs or {}))

    return dispatch


def _takes_numbers(original: Callable[[Any], bool], op: Any) -> bool:
    """Make torch compute `real.mul_(2)` on fake tensors, too; a trace must not change the real one."""
    return not op._schema.is_mutable and original(op)


def _with_sizes() -> list[tuple[Any, str, Form]]:
    """Make sizes constants for torch's path too, which has a node for each symbolic number."""

    def fetch(original: Any, tracer: Any) -> Callable[[Any], Any]:
        fetched = original(tracer)
        return lambda number: number if is_size(number) else fetched(number)

    def create_arg(original: Any, tracer: Any, value: Any) -> Any:
        return value if is_size(value) else original(tracer, value)

    def compute(original: Any, mode: Any, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if any(isinstance(value, SYMBOLIC) and not is_size(value) for value in args):
            return original(mode, function, types, args, kwargs)
        return function(*args, **kwargs)

    def equal(original: Any, number: Any, other: Any) -> Any:
        return number.wrap_bool(True) if number._expr is getattr(other, "_expr", 0) else original(number, other)

    return [
        (sym_node.SymNode, "eq", equal),
        (sym_node.SymNode, "truediv", quotient_in_cpp),
        *((sym_node.SymNode, n, partial(remembered, n)) for n in REMEMBERED if hasattr(sym_node.SymNode, n)),
        (_proxies, "fetch_sym_proxy", fetch),
        (_proxies.PythonKeyTracer, "create_arg", create_arg),
        (_proxies.ProxyTorchDispatchMode, "__sym_dispatch__", compute),
    ]


def _fast_dispatch(forms: Mapping[Any, Any], at_op: Callable[[Any, Any, Any], tuple[Any, Any]]) -> Form:
    """Return the dispatch function of one trace; its `slow` is torch's, also for nested traces."""
    outermost: Any = None
    ways: dict[int, tuple[_Way, Any]] = {}

    def dispatch(slow: Any, mode: Any, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        nonlocal outermost
        if op is _DEVICE and _kind(args[0]) in FAKE_TYPES:
            return torch.device("meta") if args[0].fake_mode.in_kernel_invocation else args[0].fake_device
        if outermost is None:
            outermost = mode
            vars(mode).setdefault(TAPE, None)
        if (way_and_form := ways.get(identity(op))) is None:
            way_and_form = ways[identity(op)] = _way_of(op), forms.get(op)
        way, form = way_and_form
        named: dict[str, Any] = kwargs or {}
        tape = getattr(mode, TAPE, None)
        try:
            if mode is not outermost or not way.is_plain or (form is not None and tape is not None):
                raise _SlowPathError
            tensors: list[tuple[Any, bool]] = []
            nodes = _nodes(mode, args, tensors), {key: _nodes(mode, value, tensors) for key, value in named.items()}
            if not _is_one_node(way, tensors):
                raise _SlowPathError
        except _SlowPathError:
            if tape is not None:
                tape.append(None)
            args, named = at_op(op, args, named)
            return slow(mode, op, types, args, named)
        if form is not None:
            with mode:
                instead = form(*args, **named)
            if instead is not NotImplemented:
                return instead
        node = _add_node(mode.tracer.graph, op, nodes, fx_traceback.current_meta.get("custom"))
        out = _record(mode.tracer, node, op, args, named)
        if tape is not None:
            tape.append((op, args, out, node))
        return out

    return dispatch


class _Way(NamedTuple):
    """How an op is recorded: as one node, if `is_plain` and no form stands for it. Where it `has_parts`, a device
    without a kernel of its own takes it apart; of one that `makes`, operands that are constants say nothing.
    """

    op: Any
    is_plain: bool
    has_parts: bool = False
    makes: bool = False


@cache
def _way_of(op: Any) -> _Way:
    if not is_op(op) or op in _SPECIAL or _SPECIAL_TAGS & set(op.tags):
        return _Way(op, False)
    has_parts: bool = torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd")
    aliases = any(argument.alias_info for argument in (*op._schema.arguments, *op._schema.returns))
    return _Way(op, True, has_parts, not aliases and torch.Tag.nondeterministic_seeded not in op.tags)


def _nodes(mode: Any, value: Any, tensors: list[tuple[Any, bool]]) -> Any:
    """Replace traced tensors in `value` by their nodes; note them in `tensors`, and whether they are constants."""
    kind = _kind(value)
    if kind in FAKE_TYPES:
        slot = mode.tracer.tensor_tracker.get(value)
        if slot is None:
            raise _SlowPathError
        tensors.append((value, slot.constant is not None))
        return slot.proxy.node
    if kind in _SEQUENCES:
        return kind([_nodes(mode, v, tensors) for v in value])
    if kind not in _VALUES and not is_size(value):
        raise _SlowPathError
    return bool(value) if kind is torch.SymBool else value


def _is_one_node(way: _Way, tensors: list[tuple[Any, bool]]) -> bool:
    """Whether an op of these tensors becomes one node, whose result is no constant."""
    constants = sum(is_constant for _, is_constant in tensors)
    if constants and not (way.makes and constants < len(tensors)):
        return False
    return not way.has_parts or (bool(tensors) and _has_kernel(way.op, tensors[0][0].device.type))


@cache
def _has_kernel(op: Any, device: str) -> bool:
    """Whether a device has a kernel of its own for an op: autograd then does not take it apart."""
    key: Any = torch._C._parse_dispatch_key(torch._C._dispatch_key_for_device(device))
    return torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key)


def _record(tracer: Any, node: torch.fx.Node, op: Any, args: Any, kwargs: Any) -> Any:
    with torch._C.DisableTorchFunction():  # in a backward, modes would see what torch computes for itself
        out: Any = fake_result(op, args, kwargs)
        if _kind(out) in FAKE_TYPES:
            node.meta["val"] = snapshot(out)
            track(tracer, node, out)
        elif _kind(out) in _SEQUENCES and all(_kind(v) in FAKE_TYPES for v in out):
            for index, value in enumerate(out):
                item = _add_node(tracer.graph, operator.getitem, ((node, index), {}), node.meta.get("custom"))
                item.meta["val"] = snapshot(value)
                track(tracer, item, value)
            node.meta["val"] = _kind(out)(snapshot(value) for value in out)
        elif out is not None:
            _proxies.track_tensor_tree(out, torch.fx.Proxy(node, tracer), constant=None, tracer=tracer)
    return out


def _add_node(graph: Any, op: Any, operands: tuple[Any, Any], notes: Any) -> torch.fx.Node:
    """Append a node with the annotations of `note_on_nodes`, and without torch's other metadata."""
    name = _first_name(getattr(op, "overloadpacket", op).__name__)
    node: torch.fx.Node = graph.create_node("call_function", op, (), {}, name)
    set_operands(node, *operands)
    if notes:
        node.meta["custom"] = notes
    return node


def same_notes(node: torch.fx.Node, other: torch.fx.Node) -> bool:
    """Return whether two nodes have the same annotations."""
    return node.meta.get("custom") == other.meta.get("custom")


def add_twin(node: torch.fx.Node, operands: tuple[Any, Any], alias: torch.fx.Node | None) -> torch.fx.Node:
    """Append a node like one of a plain result, with other operands; its value has the storage of that of `alias`."""
    twin = _add_node(node.graph, node.target, operands, node.meta.get("custom"))
    twin.meta["val"] = other_fake(node.meta["val"], alias.meta["val"] if alias is not None else None)
    return twin


@cache
def _first_name(op: str) -> str:
    """The name that a graph gives to its first node of an op."""
    return cast(Any, torch.fx.Graph())._target_to_str(op)


def track(tracer: Any, node: torch.fx.Node, value: Any) -> None:
    """Let `node` be the node of a fake tensor from now on."""
    tracer.tensor_tracker[value] = _proxies._ProxyTensor(torch.fx.Proxy(node, tracer), None)
