"""What the tests run over: training steps (a model, its batches, its loss) and optimizers with all their options."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from tests.conftest import few

Batch = dict[str, Tensor]


# -- optimizers ---------------------------------------------------------------------------
@dataclass(frozen=True)
class Recipe:
    """An optimizer with its options. `second` are those of a second group, which then holds the 1-dim parameters."""

    name: str
    kind: type[Optimizer]
    options: dict[str, Any] = field(default_factory=dict)
    second: dict[str, Any] | None = None

    def make(self, params: Iterable[nn.Parameter]) -> Optimizer:
        options = {k: v.clone() if isinstance(v, Tensor) else v for k, v in self.options.items()}
        params = list(params)
        if self.second is None:
            return self.kind(params, **options)
        groups = [{"params": [p for p in params if p.dim() > 1]}, {"params": [p for p in params if p.dim() < 2]}]
        groups[1] |= self.second
        return self.kind([g for g in groups if g["params"]], **options)


def _recipes() -> dict[str, Recipe]:
    o = torch.optim
    tensor_lr = {"lr": torch.tensor(0.03, dtype=torch.float64)}
    common = {
        "plain": {},
        "foreach": {"foreach": True},
        "weight_decay": {"weight_decay": 0.1},
        "maximize": {"maximize": True},
    }
    adam = common | {
        "amsgrad": {"amsgrad": True, "betas": (0.8, 0.9)},
        "fused": {"fused": True},
        "fused-amsgrad-wd": {"fused": True, "amsgrad": True, "weight_decay": 0.1, "maximize": True},
        "tensor-lr": tensor_lr,
        "fused-tensor-lr": tensor_lr | {"fused": True},
    }
    momentum = {"momentum": 0.9}
    table: dict[type[Optimizer], dict[str, dict[str, Any]]] = {
        o.SGD: common
        | {
            "momentum": momentum,
            "momentum-foreach": momentum | {"foreach": True},
            "nesterov-wd": momentum | {"nesterov": True, "weight_decay": 0.1},
            "dampening": momentum | {"dampening": 0.5},
            "fused": {"fused": True},
            "fused-momentum": momentum | {"fused": True, "nesterov": True, "weight_decay": 0.1},
            "tensor-lr": tensor_lr,
        },
        o.Adam: adam,
        o.AdamW: adam,
        o.NAdam: common | {"decoupled": {"weight_decay": 0.1, "decoupled_weight_decay": True, "momentum_decay": 0.1}},
        o.RAdam: common | {"decoupled": {"weight_decay": 0.1, "decoupled_weight_decay": True, "betas": (0.5, 0.6)}},
        o.Adagrad: common
        | {
            "lr_decay": {"lr_decay": 0.1, "initial_accumulator_value": 0.2},
            "fused": {"fused": True, "weight_decay": 0.1},
        },
        o.Adadelta: common | {"rho": {"rho": 0.5, "eps": 1e-4}},
        o.Adamax: common,
        o.RMSprop: common
        | {"centered": {"centered": True}, "momentum": {"momentum": 0.9, "centered": True, "foreach": True}},
        o.Rprop: {k: v for k, v in common.items() if k != "weight_decay"}
        | {"etas": {"etas": (0.4, 1.3), "step_sizes": (1e-4, 0.1)}},
        o.ASGD: common | {"averaging": {"t0": 1, "lambd": 1e-2, "alpha": 0.5}},
    }
    two = {"lr": 0.003, "weight_decay": 0.2}
    out: dict[str, Recipe] = {}
    for kind, variants in table.items():
        for variant, options in variants.items():
            name = f"{kind.__name__}-{variant}"
            out[name] = Recipe(name, kind, {"lr": 0.02} | options)
        name = f"{kind.__name__}-two-groups"
        second = two if kind is not o.Rprop else {"lr": 0.003, "etas": (0.3, 1.1)}
        first = momentum if kind in (o.SGD, o.RMSprop) else {}
        out[name] = Recipe(name, kind, {"lr": 0.02} | first, second)
    return out


OPTIMIZERS: dict[str, Recipe] = _recipes()


def _class_and_options(name: str) -> dict[str, str]:
    kind, _, variant = name.partition("-")
    return {"class": kind, "variant": variant}


RECIPES = few(OPTIMIZERS, _class_and_options)  # each class and each variant in `make test`


# -- training steps -----------------------------------------------------------------------
def _nothing(model: nn.Module) -> None:
    pass


@dataclass(frozen=True)
class Case:
    """A training step in parts: `backward` makes gradients from a batch, `adjust` works on them before the update."""

    name: str
    model: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    backward: Callable[[nn.Module, Batch], Tensor]
    adjust: Callable[[nn.Module], None] = _nothing

    def build(self, dtype: torch.dtype = torch.float64, seed: int = 0) -> nn.Module:
        torch.manual_seed(seed)
        return self.model().to(dtype)

    def batches(self, seed: int, dtype: torch.dtype = torch.float64) -> Batch:
        """The batch of one rank and step; `seed` must differ between ranks."""
        torch.manual_seed(1000 + seed)
        return {k: v.to(dtype) if v.is_floating_point() else v for k, v in self.batch().items()}

    def step(self, model: nn.Module, optimizer: Optimizer, batch: Batch) -> Tensor:
        """The whole step, as a user writes it for one device."""
        optimizer.zero_grad()
        loss = self.backward(model, batch)
        self.adjust(model)
        optimizer.step()
        return loss.detach()


def _simple(loss: Callable[[nn.Module, Batch], Tensor]) -> Callable[[nn.Module, Batch], Tensor]:
    def backward(model: nn.Module, batch: Batch) -> Tensor:
        value = loss(model, batch)
        value.backward()
        return value

    return backward


def _regression(inputs: tuple[int, ...], outputs: tuple[int, ...]) -> Callable[[], Batch]:
    return lambda: {"x": torch.randn(inputs), "y": torch.rand(outputs)}


def _mse(model: nn.Module, batch: Batch) -> Tensor:
    return F.mse_loss(model(batch["x"]), batch["y"])


def _tiny() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


class SimpleMlp(nn.Sequential):
    """The reference model of data-parallel compilers, with rows that need not divide evenly."""

    def __init__(self, rows: int = 32, out: int = 8) -> None:
        super().__init__(nn.Linear(50, rows), nn.ReLU(), nn.Linear(rows, out), nn.Sigmoid())


def _summed(model: nn.Module, batch: Batch) -> Tensor:
    return (model(batch["x"]) - batch["y"]).sum()


def _reshaped(model: nn.Module, batch: Batch) -> Tensor:
    """Views of the output, and factories of the batch's size and of other sizes."""
    out = model(batch["x"])
    again = out.clone().view(-1).squeeze().unsqueeze(0).view(out.shape)
    out = out + 0.1 * again
    out = out + torch.arange(8, dtype=out.dtype).unsqueeze(0) + torch.ones(out.shape, dtype=out.dtype)
    out = out + torch.zeros(8, dtype=out.dtype).unsqueeze(0).repeat(out.shape[0], 1)
    return (out - batch["y"]).sum()


