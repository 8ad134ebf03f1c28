"""Pipelines on gloo ranks against one process, in float64."""

import copy
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import wholestep as ws
from tests.dist.launch import run_ranks
from tests.live_bytes import peak_of
from tests.stage_models import SEQUENCE, batches, maker, train
from tests.steps import mean_square
from wholestep.backend.inductor import bodies, inductor_backend
from wholestep.capture.call_structure import take_apart
from wholestep.graph import meta
from wholestep.graph.loop import with_bodies
from wholestep.hardware.presets import one_host
from wholestep.runtime.finalize import bound_to_rank
from wholestep.runtime.random_state import of_steps

TOLERANCE = 1e-10


def _alone(tied: bool, drop: float, steps: int) -> list[Tensor]:
    """Losses and parameters of one process, which draws what the ranks draw together."""
    torch.manual_seed(0)
    model, optimizer = maker(2, tied, drop)()
    torch.manual_seed(5)
    torch.manual_seed(int(torch.randint(0, 2**62, (1,))) % 2**63)
    losses = [train(model, optimizer, *batch) for batch in batches(8, steps)]
    return [*losses, *(p.detach() for p in model.parameters())]


def _piped(
    rank: int, world: int, tied: bool, drop: float, pipeline: dict[str, Any], offload: Any = None
) -> tuple[float, int, int]:
    torch.set_default_dtype(torch.float64)
    expected = _alone(tied, drop, 3)
    of_steps.clear()
    torch.manual_seed(0)
    model, optimizer = maker(2, tied, drop)()
    step = ws.compile(train, parallel=ws.Pipeline(**pipeline), mesh=f"pp={world}", check_every=1, offload=offload)
    torch.manual_seed(5 + rank)
    found = [step(model, optimizer, *batch) for batch in batches(8, 3)]
    assert step.plan is not None
    assert step.plan.hardware != one_host(), "stages and their order follow from the machine that runs them"
    held = sum(p.to_local().numel() for p in model.parameters())  # type: ignore[operator]
    with ws.whole(model, writeback=False):
        found += [p.detach().clone() for p in model.parameters()]
    worst = max((a - b).abs().max().item() for a, b in zip(found, expected, strict=True))
    return worst, held, sum(p.numel() for p in model.parameters())


@pytest.mark.crossed
@pytest.mark.parametrize("order", ["gpipe", "1f1b", "interleaved", "zero_bubble", "auto"])
@pytest.mark.parametrize("pieces", [1, 4])
@pytest.mark.parametrize("drop", [0.0, 0.2], ids=["", "dropout"])
@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
@pytest.mark.parametrize("placement", ["loop", "v"])
def test_two_ranks_compute_what_one_process_does(
    placement: str, tied: bool, drop: float, pieces: int, order: str
) -> None:
    found = run_ranks(_piped, 2, tied, drop, {"micro_batches": pieces, "schedule": order, "placement": placement})
    assert max(worst for worst, _, _ in found) < TOLERANCE
    assert sum(held for _, held, _ in found) == found[0][2], "each parameter rests on one rank"
    assert min(held for _, held, _ in found) > 0


def test_state_in_host_memory() -> None:
    """Tied weights, whose gradient is sent, and dropout; an update on the host."""
    found = run_ranks(_piped, 2, True, 0.2, {"micro_batches": 4, "schedule": "1f1b"}, "cpu")
    assert max(worst for worst, _, _ in found) < TOLERANCE


class Bent(nn.Module):
    """Some ops on elements, which one kernel can do."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(x) + 0.3 * torch.tanh(x) - 0.1 * x.square()


def _of_kind(kind: str, rows: int) -> tuple[Any, Any, list[tuple[Any, ...]]]:
    """A step, what makes its model and optimizer, and three batches."""
    if kind == "gpt":
        return train, maker(3, True, 0.0), batches(rows, 3)

    def mlp() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(12, 12), Bent(), nn.LayerNorm(12))))
        return model, torch.optim.AdamW(model.parameters(), foreach=True)

    return mean_square, mlp, [(torch.randn(rows, 12),) for _ in range(3)]


class Interpreted:
    """A backend of a user's, which calls what a graph names as it is."""

    name = "interpreted"
    fused_optimizers, in_place_buffers, splits_steps, times_nodes, recordable = True, True, False, False, False

    def compile(self, graph: torch.fx.Graph, inputs: Any, example_inputs: Any, clock: Any) -> Any:
        module = torch.fx.GraphModule(torch.nn.Module(), graph)
        return lambda values: list(torch.fx.Interpreter(module).run(*values))


