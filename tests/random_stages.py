"""Random steps in random pipelines against one device in float64: `python -m tests.random_stages --seed 0 --count 100`.

A seed draws a model (its depth, tied weights, skips over stages, a bias and a block that several stages use), the rest
of its step, the mesh with its axes in any order, the style of data parallelism, the pieces, the order of blocks, the
rank of each stage, the sizes of buckets and how much channels hold.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW, Optimizer

import wholestep as ws
from tests.stage_models import LENGTH, TOKENS, WIDTH, Block
from tests.together import OneDevice, compare

TOLERANCE = 1e-10
TENSOR_PARALLEL = ws.TensorParallel({"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}, axis="tp")
STYLES = ("replicate", "zero1", "zero2", "fully_shard")
ORDERS = ("gpipe", "1f1b", "interleaved", "zero_bubble", "auto")


@dataclass(frozen=True)
class Case:
    """What a seed draws. `skip`: the first activations are added in front of the last block; `again`: the first block
    runs once more at the end; `bias`: a vector that every block is given; `frozen`: a parameter without a gradient.
    """

    layers: int
    tied: bool
    drop: float
    skip: bool
    again: bool
    bias: bool
    frozen: bool
    optimizer: str
    clip: bool
    loss: str
    rows: int
    mesh: str
    style: str
    regather: bool | None
    pieces: int
    order: str
    chunks: int | None
    named: bool
    bucket_bytes: int | None
    scheduled: bool
    room: int
    placement: str


def case(seed: int) -> Case:
    """The case of a seed."""
    draw = random.Random(seed)
    stages = draw.choice([2, 2, 2, 3, 4])
    axes = [f"pp={stages}", *draw.choice([(), ("dp=2",), ("dp=2",), ("dp=2",), ("dp=3",), ("tp=2",), ("dp=2", "tp=2")])]
    axes = axes if stages < 4 else axes[:2]
    draw.shuffle(axes)
    order = draw.choice(ORDERS)
    chunks = draw.choice([None, None, 2]) if order in ("interleaved", "auto") else None
    drop = draw.choice([0.0, 0.0, 0.2]) * (
        "dp=2" not in axes and "dp=3" not in axes
    )  # shards have streams of their own
    return Case(
        layers=draw.randint(max(2, stages - 1), 6), tied=draw.random() < 0.5, drop=drop,
        skip=draw.random() < 0.3, again=draw.random() < 0.2, bias=draw.random() < 0.3, frozen=draw.random() < 0.2,
        optimizer=draw.choice(["fused", "foreach", "single", "sgd"]), clip=draw.random() < 0.6,
        loss=draw.choice(["mean", "mean", "sum", "ignored", "weighted", "two"]), rows=draw.choice([4, 6, 8, 8, 9, 12]),
        mesh=",".join(axes), style=draw.choice(STYLES), regather=draw.choice([None, None, False, True]),
        pieces=draw.choice([1, 2, 2, 3, 4, 4, 6]), order=order, chunks=chunks, named=draw.random() < 0.3,
        bucket_bytes=draw.choice([None, 1 << 8, 1 << 10, 1 << 10, 1 << 12]), scheduled=draw.random() < 0.9,
        room=draw.choice([0, 0, 1, 4]), placement=draw.choice(["loop", "loop", "v"]),
    )  # fmt: skip


class Model(nn.Module):
    """A GPT with the habits of `case`."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(TOKENS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList([Block(case.drop) for _ in range(case.layers)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, TOKENS, bias=False)
        self.bias = nn.Parameter(torch.randn(WIDTH)) if case.bias else None
        self.skip, self.again = case.skip, case.again
        if case.tied:
            self.head.weight = self.tokens.weight
        if case.frozen:
            self.blocks[-1].norm_b.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = first = self.tokens(x) + self.places(torch.arange(x.shape[1]))
        for number, block in enumerate(self.blocks):
            x = x + first if self.skip and number == len(self.blocks) - 1 else x
            x = block(x if self.bias is None else x + self.bias)
        x = self.blocks[0](x) if self.again else x
        return self.head(self.norm(x))


