"""Rows about models."""

from __future__ import annotations

import copy
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune
from torch.optim import SGD

from tests.scripts.row import Made, Row, floats, mlp, pair, squares, steps, train, update


def plain_sgd(model: nn.Module) -> Any:
    return SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)


def frozen() -> nn.Module:
    model = mlp()
    model[0].requires_grad_(False)
    return model


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.table(ids))


def ids(rank: int) -> list[Made]:
    generator = torch.Generator().manual_seed(5 + rank)
    return [(torch.randint(0, 7, (5, 3), generator=generator),) for _ in range(4)]


def reduced(model: nn.Module) -> nn.Module:
    """Every linear layer frozen, with a trained product of two thin matrices beside it."""

    class LoRA(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base = base.requires_grad_(False)
            self.a = nn.Parameter(torch.randn(2, base.in_features))
            self.b = nn.Parameter(torch.zeros(base.out_features, 2))

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + x @ self.a.T @ self.b.T

    for name, child in list(model.named_children()):
        if isinstance(child, nn.Linear):
            setattr(model, name, LoRA(child))
    return model


class Experts(nn.Module):
    """The best of three experts for each row, with a loss that balances them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 3)
        self.experts = nn.ModuleList(nn.Linear(4, 3) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(x).softmax(-1)
        best, chosen = scores.topk(1, -1)
        picked = F.one_hot(chosen[:, 0], 3).to(x.dtype)
        out = torch.stack([e(x) for e in self.experts], 1)
        return (out * picked[:, :, None]).sum(1) * best + (scores.mean(0) * picked.mean(0)).sum()


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * grads[0] * x * x


def rearranged(model: nn.Module, x: Tensor) -> Tensor:
    b, t, _ = x.shape
    heads = model(x).reshape(b, t, 2, 2).permute(0, 2, 1, 3)
    return torch.einsum("bhtd,bhsd->bhts", heads, heads).softmax(-1).matmul(heads).square().mean()


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=7, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=2, max_position_embeddings=16, attn_implementation="eager",
        )
    ).double()  # fmt: skip


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(
        BertConfig(
            vocab_size=7, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
            max_position_embeddings=16, hidden_dropout_prob=0.1,
        )
    ).double()  # fmt: skip


def pruned() -> nn.Module:
    model = mlp()
    prune.l1_unstructured(model[0], "weight", 0.5)
    return model


def attention(model: nn.Module, x: Tensor) -> Tensor:
    out, _ = model(x, x, x, need_weights=False)
    return out.square().mean()


def quantized() -> nn.Module:
    from torch.ao.quantization import FakeQuantize, MovingAverageMinMaxObserver

    fake = FakeQuantize(observer=MovingAverageMinMaxObserver, quant_min=0, quant_max=255)
    return nn.Sequential(nn.Linear(4, 3), fake)


def copied(model: nn.Module, optimizer: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    before = copy.deepcopy(model)
    loss = update(optimizer, squares(model, x))
    return loss, squares(before, x).detach()


def noted(model: nn.Module, optimizer: Any, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    loss = update(optimizer, squares(model, x))
    return loss, {k: v.clone() for k, v in model.state_dict().items()}


def loaded(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
    loss = update(optimizer, squares(model, x))
    model.load_state_dict({k: v * 0.9 for k, v in model.state_dict().items()})
    return loss


def by_call(model: nn.Module, x: Tensor) -> Tensor:
    values = {name: value * 1.5 for name, value in model.named_parameters()}
    return torch.func.functional_call(model, values, (x,)).square().mean()


def tangent(model: nn.Module, x: Tensor) -> Tensor:
    return squares(model, x) + torch.func.jvp(lambda v: model(v), (x,), (torch.ones_like(x),))[1].square().mean()


def penalty(model: nn.Module, x: Tensor) -> Tensor:
    x = x.requires_grad_()
    out = model(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return out.square().mean() + (slope.norm(dim=-1) - 1).square().mean()


def mode_inside(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
    model.eval()
    with torch.no_grad():
        target = model(x)
    model.train()
    return update(optimizer, (model(x) - target).square().mean() + squares(model, x))


def dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Linear(6, 3))


def sync() -> nn.Module:
    return cast(nn.Module, nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))))


def wrapped() -> nn.Module:
    return nn.DataParallel(mlp())


G = "Models"
ROWS = (
    Row(G, "dropout, batch norm", train(model=dropout)),
    Row(
        G,
        "`BatchNorm(momentum=None)`",
        train(model=lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, momentum=None))),
    ),
    Row(
        G,
        "`SyncBatchNorm`",
        train(model=sync),
        line='on several ranks: `BatchNorm` and `DataParallel(..., semantics="global")`',
    ),
    Row(G, "frozen parameters", train(model=frozen, optimizer=plain_sgd), ranks=True),
    Row(G, "tied weights", train(model=Tied, calls=ids), ranks=True),
    Row(
        G,
        "weight norm, spectral norm",
        train(
            model=lambda: nn.Sequential(
                parametrizations.weight_norm(nn.Linear(4, 3)), parametrizations.spectral_norm(nn.Linear(3, 3))
            )
        ),
        ranks=True,
    ),
    Row(G, "pruned layers", train(model=pruned)),
    Row(
        G,
        "LoRA: frozen layers with small trained ones beside them",
        train(model=lambda: reduced(mlp()), optimizer=plain_sgd),
        ranks=True,
    ),
    Row(G, "a mixture of experts, routed by `topk`", train(model=Experts), ranks=True),
    Row(
        G,
        "LSTM, GRU",
        train(lambda m, x: m(x)[0].square().mean(), lambda: nn.LSTM(4, 3, batch_first=True), calls=floats((2, 5, 4))),
        ranks=True,
    ),
    Row(
        G,
        "`nn.MultiheadAttention`",
        train(attention, lambda: nn.MultiheadAttention(4, 2, batch_first=True), calls=floats((2, 5, 4))),
    ),
    Row(
        G,
        "`nn.TransformerEncoderLayer`, `scaled_dot_product_attention`",
        train(model=lambda: nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), calls=floats((2, 5, 4))),
    ),
    Row(
        G,
        "einsum, reshape, permute (einops)",
        train(rearranged, lambda: nn.Linear(4, 4), calls=floats((2, 5, 4))),
        ranks=True,
    ),
    Row(
        G,
        "a decoder of transformers, with its own loss",
        train(lambda m, i: m(input_ids=i, labels=i).loss, llama, calls=ids),
        ranks=True,
    ),
    Row(
        G,
        "an encoder of transformers, with dropout",
        train(lambda m, i: m(input_ids=i, labels=i).loss, bert, calls=ids),
    ),
    Row(
        G,
        "`nn.Embedding(sparse=True)`: dense gradients, said once",
        train(model=lambda: nn.Embedding(7, 3, sparse=True), optimizer=plain_sgd, calls=ids),
    ),
    Row(G, "`nn.Embedding(max_norm=...)`", train(model=lambda: nn.Embedding(7, 3, max_norm=0.5), calls=ids)),
    Row(
        G,
        "modules under `torch.compile` (the original runs, said once)",
        train(model=lambda: cast(nn.Module, torch.compile(mlp(), backend="eager"))),
    ),
    Row(
        G,
        "`torch.jit.script` modules",
        train(model=lambda: cast(nn.Module, torch.jit.script(mlp()))),
        line="the module without `torch.jit.script`",
        runs=False,
    ),
    Row(
        G,
        "models wrapped in `DataParallel`, DDP or FSDP",
        train(model=wrapped),
        line="the plain model: wholestep adds the communication",
        runs=False,
    ),
    Row(G, "fake quantization (quantization-aware training)", train(model=quantized)),
    Row(
        G,
        "a custom `autograd.Function`",
        train(lambda m, x: cast(Tensor, Cube.apply(m(x))).square().mean()),
        ranks=True,
    ),
    Row(G, "`torch.func.functional_call`", train(by_call)),
    Row(G, "`torch.func.grad`, `jvp`", train(tangent)),
    Row(G, "`torch.func.vmap`", train(lambda m, x: torch.func.vmap(lambda row: m(row).square().sum())(x).mean())),
    Row(G, "gradient penalty (double backward)", train(penalty), ranks=True),
    Row(G, "`model.eval()` and `model.train()` inside the step", steps(mode_inside, pair(dropout))),
    Row(G, "`copy.deepcopy(model)` inside the step", steps(copied)),
    Row(G, "returns `model.state_dict()`", steps(noted)),
    Row(G, "`model.load_state_dict()` inside the step", steps(loaded)),
    Row(G, "`torch.cond` on a value", train(lambda m, x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (m(x),)).sum())),
    Row(
        G,
        "masks and `torch.where` in place of branches",
        train(lambda m, x: torch.where(x.sum() > 0, m(x).sin(), m(x).cos()).sum()),
    ),
)
