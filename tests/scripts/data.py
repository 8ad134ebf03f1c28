"""Rows about batches: what they are made of, and what is done to them in the step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from tests.scripts.row import Made, Row, floats, pair, squares, steps, train, update, with_labels


@dataclass
class Batch:
    """A batch with names."""

    x: Tensor
    y: Tensor


def dicts(rank: int) -> list[Made]:
    return [({"x": x, "y": y},) for x, y in with_labels()(rank)]


def records(rank: int) -> list[Made]:
    return [(Batch(x, y),) for x, y in with_labels()(rank)]


def encodings(rank: int) -> list[Made]:
    from transformers import BatchEncoding

    return [(BatchEncoding({"x": x, "y": y}),) for x, y in with_labels()(rank)]


def nested(rank: int) -> list[Made]:
    return [([(x, None), {"deep": [y, "text"]}],) for x, y in with_labels()(rank)]


def short_last(rank: int) -> list[Made]:
    return [(x if i < 3 else x[:2], y if i < 3 else y[:2]) for i, (x, y) in enumerate(with_labels()(rank))]


def lengths(rank: int) -> list[Made]:
    return [(torch.cat([x] * (1 + i % 2)),) for i, (x,) in enumerate(floats((5, 4))(rank))]


def masks(rank: int) -> list[Made]:
    return [(x, (y > 0).long()) for x, y in with_labels()(rank)]


def entropy(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def kept_rows(model: nn.Module, x: Tensor, mask: Tensor) -> Tensor:
    return model(x)[mask.bool()].square().sum()


def with_number(model: nn.Module, x: Tensor, epoch: int) -> Tensor:
    return squares(model, x) * (0.5 if epoch > 1 else 1.0)


def loader() -> Made:
    made = DataLoader(TensorDataset(torch.arange(80.0).reshape(20, 4).sin()), batch_size=5)
    return *pair()(), iter(made)


def from_a_loader(model: nn.Module, optimizer: Any, batches: Any) -> Tensor:
    (x,) = next(batches)
    return update(optimizer, squares(model, x))


def augmented(model: nn.Module, x: Tensor) -> Tensor:
    return squares(model, torch.where(torch.rand(5, 1) < 0.5, x.flip(-1), x) + 0.1 * torch.randn_like(x))


def over_lengths(model: nn.Module, x: Tensor, n: Tensor) -> Tensor:
    packed = nn.utils.rnn.pack_padded_sequence(x, n.tolist(), batch_first=True, enforce_sorted=False)
    return model(packed)[0].data.square().mean()


def sequences(rank: int) -> list[Made]:
    sizes = [[3, 1, 2], [3, 1, 2], [2, 2, 3], [1, 3, 3]]
    return [(x, torch.tensor(n)) for (x,), n in zip(floats((3, 3, 4))(rank), sizes, strict=True)]


G = "Data"
ROWS = (
    Row(G, "batches are dicts of tensors", train(lambda m, b: entropy(m, b["x"], b["y"]), calls=dicts), ranks=True),
    Row(G, "batches are dataclasses", train(lambda m, b: entropy(m, b.x, b.y), calls=records), ranks=True),
    Row(
        G,
        "batches are `BatchEncoding`s of transformers",
        train(lambda m, b: entropy(m, b["x"], b["y"]), calls=encodings),
    ),
    Row(
        G,
        "batches are nested lists, with `None` and strings",
        train(lambda m, b: entropy(m, b[0][0], b[1]["deep"][0]), calls=nested),
    ),
    Row(G, "the last batch is shorter (captured once more)", train(entropy, calls=short_last), ranks=True),
    Row(G, "batches are padded to lengths of their own (one capture each)", train(calls=lengths)),
    Row(
        G,
        "a Python number is passed (captured for each value)",
        train(with_number, calls=lambda r: [(x, i) for i, (x,) in enumerate(floats((5, 4))(r))]),
    ),
    Row(
        G,
        "`x.to(device)`, `non_blocking=True`",
        train(lambda m, x: squares(m, x.to("cpu", non_blocking=True).to(torch.float64))),
    ),
    Row(G, "augments with `torch.rand` and `torch.randn`", train(augmented)),
    Row(
        G,
        "packs padded sequences by their lengths",
        train(over_lengths, lambda: nn.LSTM(4, 3, batch_first=True), calls=sequences),
        runs=False,
    ),
    Row(G, "picks rows by a mask of the batch (`out[mask]`, `nonzero`)", train(kept_rows, calls=masks)),
    Row(G, "picks rows by values that the model computes", train(lambda m, x: m(x)[m(x)[:, 0] > 0].sum())),
    Row(
        G,
        "takes batches from a `DataLoader` inside the step",
        steps(from_a_loader, loader, lambda r: [(), (), ()]),
        runs=False,
    ),
    Row(
        G,
        "branches on a mask: `if mask.all():`",
        train(lambda m, x, k: squares(m, x) if k.all() else m(x)[:2].square().sum(), calls=masks),
    ),
    Row(G, "one-hot labels", train(lambda m, x, y: F.mse_loss(m(x), F.one_hot(y, 3).double()), calls=with_labels())),
    Row(
        G,
        "makes a tensor from a Python list",
        train(lambda m, x: (m(x) * torch.tensor([1.0, 2.0, 3.0])).square().mean()),
    ),
    Row(G, "sparse tensors in the batch", train(lambda m, x: squares(m, x.to_sparse().to_dense()))),
    Row(G, "complex numbers, FFTs", train(lambda m, x: torch.fft.rfft(m(x)).abs().square().sum()), ranks=True),
)