def _interpreted(rank: int, world: int) -> list[list[float]]:
    """The losses of stages by the backend of a user's, and by `eager`."""
    losses: list[list[float]] = []
    for backend in (Interpreted(), "eager"):
        torch.manual_seed(0)
        fn, make, data = _of_kind("mlp", 10)
        model, optimizer = make()
        step = ws.compile(fn, parallel=ws.Pipeline(micro_batches=4), mesh="pp=2", backend=backend)
        losses.append([step(model, optimizer, *batch).item() for batch in data])
    return losses


def test_backends_of_users_run_stages() -> None:
    for ours, eager in run_ranks(_interpreted, 2):
        assert ours == eager


def _compiled(rank: int, world: int, parallel: Any, mesh: str, rows: int, kind: str) -> tuple[float, int, int]:
    """How far a step of Inductor is from one process; the calls of compiled regions in bodies, and their forms. Of the
    small model nothing is compiled: a region runs as it is.
    """
    torch.set_default_dtype(torch.float64)
    if kind == "mlp":
        inductor_backend._compile = lambda module, inputs: module.forward
    calls, forms, plain = list[str](), list[str](), bodies.in_regions

    def counted(*args: Any) -> Any:
        made = plain(*args)
        forms.append(str(args[0]))
        for node in made.nodes:
            if node.name.startswith("region"):
                node.target = lambda *given, run=node.target: (calls.append("region"), run(*given))[1]
        return made

    bodies.in_regions = counted  # the process ends with the test
    torch.manual_seed(0)
    fn, make, data = _of_kind(kind, rows)
    torch.manual_seed(0)
    model, optimizer = make()
    expected = [fn(model, optimizer, *batch) for batch in data]
    expected += [p.detach() for p in model.parameters()]
    torch.manual_seed(0)
    model, optimizer = make()
    step = ws.compile(fn, parallel=parallel, mesh=mesh, backend="inductor")
    found = [step(model, optimizer, *batch) for batch in data]
    with ws.whole(model, writeback=False):
        found += [p.detach().clone() for p in model.parameters()]
    return max((a - b).abs().max().item() for a, b in zip(found, expected, strict=True)), len(calls), len(forms)


GLOBAL = ws.DataParallel("zero1", axis="dp", semantics="global", inputs="global")


@pytest.mark.skipif(not shutil.which("g++"), reason="inductor needs g++")
@pytest.mark.parametrize(("parallel", "mesh", "rows", "kind"), [
    (ws.Pipeline(micro_batches=4, schedule="1f1b"), "pp=2", 10, "mlp"),
    (ws.MicroBatches(4), "dp=1", 10, "mlp"),
    pytest.param(ws.Pipeline(micro_batches=4, schedule="1f1b"), "pp=2", 10, "bent", marks=pytest.mark.full),
    pytest.param(ws.Pipeline(micro_batches=4, schedule="zero_bubble"), "pp=2", 8, "gpt", marks=pytest.mark.full),
    pytest.param(ws.Pipeline(micro_batches=2, schedule="interleaved"), "pp=2", 8, "gpt", marks=pytest.mark.full),
    pytest.param([GLOBAL, ws.Pipeline(micro_batches=2)], "dp=2,pp=2", 8, "gpt", marks=pytest.mark.full),
    pytest.param([GLOBAL, ws.MicroBatches(4)], "dp=2", 16, "gpt", marks=pytest.mark.full),
])  # fmt: skip
def test_blocks_are_compiled(parallel: Any, mesh: str, rows: int, kind: str) -> None:
    """Each block is compiled for the shapes of its pieces, unequal ones too, and serves all of them."""
    world = 4 if "," in mesh else int(mesh[-1])
    for worst, calls, forms in run_ranks(_compiled, world, parallel, mesh, rows, kind, timeout=500):
        assert worst < TOLERANCE
        assert calls > forms > 0


