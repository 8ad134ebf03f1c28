"""`cuda_graphs=True` without a GPU: a recorder that replays by running again, on what it was given at the time."""

import copy
import gc
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.fx import Graph

import wholestep as ws
from tests.catalogue import CASES, OPTIMIZERS
from tests.recorders import Again
from wholestep.backend import recordings
from wholestep.backend.build import compiled
from wholestep.backend.eager import Eager
from wholestep.backend.rank_binding import bind
from wholestep.backend.recordable import obstacle
from wholestep.backend.recordings import MOST_RECORDINGS, WARM_CALLS, Recordings, release_recordings
from wholestep.backend.tensorize_numbers import as_tensors
from wholestep.graph import meta
from wholestep.graph.graph import Input, Role
from wholestep.partition.host_copies import to_host
from wholestep.passes.base import run_passes
from wholestep.passes.reinplace import Reinplace
from wholestep.runtime import installer

aten = torch.ops.aten


@pytest.fixture
def again(monkeypatch: pytest.MonkeyPatch) -> Again:
    """Takes the place of the recorder."""
    made = Again()
    monkeypatch.setattr(installer, "cuda_recorder", lambda device: made)
    return made


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


@dataclass
class Twins:
    """The same training twice: op by op, and recorded."""

    make: Callable[[Any], torch.optim.Optimizer]
    keep_grads: bool = False
    backend: str = "eager"
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.models = [Net(), Net()]
        self.models[1].load_state_dict(self.models[0].state_dict())
        self.optimizers = [self.make(m.parameters()) for m in self.models]
        self.plain = ws.compile(train, keep_grads=self.keep_grads, backend=self.backend)
        recorded = {"cuda_graphs": True, **self.options}
        self.step = ws.compile(train, keep_grads=self.keep_grads, backend=self.backend, **recorded)
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
def test_ten_steps_are_those_of_eager(again: Again) -> None:
    """Dropout, a schedule, and results that are looked at only in the end."""
    twins = Twins(adamw)
    for i in range(10):
        twins.run(i, 1)
        for optimizer in twins.optimizers:
            optimizer.param_groups[0]["lr"] = 0.01 / (i + 2)
    twins.check()
    assert (twins.step.captures, again.recorded, again.replayed) == (1, 1, 10 - WARM_CALLS)


@pytest.mark.full
def test_what_inductor_compiled_is_recorded(again: Again) -> None:
    twins = Twins(adamw, backend="inductor")
    twins.run(0, 5)
    twins.check()
    assert again.recorded == 1


@pytest.mark.filterwarnings("error")
def test_gradients_that_are_kept_are_not_those_of_the_next_step(again: Again) -> None:
    twins = Twins(adamw, keep_grads=True)
    twins.run(0, 6)
    grads = [p.grad for p in twins.models[1].parameters()]
    before = [g.clone() for g in grads]
    twins.run(6, 1)
    assert all(torch.equal(a, b) for a, b in zip(grads, before, strict=True))
    twins.check()
    grads = [[p.grad for p in m.parameters()] for m in twins.models]
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    assert (again.recorded, again.replayed) == (1, 7 - WARM_CALLS)


@pytest.mark.filterwarnings("error")
def test_a_checkpoint_is_loaded_in_the_middle(again: Again) -> None:
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
    assert again.recorded == 2


@pytest.mark.filterwarnings("error")
def test_a_parameter_in_other_memory_is_recorded_again(again: Again) -> None:
    twins = Twins(adamw)
    twins.run(0, 4)
    for model in twins.models:
        with torch.no_grad():
            model[0].weight.data = model[0].weight.data * 2
    twins.run(4, 2)
    twins.check()
    assert again.recorded == 2


@pytest.mark.filterwarnings("error")
def test_addresses_may_change_now_and_then(again: Again, monkeypatch: pytest.MonkeyPatch) -> None:
    """However often, if a recording was replayed for a while before."""
    monkeypatch.setattr(recordings, "MOST_RECORDINGS", 2)
    twins = Twins(adamw)
    for i in range(4):
        twins.run(5 * i, 5)
        for model in twins.models:
            with torch.no_grad():
                model[0].weight.data = model[0].weight.data.clone()
    twins.check()
    assert again.recorded == 4


@pytest.mark.filterwarnings("error")
def test_each_kind_of_batch_has_its_recording(again: Again) -> None:
    twins = Twins(adamw)
    for i in range(5):
        twins.run(10 * i, 1, rows=6)
        twins.run(10 * i + 1, 1, rows=4)
    twins.check()
    assert again.recorded == 2


