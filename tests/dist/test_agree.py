"""Ranks that differ in any option, number, constant or version are refused on every rank; other batches are not."""

import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import wholestep as ws
from tests.backends import Interpreted
from tests.dist.launch import run_ranks
from tests.optimizers import Counting
from wholestep.distributed.launch import _MOST_OWN as OWN
from wholestep.runtime import consistency

SECONDS = 10.0


def job(rank: int, loss_of: Callable[..., torch.Tensor] | None = None, **options: Any) -> tuple[Any, ...]:
    """A model with the same weights on all ranks, an optimizer with `options`, a compiled step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    kind = options.pop("kind", torch.optim.AdamW)
    optimizer = kind(model.parameters(), **{"lr": 0.1, **options})
    loss_of = loss_of or (lambda model, x: model(x).square().mean())

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, *args: Any) -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, *args)
        loss.backward()
        optimizer.step()
        return loss.detach()

    torch.manual_seed(rank)
    return model, optimizer, step


def attempt(rank: int, job: tuple[Any, ...], *args: Any, **options: Any) -> tuple[str, str]:
    model, optimizer, step = job
    compiled = ws.compile(step, parallel=ws.DataParallel("replicate"), **options)
    start = time.monotonic()
    try:
        for _ in range(3):
            compiled(model, optimizer, *(args or (torch.randn(4, 3),)))
    except ws.WholestepError as error:
        assert time.monotonic() - start < SECONDS
        return type(error).__name__, str(error)
    return "", ""


def weighted(rank: int) -> Callable[..., torch.Tensor]:
    weight = torch.tensor([1.0, 2.0 + rank])
    return lambda model, x: (model(x).square() * weight).mean()


def scaled(by: float) -> Callable[..., torch.Tensor]:
    return lambda model, x: model(x).square().mean() * by


def differing(rank: int, world: int) -> dict[str, tuple[str, str]]:
    def other_version() -> list[str]:
        return [f"torch: 2.{rank}.0"]

    out = {
        "decay": attempt(rank, job(rank, weight_decay=0.5 if rank == 1 else 0.01)),
        "lr": attempt(rank, job(rank, lr=0.2 if rank == 1 else 0.1)),
        "betas": attempt(rank, job(rank, betas=(0.9, 0.99 - 0.01 * rank))),
        "bool": attempt(rank, job(rank, amsgrad=rank == 1)),
        "kind": attempt(rank, job(rank, kind=torch.optim.Adam if rank else torch.optim.AdamW)),
        "scaled": attempt(rank, job(rank, scaled(2.0 if rank == 1 else 1.0))),
        "other batch": attempt(rank, job(rank, scaled(2.0 if rank == 1 else 1.0)), torch.randn(3 + rank, 3)),
        "constant": attempt(rank, job(rank, weighted(rank))),
        "backend": attempt(rank, job(rank), backend="eager", check_every=10 + rank),
        "name of the backend": attempt(rank, job(rank), backend=Interpreted() if rank else "eager"),
        "keep_grads": attempt(rank, job(rank), keep_grads=rank == 1),
    }
    consistency.versions = other_version
    return out | {"version": attempt(rank, job(rank))}


EXPECTED = {
    "decay": "ranks differ in options of optimizers: weight_decay of group 0: 0.5 on rank 1, 0.01 on rank 0",
    "lr": "ranks differ in scheduled numbers: lr of group 0: 0.2 on rank 1, 0.1 on rank 0",
    "betas": "ranks differ in options of optimizers: betas of group 0: (0.9, 0.98) on rank 1, (0.9, 0.99) on rank 0",
    "bool": "ranks differ in options of optimizers: amsgrad of group 0: True on rank 1, False on rank 0",
    "kind": "ranks differ in options of optimizers: kind of optimizer: torch.optim.adam.Adam on rank 1, "
    "torch.optim.adamw.AdamW on rank 0",
    "constant": "ranks differ in constants: const.0: f32[2] [1.0, 3.0] on rank 1, f32[2] [1.0, 2.0] on rank 0",
    "backend": "ranks differ in options of the step: check_every: 11 on rank 1, 10 on rank 0",
    "name of the backend": "ranks differ in options of the step: backend: interpreted on rank 1, eager on rank 0",
    "keep_grads": "ranks differ in options of the step: keep_grads: True on rank 1, False on rank 0",
    "version": "ranks differ in versions: torch: 2.1.0 on rank 1, 2.0.0 on rank 0",
}


def test_ranks_that_differ_are_refused_on_every_rank() -> None:
    for rank, found in enumerate(run_ranks(differing, 2)):
        assert {kind for kind, _ in found.values()} == {"RankMismatchError"}, found
        first = {name: text.splitlines()[0] for name, (_, text) in found.items()}
        assert {name: first[name] for name in EXPECTED} == EXPECTED
        for name in ("scaled", "other batch"):
            assert f"rank {rank}:   %mul = aten.mul.Tensor(%mean, {1.0 + rank})" in found[name][1], name
            assert "test_agree.py:" in found[name][1]
            assert "  return lambda model, x: model(x).square().mean() * by\n" in found[name][1]


def three(rank: int, world: int) -> tuple[str, str]:
    return attempt(rank, job(rank, weight_decay=0.5 if rank != 1 else 0.01), torch.randn(2 + rank, 3))


def test_the_ranks_on_both_sides_are_named() -> None:
    text = "ranks differ in options of optimizers: weight_decay of group 0: 0.01 on rank 1, 0.5 on ranks 0, 2"
    assert [found[1].splitlines()[0] for found in run_ranks(three, 3)] == [text] * 3


def micro_batches(model: nn.Module, batches: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([model(x).square().mean() for x in batches]).sum() / len(batches)


def by_rows(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y = model(x)
    return (y.square().sum() / len(x) + y.var(0).sum() + y.std()) * (2 if len(x) > 3 else 1)


def if_all(model: nn.Module, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean() if mask.all() else (model(x).square().mean(1) * mask).sum()


def legal(rank: int, world: int) -> dict[str, tuple[str, str]]:
    """What ranks may be given: other sizes, other numbers of micro-batches, other values and numbers as arguments."""
    rows = [torch.randn(2, 3) for _ in range(1 + rank)]
    mask = torch.tensor([True, rank == 0, True])
    return {
        "sizes": attempt(rank, job(rank, by_rows), torch.randn(3 + rank, 3)),
        "sizes and counts": attempt(rank, job(rank, kind=Counting), torch.randn(3 + rank, 3)),
        "one row": attempt(rank, job(rank), torch.randn(1 + 2 * rank, 3)),
        "no row": attempt(rank, job(rank, lambda m, x: m(x).square().sum()), torch.randn(2 * rank, 3)),
        "micro-batches": attempt(rank, job(rank, micro_batches), rows),
        "number": attempt(rank, job(rank, lambda m, x, by: m(x).square().mean() * by), torch.randn(3, 3), 1.0 + rank),
        "mask": attempt(rank, job(rank, if_all), torch.randn(3, 3), mask),
        "mask and size": attempt(
            rank, job(rank, if_all), torch.randn(3 + rank, 3), torch.tensor([True] * (3 + rank)).logical_and_(mask[1])
        ),
        "object": attempt(rank, job(rank, lambda m, x, o: m(x).square().mean() * o.by), torch.randn(3, 3), Own(rank)),
    }


class Own:
    """An object of the user's, of which nothing is known."""

    def __init__(self, rank: int) -> None:
        self.by = 1.0 + rank