def _resumed(rank: int, world: int, folder: str) -> list[float]:
    """How far losses are from those of the run that was saved, on other stages, on shards, and back on stages."""
    torch.set_default_dtype(torch.float64)
    data = batches(8, 4)

    def trainer(seed: int, parallel: Any, mesh: str) -> Any:
        torch.manual_seed(seed)
        model, optimizer = maker(2, True, 0.0)()
        step = ws.compile(train, parallel=parallel, mesh=mesh)
        return step, lambda batch: step(model, optimizer, *batch)

    saved, run = trainer(0, ws.Pipeline(micro_batches=2, schedule="1f1b"), f"pp={world}")
    for batch in data[:2]:
        run(batch)
    ws.save(f"{folder}/stages", saved)
    expected = [run(batch) for batch in data[2:]]
    named = [["tokens", "places"], ["blocks", "norm", "head"]]
    shards = ws.DataParallel("fully_shard", semantics="global", inputs="global")
    found: list[float] = []
    for source, target, parallel, mesh in (
        ("stages", "others", ws.Pipeline(stages=named, micro_batches=4, schedule="zero_bubble"), f"pp={world}"),
        ("others", "shards", shards, f"dp={world}"),
        ("shards", "again", ws.Pipeline(), f"pp={world}"),
    ):
        step, run = trainer(3, parallel, mesh)
        ws.load(f"{folder}/{source}", step)
        run(data[0])  # what was loaded before the first call is put into place by it
        ws.load(f"{folder}/{source}", step)
        ws.save(f"{folder}/{target}", step)
        found.append(max((run(b) - e).abs().item() for b, e in zip(data[2:], expected, strict=True)))
    return found


@pytest.mark.full
def test_checkpoints_move_between_stages_and_shards(tmp_path: Path) -> None:
    """State, also of the optimizer, goes from stages to other stages, to shards, and back."""
    for found in run_ranks(_resumed, 2, str(tmp_path)):
        assert max(found) < TOLERANCE


def _evaluated(rank: int, world: int) -> float:
    torch.set_default_dtype(torch.float64)
    expected = _alone(False, 0.0, 1)
    torch.manual_seed(0)
    model, optimizer = maker(2, False, 0.0)()
    step = ws.compile(train, parallel=ws.Pipeline(micro_batches=2), mesh=f"pp={world}")
    step(model, optimizer, *batches(8, 1)[0])
    with torch.no_grad():
        model(batches(8, 1)[0][0]["x"])  # gathered from the stages
    with ws.whole(model, writeback=False):
        return max((p - e).abs().max().item() for p, e in zip(model.parameters(), expected[1:], strict=True))


def test_an_eager_forward_gathers_from_the_stages() -> None:
    assert max(run_ranks(_evaluated, 2)) < TOLERANCE


def _on_four(rank: int, world: int, mesh: str, style: str, order: str) -> float:
    torch.set_default_dtype(torch.float64)
    expected = _alone(True, 0.0, 2)
    torch.manual_seed(0)
    model, optimizer = maker(2, True, 0.0)()
    data = ws.DataParallel(style, axis="dp", semantics="global", inputs="global")
    step = ws.compile(train, parallel=[data, ws.Pipeline(micro_batches=2, schedule=order)], mesh=mesh)  # type: ignore[arg-type]
    found = [step(model, optimizer, *batch) for batch in batches(8, 2)]
    with ws.whole(model, writeback=False):
        found += [p.detach().clone() for p in model.parameters()]
    return max((a - b).abs().max().item() for a, b in zip(found, expected, strict=True))


@pytest.mark.full
@pytest.mark.parametrize("order", ["1f1b", "zero_bubble"])
@pytest.mark.parametrize("style", ["replicate", "zero1", "fully_shard"])
@pytest.mark.parametrize("mesh", ["dp=2,pp=2", "pp=2,dp=2"])
def test_four_ranks(mesh: str, style: str, order: str) -> None:
    assert max(run_ranks(_on_four, 4, mesh, style, order)) < TOLERANCE