@pytest.mark.filterwarnings("error")
def test_recordings_that_were_let_go_of_are_made_anew(again: Again) -> None:
    twins = Twins(adamw)
    twins.run(0, 4)
    release_recordings()
    assert again.released == 1
    assert twins.step.cuda_graph == f"recorded from call {WARM_CALLS + 1} on"
    twins.run(4, 2)
    twins.check()
    assert again.recorded == 2
    del twins
    gc.collect()
    assert again.released == 2, "with the step"


@pytest.mark.filterwarnings("error")
def test_sizes_of_one_program_have_a_recording_each(again: Again) -> None:
    """A size that is met once costs no recording; its program is that of the others."""
    twins = Twins(adamw, options={"dynamic": {"x": (0,), "y": (0,)}})
    for i, rows in enumerate((6, 4, 6, 9, 4, 6, 4, 6, 4, 5, 6, 4)):
        twins.run(i, 1, rows)
    twins.check()
    assert (len(twins.step.programs), again.recorded, again.replayed) == (1, 2, 6)
    assert twins.step.cuda_graph == (
        "2 programs recorded at x.shape[0] = 4, y.shape[0] = 4 and at x.shape[0] = 6, y.shape[0] = 6, "
        "0 B of memory (0 B before)"
    )


def test_only_so_many_sizes_are_recorded(again: Again) -> None:
    twins = Twins(adamw, options={"dynamic": {"x": (0,), "y": (0,)}, "max_recordings": 2})
    with warnings.catch_warnings(record=True) as said:
        for rows in (4, 5, 6, 7, 4, 6):
            twins.run(rows, 4, rows)
    twins.check()
    why = "max_recordings=2 sizes of the batch are recorded; others run op by op"
    assert again.recorded == 2
    assert [str(w.message) for w in said] == [f"this step is not recorded as a CUDA graph: {why}"]
    assert twins.step.cuda_graph.endswith(f"; not recorded: {why}")


def test_a_size_that_cannot_be_recorded_is_tried_once(again: Again) -> None:
    again.error = RuntimeError("operation not permitted when stream is capturing")
    twins = Twins(adamw, options={"dynamic": {"x": (0,), "y": (0,)}})
    with warnings.catch_warnings(record=True) as said:
        for rows in (4, 5):
            twins.run(rows, 5, rows)
    twins.check()
    assert len(said) == 1
    assert twins.step.cuda_graph == f"not recorded: {str(said[0].message).partition('graph: ')[2]}"


def test_max_recordings_is_a_number() -> None:
    with pytest.raises(ws.PlanError, match="max_recordings=0"):
        ws.compile(train, max_recordings=0)


def test_only_so_many_kinds_of_call_are_recorded(again: Again) -> None:
    twins = Twins(adamw, options={"dynamic": False, "max_recordings": 2})
    with warnings.catch_warnings(record=True) as said:
        for rows in (4, 5, 6, 4, 6):
            twins.run(rows, 4, rows)
    twins.check()
    assert again.recorded == 2
    assert [str(w.message) for w in said] == [
        "this step is not recorded as a CUDA graph: 2 kinds of call are recorded, and this is another one"
    ]
    assert twins.step.cuda_graph.startswith("2 programs recorded, 0 B of memory (0 B before); not recorded: ")


@pytest.mark.filterwarnings("error")
def test_what_a_step_changes_in_its_arguments(again: Again) -> None:
    """A batch is copied into a buffer: what changes there reaches the caller's tensor."""

    def step(model: nn.Module, x: Tensor, count: Tensor) -> Tensor:
        count.add_(1)
        return model(x).sum().detach()

    model, x, count = nn.Linear(3, 2), torch.randn(4, 3), torch.zeros(())
    run = ws.compile(step, cuda_graphs=True)
    for _ in range(5):
        run(model, x, count)
    assert (count.item(), again.recorded) == (5, 1)
    count.zero_()
    run(model, x, count)
    assert count.item() == 1


