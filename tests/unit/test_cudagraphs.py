"""`backend="cudagraphs"` without a GPU: a recorder that replays by running again, on what it was given at the time."""

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph

import wholestep as ws
from tests.catalogue import CASES, OPTIMIZERS
from wholestep.backend.cudagraphs import MOST_RECORDINGS, WARM_CALLS, CudaGraphs, obstacle
from wholestep.backend.rank_binding import bind
from wholestep.backend.tensorize_numbers import as_tensors
from wholestep.graph import meta
from wholestep.graph.graph import Input, Role
from wholestep.partition.rank_ops import to_host
from wholestep.passes.base import run_passes
from wholestep.passes.reinplace import Reinplace

aten = torch.ops.aten


@dataclass
class Again:
    """As a CUDA graph does, runs nothing while it records, and gives its results in the same memory at each replay."""

    kind: str = "cpu"
    recorded: int = 0
    replayed: int = 0
    error: Exception | None = None

    def record(self, run: Callable[[], list[Tensor]]) -> tuple[list[Tensor], Callable[[], None]]:
        if self.error is not None:
            raise self.error
        self.recorded += 1
        made: list[Tensor] = []

        def replay() -> None:
            self.replayed += 1
            out = run()
            if made:
                for kept, new in zip(made, out, strict=True):
                    kept.copy_(new)
            else:
                made.extend(out)

        return made, replay


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(12, 33), nn.BatchNorm1d(33), nn.GELU(), nn.Dropout(0.3), nn.Linear(33, 5))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    optimizer.zero_grad()
    out = model(x)
    loss = (out - y).square().mean()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.detach(), out.detach()


def recorded_by(again: Again, fn: Callable[..., Any], **options: Any) -> ws.CompiledStep:
    """`fn` under `cudagraphs`, with another recorder."""
    return ws.compile(fn, backend=CudaGraphs(again.kind, again.record), **options)


@dataclass
class Twins:
    """The same training twice: under `eager`, and under `cudagraphs` with the recorder `again`."""

    make: Callable[[Any], torch.optim.Optimizer]
    again: Again = field(default_factory=Again)
    keep_grads: bool = False

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.models = [Net(), Net()]
        self.models[1].load_state_dict(self.models[0].state_dict())
        self.optimizers = [self.make(m.parameters()) for m in self.models]
        self.plain = ws.compile(train, keep_grads=self.keep_grads)
        self.step = recorded_by(self.again, train, keep_grads=self.keep_grads)
        self.results: list[tuple[Any, Any]] = []

    def run(self, first: int, count: int, rows: int = 6) -> None:
        for i in range(first, first + count):
            torch.manual_seed(100 + i)
            batch = torch.randn(rows, 12), torch.randn(rows, 5)
            torch.manual_seed(1000 + i)
            expected = self.plain(self.models[0], self.optimizers[0], *batch)
            torch.manual_seed(1000 + i)
            self.results.append((self.step(self.models[1], self.optimizers[1], *batch), expected))

    def check(self) -> None:
        for found, expected in self.results:
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        states = [[*m.state_dict().values(), *_state(o)] for m, o in zip(self.models, self.optimizers, strict=True)]
        assert all(torch.equal(a, b) for a, b in zip(*states, strict=True))