class Transposed(nn.Module):
    """Takes and gives the batch on dim 1."""

    def __init__(self) -> None:
        super().__init__()
        self.net = SimpleMlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x.t()).t()


class Twice(nn.Module):
    """One layer used twice, and layer norm."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.head = nn.Linear(7, 7), nn.LayerNorm(7), nn.Linear(7, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(torch.tanh(self.layer(torch.tanh(self.layer(x))))))


class Tokens(nn.Module):
    """Embedding, learned positions, attention (by hand or SDPA), tied head; cross entropy over 11 words."""

    def __init__(self, by_hand: bool = False, tied: bool = False) -> None:
        super().__init__()
        self.by_hand = by_hand
        self.words, self.places = nn.Embedding(11, 8), nn.Parameter(torch.randn(5, 8) * 0.1)
        self.qkv, self.out, self.norm = nn.Linear(8, 24, bias=False), nn.Linear(8, 8), nn.LayerNorm(8)
        self.head = nn.Linear(8, 11, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) + self.places[: tokens.shape[1]]
        batch, length, _ = x.shape
        q, k, v = (t.view(batch, length, 2, 4).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, dim=-1))
        if self.by_hand:
            mask = torch.full((length, length), float("-inf"), dtype=x.dtype).triu(1)
            mixed = torch.softmax(q @ k.transpose(-1, -2) / 2.0 + mask, dim=-1) @ v
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, 8))
        return self.head(x)


def _next_word(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())


def _words() -> Batch:
    return {"tokens": torch.randint(0, 11, (3, 5)), "labels": torch.randint(0, 11, (3, 5))}


class Convolutions(nn.Module):
    """Convolutions and batch norm, whose statistics are each rank's own (a bias before it would have no gradient)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(3, 5, 3, padding=1, bias=False), nn.BatchNorm2d(5)
        self.conv2, self.norm2 = nn.Conv2d(5, 4, 3, stride=2, bias=False), nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.norm1(self.conv1(x))), 2)
        return self.head(F.relu(self.norm2(self.conv2(x))).mean((2, 3)))


