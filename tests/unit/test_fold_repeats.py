"""Loops that users wrote: one body for equal pieces, and the bits of the program that is not folded."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW, Optimizer

import wholestep as ws
from tests.alone import fake_group, predicted_and_measured
from tests.simulate import Simulation, cut
from wholestep.capture import capture_step
from wholestep.graph.graph import LocalGraph, Role
from wholestep.graph.loop import loop_of, with_bodies
from wholestep.passes.fold_repeats import FoldRepeats, why_not
from wholestep.passes.reinplace import Reinplace

Step = Callable[..., Any]


def _mlp(drop: float = 0.3) -> nn.Module:
    layers = [nn.Linear(10, 33), nn.Dropout(drop), nn.GELU(), nn.Linear(33, 20), nn.LayerNorm(20), nn.Linear(20, 8)]
    return nn.Sequential(*layers).double()


def _make(kind: Callable[[], nn.Module] = _mlp) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(5)
    model = kind()
    return model, AdamW(model.parameters(), lr=0.01, eps=1e-4)


def _batch(rows: int, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 10, generator=generator, dtype=torch.float64)
    return {"x": x, "y": torch.randint(0, 8, (rows,), generator=generator)}


def _looped(pieces: Callable[[dict[str, Tensor]], Any], result: str = "sum", clip: bool = True) -> Step:
    """A step that goes through `pieces` of the batch."""

    def train(model: nn.Module, optimizer: Optimizer, batch: dict[str, Tensor]) -> Any:
        optimizer.zero_grad()
        total, losses = 0.0, list[Tensor]()
        for x, y in pieces(batch):
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            total = total + loss.detach()
            losses.append(loss.detach())
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        return {"sum": total, "list": losses, "last": losses[-1], "mean": torch.stack(losses).mean()}[result]

    return train


def _chunks(number: int) -> Callable[[dict[str, Tensor]], Any]:
    return lambda b: zip(b["x"].chunk(number), b["y"].chunk(number), strict=True)


def _slices(rows: int, number: int) -> Callable[[dict[str, Tensor]], Any]:
    return lambda b: [(b["x"][i * rows :][:rows], b["y"][i * rows : (i + 1) * rows]) for i in range(number)]


def loops(local: LocalGraph) -> list[int]:
    return [loop.pieces for node in local.graph.nodes if (loop := loop_of(node))]


def _unfolded(passes: tuple[Any, ...]) -> list[Any]:
    return [one for one in passes if not isinstance(one, FoldRepeats)]


def _flat(value: Any) -> list[Tensor]:
    return [*value] if isinstance(value, list) else [value]  # pyright: ignore[reportUnknownArgumentType]  # of losses


WAYS = {
    "chunks": (_chunks(4), 16, 3), "the last is smaller": (_chunks(4), 14, 3), "slices": (_slices(4, 5), 20, 4),
    "chunks of 2": (_chunks(8), 16, 7),
}  # fmt: skip


@pytest.mark.parametrize(
    "result", ["sum", *(pytest.param(one, marks=pytest.mark.full) for one in ("list", "last")), "mean"]
)
@pytest.mark.parametrize("way", [next(iter(WAYS)), *(pytest.param(w, marks=pytest.mark.full) for w in [*WAYS][1:])])
def test_the_same_bits(way: str, result: str) -> None:
    """Against the program without the pass, and the step as it is, with dropout and clipping."""
    pieces, rows, count = WAYS[way]
    train, found = _looped(pieces, result), list[list[Tensor]]()
    folded, plain = ws.compile(train), ws.compile(train, passes=_unfolded)
    for run in (folded, plain, train):
        model, optimizer = _make()
        results = [one for seed in (0, 1, 0) for one in _flat(run(model, optimizer, _batch(rows, seed)))]
        found.append([*results, *(p.detach() for p in model.parameters())])
    assert folded.local_graph is not None
    assert folded.plan is not None
    assert loops(folded.local_graph) == [count]
    assert any(f"the first {count} pieces of the loop" in note for note in folded.plan.notes)
    assert all(torch.equal(a, b) for a, b in zip(found[0], found[1], strict=True))
    torch.testing.assert_close(found[0], found[2], rtol=0, atol=1e-12)


class _Tied(nn.Module):
    """Uses one parameter twice."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(10, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.one(self.one(x).tanh())


