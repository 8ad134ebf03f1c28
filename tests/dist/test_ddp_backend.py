"""DDP under the splitter on two ranks with data of their own: gradients, parameters and buckets of plain DDP."""

import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as Ddp

import wholestep as ws
from tests.ddp_models import Checkpointed, Mlp, WithCustom
from tests.dist.compare import difference
from tests.dist.launch import run_ranks

STEPS = 4


class Mixed(nn.Module):
    """Two dtypes, batch norm, a tied weight, dropout that drops nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(300, 300), nn.BatchNorm1d(300)
        self.wide = nn.Linear(300, 300, dtype=torch.float64)
        self.last = nn.Linear(300, 300)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x)).relu()
        return self.last(self.wide(x.double()).relu().float())


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (lambda: Mlp([400] * 7), (4, 400)),
    "measured": (lambda: Mlp([400] * 5, "measured"), (4, 400)),
    "autocast": (lambda: Mlp([400] * 5, "autocast"), (4, 400)),
    "custom": (lambda: WithCustom(400), (4, 400)),
    "checkpointed": (lambda: Checkpointed(400), (4, 400)),
    "mixed": (Mixed, (4, 300)),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "": {"bucket_cap_mb": 0.5},
    "default": {},
    "views": {"bucket_cap_mb": 1, "gradient_as_bucket_view": True},
    "static": {"bucket_cap_mb": 1, "static_graph": True},
    "unused": {"bucket_cap_mb": 1, "find_unused_parameters": True},
}


def _wrapped(name: str, option: str) -> Ddp:
    torch.manual_seed(0)
    model = MODELS[name][0]()
    if name == "mlp":
        Ddp._set_params_and_buffers_to_ignore_for_model(model, ["net.4.weight"])
    return Ddp(model, **OPTIONS[option])


def _train(rank: int, world: int, name: str, option: str, inner: str) -> dict[str, Any]:
    ours, theirs = _wrapped(name, option), _wrapped(name, option)
    backend = ws.ddp_backend(inner=inner)
    compiled = torch.compile(ours, backend=backend)
    optimizers = [torch.optim.SGD(m.parameters(), 0.05, momentum=0.9) for m in (ours, theirs)]
    worst = {"grad": 0.0, "param": 0.0}
    for step in range(STEPS):
        draw = torch.Generator().manual_seed(10 * step + rank)
        batch = [torch.randn(MODELS[name][1], generator=draw) for _ in range(2 if name == "custom" else 1)]
        for model, optimizer in zip((compiled, theirs), optimizers, strict=True):
            optimizer.zero_grad()
            model(*batch).float().square().mean().backward()
        pairs = list(zip(ours.parameters(), theirs.parameters(), strict=True))
        worst["grad"] = max(worst["grad"], *(difference(a.grad, b.grad) for a, b in pairs))
        for optimizer in optimizers:
            optimizer.step()
        worst["param"] = max(worst["param"], *(difference(a, b) for a, b in pairs))
    return worst | {
        "logged": _logged(ours),
        "sizes": ours._get_ddp_logging_data()["bucket_sizes"],
        "reduced": [set(bucket) for bucket in backend.splits[-1].reduced],
        "parts": [{p.name for p in bucket.params} for bucket in reversed(backend.buckets)],
        "starts": next(iter(ours.parameters())).detach().sum().item(),
    }


def _logged(ddp: Ddp) -> list[set[str]]:
    """The buckets that the reducer says it made anew, in the order of sending."""
    text = ddp._get_ddp_logging_data().get("rebuilt_per_bucket_param_indices", "")
    ignored = ddp.parameters_to_ignore
    names = [n for n, p in ddp.module.named_parameters() if p.requires_grad and n not in ignored]
    return [{names[int(i)] for i in bucket.split()} for bucket in text.split(",")] if text else []


RUNS = [
    ("mlp", "", "aot_eager"),
    ("mlp", "default", "aot_eager"),
    ("measured", "unused", "aot_eager"),
    ("checkpointed", "", "aot_eager"),
    pytest.param("mlp", "", "eager", marks=pytest.mark.full),
    pytest.param("mlp", "unused", "aot_eager", marks=pytest.mark.full),
    pytest.param("measured", "", "aot_eager", marks=pytest.mark.full),
    pytest.param("mlp", "views", "aot_eager", marks=pytest.mark.full),
    pytest.param("mlp", "static", "aot_eager", marks=pytest.mark.full),
    pytest.param("autocast", "", "aot_eager", marks=pytest.mark.full),
    pytest.param("custom", "", "aot_eager", marks=pytest.mark.full),
    pytest.param("mixed", "", "aot_eager", marks=pytest.mark.full),
    pytest.param(
        "mlp",
        "",
        "inductor",
        marks=[pytest.mark.full, pytest.mark.skipif(not shutil.which("g++"), reason="inductor needs g++")],
    ),
]


@pytest.mark.crossed
@pytest.mark.parametrize(("name", "option", "inner"), RUNS)
def test_trains_as_plain_ddp(name: str, option: str, inner: str) -> None:
    results = run_ranks(_train, 2, name, option, inner)
    tolerance = 1e-6 if inner == "inductor" else 0.0
    for found in results:
        assert found["grad"] <= tolerance, found
        assert found["param"] <= tolerance, found
        assert len(found["parts"]) > 1 or option == "default"
    assert all(results[0][key] == results[1][key] for key in ("logged", "parts", "starts")), "ranks agree"
    found = results[0]
    if option == "unused":  # made once, and not logged by name
        assert found["logged"] == []
        assert len(found["reduced"]) == len(found["sizes"].split(","))
        return
    assert sorted(map(sorted, found["logged"])) == sorted(map(sorted, found["reduced"]))
    if name not in ("checkpointed", "mixed"):  # one op holds two buckets; buckets of two dtypes fill side by side
        assert found["logged"] == found["parts"]
