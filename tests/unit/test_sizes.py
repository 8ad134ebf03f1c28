"""Sizes of the batch as symbols: what is captured with them is, at each size, what a capture for that size gives."""

import copy
import random
from collections.abc import Callable, Mapping
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Node
from torch.nn import functional as F
from torch.optim import SGD, AdamW, Optimizer

import wholestep as ws
from examples.demo.model import GPTConfig, build
from tests.catalogue import CASES
from tests.live_bytes import peak_of
from tests.steps import mean_square
from wholestep.backend.default_passes import default_passes
from wholestep.capture.call_structure import take_apart
from wholestep.capture.capture import Capture, capture_step
from wholestep.capture.capture_options import CaptureOptions
from wholestep.graph.meta import set_tensors
from wholestep.graph.sizes_in_graph import planned_at
from wholestep.mesh import Mesh
from wholestep.passes.base import run_passes
from wholestep.passes.context import Context
from wholestep.passes.order_collectives import CallOrder, SameOrder
from wholestep.passes.order_stages import lowered
from wholestep.passes.reinplace import Reinplace
from wholestep.plan.strategies import compose
from wholestep.planner.resolve import plan
from wholestep.runtime.symbolic_sizes import SymbolicSizes
from wholestep.sizes import SizeFloat, SizeGuards, SizeInt, UnitInt, evaluate, in_units, text_of

D = 6  # features of the random steps
Op = Callable[[Tensor, Tensor, Tensor], Tensor]


def train(
    model: nn.Module, optimizer: Optimizer, tokens: Tensor, targets: Tensor, between: Callable[[], None] | None = None
) -> Tensor:
    """One update of a model of words; `between` is called between backward and clipping."""
    optimizer.zero_grad()
    loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
    loss.backward()
    if between is not None:
        between()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.detach()


