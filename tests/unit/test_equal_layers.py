"""Equal layers of a captured step: found, and left out so that what remains is the step of the smaller model."""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Node
from torch.fx.node import map_arg
from torch.nn import functional as F
from torch.utils import checkpoint as checkpoints

import wholestep as ws
from tests.simulate import run_one
from tests.steps import mean_square as mean
from wholestep.errors import GraphError
from wholestep.graph import meta
from wholestep.graph.folding.fold import fold
from wholestep.graph.folding.repeats import Repeats, find_repeats, why_not
from wholestep.graph.graph import Role
from wholestep.hardware.hardware import Hardware
from wholestep.planner.folded_step import FoldedStep, layers_alike

DEEP, SHALLOW, WIDTH, WORDS = 6, 3, 8, 12
checkpoint: Any = vars(checkpoints)["checkpoint"]


class Block(nn.Module):
    """Attention and a gated product, each added to what came in."""

    def __init__(self, width: int = WIDTH, gated: bool = True, constant: bool = False) -> None:
        super().__init__()
        self.one, self.two = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.gated, self.constant = gated, constant
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        q, k, v = self.qkv(self.one(x)).chunk(3, -1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        made = self.up(self.two(x)) + (torch.tensor([2.0], dtype=x.dtype) if self.constant else 0)
        return x + self.down(F.gelu(made) if self.gated else made.relu())


class Words(nn.Module):
    """A small language model of `count` blocks; `order` says in which order they run."""

    def __init__(self, count: int, order: Callable[[int], list[int]] = lambda n: list(range(n)), **odd: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        constant = bool(odd.get("constant"))
        self.layers = nn.ModuleList(Block(gated=odd.get("differs") != i, constant=constant) for i in range(count))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        if odd.get("tied"):
            self.head.weight = self.embed.weight
        if odd.get("frozen"):
            self.embed.weight.requires_grad_(False)
        self.order = order(count) * (2 if odd.get("twice") else 1)
        self.again, self.skip = bool(odd.get("again")), bool(odd.get("skip"))

    def forward(self, words: Tensor) -> Tensor:
        first = x = self.embed(words)
        for i in self.order:
            made = checkpoint(self.layers[i], x, use_reentrant=False) if self.again else self.layers[i](x)
            x = made + first if self.skip else made
        return self.head(self.norm(x))


def _loss(model: nn.Module, words: Tensor) -> Tensor:
    return F.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())


def plain(model: nn.Module, optimizer: torch.optim.Optimizer, words: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = _loss(model, words)
    loss.backward()
    optimizer.step()
    return loss.detach()


def clipped(model: nn.Module, optimizer: torch.optim.Optimizer, words: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = _loss(model, words)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    return loss.detach()


def by_hand(model: nn.Module, optimizer: torch.optim.Optimizer, words: Tensor) -> Tensor:
    """Clipping as a chain of additions, over the parameters one by one."""
    optimizer.zero_grad()
    loss = _loss(model, words)
    loss.backward()
    total = torch.zeros((), dtype=words.dtype if words.is_floating_point() else torch.float64)
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    for grad in grads:
        total = total + grad.square().sum()
    for grad in grads:
        grad.mul_(torch.clamp(0.1 / (total.sqrt() + 1e-6), max=1.0))
    optimizer.step()
    return loss.detach()


def micro_batches(model: nn.Module, optimizer: torch.optim.Optimizer, words: Tensor) -> Tensor:
    optimizer.zero_grad()
    losses = [_loss(model, part) / 2 for part in words.chunk(2)]
    for part in words.chunk(2):
        (_loss(model, part) / 2).backward()
    optimizer.step()
    return torch.stack(losses).sum().detach()


def decayed(model: nn.Module, optimizer: torch.optim.Optimizer, words: Tensor) -> Tensor:
    """A penalty on all parameters at once, outside of the layers."""
    optimizer.zero_grad()
    loss = _loss(model, words) + 0.01 * sum(p.square().sum() for p in model.parameters())
    loss.backward()
    optimizer.step()
    return loss.detach()


Make = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum-foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=False),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "amsgrad-fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True, amsgrad=True),
}


def build(count: int, **odd: Any) -> nn.Module:
    torch.manual_seed(0)
    return Words(count, **odd).double()


def words() -> Tensor:
    torch.manual_seed(1)
    return torch.randint(0, WORDS, (4, 6))


@lru_cache(maxsize=16)
def step_of(count: int, step: Any = plain, make: Make = OPTIMIZERS["adamw-fused"], **odd: Any) -> ws.TrainGraph:
    model = build(count, **odd)
    return ws.capture(step, model, make(model.parameters()), words())


def without_number(name: str) -> str:
    return re.sub(r"layers\.\d+", "layers.*", name)


def unnamed(node: Node) -> Any:
    return tuple(without_number(a) if isinstance(a, str) else a for a in node.args), node.kwargs


def structure(graph: ws.TrainGraph) -> list[object]:
    """All that a graph says, but for the names of its nodes and the numbers of its layers."""
    number = {node: i for i, node in enumerate(graph.graph.nodes)}
    return [
        (
            n.op, str(n.target) if n.op == "call_function" else "", repr(map_arg(unnamed(n), number.__getitem__)),
            meta.tensors(n), without_number(meta.module_path(n)), meta.is_backward(n),
        )
        for n in graph.graph.nodes
    ]  # fmt: skip


def found_in(graph: ws.TrainGraph) -> Repeats:
    repeats = find_repeats(graph)
    assert repeats is not None, why_not(graph)
    return repeats


def check_against_capture(deep: ws.TrainGraph, shallow: ws.TrainGraph, blocks: int = SHALLOW) -> None:
    """Op for op, in what they read, in inputs, outputs and losses; the smaller one unfolded is the deep one."""
    check_equal(fold(deep, found_in(deep), blocks), shallow)
    few = find_repeats(shallow)
    if few is not None:
        long = fold(shallow, few, found_in(deep).count + few.count - blocks)
        check_equal(long, deep)
        calls = [[node.name for node in one.graph.nodes if node.op != "placeholder"] for one in (long, deep)]
        assert calls[0] == calls[1], "nodes are named as in a capture"
        named = [[one for one in graph.inputs if one.role is not Role.CONST] for graph in (long, deep)]
        assert (named[0], long.outputs) == (named[1], deep.outputs), "layers are numbered as in the deep model"


def unnumbered(one: Any) -> str:
    is_constant = getattr(one, "role", None) is Role.CONST
    return without_number(repr(replace(one, name="") if is_constant else one))


def check_equal(ours: ws.TrainGraph, theirs: ws.TrainGraph) -> None:
    assert structure(ours) == structure(theirs)
    for some, others in ((ours.inputs, theirs.inputs), (ours.outputs, theirs.outputs)):
        assert [*map(unnumbered, some)] == [*map(unnumbered, others)]
    assert len(ours.losses) == len(theirs.losses)
    assert [*map(str, ours.constants.values())] == [*map(str, theirs.constants.values())]
    for one in (ours, theirs):
        assert one.constants.keys() == {given.name for given in one.inputs if given.role is Role.CONST}


# -- the graph of the smaller model ----------------------------------------------------------
STEPS = [(clipped, "adamw"), (decayed, "adamw-fused")]
MORE_STEPS = [(by_hand, name) for name in ("adamw", "adamw-foreach")] + [(plain, "sgd")]
MORE_STEPS += [(clipped, name) for name in OPTIMIZERS if name != "adamw"]


@pytest.mark.parametrize(
    ("step", "name"), [*STEPS, *(pytest.param(*one, marks=pytest.mark.full) for one in MORE_STEPS)]
)
def test_folded_is_the_smaller_capture(step: Any, name: str) -> None:
    make = OPTIMIZERS[name]
    check_against_capture(step_of(DEEP, step, make), step_of(SHALLOW, step, make))


@pytest.mark.parametrize(
    "odd",
    [
        {"constant": True, "tied": True}, {"skip": True, "frozen": True},
        *(
            pytest.param({one: True}, marks=pytest.mark.full)
            for one in ("constant", "tied", "skip", "frozen", "again", "twice")
        ),
    ],
)  # fmt: skip
def test_models(odd: dict[str, Any]) -> None:
    """Where the first layer or the last differs (its backward adds to no other's), it stays beside the three."""
    deep = step_of(DEEP, clipped, **odd)
    check_against_capture(deep, step_of(SHALLOW + DEEP - found_in(deep).count, clipped, **odd))


@pytest.mark.full
def test_micro_batches() -> None:
    check_against_capture(step_of(DEEP, micro_batches), step_of(SHALLOW, micro_batches))


@pytest.mark.parametrize("blocks", [1, pytest.param(2, marks=pytest.mark.full), DEEP - 1])
def test_any_number_of_blocks(blocks: int) -> None:
    check_against_capture(step_of(DEEP, clipped), step_of(blocks, clipped), blocks)


def test_all_blocks_are_the_graph_itself() -> None:
    deep = step_of(DEEP)
    assert fold(deep, found_in(deep), DEEP) is deep


@pytest.mark.parametrize("blocks", [0, -1])
def test_numbers_of_blocks_that_there_are_not(blocks: int) -> None:
    deep = step_of(DEEP)
    with pytest.raises(GraphError, match=f"^{blocks} of 6 equal layers"):
        fold(deep, found_in(deep), blocks)


@pytest.mark.parametrize(
    "name", ["adamw-fused", *(pytest.param(one, marks=pytest.mark.full) for one in ("adamw", "momentum-foreach"))]
)
def test_it_computes_what_the_smaller_model_does(name: str) -> None:
    """In float64, against the eager step of a model with the same values."""
    short = step_of(DEEP, clipped, OPTIMIZERS[name])
    short = fold(short, found_in(short), SHALLOW)
    model = build(SHALLOW)
    optimizer = OPTIMIZERS[name](model.parameters())
    params, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    values = [
        (params | buffers | {"words": words(), "optimizer.lr": torch.tensor(0.1, dtype=torch.float64)}).get(
            i.name, torch.zeros(i.meta.shape, dtype=i.meta.dtype)
        ).detach().clone()
        for i in short.inputs
    ]  # fmt: skip
    made = dict(zip([(o.kind, o.target) for o in short.outputs], run_one(short, values), strict=True))
    loss = clipped(model, optimizer, words())
    assert torch.allclose(made["result", "0"], loss, rtol=1e-12)
    for key, held in (params | buffers).items():
        assert torch.allclose(made["update", key], held.detach(), rtol=1e-9, atol=1e-12), key
    assert {target for kind, target in made if kind == "update"} >= params.keys()


# -- which layers are equal ------------------------------------------------------------------
def test_what_repeats_says() -> None:
    graph = step_of(DEEP, clipped)
    repeats = found_in(graph)
    assert str(repeats) == f"layers.0 to 5: 6 blocks of {len(repeats.blocks[0])} nodes"
    owned = {i.name: node for i, node in graph.placeholders()}
    one, other = owned["layers.1.up.weight"], owned["layers.3.up.weight"]
    assert (repeats.block(one), repeats.block(other), repeats.count) == (1, 3, DEEP)
    assert repeats.places[one][1] == repeats.places[other][1]
    assert repeats.block(owned["head.weight"]) is None
    inside = sum(node in repeats.places for node in graph.graph.nodes)
    assert inside == DEEP * len(repeats.blocks[0]) > 0.8 * len(graph.graph.nodes)


def test_equals_have_equal_shapes_and_operations() -> None:
    repeats = found_in(step_of(DEEP, clipped))
    for block in repeats.blocks:
        for node, first in zip(block, repeats.blocks[0], strict=True):
            assert (node.op, meta.tensors(node)) == (first.op, meta.tensors(first))


@pytest.mark.parametrize(
    ("odd", "first", "count"), [({"differs": 0}, 1, 5), ({"differs": 5}, 0, 5), ({"differs": 2}, 3, 3)]
)
def test_a_layer_that_differs_stays(odd: dict[str, Any], first: int, count: int) -> None:
    repeats = found_in(step_of(DEEP, clipped, **odd))
    assert (repeats.first, repeats.count) == (first, count)


def test_layers_that_were_not_captured_are_compared() -> None:
    few, deep, odd = found_in(step_of(SHALLOW, clipped)), build(DEEP), build(DEEP, differs=DEEP - 1)
    assert layers_alike(deep, few)
    assert not layers_alike(odd, few)
    for number, layer in enumerate(deep.get_submodule("layers").children()):
        layer.number = number
    assert layers_alike(deep, few), "layers know their numbers"
    wider = build(DEEP)
    wider.get_submodule("layers.4").up = nn.Linear(WIDTH, WIDTH + 1)
    assert not layers_alike(wider, few)


def test_what_is_sized_by_the_number_of_layers_is_found() -> None:
    graph = step_of(SHALLOW, clipped)
    few, deep = FoldedStep(graph, found_in(graph), Hardware.default()), build(DEEP)
    assert few.stands_for(deep)
    deep.embed = nn.Embedding(WORDS, DEEP * WIDTH)
    assert not few.stands_for(deep)


def test_what_is_left_around_a_layer_that_differs() -> None:
    check_against_capture(step_of(DEEP, clipped, differs=0), step_of(SHALLOW + 1, clipped, differs=0))


def test_layers_that_take_turns() -> None:
    def build_turns(count: int) -> ws.TrainGraph:
        torch.manual_seed(0)
        model = Words(0).double()
        model.layers = nn.ModuleList(Block(gated=i % 2 == 0) for i in range(count)).double()
        model.order = list(range(count))
        return ws.capture(clipped, model, torch.optim.AdamW(model.parameters(), fused=True), words())

    deep = build_turns(6)
    assert (found_in(deep).period, found_in(deep).count) == (2, 3)
    check_against_capture(deep, build_turns(4), 2)


def second_twice(count: int) -> list[int]:
    return [0, 1, 1, *range(2, count)]


def test_one_layer_used_twice() -> None:
    """It is not equal to the others; those behind it are."""
    repeats = found_in(step_of(DEEP, clipped, order=second_twice))
    assert (repeats.first, repeats.count) == (2, 4)


# -- steps without equal layers ----------------------------------------------------------------
class Wider(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8 + i, 9 + i) for i in range(5))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class AllAtOnce(nn.Module):
    """Every layer reads what all before it made."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        seen = [x]
        for layer in self.layers:
            seen.append(layer(torch.stack(seen).sum(0)))
        return seen[-1]


class Beside(nn.Module):
    """Layers beside each other, whose results become one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(5))
        self.head = nn.Linear(40, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.cat([layer(x) for layer in self.layers], -1))