def test_tied_parameters() -> None:
    """The gradient of each piece is a sum of two terms."""
    model, optimizer = _make(lambda: _Tied().double())
    graph = ws.capture(_looped(_chunks(4)), model, optimizer, _batch(16, 0))
    local = ws.partition(graph, ws.plan(graph, "dp=2", ws.DataParallel("zero1")))
    assert loops(FoldRepeats()(local)) == [3], why_not(local)


def test_pieces_that_are_arguments() -> None:
    """A list of batches, as a loader gives them."""

    def train(model: nn.Module, optimizer: Optimizer, parts: list[dict[str, Tensor]]) -> Tensor:
        optimizer.zero_grad()
        for part in parts:
            (F.cross_entropy(model(part["x"]), part["y"]) / len(parts)).backward()
        optimizer.step()
        return parts[0]["x"].sum()

    found = list[list[Tensor]]()
    step = ws.compile(train)
    for run in (step, train):
        model, optimizer = _make()
        for seed in range(2):
            run(model, optimizer, [_batch(4, 10 * seed + part) for part in range(4)])
        found.append([p.detach() for p in model.parameters()])
    assert step.local_graph is not None
    assert loops(step.local_graph) == [3]
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-12)


def _programs(train: Step, mesh: str, parallel: Any, rows: int = 16) -> tuple[Any, Any, LocalGraph]:
    model, optimizer = _make()
    capture = capture_step(train, (model, optimizer, _batch(rows, 0)), {})
    planned = ws.plan(capture.graph, mesh, parallel)
    return capture, planned, ws.partition(capture.graph, planned)


STYLES = [
    (style, semantics)
    for style in ("replicate", "zero1", "zero2", "fully_shard")
    for semantics in ("per_rank", "global")
]


@pytest.mark.parametrize(
    ("style", "semantics"),
    [STYLES[0], *(pytest.param(*one, marks=pytest.mark.full) for one in STYLES[1:])],
)
def test_on_two_ranks(style: str, semantics: Any) -> None:
    """With different data: the bits of the program that is not folded, in every style that folds it or not."""
    ends = list[list[Tensor]]()
    capture, planned, local = _programs(_looped(_chunks(4)), "dp=2", ws.DataParallel(style, semantics=semantics))
    folded = FoldRepeats()(local)
    assert bool(loops(folded)) == (not why_not(local))
    assert semantics == "global" or bool(loops(folded)) == (style != "zero2")
    for program in (folded, local):
        simulation = Simulation(capture, planned, Reinplace()(program))
        simulation.start()
        layouts = {i.name: layout for i, layout in zip(local.inputs, local.layouts, strict=True)}
        for seed in range(2):
            ranks: list[dict[str, Tensor]] = [{}, {}]
            for key, value in _batch(16, seed).items():
                name = f"batch['{key}']"
                pieces = cut(value, layouts[name], local.mesh)
                if layouts[name].varies:
                    pieces = [value.roll(rank, 0) for rank in range(2)]
                for rank, piece in enumerate(pieces):
                    ranks[rank][name] = piece
            torch.manual_seed(seed)
            simulation.step(ranks)
        ends.append([simulation.whole(i.name) for i in planned.inputs if i.role in (Role.PARAM, Role.STATE)])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def test_size_is_that_of_two_pieces() -> None:
    sizes, per_piece = dict[int, int](), 4  # two slices of the batch, and their places in the list of the body
    for number in (4, 8):
        local = FoldRepeats()(_programs(_looped(_chunks(number)), "dp=2", ws.DataParallel("zero1"), rows=32)[2])
        sizes[number] = sum(1 for _ in with_bodies(local.graph))
    assert sizes[8] - sizes[4] <= 4 * per_piece


def test_memory_is_as_predicted() -> None:
    local = _programs(_looped(_chunks(8)), "dp=2", ws.DataParallel("zero1"), rows=256)[2]
    local = ws.run_passes(local, [FoldRepeats(), Reinplace()])
    assert loops(local) == [7]
    with fake_group(2) as group:
        predicted, measured = predicted_and_measured(local, group, exchange=False)
    assert abs(predicted.size_bytes / measured - 1) < 0.05