class PartlyUsed(nn.Module):
    """A frozen layer, a layer nothing uses, a 0-dim parameter and a constant buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.live, self.unused = nn.Linear(6, 5), nn.Linear(5, 3), nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("offset", torch.linspace(0, 1, 3))
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.live(torch.tanh(self.frozen(x))) + self.offset


def _micro_batches(model: nn.Module, batch: Batch) -> Tensor:
    total = torch.zeros((), dtype=batch["x"].dtype)
    for x, y in zip(batch["x"].chunk(3), batch["y"].chunk(3), strict=True):
        loss = F.mse_loss(model(x), y) / 3
        loss.backward()
        total = total + loss.detach()
    return total


def _clip_norm(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.05)


def _clip_value(model: nn.Module) -> None:
    nn.utils.clip_grad_value_(model.parameters(), 0.01)


def _rnn() -> nn.Module:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.gru, self.head = nn.LSTM(4, 5, batch_first=True), nn.GRU(5, 3), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.gru(self.lstm(x)[0])[0][:, -1])

    return Recurrent()


_small = _regression((6, 6), (6, 3))
_mlp_batch = _regression((16, 50), (16, 8))
CASES: dict[str, Case] = {
    case.name: case
    for case in (
        Case("tiny", _tiny, _small, _simple(_mse)),
        Case("mlp-sum", SimpleMlp, _mlp_batch, _simple(_summed)),
        Case("mlp-mean", SimpleMlp, _mlp_batch, _simple(_mse)),
        Case("uneven", lambda: SimpleMlp(33, 7), _regression((8, 50), (8, 7)), _simple(_summed)),
        Case("reshaped", SimpleMlp, _mlp_batch, _simple(_reshaped)),
        Case("square-batch", SimpleMlp, _regression((8, 50), (8, 8)), _simple(_reshaped)),
        Case("transposed", Transposed, _regression((50, 16), (8, 16)), _simple(_summed)),
        Case("twice", Twice, _regression((4, 7), (4, 2)), _simple(_mse)),
        Case("tokens", Tokens, _words, _simple(_next_word)),
        Case("by-hand", lambda: Tokens(by_hand=True), _words, _simple(_next_word)),
        Case("tied", lambda: Tokens(tied=True), _words, _simple(_next_word)),
        Case("convolutions", Convolutions, _regression((4, 3, 8, 8), (4, 3)), _simple(_mse)),
        Case("partly-used", PartlyUsed, _small, _simple(_mse)),
        Case("micro-batches", _tiny, _small, _micro_batches),
        Case("clip-norm", _tiny, _small, _simple(_mse), _clip_norm),
        Case("clip-value", _tiny, _small, _simple(_mse), _clip_value),
        Case("micro-clip", _tiny, _small, _micro_batches, _clip_norm),
        Case("recurrent", _rnn, _regression((3, 4, 4), (3, 2)), _simple(_mse)),
    )
}


# The others have sizes, losses or changes of gradients of their own in the model of one of these.
_DIFFERENT = {
    "reshaped",
    "transposed",
    "twice",
    "by-hand",
    "tied",
    "convolutions",
    "partly-used",
    "micro-clip",
    "recurrent",
}
DIFFERENT_CASES = [name if name in _DIFFERENT else pytest.param(name, marks=pytest.mark.full) for name in CASES]