# -- random steps: (b, t, D) to (b, t, D), of which w and v are parameters -----------------
def _attends(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(x @ w @ x.transpose(1, 2) / x.shape[1] ** 0.5, -1) @ x


def _masked(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    length = x.shape[1]
    mask = torch.full((length, length), -1e4, dtype=x.dtype).triu(1)
    return torch.softmax(x @ x.transpose(1, 2) + mask, -1) @ x


def _sdpa(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    heads = x.view(x.shape[0], x.shape[1], 2, D // 2).transpose(1, 2)
    return F.scaled_dot_product_attention(heads, heads, heads, is_causal=True).transpose(1, 2).reshape(x.shape)


def _convolved(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    return F.conv1d(x.transpose(1, 2), w.unsqueeze(-1).expand(D, D, 3), v, padding=1).transpose(1, 2)


def _filled(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    out[:, 1:] = x[:, :-1] * 2
    return out


def _by_count(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    return x * cast(float, (x.shape[0] * x.shape[1]) ** -0.5)


def _branches(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    return x * 2 if x.shape[1] > 5 else x + v


OPS: dict[str, Op] = {
    "linear": lambda x, w, v: F.linear(x, w, v),
    "rows": lambda x, w, v: (x.reshape(-1, D) @ w).view(x.shape[0], x.shape[1], D),
    "rows of batches": lambda x, w, v: (x.flatten(1) * 0.5).view(x.shape),
    "norm": lambda x, w, v: F.layer_norm(x, (D,), v, v),
    "mean over tokens": lambda x, w, v: x - x.mean(1, keepdim=True),
    "mean over all": lambda x, w, v: x / (x.square().mean() + 1),
    "sum over batch": lambda x, w, v: x - x.sum(0) / x.shape[0],
    "shifted": lambda x, w, v: torch.cat([x[:, 1:], x[:, :1]], 1),
    "flipped": lambda x, w, v: x.flip(1) + x.roll(1, 0),
    "halves": lambda x, w, v: torch.cat(x.chunk(2, -1)[::-1], -1),
    "places": lambda x, w, v: x + torch.arange(x.shape[1], dtype=x.dtype).unsqueeze(-1) * v,
    "summed up": lambda x, w, v: x.cumsum(1) / 4,
    "padded": lambda x, w, v: F.pad(x, (0, 0, 1, 0))[:, :-1],
    "expanded": lambda x, w, v: x + v.expand(x.shape[0], x.shape[1], D),
    "swapped": lambda x, w, v: (x.permute(1, 0, 2).contiguous() @ w).permute(1, 0, 2),
    "var": lambda x, w, v: x / (x.var((0, 1), keepdim=True) + 1),
    "stacked": lambda x, w, v: torch.stack([x, x * v]).sum(0),
    "gathered": lambda x, w, v: x.gather(1, torch.zeros(x.shape[0], x.shape[1], D, dtype=torch.int64)),
    "repeated": lambda x, w, v: x.repeat(2, 1, 1)[: x.shape[0]],
    "einsum": lambda x, w, v: torch.einsum("btd,de->bte", x, w),
    "attends": _attends, "masked": _masked, "sdpa": _sdpa, "convolved": _convolved, "filled": _filled,
    "branches": _branches, "by count": _by_count,
}  # fmt: skip


class Random(nn.Module):
    """A few ops in a row."""

    def __init__(self, ops: list[str]) -> None:
        super().__init__()
        self.ops = ops
        self.w, self.v = nn.Parameter(torch.randn(D, D) * 0.3), nn.Parameter(torch.randn(D) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.linear(x, self.w, self.v)
        for name in self.ops:
            x = OPS[name](x, self.w, self.v)
        return x


def captured(model: nn.Module, rows: int, length: int, dynamic: bool) -> Capture:
    optimizer, x = SGD(model.parameters(), lr=0.1, momentum=0.9), torch.zeros(rows, length, D)
    return capture_step(mean_square, (model, optimizer, x), {}, dynamic={"x": (0, 1)} if dynamic else None)


def sizes_in(made: Capture, rows: int, length: int) -> Mapping[str, int]:
    assert made.symbols is not None
    return {symbol: (rows, length)[dim] for symbol, (_, dim) in made.symbols.record.dims.items()}


def check_random(seed: int) -> int:
    """How many of five sizes the capture of a random step applies to: there, it is what is captured for them."""
    drawn = random.Random(seed)
    model = Random(drawn.sample(list(OPS), drawn.randint(1, 5)))
    made, applies = captured(model, 4, 7, dynamic=True), 0
    for rows, length in ((2, 2), (3, 9), (7, 4), (5, 13), (16, 8)):
        sizes = sizes_in(made, rows, length)
        assert made.symbols is not None
        if all(evaluate(guard.text, sizes) for guard in made.symbols.guards()):
            applies += 1
            fixed = captured(model, rows, length, dynamic=False)
            assert str(planned_at(made.graph, sizes)) == str(fixed.graph), (model.ops, rows, length)
    return applies


@pytest.mark.parametrize("first", [pytest.param(n, marks=pytest.mark.full if n else ()) for n in range(0, 200, 10)])
@pytest.mark.full
def test_random_steps_are_at_each_size_what_is_captured_for_it(first: int) -> None:
    assert sum(check_random(seed) for seed in range(first, first + 10)) > 25  # of 50: branches take some


# -- whole steps, against eager ------------------------------------------------------------
def follow(
    model: nn.Module, batches: list[tuple[Tensor, ...]], fn: Any = train, look: Callable[..., None] | None = None,
    **options: Any,
) -> ws.CompiledStep:  # fmt: skip
    """Train on these batches beside eager; results and parameters are equal. `look(step, *arguments)` after each."""
    other = copy.deepcopy(model)
    optimizer, plain = (AdamW(m.parameters(), lr=1e-2) for m in (model, other))
    step: Any = cast(Any, ws.compile)(fn, **options)
    for batch in batches:
        mine: Tensor = step(model, optimizer, *batch)
        torch.testing.assert_close(mine, fn(other, plain, *batch), rtol=1e-12, atol=1e-12)
        if look is not None:
            look(step, model, optimizer, *batch)
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)
    return step


def words(*sizes: tuple[int, int]) -> list[tuple[Tensor, ...]]:
    return [(torch.randint(256, size), torch.randint(256, size)) for size in sizes]


def small_gpt() -> nn.Module:
    return build(GPTConfig(layers=1, width=16, heads=2, context=32), seed=0).double()


def small_words() -> nn.Module:
    """Where it does not matter what the model computes."""
    return nn.Sequential(nn.Embedding(256, 4), nn.Linear(4, 256)).double()


@pytest.mark.smoke
def test_the_second_size_makes_a_program_for_all() -> None:
    step = follow(small_gpt(), words((4, 8), (3, 5), (7, 32), (2, 2), (4, 8), (13, 31), (5, 29)))
    assert (step.captures, len(step.programs)) == (2, 2), step.misses


@pytest.mark.parametrize("second", [(4, 5), (3, 8)], ids=["the rows of the first", "its length"])
def test_a_second_batch_that_shares_a_size_with_the_first_is_no_third_capture(second: tuple[int, int]) -> None:
    step = follow(small_words(), words((4, 8), second, (7, 12), (2, 30)))
    assert (step.captures, len(step.programs)) == (2, 2), step.misses


def test_a_list_of_sizes_beside_a_tensor_of_none() -> None:
    """Torch's table of results remembers where in a key a symbol is."""

    def expands(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
        optimizer.zero_grad()
        rows, one = x.shape[0], torch.ones(1, 4)
        loss = (model(x) * one.expand([rows, 4]) + one.expand([rows + 1, 4])[1:]).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    def at(rows: int, dynamic: dict[str, tuple[int, ...]] | None = None) -> Capture:
        arguments = model, SGD(model.parameters(), lr=0.1), torch.ones(rows, 4)
        return capture_step(expands, arguments, {}, CaptureOptions(), dynamic=dynamic)

    model = nn.Linear(4, 4)
    made = at(3, {"x": (0,)})
    assert str(planned_at(made.graph, sizes_in(made, 5, 4))) == str(at(5).graph)


def test_a_dim_of_one_has_a_program_of_its_own() -> None:
    step = follow(small_words(), words((4, 8), (3, 5), (1, 5), (6, 7), (1, 9), (1, 3)))
    assert any("tokens.shape[0] >= 2" in miss for miss in step.misses)


def test_what_is_cut_out_of_a_longer_tensor_needs_no_program_of_its_own() -> None:
    calls = [(t[:, :-1], t[:, 1:]) for t, _ in words((4, 9), (3, 6), (7, 12), (5, 8))]
    assert follow(small_words(), calls).captures <= 3  # the third is what the program is compared with


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.short, self.long = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] > 8:
            return self.long(x)
        return self.short(x)


def summed(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = model(x).square().sum() / x.shape[0]
    loss.backward()
    optimizer.step()
    return loss.detach()


def test_sizes_that_take_another_branch_break_a_guard_that_names_the_line() -> None:
    calls = [(torch.randn(3, length, 4, dtype=torch.float64),) for length in (5, 7, 11, 6, 8, 9, 23, 1, 0, 3)]
    step = follow(Branch().double(), calls, summed)
    guards = [miss for miss in step.misses if "x.shape[1] <= 8" in miss]
    assert "if x.shape[1] > 8:" in guards[0], step.misses
    assert len(step.programs) == 5  # the first; up to 8; more; 1; 0


class Loop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros_like(x[:, 0])
        for place in range(x.shape[1]):
            state = torch.tanh(self.cell(x[:, place] + state))
        return state


def test_a_loop_over_a_dim_is_captured_for_each_length_and_says_so() -> None:
    sizes = ((3, 5), (4, 6), (5, 6), (6, 6), (4, 3), (9, 6))
    step = follow(Loop().double(), [(torch.randn(*size, 4, dtype=torch.float64),) for size in sizes], summed)
    fixed = [miss for miss in step.misses if miss.startswith("each size of dim 1 of x is captured")]
    assert "for place in range(x.shape[1]):" in fixed[0], step.misses
    assert len(step.programs) < len(sizes)  # rows have one program for each length


class Typed(nn.Module):
    """Python asks what torch does not see: a size that is a symbol is no int."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * (2.0 if type(x.shape[0]) is int else 3.0)


def test_a_step_that_computes_otherwise_with_symbols_is_captured_for_each_size() -> None:
    calls = [(torch.randn(rows, 3, 4, dtype=torch.float64),) for rows in (2, 5, 7)]
    step = follow(Typed().double(), calls, summed)
    assert len(step.programs) == 3
    assert any("another graph is captured" in miss for miss in step.misses)


def test_a_guess_that_fails_is_left_out() -> None:
    """Rows are guessed to vary where a length does, and here a number of rows must be an int."""
    calls = [(torch.randn(3, length, 4, dtype=torch.float64),) for length in (2, 5, 7, 9)]
    step = follow(Typed().double(), calls, summed)
    assert len(step.programs) == 2, step.misses
    assert not any("dim 0" in miss for miss in step.misses), "rows did not vary"


def test_a_size_that_is_returned_stays_a_number() -> None:
    def fn(model: nn.Module, optimizer: Optimizer, x: Tensor) -> tuple[Tensor, int]:
        return summed(model, optimizer, x), x.shape[0]

    model = nn.Linear(4, 4)
    step = ws.compile(fn)
    optimizer = SGD(model.parameters(), lr=0.1)
    assert [type(step(model, optimizer, torch.randn(n, 2, 4))[1]) for n in (2, 3, 4)] == [int] * 3


def test_dynamic_names_dims_from_the_first_call() -> None:
    calls = words((4, 8), (3, 5), (7, 32))
    step = follow(small_words(), calls, dynamic={"tokens": (0, 1), "targets": (0, 1)})
    assert (len(step.programs), step.captures) == (1, 2)  # the second is what the program is compared with


@pytest.mark.parametrize("dynamic", [{"token": (0,)}, {"tokens": (2,)}])
def test_dynamic_that_names_no_dim_is_refused(dynamic: dict[str, tuple[int, ...]]) -> None:
    with pytest.raises(ws.PlanError, match="dims of tensors that the step is given: tokens of 2 dims, targets of"):
        follow(small_words(), words((4, 8)), dynamic=dynamic)


def test_dynamic_false_captures_each_size() -> None:
    step = follow(small_words(), words((4, 8), (3, 5), (7, 9)), dynamic=False)
    assert len(step.programs) == step.captures == 3


ONE_BY_ONE = {"recurrent": "layers of torch that unroll over tokens"}


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == "by-hand" else pytest.mark.full) for n in CASES])
def test_cases_of_the_catalogue(name: str) -> None:
    case, dim = CASES[name], 1 if name == "transposed" else 0
    calls: list[tuple[Any, ...]] = []
    for parts in (1, 2, 3, 5):
        whole = {key: torch.cat([case.batches(i)[key] for i in range(parts)], dim) for key in case.batches(0)}
        length = 6 - min(parts, 4)
        cut = {key: v[:, :length] if key in ("tokens", "labels") else v for key, v in whole.items()}
        calls.append(({key: value.contiguous() for key, value in cut.items()},))
    step = follow(case.build(), calls, case.step)
    assert (len(step.programs) == 2) is (name not in ONE_BY_ONE), step.misses


@pytest.mark.parametrize("kind", [ws.RankFailedError, ws.RankMismatchError])
def test_a_rank_that_failed_meanwhile_is_no_reason_to_capture_each_size(
    kind: type[ws.WholestepError], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> bool:
        raise kind("rank 1 is gone", "all ranks", "restart")

    model = nn.Linear(4, 4)
    optimizer, step = torch.optim.SGD(model.parameters(), lr=0.1), ws.compile(mean_square)
    step(model, optimizer, torch.randn(3, 4))
    monkeypatch.setattr(SymbolicSizes, "left", fail)
    with pytest.raises(kind, match="rank 1 is gone"):
        step(model, optimizer, torch.randn(5, 4))


# -- passes that lose what a number follows from -------------------------------------------
def _replaced(local: ws.LocalGraph, change: Callable[[Any], Any], only: str) -> ws.LocalGraph:
    """A copy with other numbers where those in arguments of nodes whose name has `only` follow from sizes."""
    made = local.copy()

    def new(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(cast(Any, value))(map(new, cast(list[Any], value)))
        return change(value) if isinstance(value, (SizeInt, SizeFloat)) else value

    for node in made.graph.nodes:
        if node.op == "call_function" and only in node.name:
            node.args = tuple(map(new, node.args))
    return made


def forgets_shapes(local: ws.LocalGraph) -> ws.LocalGraph:
    """A pass that turns the sizes of a view into the numbers of this batch."""
    return _replaced(local, int, "view")


def forgets_scalars(local: ws.LocalGraph) -> ws.LocalGraph:
    """A pass that turns the number that a loss is divided by into that of this batch."""
    return _replaced(local, lambda value: value + 0.0 if isinstance(value, float) else int(value), "div")


@pytest.mark.parametrize("lose", [forgets_shapes, pytest.param(forgets_scalars, marks=pytest.mark.full)])
def test_a_pass_that_loses_an_expression_is_caught(lose: Callable[[ws.LocalGraph], ws.LocalGraph]) -> None:
    """It is right for the batch that it is run for, and the numbers of all others are right too."""
    calls = [(torch.randn(rows, 3, 4, dtype=torch.float64),) for rows in (2, 5, 7, 3)]
    step = follow(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).double(), calls, summed, passes=lambda p: [lose, *p])
    assert len(step.programs) == 4
    assert any("passes make another program" in miss for miss in step.misses), step.misses


def test_a_built_in_pass_that_loses_an_expression_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    change = Reinplace.change
    monkeypatch.setattr(Reinplace, "change", lambda self, local: forgets_shapes(change(self, local)))
    calls = [(torch.randn(rows, 3, 4, dtype=torch.float64),) for rows in (2, 5, 7)]
    step = follow(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).double(), calls, summed)
    assert len(step.programs) == 3
    assert any("passes make another program" in miss for miss in step.misses), step.misses


def test_passes_of_the_user_run_for_all_sizes() -> None:
    seen: list[int] = []

    def look(local: ws.LocalGraph) -> ws.LocalGraph:
        seen.append(len(local.graph.nodes))
        return local

    calls = [(torch.randn(rows, 3, 4, dtype=torch.float64),) for rows in (2, 5, 7, 3)]
    step = follow(nn.Linear(4, 4).double(), calls, summed, passes=lambda p: [look, *p])
    assert (len(step.programs), step.captures) == (2, 2), step.misses
    assert len(set(seen)) == 1


def clones_large(local: ws.LocalGraph) -> ws.LocalGraph:
    """A pass that does more for large batches."""
    made = local.copy()
    for given, node in list(made.placeholders()):
        if given.name == "x" and int(given.meta.shape[0]) > 8:
            user = next(iter(node.users))
            with made.graph.inserting_before(user):
                copied = made.graph.create_node("call_function", torch.ops.aten.clone.default, (node,))
            set_tensors(copied, (given.meta,))
            user.replace_input_with(node, copied)
    return made


def test_a_pass_that_does_something_else_for_large_batches_runs_for_each_size() -> None:
    calls = [(torch.randn(rows, 3, 4, dtype=torch.float64),) for rows in (2, 5, 30, 4)]
    step = follow(nn.Linear(4, 4).double(), calls, summed, passes=lambda p: [clones_large, *p])
    assert len(step.programs) == 4
    assert any("passes make another program" in miss for miss in step.misses), step.misses


# -- what was compared of sizes ------------------------------------------------------------
def planned_guards(rows: int, length: int) -> list[str]:
    """What a plan for two ranks with one batch compares, by dims."""
    model = small_gpt()
    batch = torch.zeros(rows, length, dtype=torch.int64), torch.zeros(rows, length, dtype=torch.int64)
    dims = {"tokens": (0, 1), "targets": (0, 1)}
    made = capture_step(train, (model, AdamW(model.parameters()), *batch), {}, dynamic=dims)
    assert made.symbols is not None
    plan(made.graph, Mesh("dp=2"), compose(ws.DataParallel("fully_shard", semantics="global")))
    return [made.symbols.record.shown(guard.text) for guard in made.symbols.guards()]


def test_a_second_plan_compares_what_the_first_compared() -> None:
    """Nothing of the first is taken for the second: its guards would be noted nowhere."""
    first, second = planned_guards(8, 6), planned_guards(8, 6)
    assert any("tokens" in guard for guard in second)
    assert first == second


def test_sizes_that_equal_those_of_parameters_by_chance_are_not_bound_to_them() -> None:
    """48 tokens, and 48 rows of a parameter."""
    planned_guards(6, 5)
    guards = [guard for guard in planned_guards(4, 12) if guard.endswith(("== 48", "== 16", "== 12"))]
    assert all(guard.startswith("not ") for guard in guards), guards


def turned(local: ws.LocalGraph) -> ws.LocalGraph:
    """Another order of the same calls, as other prices lead to one: the last of those that can run is the next."""
    made = local.copy()
    calls = [node for node in made.graph.nodes if node.op == "call_function"]
    output, left, done = next(iter(reversed(made.graph.nodes))), dict.fromkeys(calls), set[Node]()
    while left:
        node = next(n for n in reversed(left) if all(g in done or g.op == "placeholder" for g in n.all_input_nodes))
        output.prepend(node)
        done.add(node)
        del left[node]
    return made


def scheduled(change: Callable[[ws.LocalGraph], ws.LocalGraph] | None, calls: CallOrder | None) -> list[str]:
    """The lines of a program of two ranks, whose order `change` has changed before the last passes."""
    batch = torch.zeros(8, 32, dtype=torch.int64)
    model = small_gpt()
    made = capture_step(train, (model, AdamW(model.parameters()), batch, batch), {})
    planned = plan(made.graph, Mesh("dp=2"), compose(ws.DataParallel("fully_shard")))
    passes = default_passes(schedule=ws.Schedule(bucket_bytes=2000, first_bucket_bytes=300))
    at = next(i for i, one in enumerate(passes) if isinstance(one, SameOrder))
    edited = (*passes[:at], change, *passes[at:]) if change else passes
    local = run_passes(lowered(made.graph, planned), edited, context=Context(calls=calls))
    return sorted(str(local).splitlines())


@pytest.mark.full
def test_an_order_that_follows_from_prices_is_no_other_program() -> None:
    """Passes behind it number what they add: in another order, they name it otherwise."""
    assert scheduled(None, None) != scheduled(turned, None)
    calls = CallOrder()
    assert scheduled(None, calls) == scheduled(turned, calls)


# -- models of transformers ----------------------------------------------------------------
def train_hf(model: Any, optimizer: Optimizer, tokens: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    return loss.detach()


@pytest.mark.parametrize("kind", ["gpt2", pytest.param("llama", marks=pytest.mark.full)])
def test_a_model_of_transformers_takes_texts_of_all_lengths(kind: str) -> None:
    """Its loss pads the labels by one."""
    transformers: Any = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 32}
    names = {"intermediate_size": 32, "max_position_embeddings": 64, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
    config = transformers.AutoConfig.for_model(kind, **sizes, **names, use_cache=False)
    model = transformers.AutoModelForCausalLM.from_config(config).double()
    calls = [(torch.randint(32, size),) for size in ((4, 9), (3, 5), (7, 31), (2, 17))]
    step = follow(model, calls, train_hf)
    assert (step.captures, len(step.programs)) == (2, 2), step.misses


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_attention_as_on_a_gpu_is_captured_for_all_sizes(dtype: torch.dtype) -> None:
    """The kernel that CUDA would choose: of 16 bits flash attention, else the one that pads what it saves."""
    model = build(GPTConfig(layers=1, width=16, heads=2, context=32), seed=0).to(dtype)
    options = CaptureOptions(kernels="cuda")

    def at(rows: int, length: int, dynamic: dict[str, tuple[int, ...]] | None = None) -> Capture:
        arguments = model, SGD(model.parameters(), lr=0.1), *words((rows, length))[0]
        return capture_step(train, arguments, {}, options, dynamic=dynamic)

    made = at(4, 16, {"tokens": (0, 1), "targets": (0, 1)})
    for rows, length in ((2, 32), (5, 8)):
        assert str(planned_at(made.graph, sizes_in(made, rows, length))) == str(at(rows, length).graph)


# -- micro-batches -------------------------------------------------------------------------
def test_micro_batches_take_all_sizes() -> None:
    micro = [ws.DataParallel("replicate"), ws.MicroBatches(3)]
    step = follow(small_gpt(), words((6, 8), (9, 5), (15, 9), (12, 31)), parallel=micro)
    assert (step.captures, len(step.programs)) == (2, 2), step.misses


def test_pieces_that_differ_in_size_share_a_program() -> None:
    """Of 7 and 11 rows in threes the last piece is shorter. Another number of pieces is planned again, not captured."""
    calls = [(torch.randn(rows, 4, dtype=torch.float64),) for rows in (5, 7, 11, 9, 8, 4)]
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()
    step = follow(model, calls, summed, parallel=[ws.DataParallel("replicate"), ws.MicroBatches(3)])
    assert step.captures == 2, step.misses
    assert len(step.programs) == 4, step.misses  # 5 rows; three pieces; three even ones; two pieces


# -- budgets of memory, and schedules across steps ------------------------------------------
def deep() -> nn.Module:
    layers = [layer for _ in range(4) for layer in (nn.Linear(32, 32), nn.LayerNorm(32), nn.GELU())]
    return nn.Sequential(*layers, nn.Linear(32, 8)).double()


@pytest.mark.full
def test_a_budget_of_memory_is_met_at_each_size() -> None:
    """Counted while the step runs. A batch that takes more is planned again, not captured, and recomputes."""
    model = deep()
    optimizer, batches = AdamW(model.parameters()), {n: torch.randn(n, 32, dtype=torch.float64) for n in ROWS}
    plain = ws.compile(summed)
    plain(model, optimizer, batches[max(ROWS)])
    assert plain.local_graph is not None
    most = ws.peak_memory(plain.local_graph)
    budget = int(most.rest_bytes + 0.75 * (most.size_bytes - most.rest_bytes))
    again: list[int] = []

    def look(step: ws.CompiledStep, *arguments: Any) -> None:
        assert step.local_graph is not None
        inputs = copy.deepcopy(step.programs[-1].gather_inputs(take_apart((arguments, {})).leaves))
        assert peak_of(step.programs[-1].run, inputs) <= budget
        again.append(sum("_again" in node.name for node in step.local_graph.graph.nodes))

    step = follow(model, [(batches[n],) for n in ROWS], summed, look, memory_bytes=budget)
    assert step.captures == 2, step.misses
    assert len(step.programs) < len(ROWS) - 2, step.misses  # the first; small batches; 160 and 200 rows recompute
    assert any("of memory_bytes" in miss for miss in step.misses), step.misses
    assert again[ROWS.index(max(ROWS))] > again[0], "large batches recompute"


ROWS = (40, 64, 33, 160, 50, 200, 41)


def test_a_size_in_units_leaves_expressions_and_comparisons_to_symbols() -> None:
    """A fixed number of rows, cut between units, times a length that varies."""
    record = SizeGuards(hints={"s": 8})
    rows, length = in_units(4, 1), SizeInt(8, "s", record)
    assert isinstance(rows, UnitInt)
    assert {text_of(rows * length), text_of(length * rows)} == {"(4 * s)", "(s * 4)"}
    assert [text_of(n) for n in (rows + length, rows - length, rows // length)] == ["(4 + s)", "(4 - s)", "(4 // s)"]
    assert rows != length
    assert rows < length
    assert list(record.noted) == ["s != 4", "s > 4"]
