"""Ranks that come apart after the first call: found every so many calls, by name, on every rank."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import wholestep as ws
from tests.dist.launch import run_ranks
from tests.steps import mean_square as train_step

EVERY = 3
STYLES = {
    "replicate": ws.DataParallel("replicate"),
    "zero1": ws.DataParallel("zero1"),
    "fully_shard": ws.DataParallel("fully_shard"),
    "global": ws.DataParallel("fully_shard", semantics="global"),
}


class Net(nn.Module):
    """Layers whose sizes divide by nothing, a norm that has statistics of its own on each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(b, 3) -> (b, 2)."""
        return self.last(self.norm(self.first(x)))


def trained(rank: int, calls: int, change: Any = None, **options: Any) -> tuple[int, str]:
    """How many calls were made, and the error that ended them. `change` is called before each."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    step = ws.compile(train_step, **{"check_every": EVERY, **options})
    torch.manual_seed(rank)
    for call in range(calls):
        if change is not None:
            change(call, model, optimizer)
        try:
            step(model, optimizer, torch.randn(4 + rank % 2, 3))
        except ws.RankMismatchError as error:
            return call + 1, str(error).splitlines()[0]
    return calls, ""


def scheduled(rank: int, world: int, style: str) -> tuple[int, str]:
    def change(call: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + call * (1 + (rank == 1)))

    return trained(rank, 7, change, parallel=STYLES[style])


@pytest.mark.parametrize(
    "style", [pytest.param(s, marks=() if s in ("replicate", "global") else pytest.mark.full) for s in STYLES]
)
def test_a_schedule_that_differs_is_named(style: str) -> None:
    text = f"lr of group 0: {0.1 / 5!r} on rank 1, {0.1 / 3!r} on rank 0; found before call 3, with check_every=3"
    assert run_ranks(scheduled, 2, style) == [(3, f"ranks differ in options of optimizers: {text}")] * 2