# -- what stays as it is ----------------------------------------------------------------------------------------------
def _reason(train: Step, kind: Callable[[], nn.Module] = _mlp, style: str = "zero1") -> str:
    """Why the program of a step is not folded; it is unchanged."""
    model, optimizer = _make(kind)
    graph = ws.capture(train, model, optimizer, _batch(16, 0))
    local = ws.partition(graph, ws.plan(graph, "dp=2", ws.DataParallel(style)))
    assert FoldRepeats()(local) is local
    return why_not(local)


def _differing(model: nn.Module, optimizer: Optimizer, batch: dict[str, Tensor]) -> None:
    optimizer.zero_grad()
    for number, (x, y) in enumerate(_chunks(4)(batch)):
        (F.cross_entropy(model(x), y) * (1 + number)).backward()
    optimizer.step()


def _partly_trained(model: nn.Sequential, optimizer: Optimizer, batch: dict[str, Tensor]) -> None:
    optimizer.zero_grad()
    for number, (x, y) in enumerate(_chunks(4)(batch)):
        out = model[:5](x)
        F.cross_entropy(model[5](out.detach() if number == 1 else out), y).backward()
    optimizer.step()


def _drawing_between(model: nn.Module, optimizer: Optimizer, batch: dict[str, Tensor]) -> Tensor:
    optimizer.zero_grad()
    noise = torch.zeros(())
    for x, y in _chunks(4)(batch):
        F.cross_entropy(model(x), y).backward()
        noise = noise + torch.rand(())
    optimizer.step()
    return noise


def _with_batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)).double()


def _of_two(model: nn.Module, optimizer: Optimizer, batch: dict[str, Tensor]) -> None:
    _looped(_chunks(2))(model, optimizer, batch)


@pytest.mark.parametrize(
    ("train", "options", "reason"),
    [
        (_differing, {}, "differs between pieces"),
        (_partly_trained, {}, "some gradients are summed over 3 and 4 values"),
        (_drawing_between, {}, "draws random numbers between pieces"),
        (_looped(_chunks(4)), {"kind": _with_batch_norm}, "one piece depends on it and another one makes it"),
        (_looped(_chunks(4)), {"style": "zero2"}, "communicates for each piece"),
        (_of_two, {}, "2 pieces are no more than a body and the last one"),
    ],
    ids=["differing", "partly", "drawing", "batch norm", "zero2", "two"],
)
def test_what_stays_says_why(train: Step, options: dict[str, Any], reason: str) -> None:
    assert reason in _reason(train, **options)


def test_a_step_without_a_loop_has_no_reason() -> None:
    """Three gradients of one activation are a sum of three terms too."""

    def train(model: nn.Module, optimizer: Optimizer, batch: dict[str, Tensor]) -> None:
        optimizer.zero_grad()
        x = model(batch["x"])
        (x.sin() + x.cos() * x.exp() + x.tanh()).sum().backward()
        optimizer.step()

    assert not _reason(train)


def test_the_plan_says_that_a_budget_keeps_pieces_apart() -> None:
    step = ws.compile(_looped(_chunks(4)), memory_bytes="1GiB")
    step(*_make(), _batch(16, 0))
    assert step.plan is not None
    assert "the loop of the step is not folded: a budget of memory, or a backend that runs no loops" in step.plan.notes
    step = ws.compile(_differing)
    step(*_make(), _batch(16, 0))
    assert step.plan is not None
    (note,) = step.plan.notes
    assert note.startswith("the loop of the step is not folded: %")
    assert "test_fold_repeats.py:" in note


@pytest.mark.parametrize("pieces", [2, 4])
def test_gradients_that_stay_are_added_to(pieces: int) -> None:
    """The first term of each sum is no call, but the gradient of an earlier step."""

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
        optimizer.zero_grad(set_to_none=False)
        for part in x.chunk(pieces):
            (model(part).square().mean() / pieces).backward()
        optimizer.step()

    found: list[list[Tensor]] = []
    for wrap in (lambda one: one, ws.compile):
        torch.manual_seed(0)
        model, run = nn.Linear(4, 3), wrap(step)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for call in range(4):
            run(model, optimizer, torch.randn(8, 4, generator=torch.Generator().manual_seed(call)))
        found.append([p.detach() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