def _bounded(rank: int, world: int, mesh: str, parallel: Any, share: float) -> dict[str, Any]:
    """A step under a budget beside one without: how far results are apart, what a stage holds, and what it refuses."""
    torch.set_default_dtype(torch.float64)
    data = batches(64, 2)

    def run(**options: Any) -> tuple[ws.CompiledStep, list[Tensor], int]:
        of_steps.clear()
        torch.manual_seed(0)
        model, optimizer = maker(3, False, 0.1)()
        step = ws.compile(train, parallel=parallel, mesh=mesh, **options)
        found = [step(model, optimizer, *batch) for batch in data]
        inputs = step.programs[-1].gather_inputs(take_apart(((model, optimizer, *data[-1]), {})).leaves)
        # A rank's rows are a view of all rows: the others are the test's own bytes.
        inputs = [leaf.clone() if isinstance(leaf, Tensor) and leaf.dtype == torch.int64 else leaf for leaf in inputs]
        measured = min(peak_of(step.programs[-1].run, inputs) for _ in range(3))
        return step, found, measured

    free, expected, _ = run()
    assert free.local_graph is not None
    held: list[Any] = [None] * world
    torch.distributed.all_gather_object(held, ws.peak_memory(free.local_graph).size_bytes)
    budget = int(share * max(held))
    kept, found, measured = run(memory_bytes=budget)
    assert kept.local_graph is not None
    assert kept.world is not None
    again = sum(meta.is_recomputed(node) for node, _ in with_bodies(kept.local_graph.graph))
    try:
        run(memory_bytes=max(held) // 8)
        said = ""
    except ws.WholestepError as error:
        said = str(error)
    worst = max((a - b).abs().max().item() for a, b in zip(found, expected, strict=True))
    predicted = ws.peak_memory(bound_to_rank(kept.local_graph, kept.world)).size_bytes
    return {"worst": worst, "held": held[rank], "measured": measured, "predicted": predicted, "budget": budget,
            "again": again, "said": said}  # fmt: skip


@pytest.mark.parametrize(("mesh", "parallel", "share"), [
    ("pp=2", ws.Pipeline(micro_batches=4, schedule="1f1b"), 0.8),
    pytest.param("dp=2,pp=2", [GLOBAL, ws.Pipeline(micro_batches=2)], 0.8, marks=pytest.mark.full),
    pytest.param(
        "pp=2,tp=2", [ws.TensorParallel(SEQUENCE), ws.Pipeline(micro_batches=4, schedule="1f1b")], 0.85,
        marks=pytest.mark.full,
    ),
])  # fmt: skip
def test_a_budget_bounds_each_stage(mesh: str, parallel: Any, share: float) -> None:
    """Stages compute again what they have to, with the same bits; the rank that cannot fit stops the others."""
    ranks = run_ranks(_bounded, 4 if "," in mesh else 2, mesh, parallel, share)
    assert sum(found["again"] for found in ranks) > 0
    for found in ranks:
        assert found["worst"] == 0
        assert found["measured"] <= 1.01 * found["predicted"] <= 1.01 * found["budget"]
        assert found["again"] > 0 or found["held"] <= found["budget"]
        assert found["said"]
    assert any("stage 0 needs at least" in found["said"] for found in ranks)


@torch.no_grad()
def _halved(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for param in model.parameters():
        param.mul_(0.5)
        param.data.add_(torch.full(param.shape, 0.01))  # a whole tensor, of which each rank takes what it has


@torch.no_grad()
def _averaged(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    average = [torch.zeros_like(param) for param in model.parameters()]
    for mean, param in zip(average, model.parameters(), strict=True):
        param.copy_(mean.lerp_(param, 0.9) + param * param.abs().clamp(max=0.1))
    torch._foreach_mul_(list(model.parameters()), 0.9)


def _loaded(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.load_state_dict(copy.deepcopy(model).state_dict())
    optimizer.load_state_dict(optimizer.state_dict())


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _updated(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    sums = [_whole(param.grad).sum() + _whole(param.square().mean()) for param in model.parameters()]
    nn.utils.clip_grad_norm_(model.parameters(), float(sum(sums).detach().abs()) / 10)
    optimizer.step()


def _between_steps(rank: int, world: int) -> tuple[float, list[str]]:
    torch.set_default_dtype(torch.float64)
    ends: list[list[Tensor]] = []
    refused: list[str] = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model, optimizer = maker(2, True, 0.0)()
        step: Any = train
        if compiled:
            step = ws.compile(train, parallel=ws.Pipeline(micro_batches=2), mesh=f"pp={world}", keep_grads=True)
        for between, batch in zip((_halved, _averaged, _loaded, _updated, None), batches(8, 5), strict=True):
            step(model, optimizer, *batch)
            if between is not None:
                between(model, optimizer)
        for change in (lambda p: p.view(-1).mul_(2.0), lambda p: p.normal_(), lambda p: p[:1].zero_(), lambda p: p.t()):
            try:
                with torch.no_grad():
                    change(next(model.parameters())) if compiled else None
            except ws.StateError as error:
                refused.append(error.next_step)
        ends.append([_whole(param).detach().clone() for param in model.parameters()])
    return max((a - b).abs().max().item() for a, b in zip(*ends, strict=True)), refused


def test_parameters_between_steps() -> None:
    """What is written and read between steps is what one process writes and reads; a view, which others would not see
    written, and random numbers are refused.
    """
    for worst, refused in run_ranks(_between_steps, 2):
        assert worst < TOLERANCE
        assert refused == ["do it inside of `with ws.whole(model, optimizer):`, on all ranks"] * 4