def _state(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [v for p in optimizer.param_groups[0]["params"] for v in optimizer.state[p].values() if v is not None]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


@pytest.mark.filterwarnings("error")
def test_ten_steps_are_those_of_eager() -> None:
    """Dropout, a schedule, and results that are looked at only in the end."""
    twins = Twins(adamw)
    for i in range(10):
        twins.run(i, 1)
        for optimizer in twins.optimizers:
            optimizer.param_groups[0]["lr"] = 0.01 / (i + 2)
    twins.check()
    assert (twins.step.captures, twins.again.recorded, twins.again.replayed) == (1, 1, 10 - WARM_CALLS)


@pytest.mark.filterwarnings("error")
def test_gradients_that_are_kept_are_not_those_of_the_next_step() -> None:
    twins = Twins(adamw, keep_grads=True)
    twins.run(0, 6)
    grads = [p.grad for p in twins.models[1].parameters()]
    before = [g.clone() for g in grads]
    twins.run(6, 1)
    assert all(torch.equal(a, b) for a, b in zip(grads, before, strict=True))
    twins.check()
    grads = [[p.grad for p in m.parameters()] for m in twins.models]
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    assert (twins.again.recorded, twins.again.replayed) == (1, 7 - WARM_CALLS)


@pytest.mark.filterwarnings("error")
def test_a_checkpoint_is_loaded_in_the_middle() -> None:
    """Parameters are loaded in place, the optimizer's state comes in other tensors: it is recorded again."""
    twins = Twins(adamw)
    twins.run(0, 3)
    both = list(zip(twins.models, twins.optimizers, strict=True))
    saved = [copy.deepcopy((model.state_dict(), optimizer.state_dict())) for model, optimizer in both]
    twins.run(3, 3)
    for (model, optimizer), (ours, theirs) in zip(both, saved, strict=True):
        model.load_state_dict(ours)
        optimizer.load_state_dict(theirs)
    twins.run(6, 3)
    twins.check()
    assert twins.again.recorded == 2


@pytest.mark.filterwarnings("error")
def test_a_parameter_in_other_memory_is_recorded_again() -> None:
    twins = Twins(adamw)
    twins.run(0, 4)
    for model in twins.models:
        with torch.no_grad():
            model[0].weight.data = model[0].weight.data * 2
    twins.run(4, 2)
    twins.check()
    assert twins.again.recorded == 2


@pytest.mark.filterwarnings("error")
def test_each_kind_of_batch_has_its_recording() -> None:
    twins = Twins(adamw)
    for i in range(5):
        twins.run(10 * i, 1, rows=6)
        twins.run(10 * i + 1, 1, rows=4)
    twins.check()
    assert twins.again.recorded == 2


@pytest.mark.parametrize("recipe", ["SGD-plain", "SGD-foreach", "Adagrad-plain", "AdamW-fused", "AdamW-foreach"])
def test_scheduled_numbers_reach_a_recording(recipe: str) -> None:
    """Numbers that eager mode reads into Python: multiplied before they are added, one more rounding."""
    case, again = CASES["mlp-mean"], Again()
    models = [case.build(torch.float32) for _ in range(2)]
    optimizers = [OPTIMIZERS[recipe].make(m.parameters()) for m in models]
    step = recorded_by(again, case.step)
    for i in range(8):
        batch = case.batches(i, torch.float32)
        found, expected = step(models[0], optimizers[0], batch), case.step(models[1], optimizers[1], batch)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] *= 0.7
    assert again.recorded == 1
    for mine, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


# -- where it cannot ---------------------------------------------------------------------
def test_what_cannot_be_recorded_runs_as_it_did_and_says_so_once() -> None:
    twins = Twins(adamw, Again(error=RuntimeError("operation not permitted when stream is capturing")))
    with warnings.catch_warnings(record=True) as said:
        twins.run(0, 6)
    twins.check()
    assert [str(w.message) for w in said] == [
        "backend='cudagraphs' runs this step as 'eager' does from here on: it cannot be recorded: operation not "
        "permitted when stream is capturing"
    ]


def test_addresses_that_keep_changing_end_it() -> None:
    twins = Twins(adamw)
    kept = []
    with warnings.catch_warnings(record=True) as said:
        for i in range(MOST_RECORDINGS + 6):
            twins.run(i, 1)
            kept.append([model[0].weight.data for model in twins.models])
            for model in twins.models:
                with torch.no_grad():
                    model[0].weight.data = model[0].weight.data.clone()
    twins.check()
    assert twins.again.recorded == MOST_RECORDINGS
    assert [str(w.message) for w in said] == [
        "backend='cudagraphs' runs this step as 'eager' does from here on: parameters, state or gradients have other "
        f"addresses again and again ({MOST_RECORDINGS} recordings so far): change them in place"
    ]


def test_a_step_on_the_cpu_runs_as_eager_and_says_why() -> None:
    model = nn.Linear(3, 2)
    step = ws.compile(train, backend="cudagraphs")
    optimizer = adamw(model.parameters())
    with warnings.catch_warnings(record=True) as said:
        for _ in range(4):
            step(model, optimizer, torch.randn(4, 3), torch.randn(4, 2))
    assert [str(w.message) for w in said] == [
        "backend='cudagraphs' runs this step as 'eager' does: 'weight' is on cpu, and a graph is recorded on cuda"
    ]


