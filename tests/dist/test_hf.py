"""Hugging Face models on two ranks with different data: the losses and parameters of DistributedDataParallel.

`make test` runs one model of each kind; `-m full` runs the whole catalogue.
"""

from __future__ import annotations

import copy
import importlib.util
import random
import time
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

import wholestep as ws
from tests.dist.launch import run_ranks
from tests.hf_models import CATALOGUE, Batch, entries, loss_of

pytestmark = pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")

STEPS, TOLERANCE = 3, 1e-5
CHUNK = 10  # models in one job of the slow tests
# Gradients that are zero in exact arithmetic (of the bias of keys, say) hold rounding errors alone. With the usual 1e-8
# AdamW makes whole steps of them; models that trace other forms of a scan, or update shards, then round another way.
EPS = 1e-6
USUAL = ["llama", "t5", "mixtral", "clip"]
REFUSED = {
    "ibert": "quant_modules.py",  # asserts on activations
    "detr": "modeling_detr.py",  # clamps activations if one is not finite
    "glpn": "modeling_glpn.py",  # a loss over the pixels whose depth is positive
    "vilt": "modeling_vilt.py",  # sizes patches by a mask
}
# Of its few tokens, ranks choose other experts: those that no token chose have no gradient, so programs differ.
OF_ONE_RANK = ["switch_transformers"]
REST = [name for name in CATALOGUE if name not in (*REFUSED, *USUAL, *OF_ONE_RANK)]


def train_step(model: nn.Module, optimizer: Optimizer, batch: Batch) -> torch.Tensor:
    optimizer.zero_grad()
    loss = loss_of(model, batch)
    loss.backward()
    optimizer.step()
    return loss.detach()


def seed(number: int) -> None:
    """Dropout, and what transformers draws from elsewhere."""
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def farthest(model: nn.Module, other: nn.Module) -> float:
    """The largest difference of a parameter or buffer."""
    pairs = zip([*model.parameters(), *model.buffers()], [*other.parameters(), *other.buffers()], strict=True)
    whole = [(a.full_tensor() if isinstance(a, DTensor) else a, b) for a, b in pairs]
    return max((a.double() - b.double()).abs().max().item() for a, b in whole if a.numel())


def compare(rank: int, style: str, name: str) -> dict[str, float]:
    """Train one model both ways from the same start; what differs, and the seconds of processor time."""
    entry = next(entries([name]))
    seed(0)
    model = entry.build()
    reference = copy.deepcopy(model)
    start = time.process_time()
    optimizer = AdamW(model.parameters(), lr=1e-3, eps=EPS, fused=True)
    step = ws.compile(train_step, parallel=ws.DataParallel(style))
    wrapped = DistributedDataParallel(reference, broadcast_buffers=False, find_unused_parameters=True)
    other = AdamW(reference.parameters(), lr=1e-3, eps=EPS, fused=True)
    losses = 0.0
    for number in range(STEPS):
        batch = entry.batch(torch.Generator().manual_seed(10 * number + rank))
        seed(100 * number + rank)
        found = step(model, optimizer, batch)
        seed(100 * number + rank)
        losses = max(losses, (found - train_step(wrapped, other, batch)).abs().item())
    difference = farthest(model, reference)
    return {"loss": losses, "parameters": difference, "captures": step.captures, "seconds": time.process_time() - start}


def job(rank: int, world: int, style: str, names: list[str]) -> dict[str, Any]:
    """Every named model: what differs, or the error it ended in."""
    results: dict[str, Any] = {}
    for name in names:
        try:
            results[name] = compare(rank, style, name)
        except ws.WholestepError as error:
            results[name] = str(error)
    return results


def check(style: str, names: list[str]) -> None:
    results = run_ranks(job, 2, style, names, timeout=60.0 + 30.0 * len(names))
    wrong = [f"{name} on rank {rank}: {r}" for rank, found in enumerate(results) for name, r in found.items() if bad(r)]
    assert not wrong, "\n".join(wrong)
    for name, found in results[0].items():
        print(f"{style:12} {name:22} {found}")


def bad(result: Any) -> bool:
    if isinstance(result, str):
        return True
    return (
        max(result["loss"], result["parameters"]) > TOLERANCE or result["captures"] > 2
    )  # a config that learns its kind of problem in the first call costs one more


@pytest.mark.timeout(900)  # about 25 s on two free cores
@pytest.mark.parametrize("style", [pytest.param("replicate", marks=pytest.mark.full), "fully_shard"])
def test_same_as_ddp(style: str) -> None:
    check(style, USUAL)


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("style", ["replicate", "fully_shard"])
@pytest.mark.parametrize("names", [REST[i : i + CHUNK] for i in range(0, len(REST), CHUNK)], ids=lambda names: names[0])
def test_others_are_the_same_as_ddp(style: str, names: list[str]) -> None:
    check(style, names)


@pytest.mark.full
@pytest.mark.parametrize("name", list(REFUSED))
def test_what_depends_on_values_is_refused_with_its_line(name: str) -> None:
    entry = next(entries([name]))
    model = entry.build()
    step = ws.compile(train_step, parallel=ws.DataParallel("replicate"))
    with pytest.raises(ws.CaptureError) as caught:
        step(model, AdamW(model.parameters()), entry.batch(torch.Generator().manual_seed(0)))
    assert f"/{REFUSED[name]}:" in str(caught.value).splitlines()[1]
