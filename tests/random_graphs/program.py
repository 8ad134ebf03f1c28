"""A random step as a graph: calls, then gradients of a loss and an update of some inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from random import Random
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from tests.random_graphs.builder import Builder, Given, Step, is_real, tensors_of
from tests.random_graphs.choices import WEIGHTS
from tests.random_graphs.table import pointwise, tabled
from wholestep import _torch
from wholestep.errors import GraphError
from wholestep.graph import meta
from wholestep.graph.graph import Input, Output, Role, TrainGraph
from wholestep.graph.meta import meta_of
from wholestep.graph.nodes import function_of, is_mutating
from wholestep.graph.ops import GRAD_READY
from wholestep.graph.verify import check_train_graph

CHOICES = {**WEIGHTS, tabled: 22, pointwise: 6}
NOISE = 1e-13
STEADY = 1e-10


@dataclass(frozen=True)
class Program:
    """A graph, the value of each of its inputs by name, whether it works in less than double precision."""

    graph: TrainGraph
    values: dict[str, Tensor]
    coarse: bool = False


@dataclass
class _Ending:
    """What is computed from the values of a program: which gradients, and how inputs are updated by them."""

    ends: Sequence[int]
    params: Sequence[int]
    style: str
    marked: bool
    clipped: bool
    momentum: dict[int, int] = field(default_factory=dict)
    rate: int = -1


@lru_cache(maxsize=4)
def program(seed: int) -> Program:
    """The program of a seed: the first one, of those that it leads to, whose results rounding does not change much."""
    rng = Random(seed)
    while True:
        found = _attempt(rng.randrange(2**60))
        if found is not None and steady(found):
            return found


def _attempt(seed: int) -> Program | None:
    rng = Random(seed)
    b = Builder(rng, torch.Generator().manual_seed(seed % 2**31))
    wanted, names, weights = rng.randint(2, 7), list(CHOICES), list(CHOICES.values())
    for _ in range(4 * wanted):
        if sum(isinstance(item, Step) for item in b.items) < wanted:
            b.attempt(rng.choices(names, weights)[0])
    ending = _ending(b)
    if ending is None:
        return None
    try:
        return _traced(b, ending)
    except (RuntimeError, ValueError, IndexError, TypeError, GraphError):
        return None  # an op without a derivative, or that a trace refuses


def _ending(b: Builder) -> _Ending | None:
    """Random results, and for most programs a loss, its gradients and an update."""
    used: set[int] = set()
    numbered = 0
    made: list[int] = []
    for item in b.items:
        if isinstance(item, Given):
            numbered += 1
            continue
        used |= set(item.args)
        count = len(list(tensors_of(item.fn(*(b.values[a] for a in item.args)))))
        made += range(numbered, numbered + count)
        numbered += count
    if not made:
        return None
    ends = [i for i in made if i not in used]
    ends += b.rng.sample(made, min(len(made), b.rng.randint(0, 1)))
    smooth = any(is_real(b.values[i]) and b.values[i].numel() for i in ends)
    params = [g.number for g in b.givens if is_real(g.value)]
    style = b.rng.choice(["none", "none", "grads", "sgd", "sgd", "foreach"]) if smooth and params else "none"
    chosen = sorted(b.rng.sample(params, b.rng.randint(1, min(3, len(params))))) if style != "none" else []
    ending = _Ending(list(dict.fromkeys(ends)), chosen, style, b.rng.random() < 0.6, b.rng.random() < 0.3)
    if style in ("sgd", "foreach") or ending.marked:
        for given in (g for g in b.givens if g.number in chosen):
            given.role = Role.PARAM
    if style in ("sgd", "foreach"):
        for given in [g for g in b.givens if g.number in chosen and b.rng.random() < 0.5]:
            momentum = torch.randn(given.value.shape, dtype=torch.float64, generator=b.source)
            ending.momentum[given.number] = b.give(momentum, Role.STATE, given.name)
        ending.rate = b.give(torch.tensor(0.1, dtype=torch.float64), Role.HYPER)
    return ending


# -- tracing ---------------------------------------------------------------------------
def _traced(b: Builder, ending: _Ending) -> Program | None:
    outputs: list[Output] = []

    def run(*tensors: Tensor) -> Any:
        outputs.clear()
        made, kinds = _run(b, ending, tensors)
        outputs.extend(kinds)
        return made

    given = [g.value for g in b.givens]
    module = _torch.trace(run, given, {})
    if any(n.op == "call_function" and is_mutating(n) for n in module.graph.nodes):
        module = _torch.functionalize(module, given)
    graph = module.graph
    if any(n.op == "get_attr" for n in graph.nodes):
        return None
    inputs = [
        Input(g.name, g.role, meta_of(g.value), g.owner, "momentum" if g.owner else "", g.role is Role.PARAM)
        for g in b.givens
    ]
    made = finished(graph, inputs, outputs)
    values = {g.name: g.value for g in b.givens}
    nodes = [t for n in made.graph.nodes for t in meta.tensors(n) if t is not None]
    known = all(isinstance(n, int) and not t.dtype.is_complex for t in nodes for n in t.shape)
    if not known or not any(n.op == "call_function" for n in made.graph.nodes):
        return None
    coarse = any(t.dtype.is_floating_point and t.dtype != torch.float64 for t in nodes)
    return Program(made, {i.name: values[i.name] for i in made.inputs}, coarse)


def finished(graph: Graph, inputs: Sequence[Input], outputs: Sequence[Output]) -> TrainGraph:
    """A checked graph without what nothing needs; state goes with its parameter."""
    graph.eliminate_dead_code(is_impure_node=lambda n: n.op in ("placeholder", "output"))
    nodes = [n for n in graph.nodes if n.op == "placeholder"]
    targets = {o.target for o in outputs if o.kind == "update"}
    kept: list[Input] = []
    for given, node in zip(inputs, nodes, strict=True):
        owned = any(i.owner == given.name for i in inputs)
        if node.users or given.name in targets or owned:
            kept.append(given)
            node.name = given.name
        else:
            graph.erase_node(node)
    train = TrainGraph(graph, tuple(kept), tuple(outputs))
    check_train_graph(train)
    return train


def _run(b: Builder, ending: _Ending, tensors: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], list[Output]]:
    values: list[Tensor] = []
    feed = iter(tensors)
    names = {g.number: g.name for g in b.givens}
    _torch.note_on_nodes(backward=False)
    for item in b.items:
        if isinstance(item, Given):
            value = next(feed)
            values.append(value.detach().requires_grad_() if len(values) in ending.params else value)
        else:
            values.extend(tensors_of(item.fn(*(values[a] for a in item.args))))
    results = [values[i].detach() if values[i].is_floating_point() else values[i] for i in ending.ends]
    kinds = [Output("result", f"result{i}") for i in range(len(results))]
    if ending.style == "none":
        return tuple(results), kinds
    grads = _gradients([values[i] for i in ending.ends], [values[p] for p in ending.params])
    marks = [GRAD_READY(g, names[p]) if ending.marked else g for p, g in zip(ending.params, grads, strict=True)]
    _torch.note_on_nodes(backward=False)
    if ending.clipped:
        total = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(marks)))
        results, kinds = [*results, total], [*kinds, Output("result", "norm")]
        marks = list(torch._foreach_mul(marks, (1.0 / (total + 1e-6)).clamp(max=1.0)))
    if ending.style == "grads":
        more = [Output("result", f"grad{i}") for i in range(len(marks))]
        return (*results, *marks), [*kinds, *more]
    updates = _updates(ending, [values[p].detach() for p in ending.params], marks, values)
    made = [Output("update", names[i]) for i in updates]
    return (*results, *updates.values()), [*kinds, *made]


def _gradients(ends: Sequence[Tensor], params: Sequence[Tensor]) -> list[Tensor]:
    total = sum(v.square().mean() + v.sum() for v in ends if v.requires_grad and v.numel())
    if not isinstance(total, Tensor):
        raise NotImplementedError
    _torch.note_on_nodes(backward=True)
    found = torch.autograd.grad(total, params, allow_unused=True)
    if all(g is None for g in found):
        raise NotImplementedError
    return [torch.zeros_like(p) if g is None else g for g, p in zip(found, params, strict=True)]


def _updates(
    ending: _Ending, params: Sequence[Tensor], grads: Sequence[Tensor], values: Sequence[Tensor]
) -> dict[int, Tensor]:
    """New values of inputs, by number: SGD with momentum where there is some."""
    steps, out = list(grads), dict[int, Tensor]()
    for position, p in enumerate(ending.params):
        if p in ending.momentum:
            steps[position] = out[ending.momentum[p]] = values[ending.momentum[p]] * 0.9 + grads[position]
    rate = values[ending.rate]
    if ending.style == "foreach":
        moved = torch._foreach_add(params, torch._foreach_mul(steps, rate), alpha=-1.0)
    else:
        moved = [p - rate * s for p, s in zip(params, steps, strict=True)]
    return {**out, **dict(zip(ending.params, moved, strict=True))}


# -- rounding ------------------------------------------------------------------------------
_EXACT = ("view", "reshape", "t", "transpose", "permute", "expand", "squeeze", "unsqueeze", "slice", "select", "split",
          "clone", "detach", "alias", "cat", "stack", "amax", "amin", "max", "min", "sort", "topk", "gather", "where",
          "index", "index_select", "flip", "roll", "tril", "triu", "relu", "abs", "neg", "constant_pad_nd", "_to_copy",
          "_unsafe_view", "unbind", "split_with_sizes", "repeat", "scatter", "index_put", "embedding", "maximum",
          "minimum", "clamp", "masked_fill", "zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "sign",
          "threshold_backward", "diagonal", "unfold", "full", "kthvalue", "median", "cummax", "cummin",
          "max_pool2d_with_indices", "grad_ready", "scatter_add", "mode", "zeros", "ones", "copy")  # fmt: skip


def steady(found: Program) -> bool:
    """True when results are finite and stay what they are, up to rounding, where every call rounds otherwise."""
    nodes = [n for n in found.graph.graph.nodes if n.op == "placeholder"]
    whole = _shaken(found.graph, dict(zip(nodes, found.values.values(), strict=True)), None)
    if not all(bool(torch.isfinite(v.double()).all()) for v in whole):
        return False
    for seed in range(2):
        source = torch.Generator().manual_seed(seed)
        given = {n: _noisy(v, source) for n, v in zip(nodes, found.values.values(), strict=True)}
        try:
            shaken = _shaken(found.graph, given, source)
        except RuntimeError:  # a value out of the range that a call takes
            return False
        if any(error(a, b) > (1e-5 if found.coarse else STEADY) for a, b in zip(shaken, whole, strict=True)):
            return False
    return True


def _shaken(train: TrainGraph, env: dict[Node, Any], source: torch.Generator | None) -> list[Tensor]:
    for node in train.graph.nodes:
        if node.op == "call_function":
            args, kwargs = map_arg((node.args, node.kwargs), env.__getitem__)
            made: Any = function_of(node)(*args, **kwargs)
            name = getattr(getattr(node.target, "_overloadpacket", None), "__name__", "")
            exact = source is None or not name or name in _EXACT or name.startswith("_foreach_max")
            env[node] = made if exact else _every(made, source)
    return [env[n] for _, n in train.results()]


def _every(made: Any, source: torch.Generator) -> Any:
    if isinstance(made, (list, tuple)):
        return [_every(m, source) for m in made]
    return _noisy(made, source) if isinstance(made, Tensor) else made


def _noisy(value: Tensor, source: torch.Generator) -> Tensor:
    if value.dtype != torch.float64 or not value.numel():
        return value
    noise = torch.randn(value.shape, generator=source, dtype=torch.float64) * NOISE
    return value * (1 + noise) if value.is_contiguous() else torch.empty_like(value).copy_(value * (1 + noise))


def error(found: Tensor, expected: Tensor) -> float:
    """Largest difference over the largest expected magnitude (at least 1); infinite where they do not compare."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return float("inf")
    if torch.equal(found, expected):
        return 0.0
    if not expected.is_floating_point():
        return float("inf")
    found, expected = found.double(), expected.double()
    worst = ((found - expected).abs().max() / expected.abs().max().clamp_min(1.0)).item()
    return worst if worst == worst else float("inf")
