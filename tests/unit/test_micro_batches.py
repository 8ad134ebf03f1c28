"""Micro-batches: pieces of a batch, one after the other, against one device on all of it, in float64."""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW, Optimizer

import wholestep as ws
from tests.alone import fake_group, predicted_and_measured
from tests.simulate import Simulation, cut
from tests.together import OneDevice, compare
from wholestep.errors import MeshError, PlanError
from wholestep.graph import meta
from wholestep.graph.graph import LocalGraph
from wholestep.graph.loop import Loop, loop_of
from wholestep.partition.accumulators import add_up
from wholestep.passes.reinplace import Reinplace
from wholestep.plan.data_parallel import STYLES

pytestmark = pytest.mark.usefixtures("double")

TOLERANCE = 1e-10
Loss = Callable[[Tensor, dict[str, Tensor]], Tensor]


def _token_weighted(out: Tensor, b: dict[str, Tensor]) -> Tensor:
    return (F.cross_entropy(out, b["y"], reduction="none") * b["weight"]).sum() / b["weight"].sum()


def _masked(out: Tensor, b: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(out, b["y"].masked_fill(b["weight"] < 0.4, -100))


LOSSES: dict[str, Loss] = {
    "mean": lambda out, b: F.cross_entropy(out, b["y"]),
    "mean of squares": lambda out, b: (out - b["weight"][:, None]).square().mean(),
    "sum": lambda out, b: F.cross_entropy(out, b["y"], reduction="sum"),
    "token-weighted": _token_weighted,
    "masked": _masked,
    "class weights": lambda out, b: F.cross_entropy(
        out, b["y"].masked_fill(b["weight"] < 0.3, -100), torch.arange(1.0, 9)
    ),
}


def _step(loss: Loss, clip: bool) -> Callable[..., Any]:
    def train(model: nn.Module, optimizer: Optimizer, batch: dict[str, Tensor]) -> Tensor:
        optimizer.zero_grad()
        value = loss(model(batch["x"]), batch)
        value.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        return value.detach()

    return train


def _mlp(drop: float) -> nn.Module:
    return nn.Sequential(
        nn.Linear(10, 33),
        nn.ReLU(),
        nn.Dropout(drop),
        nn.Linear(33, 20),
        nn.LayerNorm(20),
        nn.Dropout(drop),
        nn.Linear(20, 8),
    )


@lru_cache(maxsize=4)
def one_device(loss: str, rows: int, clip: bool, drop: float) -> OneDevice:
    generator = torch.Generator().manual_seed(7)

    def make() -> tuple[nn.Module, Optimizer]:
        model = _mlp(drop)
        return model, AdamW(model.parameters(), lr=0.01, eps=1e-4, fused=True)

    def batch() -> dict[str, Tensor]:
        return {
            "x": torch.randn(rows, 10, generator=generator), "y": torch.randint(0, 8, (rows,), generator=generator),
            "weight": torch.rand(rows, generator=generator),
        }  # fmt: skip

    return OneDevice(make, _step(LOSSES[loss], clip), [(batch(),) for _ in range(2)])


def loops(local: LocalGraph) -> list[Loop]:
    return [loop for node in local.graph.nodes if (loop := loop_of(node))]


def calls(local: LocalGraph) -> int:
    """Nodes of a program, those of bodies included."""
    return len(local.graph.nodes) + sum(len(loop.body.nodes) for loop in loops(local))


@pytest.mark.crossed
@pytest.mark.parametrize("drop", [0.0, 0.3], ids=["", "dropout"])
@pytest.mark.parametrize("clip", [False, True], ids=["", "clip"])
@pytest.mark.parametrize("rows", [16, 10], ids=["even", "uneven"])
@pytest.mark.parametrize("pieces", [1, 2, 3, 8])
@pytest.mark.parametrize("loss", LOSSES)
def test_one_rank(loss: str, pieces: int, rows: int, clip: bool, drop: float) -> None:
    """Dropout draws what one device draws."""
    one = one_device(loss, rows, clip, drop)
    found = compare(one, "dp=1", ws.MicroBatches(pieces))
    assert found.worst < TOLERANCE, f"{found.where} differs by {found.worst:.1e}"
    counts = loss in ("mean", "token-weighted", "masked", "class weights")
    assert len(loops(found.local)) == (0 if pieces == 1 else 1 + counts), (
        "targets are counted, then all else is one loop"
    )
    assert not found.ruleless


def test_the_comparison_sees_a_piece_that_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_one(graph: ws.TrainGraph, plan: ws.Plan) -> LocalGraph:
        local = ws.partition(graph, plan)
        for node in local.graph.nodes:
            if loop := loop_of(node):
                node.target = Loop(loop.body, loop.pieces - 1)
        return local

    one = one_device("sum", 16, False, 0.0)
    monkeypatch.setattr("tests.together.partition", without_one)
    assert compare(one, "dp=1", ws.MicroBatches(4)).worst > 1e-3


@pytest.mark.crossed
@pytest.mark.parametrize("semantics", ["per_rank", "global"])
@pytest.mark.parametrize("rows", [16, 10], ids=["even", "uneven"])
@pytest.mark.parametrize("pieces", [2, 3, 8])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("style", STYLES)
def test_styles(style: str, loss: str, pieces: int, rows: int, semantics: Any) -> None:
    """Beside every style of data parallelism, pieces change nothing: not the numbers that ranks draw either."""
    one, mesh = one_device(loss, rows, True, 0.3), "r=2,s=2" if style == "hybrid" else "dp=2"
    data = ws.DataParallel(style, semantics=semantics)
    with_pieces, without = (_trained(one, mesh, parallel) for parallel in ([data, ws.MicroBatches(pieces)], data))
    for name, value in without.items():
        torch.testing.assert_close(with_pieces[name], value, rtol=0, atol=1e-12, msg=name)
    if semantics == "global":
        quiet = one_device(loss, rows, True, 0.0)
        found = compare(quiet, mesh, [data, ws.MicroBatches(pieces)])
        assert found.worst < TOLERANCE, f"{found.where} differs by {found.worst:.1e}"


def _trained(one: OneDevice, mesh: str, parallel: Any) -> dict[str, Tensor]:
    """Parameters after all steps, on ranks with different batches."""
    planned = ws.plan(one.capture.graph, mesh, parallel)
    local = ws.partition(one.capture.graph, planned)
    simulation = Simulation(one.capture, planned, local)
    simulation.start()
    layouts = {i.name: layout for i, layout in zip(local.inputs, local.layouts, strict=True)}
    for number, (batch,) in enumerate(one.batches):
        ranks: list[dict[str, Tensor]] = [{} for _ in range(local.mesh.size)]
        for key, value in batch.items():
            name = f"batch['{key}']"
            pieces = cut(value, layouts[name], local.mesh)
            if layouts[name].varies:  # ranks have batches of their own
                pieces = [value.roll(rank, 0) for rank in range(local.mesh.size)]
            for rank, piece in enumerate(pieces):
                ranks[rank][name] = piece
        torch.manual_seed(number)
        simulation.step(ranks)
    return {name: simulation.whole(name) for name in dict(one.model.named_parameters())}


def test_draws_keep_their_order() -> None:
    """One that only a result needs comes before the mask that the loop needs."""

    def train(model: nn.Module, optimizer: Optimizer, x: Tensor) -> tuple[Tensor, Tensor]:
        noise = torch.rand(3)
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach(), noise

    def make() -> tuple[nn.Module, Optimizer]:
        model = _mlp(0.3)
        return model, SGD(model.parameters(), lr=0.1)

    found = compare(OneDevice(make, train, [(torch.randn(9, 10),)]), "dp=1", ws.MicroBatches(3))
    assert found.worst < TOLERANCE, f"{found.where} differs by {found.worst:.1e}"


class Attention(nn.Module):
    """Embeddings, fused attention, layer norm, tied output."""

    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(11, 16), nn.Embedding(6, 16)
        self.qkv, self.out, self.norm, self.drop = (
            nn.Linear(16, 48),
            nn.Linear(16, 16),
            nn.LayerNorm(16),
            nn.Dropout(drop),
        )

    def forward(self, tokens: Tensor) -> Tensor:
        b, t = tokens.shape
        x = self.norm(self.table(tokens) + self.places(torch.arange(t)))
        q, k, v = (p.view(b, t, 4, 4).transpose(1, 2) for p in self.qkv(x).chunk(3, -1))
        fused = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.out(fused.transpose(1, 2).reshape(b, t, 16)))
        return x @ self.table.weight.t()