def step_of(case: Case) -> Callable[[nn.Module, Optimizer, dict[str, Tensor]], Any]:
    """The step of a case."""

    def step(model: nn.Module, optimizer: Optimizer, batch: dict[str, Tensor]) -> Any:
        optimizer.zero_grad()
        logits, y = model(batch["x"]).flatten(0, 1), batch["y"].flatten()
        other = None
        if case.loss in ("mean", "sum", "ignored"):
            how = "sum" if case.loss == "sum" else "mean"
            y = torch.where(batch["weight"].flatten() > 0.3, y, -100) if case.loss == "ignored" else y
            loss = F.cross_entropy(logits, y, reduction=how)
        elif case.loss == "weighted":
            each, weight = F.cross_entropy(logits, y, reduction="none"), batch["weight"].flatten()
            loss = (each * weight).sum() / weight.sum()
        else:
            loss = F.cross_entropy(logits, y)
            other = 0.1 * logits.square().mean()
        (loss if other is None else loss + other).backward()
        if case.clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        return loss.detach() if other is None else (loss.detach(), other.detach())

    return step


def one_device(case: Case) -> OneDevice:
    """The step of a case, run on one device for two batches."""
    generator = torch.Generator().manual_seed(1)

    def make() -> tuple[nn.Module, Optimizer]:
        model = Model(case)
        if case.optimizer == "sgd":
            return model, SGD(model.parameters(), 0.01, momentum=0.9)
        kind = {"fused": {"fused": True}, "foreach": {"foreach": True}, "single": {"foreach": False}}[case.optimizer]
        return model, AdamW(model.parameters(), lr=1e-2, eps=1e-4, **kind)

    def batch() -> tuple[dict[str, Tensor]]:
        x, y = (torch.randint(TOKENS, (case.rows, LENGTH), generator=generator) for _ in range(2))
        return ({"x": x, "y": y, "weight": torch.rand((case.rows, LENGTH), generator=generator)},)

    return OneDevice(make, step_of(case), [batch() for _ in range(2)])


def strategies(case: Case, seed: int) -> list[Any]:
    """The strategies of a case."""
    mesh, names, order, placement = ws.Mesh(case.mesh), None, cast(Any, case.order), cast(Any, case.placement)
    pipeline = ws.Pipeline(micro_batches=case.pieces, schedule=order, chunks=case.chunks, placement=placement)
    count = mesh.axis_size("pp") * pipeline.chunks_of_rank
    if case.named:
        whole = ["tokens", "places", *(f"blocks.{number}" for number in range(case.layers)), "norm", "head"]
        whole = whole[:-1] if case.tied else whole
        count = count if count <= len(whole) else mesh.axis_size("pp")
        ends = sorted(random.Random(seed).sample(range(1, len(whole)), count - 1))
        names = [whole[a:b] for a, b in zip([0, *ends], [*ends, len(whole)], strict=True)]
    found: list[Any] = [replace(pipeline, stages=names)]
    if "dp" in mesh.names:
        style: Any = case.style
        data = ws.DataParallel(style, axis="dp", semantics="global", reshard_after_forward=case.regather)
        found.insert(0, data)
    return [*found, TENSOR_PARALLEL] if "tp" in mesh.names else found


def problem(seed: int) -> str:
    """What is wrong with the case of a seed: nothing (""), a refusal, as `refused: ...`, or what differs."""
    made = case(seed)
    schedule = ws.Schedule(
        bucket_bytes=made.bucket_bytes, first_bucket_bytes=min(made.bucket_bytes or 1 << 20, 1 << 20)
    )
    passes = ws.default_passes(schedule=schedule) if made.scheduled else ()
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        found = compare(one_device(made), made.mesh, strategies(made, seed), passes=passes, room=made.room)
    except ws.PlanError as error:
        return f"refused: {error.found}"
    except Exception:
        return traceback.format_exc()
    finally:
        torch.set_default_dtype(before)
    return "" if found.worst < TOLERANCE else f"{found.where} differs by {found.worst:.1e}"


def main() -> int:
    """1 where a case fails."""
    parser = argparse.ArgumentParser(prog="python -m tests.random_stages", description=__doc__)
    parser.add_argument("--seed", type=int, required=True, help="the first seed")
    parser.add_argument("--count", type=int, default=1, help="how many seeds")
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    counts = Counter[str]()
    for seed in range(given.seed, given.seed + given.count):
        text = problem(seed)
        kind = "equal" if not text else re.sub(r"[\d.]+", "N", text) if text.startswith("refused") else "wrong"
        counts[kind] += 1
        if kind == "wrong" or (text and counts[kind] == 1):
            print(f"seed {seed}: {case(seed)}\n{text}", flush=True)
    print("\n".join(f"{number} {kind}" for kind, number in counts.most_common()))
    return int(counts["wrong"] > 0)


if __name__ == "__main__":
    sys.exit(main())