def touched(rank: int, world: int, mesh: str, parallel: list[Any], who: int) -> tuple[int, str]:
    def change(call: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if call == 4 and rank == who:
            with torch.no_grad():
                bias = model.last.bias
                own = bias.to_local() if isinstance(bias, DTensor) else bias
                own[-1:].add_(1e-6)  # the least bits of one value

    return trained(rank, 9, change, parallel=parallel, mesh=mesh)


TOUCHED = (
    "'last.bias' is not the same on ranks that hold the same of it: one value on {}, another on rank {}; "
    "found before call 6, with check_every=3"
)


def test_a_weight_that_only_one_rank_changes_is_named() -> None:
    found = run_ranks(touched, 3, "dp=3", [ws.DataParallel("replicate")], 1)
    assert found == [(6, TOUCHED.format("ranks 0, 2", 1))] * 3


@pytest.mark.full
def test_a_weight_that_one_rank_of_a_node_changes_is_named() -> None:
    found = run_ranks(touched, 4, "r=2,s=2", [ws.DataParallel("hybrid")], 3, timeout=60)
    assert all(found == (6, TOUCHED.format("rank 1", 3)) for found in found), found


def rounded(rank: int, world: int, by: float) -> tuple[int, str]:
    """Ranks along tp each compute the last bias for themselves, and may round otherwise."""

    def change(call: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if call == 4 and rank == 1:
            with torch.no_grad():
                model.last.bias.mul_(by)

    torch.manual_seed(0)
    tensor = ws.TensorParallel({"first": "colwise_rep", "last": "rowwise"}, axis="tp")
    return trained(0, 9, change, parallel=[tensor], mesh="tp=2")


def test_rounding_along_other_axes_is_none_and_more_is() -> None:
    assert run_ranks(rounded, 2, 1 + 1e-6) == [(9, "")] * 2
    for calls, text in run_ranks(rounded, 2, 1.5):
        assert calls == 6
        assert text.startswith("'last.bias' is not the same on ranks that hold the same of it")


def sound(rank: int, world: int) -> dict[str, tuple[int, str]]:
    """Nothing differs but batches, their sizes, and what ranks hold of their own."""
    found = {name: trained(rank, 7, parallel=style) for name, style in STYLES.items()}
    found["across"] = trained(rank, 7, parallel=STYLES["replicate"], schedule="across_steps")

    def change(call: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if call == 4 and rank == 1:
            optimizer.param_groups[0]["lr"] = 0.2

    found["never"] = trained(rank, 7, change, parallel=STYLES["replicate"], check_every=0)
    return found


def test_what_is_the_same_stays_unnoticed() -> None:
    for found in run_ranks(sound, 2):
        assert {name: said for name, said in found.items() if said != (7, "")} == {}


def alone(rank: int, world: int) -> tuple[float, int]:
    """The first rank alone calls a compiled function without collectives, between steps that all ranks run."""

    @ws.compile(parallel=ws.DataParallel("replicate"), check_every=2)
    def evaluate(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return model(x).square().mean()

    model = nn.Linear(3, 3)
    evaluate(model, torch.zeros(2, 3))
    value = torch.zeros(())
    for _ in range(5 if rank == 0 else 0):
        value = evaluate(model, torch.ones(2, 3))
    return float(value), trained(rank, 7)[0]


def test_what_one_rank_calls_alone_is_not_counted() -> None:
    assert [calls for _, calls in run_ranks(alone, 2)] == [7, 7]


TENSOR = ws.TensorParallel({"0": "colwise", "2": "rowwise"}, axis="tp")
SHARED: dict[str, dict[str, Any]] = {
    "tp": {"parallel": TENSOR, "mesh": "tp=2"},
    "pp": {"parallel": ws.Pipeline(micro_batches=2), "mesh": "pp=2"},
    "dp": {"parallel": ws.DataParallel("fully_shard", semantics="global")},
    "dp of the whole": {"parallel": ws.DataParallel("zero1", semantics="global", inputs="global")},
    "dp of each": {"parallel": ws.DataParallel("fully_shard")},
    "tp of parts": {"parallel": ws.TensorParallel({"0": "colwise", "2": "rowwise"}, input_dim=0), "mesh": "tp=2"},
    "dp, tp": {"parallel": [ws.DataParallel("fully_shard", axis="dp"), TENSOR], "mesh": "dp=2,tp=2"},
}


def pieces(model: nn.Module) -> list[torch.Tensor]:
    params = (p.detach() for p in model.parameters())
    return [(p.to_local() if isinstance(p, DTensor) else p).clone() for p in params]


def shared_batches(rank: int, world: int, rows: list[tuple[str, str, int]]) -> list[list[str]]:
    """For each layout, kind of difference between ranks and first call that has it: which calls raised, and what."""

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, Any]) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(batch["x"]).square().mean() * batch["weight"]
        loss.backward()
        optimizer.step()
        return loss.detach()

    found: list[list[str]] = []
    for layout, kind, first in rows:
        model = square_net()
        step = ws.compile(train, check_every=EVERY, **SHARED[layout])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        said: list[str] = []
        for call in range(1, 5):
            differs = first <= call < first + 2
            batch: dict[str, Any] = {"x": drawn(call, rank if kind == "rows" and differs else rank // 2), "weight": 1.0}
            if kind == "order" and differs:
                batch["x"] = batch["x"].roll(rank, 0)
            if kind in ("0-dim", "number") and differs:
                batch["weight"] = 1.0 + rank
            if kind == "0-dim":
                batch["weight"] = torch.tensor(batch["weight"])
            before = pieces(model)
            try:
                step(model, optimizer, batch)
            except ws.RankMismatchError as error:
                said.append(error.found)
                if call > 1:  # the first call places parameters
                    assert all(map(torch.equal, before, pieces(model))), "the call has not happened"
        found.append(said)
    return found


def test_ranks_that_share_a_batch_were_given_the_same() -> None:
    """Before the first call and each third one, by argument; where each rank has its part, or its own, nothing is."""
    text = (
        "{} is not the same on ranks that share a batch along axis '{}': one value on rank {}, another on rank {}; "
        "found before call {}, with check_every=3"
    ).format
    x, weight, graph = (
        "argument batch['x']",
        "argument batch['weight']",
        "the captured step, with Python values of its ",
    )
    expected: list[tuple[tuple[str, str, int], list[str]]] = [
        (("tp", "rows", 1), [text(x, "tp", 0, 1, 1)] * 2),
        (("tp", "order", 3), [text(x, "tp", 0, 1, 3)] * 2),
        (("pp", "rows", 3), [text(x, "pp", 0, 1, 3)] * 2),
        (("dp", "0-dim", 1), [text(weight, "dp", 0, 1, 1)] * 2),
        (("tp", "number", 1), [text(graph + "arguments,", "tp", 0, 1, 1)] * 4),
        (("dp of the whole", "rows", 3), [text(x, "dp", 0, 1, 3)] * 2),
        (("tp of parts", "rows", 1), []),
        (("dp", "rows", 1), []),
        (("dp of each", "number", 1), []),
    ]
    rows = [row for row, _ in expected]
    assert run_ranks(shared_batches, 2, rows) == [[said for _, said in expected]] * 2


@pytest.mark.full
def test_ranks_that_share_a_batch_along_one_axis_of_two() -> None:
    found = run_ranks(shared_batches, 4, [("dp, tp", "", 1), ("dp, tp", "rows", 1)], timeout=240)
    for same, other in found:
        assert same == []
        assert [said.split(":")[0] for said in other] == [
            "argument batch['x'] is not the same on ranks that share a batch along axis 'tp'"
        ] * 2


CALLS = 4
OPTIMIZERS: dict[str, Any] = {
    "without state": lambda params: torch.optim.SGD(params, lr=0.1),
    "state from its first step": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, dampening=0.5),
    "state": lambda params: torch.optim.AdamW(params, lr=0.01),
}
LAYOUTS: dict[str, dict[str, Any]] = {
    **{name: {"parallel": ws.DataParallel(name)} for name in ("replicate", "zero1", "zero2", "fully_shard")},
    "default": {},
    "hybrid": {"parallel": ws.DataParallel("hybrid"), "mesh": "r=1,s=2"},
    "global": {"parallel": ws.DataParallel("fully_shard", semantics="global")},
    "micro-batches": {"parallel": [ws.DataParallel("fully_shard"), ws.MicroBatches(2)]},
    "tp": {"parallel": ws.TensorParallel({"0": "colwise", "2": "rowwise"}, axis="tp"), "mesh": "tp=2"},
    "pp": {"parallel": ws.Pipeline(micro_batches=2), "mesh": "pp=2"},
}
CHOICES: dict[str, dict[str, Any]] = {
    "across steps": {"schedule": "across_steps"},
    "no schedule": {"schedule": None},
    "a budget": {"memory_bytes": "1GiB"},
    "offload": {"offload": "cpu"},
    "gradients": {"keep_grads": True},
    "skips": {"on_nonfinite": "skip"},
    "one program": {"max_programs": 1, "dynamic": False},
    "measured": {"measure": True},
    "traced again": {"verify": True},
    "replaced modules": {"module_overrides": {"1": nn.Tanh()}},
    "passes": {"passes": list},
    "dims": {"dynamic": {"x": (0,)}},
}


def without_copies(
    rank: int, world: int, rows: list[tuple[str, dict[str, Any]]], optimizers: tuple[str, ...]
) -> dict[str, str]:
    """Rows of options whose parameters divide evenly, so that ranks may hold nothing alike, with each optimizer: what
    differs from one device, or fails. All compare what they hold in every call.
    """
    found: dict[str, str] = {}
    for name, options in rows:
        for kind in optimizers:
            make = OPTIMIZERS[kind]
            together = "mesh" in options and options["mesh"].startswith(("tp", "pp"))
            ranks = range(1) if together else range(world)
            ours, theirs = square_net(), square_net()
            optimizer, other = make(ours.parameters()), make(theirs.parameters())
            step = ws.compile(train_step, check_every=1, **options)
            for call in range(CALLS):
                batches = [drawn(call, r) for r in ranks]
                try:
                    step(ours, optimizer, batches[0 if together else rank])
                except Exception as error:
                    found[f"{name}, {kind}"] = f"call {call + 1}: {type(error).__name__}: {error}"
                    break
                train_step(theirs, other, torch.cat(batches))
            else:
                with ws.whole(ours, writeback=False):
                    pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
                    off = max((a - b).detach().abs().max().item() for a, b in pairs)
                if off > 1e-9 or step.captures > 2:
                    found[f"{name}, {kind}"] = f"off by {off}, {step.captures} captures"
    return found


def square_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4, bias=False), nn.Tanh(), nn.Linear(4, 4, bias=False)).double()


def drawn(call: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * call + rank)
    return torch.randn(4, 4, generator=generator, dtype=torch.float64)


@pytest.mark.full
def test_ranks_may_hold_nothing_alike() -> None:
    rows = list(LAYOUTS.items())
    assert run_ranks(without_copies, 2, rows, ("without state", "state"), timeout=300) == [{}] * 2


@pytest.mark.full
def test_ranks_may_hold_nothing_alike_with_any_option() -> None:
    assert run_ranks(without_copies, 2, list(CHOICES.items()), ("without state",), timeout=300) == [{}] * 2
    rows = [("default", {}), ("across steps", CHOICES["across steps"])]
    assert run_ranks(without_copies, 2, rows, ("state from its first step",), timeout=300) == [{}] * 2