def _next_token(model: nn.Module, optimizer: Optimizer, tokens: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(tokens)[:, :-1].reshape(-1, 11), tokens[:, 1:].reshape(-1))
    loss.backward()
    optimizer.step()
    return loss.detach()


def _attention(drop: float) -> tuple[nn.Module, Optimizer]:
    model = Attention(drop)
    return model, AdamW(model.parameters(), lr=0.01, eps=1e-4, fused=True)


@lru_cache(maxsize=2)
def language_model(rows: int, drop: float = 0.0) -> OneDevice:
    return OneDevice(lambda: _attention(drop), _next_token, [(torch.randint(0, 11, (rows, 6)),) for _ in range(2)])


@pytest.mark.parametrize(("rows", "pieces", "made"), [(12, 2, 2), (12, 8, 6), (7, 8, 7)])
def test_a_language_model(rows: int, pieces: int, made: int) -> None:
    found = compare(language_model(rows, 0.2), "dp=1", ws.MicroBatches(pieces))
    assert found.worst < TOLERANCE, f"{found.where} differs by {found.worst:.1e}"
    assert [loop.pieces for loop in loops(found.local)] == [made, made], "as torch.chunk: none is empty"
    assert found.plan.mesh.pieces == made


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_sums_of_a_loss_wait_for_no_count(smoothing: float) -> None:
    """A loss that adds a sum to a mean is added up after the loop: the forward stays beside its backward."""

    def smoothed(model: nn.Module, optimizer: Optimizer, tokens: Tensor) -> Tensor:
        optimizer.zero_grad()
        logits, labels = model(tokens)[:, :-1].transpose(1, 2), tokens[:, 1:]
        loss = F.cross_entropy(logits, labels, label_smoothing=smoothing) + 1e-3 * logits.square().sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    one = OneDevice(lambda: _attention(0.0), smoothed, [(torch.randint(0, 11, (12, 6)),) for _ in range(2)])
    found = compare(one, "dp=1", ws.MicroBatches(3))
    assert found.worst < TOLERANCE, f"{found.where} differs by {found.worst:.1e}"
    count, rest = loops(found.local)
    assert len(count.body.nodes) < 0.2 * len(rest.body.nodes)