def test_ranks_may_be_given_other_batches() -> None:
    for found in run_ranks(legal, 2):
        assert {name: said for name, said in found.items() if said != ("", "")} == {}


def secret(rank: int, world: int, case: str) -> tuple[str, str]:
    """A loss that is scaled on one rank, by a closure, is seen through batches of other kinds."""
    by = 1.0 + rank
    if case == "micro-batches":
        return attempt(
            rank, job(rank, lambda m, b: micro_batches(m, b) * by), [torch.randn(2, 3) for _ in range(1 + rank)]
        )
    if case == "number":
        return attempt(rank, job(rank, lambda m, x, n: m(x).square().mean() * n * by), torch.randn(3, 3), 1.0 + rank)
    mask = torch.tensor([True] * (3 + rank))
    return attempt(rank, job(rank, lambda m, x, k: if_all(m, x, k) * by), torch.randn(3 + rank, 3), mask)


@pytest.mark.parametrize("case", ["micro-batches", "number", "mask"])
def test_a_scaled_loss_is_seen_through_other_batches(case: str) -> None:
    for kind, text in run_ranks(secret, 2, case):
        assert kind == "RankMismatchError", text
        assert "rank 1:   %mul" in text
        assert ", 2.0)" in text


def scheduled_later(rank: int, world: int) -> list[int]:
    """A scheduler is made after the first call and moves momentum; then one rank alone is given another batch."""
    model, optimizer, step = job(rank, kind=torch.optim.SGD, momentum=0.9)
    compiled = ws.compile(step, parallel=ws.DataParallel("replicate"), agree_timeout=60.0)
    compiled(model, optimizer, torch.randn(4, 3))
    scheduler = torch.optim.lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, base_momentum=0.8, max_momentum=0.9)
    compiled(model, optimizer, torch.randn(4 + rank, 3))
    for call in range(3):
        scheduler.step()
        compiled(model, optimizer, torch.randn(4 + rank * call, 3))
    optimizer.param_groups[0]["nesterov"] = True
    compiled(model, optimizer, torch.randn(4, 3))
    optimizer.param_groups[0]["nesterov"] = False
    compiled(model, optimizer, torch.randn(9 + rank, 3))
    return [int(compiled.calls), len(optimizer.param_groups)]


