"""`semantics="global"`: what one device computes on the whole batch, in float64; ranks hold different parts."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW, Optimizer

import wholestep as ws
from tests.catalogue import SimpleMlp
from tests.together import Double, OneDevice, compare, joined, without_chance
from wholestep.plan.data_parallel import STYLES

pytestmark = pytest.mark.usefixtures("double")

STEPS, TOLERANCE = 3, 1e-10
WORLDS = ("dp=2", "dp=3", "dp=4")
HYBRID = "r=2,s=2"
Loss = Callable[[nn.Module, dict[str, Tensor]], Tensor]


def _numbers(rows: int, generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "x": torch.randn(rows, 50, generator=generator),
        "y": torch.randn(rows, 8, generator=generator),
        "classes": torch.randint(0, 8, (rows,), generator=generator),
        "weight": torch.rand(rows, generator=generator),
        "image": torch.randn(rows, 3, 8, 8, generator=generator),
        "tokens": torch.randint(0, 11, (rows, 6), generator=generator),
    }


def _views(model: nn.Module, b: dict[str, Tensor]) -> Tensor:
    """Views of the output that merge and split the batch, factories of its size and of others."""
    out = model(b["x"])
    again = out.clone().view(-1).squeeze().unsqueeze(0).view(out.shape)
    out = out + 0.1 * again
    out = out + torch.arange(8).unsqueeze(0) + torch.ones(out.shape)
    return (out + torch.zeros(8).unsqueeze(0).repeat(out.shape[0], 1) - b["y"]).sum()


def _ignoring(model: nn.Module, b: dict[str, Tensor]) -> Tensor:
    labels = b["classes"].masked_fill(b["weight"] < 0.4, -100)
    return F.cross_entropy(model(b["x"]), labels)


def _token_weighted(model: nn.Module, b: dict[str, Tensor]) -> Tensor:
    losses = F.cross_entropy(model(b["x"]), b["classes"], reduction="none")
    return (losses * b["weight"]).sum() / b["weight"].sum()


LOSSES: dict[str, Loss] = {
    "views": _views,
    "sum": lambda model, b: (model(b["x"]) - b["y"]).sum(),
    "mean": lambda model, b: (model(b["x"]) - b["y"]).square().mean(),
    "mse": lambda model, b: F.mse_loss(model(b["x"]), b["y"]),
    "smooth l1, summed": lambda model, b: F.smooth_l1_loss(model(b["x"]), b["y"], reduction="sum"),
    "bce": lambda model, b: F.binary_cross_entropy_with_logits(model(b["x"]), b["y"].sigmoid()),
    "kl": lambda model, b: F.kl_div(model(b["x"]).log_softmax(-1), b["y"].softmax(-1), reduction="batchmean"),
    "cross entropy": lambda model, b: F.cross_entropy(model(b["x"]), b["classes"]),
    "class weights": lambda model, b: F.cross_entropy(
        model(b["x"]), b["classes"], weight=torch.arange(1.0, 9.0), label_smoothing=0.1
    ),
    "ignored labels": _ignoring,
    "token weights": _token_weighted,
    "maximum": lambda model, b: model(b["x"]).amax() + model(b["x"]).square().amax(0).sum(),
    "penalty": lambda model, b: (
        F.mse_loss(model(b["x"]), b["y"]) + 0.1 * sum(p.square().sum() for p in model.parameters())
    ),
    "spread": lambda model, b: model(b["x"]).std(0).mean() + model(b["x"]).var(),
}


class Tokens(nn.Module):
    """(b, t, d) to (b, t, d): merges rows and places, and computes on both."""

    def __init__(self, kind: str, t: int, d: int) -> None:
        super().__init__()
        self.kind, self.mix, self.out, self.scale = (
            kind,
            nn.Linear(d, d),
            nn.Linear(d, d),
            nn.Parameter(torch.rand(t, d)),
        )

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.mix(x).flatten(0, 1)
        return self.out(MERGED[self.kind](tokens, x, self.scale).view(x.shape)).tanh()


def _of_places(tokens: Tensor, x: Tensor, scale: Tensor) -> Tensor:
    """What ranks have whole, over merged dims."""
    return tokens * torch.linspace(0, 1, tokens.shape[0], dtype=x.dtype).unsqueeze(1)


MERGED: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "elements": lambda tokens, x, scale: tokens.sigmoid() * x.flatten(0, 1) + tokens,
    "softmax": lambda tokens, x, scale: tokens.softmax(-1) * (tokens.sum(-1, keepdim=True) > 0),
    "product": lambda tokens, x, scale: tokens @ (x.flatten(0, 1).t() @ tokens),
    "other order": lambda tokens, x, scale: (tokens.view(x.shape) * scale).transpose(0, 1).reshape(-1, x.shape[2]),
    "all in one": lambda tokens, x, scale: (tokens.flatten() * x.flatten()).view(tokens.shape),
    "rows": lambda tokens, x, scale: tokens.view(x.shape[0], -1) * x.flatten(1).mean(),
    "finer": lambda tokens, x, scale: tokens.view(x.shape[0], x.shape[1], 2, -1).flip(2).flatten(0, 1).flatten(1),
    "coarser": lambda tokens, x, scale: tokens.reshape(-1, x.shape[1] // 2, x.shape[2]).cumsum(1) - tokens.mean(0),
    "of places": _of_places,
    "shifted": lambda tokens, x, scale: tokens + tokens.roll(1, 0) + torch.cat([tokens[1:], tokens[:1]]),
    "summed up": lambda tokens, x, scale: tokens.cumsum(0) / tokens.shape[0] + tokens.amax(0),
    "expanded": lambda tokens, x, scale: tokens + scale.expand(x.shape).reshape(tokens.shape),
    "gathered": lambda tokens, x, scale: tokens[torch.arange(tokens.shape[0] - 1, -1, -1)] * tokens,
}
ONCE = {"elements", "softmax", "product", "all in one", "rows", "finer"}
"""Those that need no token of another rank."""


@pytest.mark.crossed
@pytest.mark.parametrize("mesh", [*WORLDS, HYBRID])
@pytest.mark.parametrize("rows", [5, 7])
@pytest.mark.parametrize("kind", MERGED)
def test_tokens_are_cut_between_rows(kind: str, rows: int, mesh: str) -> None:
    """Also where ranks have other numbers of rows: numbers are those of one device, and only sums are sent."""

    def make() -> tuple[nn.Module, Optimizer]:
        model = Tokens(kind, 4, 6)
        return model, SGD(model.parameters(), lr=0.05)

    drawn = torch.Generator().manual_seed(3)
    batches = [({"x": torch.randn(rows, 4, 6, generator=drawn, dtype=torch.float64)},) for _ in range(2)]
    one = OneDevice(make, _step(lambda model, b: model(b["x"]).square().mean()), batches)
    found = compare(one, mesh, ws.DataParallel("replicate", semantics="global"))
    assert found.worst < TOLERANCE, f"{found.where} differs by {found.worst:.1e}"
    if kind in ONCE:
        found = found if mesh == "dp=2" else compare(one, "dp=2", ws.DataParallel("replicate", semantics="global"))
        assert not [n for n in found.local.graph.nodes if "all_gather" in str(n.target)]


class Attends(nn.Module):
    """(b, t, d) to (b, t, d), by a kernel that needs a row."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.mix = nn.Linear(d, 3 * d)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.mix(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("rows", [5, pytest.param(9, marks=pytest.mark.full)])