@pytest.mark.full
def test_with_tensor_parallelism() -> None:
    one, plan = language_model(8), {"qkv": "colwise", "out": "rowwise"}
    for mesh, data in (("tp=2", []), ("dp=2,tp=2", [ws.DataParallel("fully_shard", axis="dp", semantics="global")])):
        found = compare(one, mesh, [*data, ws.TensorParallel(plan, axis="tp"), ws.MicroBatches(2)])
        assert found.worst < TOLERANCE, f"{mesh}: {found.where} differs by {found.worst:.1e}"


class Centred(nn.Module):
    """Scales by a parameter, and takes off the mean of the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.scale, self.rest = nn.Linear(10, 4), nn.Parameter(torch.rand(4)), _mlp(0.0)
        self.widen = nn.Linear(4, 10)

    def forward(self, x: Tensor) -> Tensor:
        scaled = self.first(x) * self.scale
        return self.rest(self.widen(scaled - scaled.mean(0)))


def test_what_reads_a_parameter_that_one_loop_gathers_is_kept_for_the_next() -> None:
    """Two loops read what is scaled, and the parameter is gathered for each piece in the first alone."""

    def make() -> tuple[nn.Module, Optimizer]:
        model = Centred()
        return model, AdamW(model.parameters(), lr=0.01, eps=1e-4, fused=True)

    batch = {"x": torch.randn(12, 10), "y": torch.randint(0, 8, (12,))}
    one = OneDevice(make, _step(LOSSES["mean"], True), [(batch,)])
    data = ws.DataParallel("fully_shard", semantics="global", reshard_after_forward=True)
    found = compare(one, "dp=2", [data, ws.MicroBatches(2)])
    assert found.worst < TOLERANCE, f"{found.where} differs by {found.worst:.1e}"


# -- what it is for ---------------------------------------------------------------------------------------------------
def _final(parallel: Any, mesh: str = "dp=2", drop: float = 0.2) -> LocalGraph:
    graph = language_model(24, drop).capture.graph
    return ws.run_passes(ws.partition(graph, ws.plan(graph, mesh, parallel)), [Reinplace()])


@pytest.mark.crossed
@pytest.mark.parametrize("again", [None, True])
@pytest.mark.parametrize("pieces", [1, 2, 4, 12])
@pytest.mark.parametrize("style", ["replicate", "zero1", "zero2", "fully_shard"])
def test_memory_is_as_predicted(style: str, pieces: int, again: bool | None) -> None:
    data = ws.DataParallel(style, reshard_after_forward=again)
    with fake_group(2) as group:
        predicted, measured = predicted_and_measured(_final([data, ws.MicroBatches(pieces)]), group, exchange=False)
    assert -0.05 < predicted.size_bytes / measured - 1 < 0.1, "the last piece frees what it reads"


def test_activations_are_those_of_one_piece() -> None:
    peaks = {n: ws.peak_memory(_final(ws.MicroBatches(n), "dp=1", 0.0)) for n in (1, 2, 6)}
    grads = sum(p.numel() for p in Attention().parameters()) * 8
    held = {pieces: peak.size_bytes - peak.rest_bytes for pieces, peak in peaks.items()}
    assert held[2] - grads < 0.55 * held[1]
    assert held[6] - grads < 0.25 * held[1]


def test_the_program_does_not_grow_with_the_number_of_pieces() -> None:
    sizes = {pieces: calls(_final(ws.MicroBatches(pieces), "dp=1")) for pieces in (2, 24)}
    assert len(set(sizes.values())) == 1, sizes


def test_gradients_are_reduced_once_or_for_each_piece() -> None:
    counts = {
        style: _final([ws.DataParallel(style), ws.MicroBatches(4)]).collectives()
        for style in ("replicate", "zero1", "zero2")
    }
    params = len(list(Attention().parameters()))
    assert counts["replicate"]["all_reduce"].count == params
    assert counts["zero1"]["reduce_scatter"].count == params
    assert counts["zero2"]["reduce_scatter"].count == 4 * params
    assert counts["zero2"]["reduce_scatter"].bytes == 4 * counts["zero1"]["reduce_scatter"].bytes


def test_parameters_are_gathered_once_or_for_each_piece() -> None:
    def gathers(again: bool) -> int:
        data = ws.DataParallel("fully_shard", reshard_after_forward=again)
        return _final([data, ws.MicroBatches(4)]).collectives()["all_gather"].count

    params = len(list(Attention().parameters()))
    assert gathers(False) == params
    assert gathers(True) > 4 * params


def test_time_is_that_of_all_pieces() -> None:
    hardware = ws.Hardware.preset("dgx-h100")
    times = {pieces: ws.simulate(_final(ws.MicroBatches(pieces), "dp=1"), hardware) for pieces in (2, 4, 6)}
    first, second = times[4].step_us - times[2].step_us, times[6].step_us - times[4].step_us
    assert first == pytest.approx(second, rel=0.05), (
        "two pieces more take as long again: kernels here are launches alone"
    )
    assert times[2].host_us < times[4].host_us < times[6].host_us


def test_a_budget_is_met_or_refused() -> None:
    graph = language_model(24).capture.graph
    local = ws.partition(graph, ws.plan(graph, "dp=1", ws.MicroBatches(4)))
    peak = ws.peak_memory(_final(ws.MicroBatches(4), "dp=1", 0.0)).size_bytes
    assert ws.run_passes(local, ws.default_passes(memory_bytes=peak)).passes[0] == "FitMemory"
    fitted = ws.run_passes(local, ws.default_passes(memory_bytes=peak - 1))
    assert ws.peak_memory(fitted).size_bytes < peak
    with pytest.raises(PlanError, match="the step needs at least") as caught:
        ws.run_passes(local, ws.default_passes(memory_bytes=peak // 10))
    assert "more micro-batches" in str(caught.value)


# -- compiled ---------------------------------------------------------------------------------------------------------
class Interpreted:
    """A backend that calls what a graph names, as it is."""

    name = "interpreted"
    fused_optimizers, in_place_buffers, splits_steps, times_nodes, recordable = True, True, False, False, False

    def compile(
        self, graph: torch.fx.Graph, inputs: Any, example_inputs: Any, clock: Any
    ) -> Callable[[Any], list[Any]]:
        module = torch.fx.GraphModule(nn.Module(), graph)
        return lambda values: list(torch.fx.Interpreter(module).run(*values))


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"backend": Interpreted()}, marks=pytest.mark.full),
        pytest.param({"offload": "cpu"}, marks=pytest.mark.full),
        {"keep_grads": True, "measure": True},
    ],
    ids=["", "backend", "offload", "measured"],
)
def test_compiled(options: dict[str, Any]) -> None:
    """A smaller batch has pieces of its own; results of each sample come whole."""

    def train(model: nn.Module, optimizer: Optimizer, x: Tensor) -> tuple[Tensor, Tensor]:
        optimizer.zero_grad()
        out = model(x)
        loss = out.square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach(), out.detach()

    found: list[list[Tensor]] = []
    for run in (train, ws.compile(train, parallel=ws.MicroBatches(3), **options)):
        torch.manual_seed(0)
        model = _mlp(0.3)
        optimizer = AdamW(model.parameters(), lr=0.01)
        results = [value for rows in (9, 9, 5) for value in run(model, optimizer, torch.randn(rows, 10))]
        found.append([*results, *(p.detach() for p in model.parameters())])
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-10)


def test_sums_of_16_bits_are_accumulated_in_32() -> None:
    model = nn.Linear(8, 8).bfloat16()
    step = _step(lambda out, b: out.float().square().sum(), False)
    graph = ws.capture(step, model, SGD(model.parameters(), lr=0.1), {"x": torch.randn(12, 8).bfloat16()})
    local = ws.partition(graph, ws.plan(graph, "dp=1", ws.MicroBatches(4)))
    totals = [line for line in str(local).splitlines() if "add_up(" in line]
    assert len(totals) == 3
    assert all(": f32[" in line for line in totals)


def test_a_gradient_in_16_bits_is_added_to_its_sum_in_32_without_a_copy() -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 8).float()
    weight, batch = model.weight.detach().clone(), {"x": torch.randn(12, 8, dtype=torch.float32)}
    step, half = _step(lambda out, b: out.float().square().sum(), False), ws.MixedPrecision(torch.bfloat16)
    options = ws.CaptureOptions(mixed_precision=half)
    graph = ws.capture(step, model, SGD(model.parameters(), lr=0.1), batch, options=options)
    local = ws.partition(graph, ws.plan(graph, "dp=1", ws.MicroBatches(4)))
    loop = next(loop for node in local.graph.nodes if (loop := loop_of(node)))
    added = [node.args[1] for node in loop.body.nodes if node.target is add_up]
    assert [meta.one_tensor(value).dtype for value in added] == [torch.float32, torch.bfloat16, torch.bfloat16]

    wide = torch.zeros(8, 8)
    for piece in batch["x"].bfloat16().chunk(4):
        out = F.linear(piece, weight.bfloat16(), model.bias.detach().bfloat16())
        wide += ((2 * out.float()).bfloat16().T @ piece).float()
    ws.compile(step, parallel=ws.MicroBatches(4), mixed_precision=half)(model, SGD(model.parameters(), lr=0.1), batch)
    torch.testing.assert_close(model.weight.detach(), weight - 0.1 * wide.float(), rtol=0, atol=1e-6)


def test_frozen_batch_norms_leave_their_statistics() -> None:
    def make() -> tuple[nn.Module, Optimizer]:
        model = nn.Sequential(nn.Linear(10, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 8))
        model[1].eval()
        return model, SGD(model.parameters(), lr=0.1)

    batches = [({"x": torch.randn(7, 10), "y": torch.randint(8, (7,))},) for _ in range(2)]
    one = OneDevice(make, _step(LOSSES["mean"], False), batches)
    found = compare(one, "dp=1", ws.MicroBatches(3))
    assert found.worst < TOLERANCE, f"{found.where} differs by {found.worst:.1e}"
    assert not [out for out in one.capture.graph.outputs if "running" in out.target]


# -- what has no form as a loop ---------------------------------------------------------------------------------------
def test_a_change_of_an_argument_that_is_cut_is_refused() -> None:
    def train(model: nn.Module, optimizer: Optimizer, batch: dict[str, Tensor], sums: Tensor) -> Tensor:
        value = _step(LOSSES["mean of squares"], False)(model, optimizer, batch)
        sums += value  # here
        return value

    model = _mlp(0.0)
    batch, sums = {"x": torch.randn(8, 10), "weight": torch.randn(8)}, torch.zeros(4)
    graph = ws.capture(train, model, SGD(model.parameters(), lr=0.1), batch, sums)
    with pytest.raises(PlanError) as caught:
        ws.partition(graph, ws.plan(graph, "dp=1", ws.MicroBatches(2)))
    found = str(caught.value)
    assert found.startswith("the step changes sums, of which each micro-batch has a piece")
    assert "sums += value  # here" in found
    assert "MicroBatches(..., input_batch_dim={'sums': None, '*': 0})" in found
    ws.partition(graph, ws.plan(graph, "dp=1", ws.MicroBatches(2, input_batch_dim={"sums": None, "*": 0})))
    shared = ws.DataParallel("zero1", semantics="global")
    with pytest.raises(PlanError, match=r"the step changes sums, of which each rank has a piece"):
        ws.partition(graph, ws.plan(graph, "dp=2", shared))
    ws.partition(graph, ws.plan(graph, "dp=2", replace(shared, input_batch_dim={"sums": None, "*": 0})))
    ws.partition(graph, ws.plan(graph, "dp=2", ws.DataParallel("zero1")))


def test_a_loop_that_is_split_everywhere_is_refused() -> None:
    model = nn.Sequential(*(part for _ in range(3) for part in (nn.Linear(8, 8), nn.BatchNorm1d(8))))
    step = _step(lambda out, b: out.square().mean(), False)
    graph = ws.capture(step, model, SGD(model.parameters(), lr=0.1), {"x": torch.randn(12, 8)})
    with pytest.raises(PlanError) as caught:
        ws.partition(graph, ws.plan(graph, "dp=1", ws.MicroBatches(3)))
    found = str(caught.value)
    assert found.startswith("3 micro-batches save too little memory: ")
    assert "waits for the whole batch" in found
    assert "leave out MicroBatches" in found


@pytest.mark.parametrize(
    ("rows", "cure"), [(7, "give a number that divides 7"), (8, "cut in the step or by MicroBatches")]
)
def test_a_step_that_cuts_the_batch_itself_is_refused_with_its_line(rows: int, cure: str) -> None:
    def train(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = torch.stack([model(part).square().mean() for part in x.chunk(4)]).sum()  # cut
        loss.backward()
        optimizer.step()
        return loss.detach()

    model = nn.Linear(8, 4)
    graph = ws.capture(train, model, SGD(model.parameters(), lr=0.1), torch.randn(rows, 8))
    with pytest.raises(PlanError) as caught:
        ws.partition(graph, ws.plan(graph, "dp=1", ws.MicroBatches(2)))
    found = str(caught.value)
    assert found.startswith(f"the step cuts or joins the {rows} rows of %x; 2 micro-batches take a part each\n  at: ")
    assert f"# cut\n  needed: rows that stay apart\n  next: {cure}" in found


def test_values_that_cross_loops_are_kept_or_computed_again() -> None:
    """Batch norm needs the statistics of all pieces before it goes on."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(
                nn.Linear(10, 4),
                nn.BatchNorm1d(4),
                nn.Linear(4, 64),
                nn.GELU(),
                nn.Linear(64, 64),
                nn.GELU(),
                nn.Linear(64, 8),
            )

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x.square().sqrt())

    def make() -> tuple[nn.Module, Optimizer]:
        model = Net()
        return model, SGD(model.parameters(), lr=0.05, momentum=0.9)

    batches = [(dict(b),) for (b,) in one_device("mean", 10, False, 0.0).batches]
    one = OneDevice(make, _step(LOSSES["mean"], True), batches)
    found = compare(one, "dp=1", ws.MicroBatches(3))
    assert found.worst < TOLERANCE, f"{found.where} differs by {found.worst:.1e}"
    assert len(loops(found.local)) > 2
    text = str(found.local)
    assert "keep_piece" in text
    assert "kept_piece" in text


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: ws.MicroBatches(0), PlanError, "MicroBatches(0)"),
        (lambda: ws.MicroBatches(2.0), PlanError, "MicroBatches(pieces=2.0)"),  # type: ignore[arg-type]
        (lambda: _final([ws.MicroBatches(2), ws.MicroBatches(3)]), PlanError, "two MicroBatches"),
        (lambda: _final(ws.MicroBatches(2), "time=2"), MeshError, "mesh time=2 has an axis 'time'"),
        (lambda: ws.compile(_next_token, parallel=ws.MicroBatches(2), mesh="time=1"), MeshError, "has an axis 'time'"),
        (
            lambda: _final([ws.TensorParallel({"qkv": "colwise"}, async_tp=True), ws.MicroBatches(2)], "tp=2"),
            PlanError,
            "async_tp with MicroBatches(2)",
        ),
    ],
)
def test_options(make: Callable[[], Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        make()
    assert text in str(caught.value)


def test_a_plan_in_a_file() -> None:
    graph = language_model(12).capture.graph
    planned = ws.plan(graph, "dp=2", [ws.DataParallel("zero2"), ws.MicroBatches(3)])
    again = ws.Plan.from_json(planned.to_json())
    assert str(again.mesh) == "time=3,dp=2"
    assert str(ws.partition(graph, again)) == str(ws.partition(graph, planned))