def test_a_rank_captures_alone_where_only_its_batch_is_new() -> None:
    assert run_ranks(scheduled_later, 2) == [[7, 1]] * 2


def option_alone(rank: int, world: int) -> str:
    model, optimizer, step = job(rank, weight_decay=0.1)
    compiled = ws.compile(step, parallel=ws.DataParallel("replicate"), agree_timeout=3.0)
    compiled(model, optimizer, torch.randn(4, 3))
    if rank == 0:
        return ""
    optimizer.param_groups[0]["maximize"] = True
    try:
        compiled(model, optimizer, torch.randn(4, 3))
    except ws.RankMismatchError as error:
        return str(error).splitlines()[0]
    return "nothing"


def test_an_option_that_one_rank_changes_later_is_an_error() -> None:
    assert run_ranks(option_alone, 2)[1] == "ranks [0] compiled no program while rank 1 did, within 3 s"


def mode_later(rank: int, world: int, modes: tuple[str, str], rows: tuple[int, int]) -> str:
    """What the step reads is another text on the ranks from the third call on; the collectives are the same."""
    torch.manual_seed(0)
    mode = {"name": "mean"}

    def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        found = model(x).square().mean()
        return found * {"mean": 1.0, "twice": 2.0, "half": 0.5}[mode["name"]]

    model, optimizer, step = job(rank, loss_of)
    compiled = ws.compile(step, parallel=ws.DataParallel("replicate"), agree_timeout=6.0, timeout=12.0)
    try:
        for call in range(4):
            mode["name"] = modes[rank] if call >= 2 else "mean"
            compiled(model, optimizer, torch.randn(4 if call < 3 else rows[rank], 3))
    except ws.WholestepError as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("rows", [(4, 4), (5, 6)])
def test_what_the_step_reads_later_is_compared_as_at_first(rows: tuple[int, int]) -> None:
    for found in run_ranks(mode_later, 2, ("twice", "half"), rows):
        assert found.startswith("RankMismatchError: rank ")
        assert "compiled different programs" in found
        assert ", 2.0) : f" in found
        assert ", 0.5) : f" in found
    assert run_ranks(mode_later, 2, ("twice", "twice"), rows) == ["", ""]


def test_what_one_rank_alone_reads_later_is_an_error() -> None:
    first, second = run_ranks(mode_later, 2, ("mean", "half"), (4, 4))
    assert first == second
    assert first.startswith("RankMismatchError: rank 1 compiled another program for call 3 of step, rank 0 did not: ")