def test_a_rank_without_rows_is_no_reason_to_gather(rows: int) -> None:
    """Five rows on four ranks are two, two, one and none, and on two times two, two, one, one and one."""

    def make() -> tuple[nn.Module, Optimizer]:
        model = Attends(8)
        return model, SGD(model.parameters(), lr=0.05)

    drawn = torch.Generator().manual_seed(3)
    batches = [({"x": torch.randn(rows, 4, 8, generator=drawn, dtype=torch.float64)},) for _ in range(2)]
    one = OneDevice(make, _step(lambda model, b: model(b["x"]).square().mean()), batches)
    for mesh in ("dp=4", HYBRID):
        found = compare(one, mesh, ws.DataParallel("replicate", semantics="global"))
        assert found.worst < TOLERANCE, f"{mesh}: {found.where} differs by {found.worst:.1e}"
        assert not [n for n in found.local.graph.nodes if "all_gather" in str(n.target)]


def mlp() -> nn.Module:
    return SimpleMlp(33, 8)


def _step(loss: Loss, clip: bool = False) -> Callable[..., Any]:
    def train(model: nn.Module, optimizer: Optimizer, batch: dict[str, Tensor]) -> Tensor:
        optimizer.zero_grad()
        value = loss(model, batch)
        value.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        return value.detach()

    return train


OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "SGD": lambda model: SGD(model.parameters(), lr=0.05, momentum=0.9),
    "AdamW": lambda model: AdamW(model.parameters(), lr=0.01, eps=1e-4, fused=True),
}


@lru_cache(maxsize=2)
def one_device(loss: str, optimizer: str, rows: int) -> OneDevice:
    generator = torch.Generator().manual_seed(7)

    def make() -> tuple[nn.Module, Optimizer]:
        model = mlp()
        return model, OPTIMIZERS[optimizer](model)

    batches = [(_used(_numbers(rows, generator), loss),) for _ in range(STEPS)]
    return OneDevice(make, _step(LOSSES[loss], clip=loss in ("mean", "cross entropy")), batches)