@pytest.mark.filterwarnings("error")
def test_gradients_add_up_in_place(again: Again) -> None:
    def step(model: nn.Module, x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        return loss.detach()

    models = [nn.Linear(3, 2), nn.Linear(3, 2)]
    models[1].load_state_dict(models[0].state_dict())
    for model in models:
        for param in model.parameters():
            param.grad = torch.zeros_like(param)
    run, grad = ws.compile(step, cuda_graphs=True), models[1].weight.grad
    for i in range(5):
        x = torch.full((4, 3), float(i))
        step(models[0], x)
        run(models[1], x)
    assert models[1].weight.grad is grad
    assert again.recorded == 1
    torch.testing.assert_close(grad, models[0].weight.grad)


@pytest.mark.filterwarnings("error")
def test_recordings_go_before_their_process_group(again: Again) -> None:
    """NCCL waits for recordings of its collectives when a group ends."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        twins = Twins(adamw)
        twins.run(0, 4)
        assert (again.recorded, again.released) == (1, 0)
    finally:
        dist.destroy_process_group()
    assert again.released == 1


def test_state_that_was_moved_to_the_device_after_the_capture() -> None:
    graph = Graph()
    step = graph.placeholder("step")
    number = replace(meta.meta_of(torch.empty(())), device="elsewhere")
    made = graph.call_function(aten.add.Tensor, (step, 1))
    out = graph.call_function(aten._to_copy.default, (made,), {"device": torch.device("cpu")})
    for node, about in ((step, number), (made, number), (out, replace(number, device="cpu"))):
        meta.set_tensors(node, (about,))
    graph.output((out,))
    assert obstacle(graph, [Input("step", Role.STATE, number)], [torch.empty(())], "cpu", "") == ""
    away = obstacle(graph, [Input("step", Role.STATE, number)], [torch.empty((), device="meta")], "cpu", "")
    assert away == "'step' is on meta, and a graph is recorded on cpu"


@pytest.mark.parametrize("recipe", ["SGD-plain", "SGD-foreach", "Adagrad-plain", "AdamW-fused", "AdamW-foreach"])
def test_scheduled_numbers_reach_a_recording(recipe: str, again: Again) -> None:
    """Numbers that eager mode reads into Python: multiplied before they are added, one more rounding."""
    case = CASES["mlp-mean"]
    models = [case.build(torch.float32) for _ in range(2)]
    optimizers = [OPTIMIZERS[recipe].make(m.parameters()) for m in models]
    step = ws.compile(case.step, cuda_graphs=True)
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
def test_what_cannot_be_recorded_runs_as_it_did_and_says_so_once(again: Again) -> None:
    again.error = RuntimeError("operation not permitted when stream is capturing")
    twins = Twins(adamw)
    with warnings.catch_warnings(record=True) as said:
        twins.run(0, 6)
    twins.check()
    assert [str(w.message) for w in said] == [
        "this step is not recorded as a CUDA graph: it cannot be recorded: operation not permitted when stream is "
        "capturing"
    ]


def test_addresses_that_keep_changing_end_it(again: Again) -> None:
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
    assert again.recorded == MOST_RECORDINGS
    assert [str(w.message) for w in said] == [
        "this step is not recorded as a CUDA graph: parameters, state or gradients have other addresses again and "
        f"again ({MOST_RECORDINGS} recordings so far): change them in place"
    ]


def test_a_step_on_the_cpu_runs_op_by_op_and_says_why() -> None:
    model = nn.Linear(3, 2)
    asked, auto = ws.compile(train, cuda_graphs=True), ws.compile(train)
    optimizer = adamw(model.parameters())
    with warnings.catch_warnings(record=True) as said:
        for _ in range(4):
            for step in (asked, auto):
                step(model, optimizer, torch.randn(4, 3), torch.randn(4, 2))
    why = "'weight' is on cpu, and a graph is recorded on cuda"
    assert [str(w.message) for w in said] == [f"this step is not recorded as a CUDA graph: {why}"]
    assert (asked.cuda_graph, auto.cuda_graph) == (f"not recorded: {why}", "the step runs on cpu")


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


def test_a_number_of_the_host_is_made_on_the_device_that_it_is_copied_to() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    made = meta.meta_of(torch.empty(3))
    number = replace(made, shape=(), stride=(), device="elsewhere")
    full = graph.call_function(aten.full.default, ([], 2.0), {"device": torch.device("meta")})
    moved = graph.call_function(aten._to_copy.default, (full,), {"device": torch.device("cpu")})
    out = graph.call_function(aten.mul.Tensor, (x, moved))
    for node, about in ((x, made), (full, number), (moved, replace(number, device="cpu")), (out, made)):
        meta.set_tensors(node, (about,))
    graph.output((out,))
    assert obstacle(graph, [Input("x", Role.PARAM, made)], [torch.empty(3)], "cpu", "") == ""
    assert full.kwargs["device"] == torch.device("cpu")


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
    made_of = Recordings(Again(), warns=False)
    run = compiled(Eager(), graph, inputs, [torch.ones(3), torch.tensor(0.5)], recordings=made_of)
    assert torch.equal(run([-torch.ones(3), torch.tensor(0.5)])[0], torch.full((3,), -0.5))
    assert str(made_of) == (
        "not recorded: %leaky_relu_default (aten.leaky_relu.default) takes a scheduled number as a Python number"
    )