def _bound() -> tuple[Graph, tuple[Input, ...], list[Any]]:
    case = CASES["mlp-mean"]
    model = case.build(torch.float32)
    graph = ws.capture(case.step, model, torch.optim.SGD(model.parameters(), lr=0.1), case.batches(0, torch.float32))
    plan = ws.plan(graph, "dp=2", ws.DataParallel("fully_shard"))
    local = run_passes(ws.partition(graph, plan), [Reinplace()])
    examples = [torch.empty(i.meta.shape, dtype=i.meta.dtype) for i in local.inputs]
    return bind(local, {"dp": 0}, {"dp": "dp"}), local.inputs, examples


def test_collectives_need_a_library_that_can_be_recorded() -> None:
    graph, inputs, examples = _bound()
    why = obstacle(graph, inputs, examples, "cpu", "gloo")
    assert why.endswith(" communicates over gloo, which a graph cannot hold")
    assert obstacle(graph, inputs, examples, "cpu", "nccl") == ""


def _graph(target: Any, device: str) -> tuple[Graph, list[Input], list[Tensor]]:
    """One call, which makes a tensor on `device`."""
    graph = Graph()
    x = graph.placeholder("x")
    made = meta.meta_of(torch.empty(3, device="cpu"))
    meta.set_tensors(x, (made,))
    node = graph.call_function(target, (x,))
    meta.set_tensors(node, (replace(made, device=device),))
    graph.output((node,))
    return graph, [Input("x", Role.PARAM, made)], [torch.empty(3)]


@pytest.mark.parametrize(
    ("target", "device", "why"),
    [
        (to_host, "elsewhere", "%to_host moves between host and device"),
        (aten._to_copy.default, "elsewhere", "%_to_copy_default computes on elsewhere"),
        (aten.bernoulli.default, "elsewhere", "%bernoulli_default draws on elsewhere"),
        (aten.neg.default, "cpu", ""),
    ],
)
def test_obstacles(target: Any, device: str, why: str) -> None:
    assert obstacle(*_graph(target, device), "cpu", "") == why


def test_an_expanded_batch_and_a_tensor_elsewhere() -> None:
    graph, (given,), _ = _graph(aten.neg.default, "cpu")
    batch = replace(given, role=Role.BATCH)
    assert obstacle(graph, [batch], [torch.empty(1).expand(3)], "cpu", "") == (
        "'x' is expanded: several of its elements are one in memory"
    )
    assert obstacle(graph, [given], [torch.empty(3, device="meta")], "cpu", "") == (
        "'x' is on meta, and a graph is recorded on cpu"
    )


def test_a_number_that_an_op_takes_in_python() -> None:
    graph = Graph()
    x, lr = graph.placeholder("x"), graph.placeholder("lr")
    made = meta.meta_of(torch.empty(3))
    number = replace(made, shape=(), stride=(), dtype=torch.float64)
    meta.set_tensors(x, (made,))
    meta.set_tensors(lr, (number,))
    read = graph.call_function(aten._local_scalar_dense.default, (lr,))
    out = graph.call_function(aten.leaky_relu.default, (x, read))
    meta.set_tensors(out, (made,))
    graph.output((out,))
    assert as_tensors(graph) == ["%leaky_relu_default (aten.leaky_relu.default)"]
    inputs = [Input("x", Role.PARAM, made), Input("lr", Role.HYPER, number)]
    backend = CudaGraphs("cpu", Again().record)
    with pytest.warns(UserWarning, match="takes a scheduled number"):
        run = backend.compile(graph, inputs, [torch.ones(3), torch.tensor(0.5)], None)
    assert torch.equal(run([-torch.ones(3), torch.tensor(0.5)])[0], torch.full((3,), -0.5))
    assert list(backend.warned) == [
        "backend='cudagraphs' runs this step as 'eager' does: %leaky_relu_default (aten.leaky_relu.default) takes a "
        "scheduled number as a Python number"
    ]