def _used(batch: dict[str, Tensor], loss: str) -> dict[str, Tensor]:
    return {k: v for k, v in batch.items() if k in ("x", "y", "classes", "weight")}


@pytest.mark.crossed
@pytest.mark.parametrize("rows", [12, 7], ids=["even", "uneven"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("mesh", WORLDS)
def test_losses(mesh: str, loss: str, optimizer: str, rows: int) -> None:
    found = compare(one_device(loss, optimizer, rows), mesh, ws.DataParallel("fully_shard", semantics="global"))
    assert found.worst < TOLERANCE, f"{found.where} differs by {found.worst:.1e}"
    assert not found.ruleless


def test_the_comparison_sees_a_missing_reduction(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks have different data: without one of its all-reduces a program gives other numbers."""

    def without_one(graph: ws.TrainGraph, plan: ws.Plan) -> ws.LocalGraph:
        local = ws.partition(graph, plan)
        reduced = [
            n for n in local.graph.nodes if "all_reduce" in str(n.target) and n.all_input_nodes[0].name != "loss"
        ]
        reduced[-1].replace_all_uses_with(reduced[-1].all_input_nodes[0])
        return local

    one = one_device("mean", "SGD", 7)
    assert compare(one, "dp=2", ws.DataParallel("replicate", semantics="global")).worst < TOLERANCE
    monkeypatch.setattr("tests.together.partition", without_one)
    assert compare(one, "dp=2", ws.DataParallel("replicate", semantics="global")).worst > 1e-3


@pytest.mark.crossed
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("style", STYLES)
def test_styles(style: str, in_place: bool) -> None:
    one = one_device("mean", "AdamW", 7)
    for mesh in [HYBRID] if style == "hybrid" else [*WORLDS, HYBRID]:
        found = compare(one, mesh, ws.DataParallel(style, semantics="global"), in_place)
        assert found.worst < TOLERANCE, f"{mesh}: {found.where} differs by {found.worst:.1e}"


class ConvNet(nn.Module):
    """Convolutions with batch norm (statistics over the whole batch), pooling, a grouped convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(8, 8, 3, groups=4), nn.BatchNorm2d(8, affine=False), nn.GELU(), nn.AdaptiveAvgPool2d(1),
            nn.Flatten(), nn.Linear(8, 8), nn.BatchNorm1d(8, track_running_stats=False),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


class Attention(nn.Module):
    """Embedding, learned positions, attention by SDPA and by hand, layer norm, tied output."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(11, 16), nn.Embedding(6, 16)
        self.qkv, self.out, self.norm = nn.Linear(16, 48), nn.Linear(16, 16), nn.LayerNorm(16)

    def forward(self, tokens: Tensor) -> Tensor:
        b, t = tokens.shape
        x = self.norm(self.table(tokens) + self.places(torch.arange(t)))
        q, k, v = (p.view(b, t, 4, 4).transpose(1, 2) for p in self.qkv(x).chunk(3, -1))
        fused = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        mask = torch.full((t, t), float("-inf")).triu(1)
        by_hand = ((q @ k.transpose(-1, -2)) / 2 + mask).softmax(-1) @ v
        x = x + self.out((fused + by_hand).transpose(1, 2).reshape(b, t, 16))
        return x @ self.table.weight.t()


def _next_token(model: nn.Module, b: dict[str, Tensor]) -> Tensor:
    logits = model(b["tokens"])
    return F.cross_entropy(logits[:, :-1].reshape(-1, 11), b["tokens"][:, 1:].reshape(-1))


MODELS: dict[str, tuple[Callable[[], nn.Module], Loss]] = {
    "conv": (ConvNet, lambda model, b: F.cross_entropy(model(b["image"]), b["classes"])),
    "attention": (Attention, _next_token),
}


@pytest.mark.crossed
@pytest.mark.parametrize("rows", [12, 7], ids=["even", "uneven"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", MODELS)
def test_models(name: str, optimizer: str, rows: int) -> None:
    build, loss = MODELS[name]
    generator = torch.Generator().manual_seed(7)
    keys = {"conv": ("image", "classes"), "attention": ("tokens",)}[name]
    batches = [({k: v for k, v in _numbers(rows, generator).items() if k in keys},) for _ in range(STEPS)]

    def make() -> tuple[nn.Module, Optimizer]:
        model = build()
        return model, OPTIMIZERS[optimizer](model)

    one = OneDevice(make, _step(loss), batches)
    styles = ("replicate", "fully_shard", "replicate") if rows == 12 else ("fully_shard", "replicate", "fully_shard")
    for mesh, style in zip(WORLDS, styles, strict=True):
        found = compare(one, mesh, ws.DataParallel(style, semantics="global"))
        assert found.worst < TOLERANCE, f"{mesh} {style}: {found.where} differs by {found.worst:.1e}"
        assert not found.ruleless


def test_batch_on_dim_1() -> None:
    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = mlp()

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x.t()).t()

    def train(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = (model(x) - y).sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    def make() -> tuple[nn.Module, Optimizer]:
        model = Turned()
        return model, AdamW(model.parameters(), lr=0.01, fused=True)

    one = OneDevice(make, train, [(torch.randn(50, 10), torch.randn(8, 10)) for _ in range(STEPS)])
    for mesh in WORLDS:
        found = compare(one, mesh, ws.DataParallel("fully_shard", semantics="global", input_batch_dim=1))
        assert found.worst < TOLERANCE, f"{mesh}: {found.where} differs by {found.worst:.1e}"
        assert found.plan.storage["x"].dims == ((), ("dp",))


def test_pieces_lie_in_memory_as_the_trace_says() -> None:
    """The backward of softplus keeps the order of a turned gradient; the trace has it row by row, to be viewed."""

    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rates, self.out = nn.Linear(6, 4), nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(F.softplus(self.rates(x)).transpose(1, 2))

    def make() -> tuple[nn.Module, Optimizer]:
        model = Turned().double()
        return model, SGD(model.parameters(), lr=0.1)

    step = _step(lambda model, batch: (model(batch["x"]) ** 3).sum())
    one = OneDevice(make, step, [({"x": torch.randn(8, 5, 6, dtype=torch.float64)},) for _ in range(2)])
    found = compare(one, "dp=2", ws.DataParallel("fully_shard", semantics="global"))
    assert found.worst < 1e-10, found.where


def test_a_tensor_that_is_no_batch() -> None:
    """Cut by name: another dim of the batch's size, or a tensor of the same size, is not taken for it."""

    def train(model: nn.Module, optimizer: Optimizer, x: Tensor, mask: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = ((model(x) @ model(x).t()) * mask).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    def make() -> tuple[nn.Module, Optimizer]:
        model = mlp()
        return model, SGD(model.parameters(), lr=0.01)

    one = OneDevice(make, train, [(torch.randn(8, 50), torch.rand(8, 8)) for _ in range(STEPS)])
    for dims in ({"x": 0, "mask": None}, {"x": 0, "m*": 1}, 0):
        found = compare(one, "dp=3", ws.DataParallel("fully_shard", semantics="global", input_batch_dim=dims))
        assert found.worst < TOLERANCE, f"{dims}: {found.where} differs by {found.worst:.1e}"


def test_gradients_over_micro_batches_reduce_once() -> None:
    def train(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        total = torch.zeros(())
        for a, b in zip(x.chunk(3, 1), y.chunk(3, 1), strict=True):
            loss = F.mse_loss(model(a), b)
            loss.backward()
            total = total + loss.detach()
        optimizer.step()
        return total

    def make() -> tuple[nn.Module, Optimizer]:
        model = mlp()
        return model, SGD(model.parameters(), lr=0.05)

    one = OneDevice(make, train, [(torch.randn(6, 3, 50), torch.randn(6, 3, 8)) for _ in range(STEPS)])
    found = compare(one, "dp=2", ws.DataParallel("replicate", semantics="global"))
    assert found.worst < TOLERANCE, found.where
    # one for each parameter and one for the loss
    assert {k: v.count for k, v in found.local.collectives().items()} == {"all_reduce": 5}


HF = ["gpt2", "llama", "qwen3", "gemma2", "bert", "roberta", "t5", "bart", "vit", "resnet", "whisper", "mamba", "clip"]
USUAL_HF = ("gpt2",)


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in USUAL_HF else pytest.mark.full) for n in HF])
def test_hugging_face(name: str) -> None:
    pytest.importorskip("transformers")
    from tests.hf_models import entries, loss_of

    (entry,) = entries([name])
    generator = torch.Generator().manual_seed(5)

    def make() -> tuple[nn.Module, Optimizer]:
        model = without_chance(entry.build().double())
        return model, AdamW(model.parameters(), lr=1e-3, eps=1e-4, fused=True)

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        with Double():
            return loss_of(model, batch)

    batches = [(joined([entry.batch(generator) for _ in range(6)]),) for _ in range(STEPS)]
    one = OneDevice(make, _step(loss), batches)
    for mesh in ("dp=2", "dp=4"):  # of six parts, evenly and not
        found = compare(one, mesh, ws.DataParallel("fully_shard", semantics="global"))
        assert found.worst < TOLERANCE, f"{mesh}: {found.where} differs by {found.worst:.1e}"