@pytest.mark.parametrize("kind", [Wider, AllAtOnce])
def test_layers_that_are_not_equal(kind: Callable[[], nn.Module]) -> None:
    model = kind()
    graph = ws.capture(mean, model, torch.optim.AdamW(model.parameters()), torch.randn(3, 8))
    assert find_repeats(graph) is None
    assert why_not(graph).startswith("layers: ")


def test_no_list_of_layers() -> None:
    model = nn.Linear(8, 8)
    graph = ws.capture(mean, model, torch.optim.AdamW(model.parameters()), torch.randn(3, 8))
    assert why_not(graph) == "no list of 3 layers or more with parameters"


def test_shapes_that_follow_from_the_number_of_layers() -> None:
    model = Beside()
    graph = ws.capture(mean, model, torch.optim.AdamW(model.parameters()), torch.randn(3, 8))
    repeats = find_repeats(graph)
    if repeats is not None:
        with pytest.raises(GraphError, match=r"with fewer layers|depends on the number of layers"):
            fold(graph, repeats, 3)


def test_inputs_are_those_of_the_layers_that_are_left() -> None:
    deep = step_of(DEEP)
    short = fold(deep, found_in(deep), 2)
    layers = {i.name.split(".")[1] for i in short.inputs if i.name.startswith("layers.")}
    assert layers == {"0", "1"}
    assert sum(i.role is Role.BATCH for i in short.inputs) == 1
