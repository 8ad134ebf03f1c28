"""Ranks whose call raises go on where all of them can, and else say so in the next call."""

import signal
from operator import is_
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import wholestep as ws
from tests.dist.launch import run_ranks
from wholestep._torch import is_fake
from wholestep.runtime import compiler
from wholestep.runtime.installer import Installer

SECONDS = 3.0


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.detach()


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    layers = nn.Embedding(10, 4), nn.Flatten(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 4)
    model = nn.Sequential(*layers).double()
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def batch(call: int, rank: int, wrong: bool = False) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(10 * call + rank)
    return torch.randint(10, (6, 4), generator=draw) + 100 * wrong, torch.randint(4, (6,), generator=draw)


def said(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0]}" if str(error) else type(error).__name__


def trained(rank: int, world: int, styles: list[str], options: dict[str, Any], wrong: dict[int, int]) -> list[Any]:
    """Losses and errors of six calls, of which some are `wrong`: call 3 on rank 0, say."""
    found: list[Any] = []
    for style in styles:
        model, optimizer = made()
        step = ws.compile(
            train_step, parallel=ws.DataParallel(style), timeout=2 * SECONDS, agree_timeout=SECONDS, **options
        )
        for call in range(6):
            try:
                found.append(step(model, optimizer, *batch(call, rank, call == wrong.get(rank))).item())
            except (IndexError, ws.WholestepError) as error:
                found.append(said(error))
                if not isinstance(error, IndexError):
                    break
    return found


def on_one_device(wrong: int) -> list[Any]:
    """Losses of the first rank."""
    model, optimizer = made()
    found: list[Any] = []
    for call in range(6):
        if call == wrong:
            found.append("IndexError: index out of range in self")
            continue
        optimizer.zero_grad()
        losses = [F.cross_entropy(model(x), y) for x, y in (batch(call, rank) for rank in range(2))]
        (sum(losses) / 2).backward()
        optimizer.step()
        found.append(losses[0].item())
    return found


def test_ranks_go_on_after_a_call_that_raised_on_all() -> None:
    styles = ["replicate", "zero1", "fully_shard"]
    found, _ = run_ranks(trained, 2, styles, {}, {0: 3, 1: 3})
    assert found == pytest.approx(on_one_device(3) * 3)


def test_an_end_that_was_left_to_the_next_call_is_completed_where_that_raises() -> None:
    styles = ["zero1", "fully_shard"]
    found, _ = run_ranks(trained, 2, styles, {"schedule": "across_steps"}, {0: 3, 1: 3})
    assert found == pytest.approx(on_one_device(3) * len(styles))


def test_a_rank_whose_call_raised_alone_does_not_meet_another_call() -> None:
    first, second = run_ranks(trained, 2, ["fully_shard"], {}, {0: 3})
    assert first[3].startswith("IndexError")
    assert first[4].startswith("RankMismatchError: the question of whether call 4 of train_step raised on all ranks")
    assert len(second) == 4
    assert second[3].startswith("RankFailedError: rank 0")


def interrupted_at_first(
    rank: int, world: int, where: str, style: str
) -> tuple[list[str], bool, list[float], list[float]]:
    """Ctrl-C on rank 1 in the first call, which is made again; then more calls, and those of a job without Ctrl-C."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background of a shell is to ignore it
    left = [rank == 1]

    def ctrl_c(held: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if left.pop():
                left.append(False)
                signal.raise_signal(signal.SIGINT)
            left.append(False)
            return held(*args, **kwargs)

        return call

    losses: list[list[float]] = [[], []]
    errors: list[str] = []
    clean = True
    for number, found in enumerate(losses):
        model, optimizer = made()
        params = list(model.parameters())
        step = ws.compile(train_step, parallel=ws.DataParallel(style), timeout=8.0)
        owner, name = (Installer, "finish") if where == "installing" else (compiler, "capture_step")
        before = getattr(owner, name)
        if number == 1:
            setattr(owner, name, ctrl_c(before))
        for _ in range(5):
            try:
                found.append(float(step(model, optimizer, *batch(len(found), rank))))
            except (KeyboardInterrupt, ws.WholestepError) as error:
                errors.append(said(error))
                state = [t for entry in optimizer.state.values() for t in entry.values()]
                clean &= not any(is_fake(t) for t in state) and all(map(is_, model.parameters(), params))
            if len(found) == 3:
                break
        setattr(owner, name, before)
    return errors, clean, *losses


@pytest.mark.parametrize(
    ("where", "style"), [("capturing", "replicate"), ("installing", "replicate"), ("installing", "fully_shard")]
)
def test_after_ctrl_c_on_one_rank_in_the_first_call_both_go_on(where: str, style: str) -> None:
    found = run_ranks(interrupted_at_first, 2, where, style)
    (other, clean, expected, losses), (own, own_clean, own_expected, own_losses) = found
    assert own[0] == "KeyboardInterrupt"
    assert clean or style == "fully_shard", "a shard replaces a parameter"
    assert own_clean or style == "fully_shard"
    failed = "RankMismatchError: rank 1 could not compile its step: KeyboardInterrupt: "
    assert (other, own[1:]) == ([failed] if where == "capturing" else [], [])
    assert (losses, own_losses) == (expected, own_expected)