def known_branches(rank: int, world: int, last: str) -> str:
    """Both branches are known on all ranks, and have the same collectives; then each rank takes one of them."""
    torch.manual_seed(0)
    model = nn.ModuleDict({name: nn.Linear(3, 3) for name in ("trunk", "a", "b")})

    def step(model: nn.ModuleDict, optimizer: torch.optim.Optimizer, x: torch.Tensor, head: str) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model[head](model["trunk"](x)).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    compiled = ws.compile(step, parallel=ws.DataParallel("replicate"), timeout=6.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        for head in ("a", "b", "a", "b", "b", "ab"[rank] if last == "apart" else "a"):
            compiled(model, optimizer, torch.randn(4, 3), head)
        for _ in range(20 if last == "apart" else 2):
            time.sleep(0.5)
            compiled(model, optimizer, torch.randn(4, 3), "a")
    except ws.WholestepError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_ranks_that_run_different_known_programs_are_told() -> None:
    assert run_ranks(known_branches, 2, "together") == ["", ""]
    first, second = run_ranks(known_branches, 2, "apart")
    assert first == second
    assert first.startswith("RankMismatchError: ranks ")
    assert "ran different programs in call 6, counted over all steps" in first or "in one of calls" in first


class Parts(nn.Module):
    """Images have a part of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.text, self.images, self.sounds = (nn.Linear(3, 3) for _ in range(3))


def branches(rank: int, world: int) -> tuple[list[str], list[torch.Tensor]]:
    """Batches with images on rank 0 alone at the first call; on all at call 3; on rank 1 alone at call 2."""

    def step(model: Parts, optimizer: torch.optim.Optimizer, x: torch.Tensor, images: torch.Tensor | None) -> None:
        optimizer.zero_grad()
        loss = model.text(x).square().mean()
        if images is not None:
            loss = loss + model.images(images).square().mean()
        elif sounds:
            loss = loss + model.sounds(x).square().mean()
        loss.backward()
        optimizer.step()

    def run(step: Any, model: Parts, optimizer: Any, calls: list[tuple[torch.Tensor, torch.Tensor | None]]) -> str:
        try:
            for x, images in calls:
                step(model, optimizer, x, images)
        except ws.WholestepError as error:
            return f"{type(error).__name__}: {error}"
        return ""

    found: list[str] = []
    for case in ("first", "good", "alike", "last"):
        sounds = case == "alike"
        torch.manual_seed(0)
        model = Parts()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        compiled = ws.compile(step, parallel=ws.DataParallel("replicate"), timeout=8.0)
        torch.manual_seed(rank)
        x = [torch.randn(4, 3) for _ in range(4)]
        calls = {
            "first": [(x[0], None if rank else x[1])],
            "good": [(x[0], None), (x[1], None), (x[2], x[3]), (x[3], None)],
            "alike": [(x[0], None if rank else x[1])],
            "last": [(x[0], None), (x[0], x[1] if rank else None)],
        }[case]
        found.append(run(compiled, model, optimizer, calls))
        if case == "good":
            after = [param.detach().clone() for param in model.parameters()]
    return found, after


def test_the_lines_at_which_ranks_part_are_named_at_the_first_call_and_later() -> None:
    (first, good, alike, last), after = (found := run_ranks(branches, 2))[0]
    (other_first, _, other_alike, other_last), other_after = found[1]
    here = re.escape(__file__)
    images = rf"rank \d: {here}:\d+  loss = loss \+ model\.images\(.*\n"
    plain = rf"{{}}: {here}:\d+  loss\.backward\(\)\n"
    cure = "  next: run this part on every rank: on zeros, with torch.where, or times a tensor that is 0 or 1"
    for text in (first, other_first):
        assert text.startswith("RankMismatchError: rank ")
        assert re.search(f"the step parts at\n(    {images}|    {plain.format('rank 1')}){{2}}", text), text
        assert text.endswith(cure)
    for rank, text in enumerate((alike, other_alike)):  # the same collectives, for gradients of other parameters
        assert f"    rank {rank}: update of {('images', 'sounds')[rank]}.bias\n" in text
        assert text.endswith(cure)
    assert good == "", "all ranks take the branch at one call"
    assert last == other_last
    assert last.startswith("RankMismatchError: rank 1 compiled another program for call 2 of step, rank 0 did not: ")
    assert re.search(f"    {images.replace('rank .d', 'rank 1')}    {plain.format('earlier calls')}", last), last
    assert last.endswith(cure)

    torch.manual_seed(0)
    model = Parts()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    draws = [(torch.manual_seed(rank), [torch.randn(4, 3) for _ in range(4)])[1] for rank in range(2)]
    for call in range(4):
        optimizer.zero_grad()
        for x in draws:
            loss = model.text(x[call]).square().mean()
            loss = loss + model.images(x[3]).square().mean() if call == 2 else loss
            (loss / 2).backward()
        optimizer.step()
    for one, two, expected in zip(after, other_after, model.parameters(), strict=True):
        assert torch.equal(one, two)
        torch.testing.assert_close(one, expected.detach())


def many_steps(rank: int, world: int) -> tuple[int, list[float]]:
    def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss = model(x).mean()
        loss.backward()
        return loss.detach()

    losses: list[float] = []
    for number in range(2 * OWN + 1):
        model = nn.Linear(3, 1, bias=False)
        nn.init.constant_(model.weight, number)
        compiled = ws.compile(step, parallel=ws.DataParallel("replicate"))
        losses += [float(compiled(model, torch.full((2, 3), 1.0 + rank)))]
        assert torch.equal(model.weight.grad, torch.full((1, 3), 1.5))
    return len(dist.distributed_c10d._world.pg_map), losses


def test_groups_do_not_grow_with_steps() -> None:
    for rank, (groups, losses) in enumerate(run_ranks(many_steps, 2)):
        assert groups <= 2 + OWN
        assert losses == [3.0 * number * (1 + rank) for number in range(2 * OWN + 1)]
