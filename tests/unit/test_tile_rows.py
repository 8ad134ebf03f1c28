"""Long products tile by tile: the numbers of one device, and no more than a tile of them in memory."""

import copy
import warnings
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW, Optimizer
from transformers import LlamaConfig, LlamaForCausalLM

import wholestep as ws
from tests.alone import fake_group, predicted_and_measured
from tests.simulate import Simulation
from tests.together import OneDevice, compare
from tests.unit.test_recompute_layers import Block
from wholestep.graph.loop import loop_of
from wholestep.passes.recompute_layers import RecomputeLayers
from wholestep.passes.reinplace import Reinplace

pytestmark = pytest.mark.usefixtures("double")

CLASSES = 211
Loss = Callable[[Tensor, Tensor], Any]


class Model(nn.Module):
    """Tokens to logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(CLASSES, 16), nn.LayerNorm(16)
        self.body, self.head = nn.Linear(16, 16), nn.Linear(16, CLASSES, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(self.norm(self.embed(x)))))


def _mean(logits: Tensor, y: Tensor) -> Any:
    return F.cross_entropy(logits.flatten(0, 1), y.flatten())


def _class_weights(logits: Tensor, y: Tensor) -> Any:
    return F.cross_entropy(logits.flatten(0, 1), y.flatten(), torch.arange(1.0, CLASSES + 1))


def _token_weights(logits: Tensor, y: Tensor) -> Any:
    each = F.cross_entropy(logits.transpose(1, 2), y, reduction="none")
    weight = (y % 3 + 1).to(each.dtype)
    return (each * weight).sum() / weight.sum()


def _with_more(logits: Tensor, y: Tensor) -> Any:
    """A loss of the normalizer, smoothed labels, and the share of right answers."""
    z = logits.logsumexp(-1).square().mean()
    right = (logits.argmax(-1) == y).double().mean()
    return F.cross_entropy(logits.flatten(0, 1), y.flatten(), label_smoothing=0.1) + 1e-3 * z, right


def _each(logits: Tensor, y: Tensor) -> Any:
    """The loss of each token is returned."""
    each = F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none")
    return each.sum(), each.detach()


def _shifted(logits: Tensor, y: Tensor) -> Any:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), y[:, 1:].flatten())


LOSSES: dict[str, Loss] = {
    "mean": _mean, "class weights": _class_weights, "token weights": _token_weights, "more": _with_more, "each": _each,
}  # fmt: skip


def step_of(loss_of: Loss) -> Callable[..., Any]:
    """A step with this loss."""

    def train(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Any:
        optimizer.zero_grad()
        result = loss_of(model(x), y)
        (result[0] if isinstance(result, tuple) else result).backward()
        optimizer.step()
        return [r.detach() for r in result] if isinstance(result, tuple) else result.detach()

    return train


def make(kind: Callable[[], nn.Module] = Model) -> tuple[nn.Module, Optimizer]:
    """A model and its optimizer."""
    torch.manual_seed(3)
    model = kind()
    return model, AdamW(model.parameters(), lr=0.01, eps=1e-4, fused=True)


@lru_cache(maxsize=8)
def one_device(loss: str, rows: int, tokens: int) -> OneDevice:
    """Three steps, on tokens of which some have no label, others in each row."""
    batches = torch.randint(CLASSES, (3, 2, rows, tokens), generator=torch.Generator().manual_seed(rows)).unbind()
    none = torch.arange(rows)[:, None] + torch.arange(tokens) < tokens // 4
    ignored = -100 if loss != "token weights" else 0
    labels = [y.masked_fill(none, ignored) for _, y in batches]
    return OneDevice(make, step_of(LOSSES[loss]), [(x, y) for (x, _), y in zip(batches, labels, strict=True)])


def tiles(local: ws.LocalGraph) -> list[int]:
    """The number of tiles of each loop."""
    return [loop.pieces for node in local.graph.nodes if (loop := loop_of(node))]


@pytest.mark.crossed
@pytest.mark.parametrize(("rows", "tokens"), [(1, 96), (2, 50), (3, 31)])
@pytest.mark.parametrize("loss", LOSSES)
def test_one_rank(loss: str, rows: int, tokens: int) -> None:
    found = compare(one_device(loss, rows, tokens), "dp=1", ws.DataParallel("replicate"), True, edit=ws.TileRows(4, 1))
    assert found.worst < 1e-10, f"{found.where} differs by {found.worst:.1e}"
    assert tiles(found.local) == [4]


STRATEGIES: dict[str, tuple[str, Any]] = {
    "replicate": ("dp=2", ws.DataParallel("replicate", semantics="global")),
    "fully_shard": ("dp=2", ws.DataParallel("fully_shard", semantics="global")),
    "context": ("cp=2", ws.ContextParallel(method="gather")),
    "heads": ("cp=2", ws.ContextParallel(method="heads")),
    "both": ("dp=2,cp=2", [ws.DataParallel("fully_shard", semantics="global", axis="dp"), ws.ContextParallel()]),
}


@pytest.mark.crossed
@pytest.mark.parametrize("loss", ["mean", "class weights", "token weights", "more"])
@pytest.mark.parametrize("name", STRATEGIES)
def test_ranks(name: str, loss: str) -> None:
    """Ranks count the labels of all of them before the first tile."""
    found = compare(one_device(loss, 4, 38), *STRATEGIES[name], edit=ws.TileRows(3, 1))
    assert found.worst < 1e-10, f"{found.where} differs by {found.worst:.1e}"
    assert tiles(found.local) == [3]


@pytest.mark.parametrize("style", ["replicate", "fully_shard"])
def test_ranks_with_their_own_batches(style: Any) -> None:
    one = one_device("mean", 3, 31)
    planned = ws.plan(one.capture.graph, "dp=2", ws.DataParallel(style))
    plain = ws.partition(one.capture.graph, planned)
    tiled = ws.run_passes(plain, [ws.TileRows(4, 1), Reinplace()])
    states = list[dict[str, Tensor]]()
    for local in (plain, tiled):
        simulation = Simulation(one.capture, planned, local)
        simulation.start()
        for x, y in one.batches:
            simulation.step([{"x": x.roll(rank, 1), "y": y.roll(rank, 0)} for rank in range(2)])
        states.append({name: simulation.whole(name) for name in one.state})
    assert tiles(tiled) == [4]
    for name, value in states[0].items():
        torch.testing.assert_close(states[1][name], value, rtol=0, atol=1e-12, msg=name)


def test_calls() -> None:
    """Through `compile`, with a batch of another size."""
    (model, optimizer), train = make(), step_of(_mean)
    twin = copy.deepcopy(model)
    other = AdamW(twin.parameters(), lr=0.01, eps=1e-4, fused=True)
    step = ws.compile(train, passes=lambda passes: [ws.TileRows(4, 1), *passes], progress=None)
    for rows, tokens in ((2, 50), (2, 50), (3, 41)):
        x, y = torch.randint(CLASSES, (2, rows, tokens))
        torch.testing.assert_close(step(model, optimizer, x, y), train(twin, other, x, y), rtol=0, atol=1e-12)
        assert step.local_graph is not None
        assert tiles(step.local_graph) == [4]
    for mine, expected in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["fully_shard", "context"])
def test_logits_exist_for_one_tile(name: str) -> None:
    """As predicted, and measured while the program of a rank runs."""
    capture = one_device("mean", 4, 512).capture
    local = ws.partition(capture.graph, ws.plan(capture.graph, *STRATEGIES[name]))
    logits_bytes = 2 * 512 * CLASSES * 8
    predicted, measured = list[int](), list[int]()
    for passes in ([Reinplace()], [ws.TileRows(8, 1), Reinplace()]):
        with fake_group(2) as group:
            peak, live_bytes = predicted_and_measured(ws.run_passes(local, passes), group, exchange=False)
        predicted.append(peak.size_bytes)
        measured.append(live_bytes)
    assert predicted[0] - predicted[1] > 1.7 * logits_bytes
    assert measured[0] - measured[1] > 1.7 * logits_bytes
    assert abs(predicted[1] / measured[1] - 1) < 0.05


class Deep(nn.Module):
    """Layers whose backward computes them again."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(CLASSES, width), nn.Linear(width, CLASSES, bias=False)
        self.layers = nn.ModuleList(Block(width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Llama(nn.Module):
    """Layers with a gate: three wide products read the same rows, and each other's."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"vocab_size": CLASSES, "hidden_size": 16, "intermediate_size": 96, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
        self.model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, use_cache=False))

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x).logits


@pytest.mark.crossed
@pytest.mark.parametrize("name", ["fully_shard", "context", "heads"])
@pytest.mark.parametrize("kind", [Deep, Llama])
def test_recomputed_layers_are_tiled(name: str, kind: Callable[[], nn.Module]) -> None:
    x, y = torch.randint(CLASSES, (2, 2, 4, 38), generator=torch.Generator().manual_seed(0))
    one = OneDevice(partial(make, kind), step_of(_mean), list(zip(x, y, strict=True)))
    tiled = list[ws.LocalGraph]()
    for passes in ([RecomputeLayers("full")], [RecomputeLayers("full"), ws.TileRows(3, 1)]):
        found = compare(one, *STRATEGIES[name], edit=lambda local, passes=passes: ws.run_passes(local, passes))
        assert found.worst < 1e-10, f"{found.where} differs by {found.worst:.1e}"
        tiled.append(found.local)
    assert len(tiles(tiled[1])) >= 3, "the logits, and what each layer computes again"
    share = 0.7 if kind is Deep else 0.85
    assert ws.peak_memory(tiled[1]).size_bytes < share * ws.peak_memory(tiled[0]).size_bytes


def _local(
    loss: Loss, rows: int, mesh: str = "dp=1", *strategies: Any, model: Callable[[], nn.Module] = Model
) -> ws.LocalGraph:
    x, y = torch.randint(CLASSES, (2, rows, 64))
    graph = ws.capture(step_of(loss), *make(model), x, y)
    return ws.partition(graph, ws.plan(graph, mesh, *strategies))


def test_what_is_refused() -> None:
    with pytest.raises(ws.PlanError) as error:
        ws.TileRows(4, 1)(_local(_shifted, 1))
    problem = str(error.value).splitlines()[0]
    assert problem.startswith("TileRows(4) tiles nothing: %mm [64, 211] (")
    assert problem.endswith("reads all of it")
    with pytest.raises(ws.PlanError) as error:
        ws.TileRows(4, 1)(_local(_mean, 2, "dp=1", ws.MicroBatches(2)))
    problem = "TileRows(4) in a step with stages, micro-batches, or an end in the next call"
    assert str(error.value).splitlines()[0] == problem
    with pytest.raises(ws.PlanError, match=r"has other sizes on other ranks"):
        ws.TileRows(4, 1)(_local(_mean, 3, *STRATEGIES["replicate"]))
    with pytest.raises(ws.PlanError, match=r"TileRows\(0\)"):
        ws.TileRows(0)


def test_long_products_that_stay_whole_are_named() -> None:
    """Without recomputation the backward of a layer reads all of its wide values. They matter where they are larger
    than the logits.
    """
    local = _local(_mean, 2, model=partial(Deep, 64))
    with pytest.warns(
        UserWarning, match=r"TileRows\(4\) leaves \d+ long products whole: %\w+ \[128, 256\] .* reads all of it"
    ):
        assert len(tiles(ws.TileRows(4, 1)(local))) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(tiles(ws.TileRows(4, 1)(_local(_mean, 2, model=Deep)))) == 1


def test_short_products_stay() -> None:
    local = _local(_mean, 2)
    text = r"TileRows\(4\) tiles nothing: no product has 268.4 MB"
    with pytest.warns(UserWarning, match=text):
        assert ws.TileRows(4)(local) is local
