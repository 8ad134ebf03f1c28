"""`ContextParallel` on gloo ranks: sequences given whole or in pieces, of lengths that change, against one device."""

import copy
from contextlib import nullcontext
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW

import wholestep as ws
from tests.dist.launch import run_ranks
from tests.tp_models import VOCAB, Llama, next_token, step_of
from tests.unit.test_context_parallel import DIM, MASKS, Again
from wholestep.errors import RankMismatchError

of_tokens = step_of(next_token)
ahead = {
    "local": step_of(lambda model, ids, _: F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())),
    "global": step_of(lambda model, ids, _: F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())),
}
LENGTHS = [(2, 16), (2, 12), (2, 13), (2, 3), (2, 29), (1, 13), (3, 8)]  # the last two, by one method, need programs
SHARES = {
    2: [(8, 8), (5, 7), (13, 0), (1, 2), (15, 14), (6, 7), (4, 4)],
    4: [(4, 4, 4, 4), (2, 3, 3, 4), (9, 0, 1, 3), (1, 0, 2, 0), (8, 7, 7, 7)],
}
METHODS = "gather", "heads", "exchanged", "ring", "window", "documents", "ahead"


def _setup(mask: str = "") -> tuple[Any, Any, Any, Any]:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model: Any = Llama(layers=1)
    if mask in MASKS:
        model = nn.Sequential(nn.Embedding(VOCAB, DIM), Again(MASKS[mask]), nn.Linear(DIM, VOCAB))
    other = copy.deepcopy(model)
    optimizer, plain = (AdamW(m.parameters(), lr=1e-2, eps=1e-4, fused=True) for m in (model, other))
    return model, optimizer, other, plain


def _batch(call: int, rows: int, length: int) -> torch.Tensor:
    """Ids and labels; labels of a few tokens are ignored, more of the later ones."""
    drawn = torch.Generator().manual_seed(call)
    ids, labels = torch.randint(VOCAB, (2, rows, length), generator=drawn)
    labels[:, -2:] = -100
    return torch.stack([ids, labels])


def _whole(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _trains(rank: int, world: int, method: Any, inputs: Any) -> tuple[float, list[int]]:
    model, optimizer, other, plain = _setup(method)
    trains = ahead[inputs] if method == "ahead" else of_tokens
    balance = True if method == "exchanged" or (method == "ring" and inputs == "local") else None  # windows are not
    twice = method == "two axes"
    method = {"ahead": "gather", "exchanged": "gather", "gather": "gather", "heads": "heads"}.get(method, "ring")
    options: Any = {"method": method, "balance": balance}
    parallel: list[ws.Strategy] = [ws.ContextParallel(inputs=inputs, **options)]
    parallel += [ws.ContextParallel("inner", method="heads", inputs=inputs)] * twice
    step = ws.compile(trains, mesh="cp=2,inner=2" if twice else f"cp={world}", parallel=parallel)
    worst, captures = 0.0, list[int]()
    calls = list(zip(LENGTHS, SHARES[world], strict=False))
    for call, ((rows, length), shares) in enumerate(calls if method == "gather" and not balance else calls[:5]):
        batch = _batch(call, rows, length)
        start = sum(shares[:rank])
        own = batch if inputs == "global" else batch[:, :, start : start + shares[rank]]
        loss = step(model, optimizer, *own)
        worst = max(worst, abs(loss.item() - trains(other, plain, *batch).item()))
        captures.append(step.captures)
        assert bool(step.plan.options.balanced) == bool(balance)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        worst = max(worst, (_whole(a) - b).abs().max().item())
    return worst, captures


@pytest.mark.usual(
    "2-gather-local", "2-heads-global", "2-exchanged-global", "4-ring-local", "2-window-global", "2-ahead-global",
    "2-documents-local", "4-two axes-global",
)  # fmt: skip
@pytest.mark.parametrize("inputs", ["global", "local"])
@pytest.mark.parametrize(("ranks", "method"), [*product((2, 4), METHODS), (4, "two axes")])
def test_lengths_that_change(ranks: int, method: str, inputs: str) -> None:
    """Pieces of any lengths, none included. One program serves all lengths of two rows, from the second one on, and
    another one those of which the first rank has one token: a model of two of three tokens.
    """
    for worst, captures in run_ranks(_trains, ranks, method, inputs):
        assert worst < 1e-12
        assert captures[:3] == [1, 2, 2]
        assert 2 <= captures[3] == captures[4] <= 2 + (ranks == 4 or (method, inputs) == ("ahead", "global"))


def _evaluates(rank: int, world: int, method: Any, inputs: Any) -> float:
    model, optimizer, other, plain = _setup()
    context, worst = ws.ContextParallel(method=method, inputs=inputs), 0.0
    step = ws.compile(of_tokens, mesh="cp=2", parallel=context)
    check = ws.compile(_logits, mesh="cp=2", parallel=context)
    for call, length in enumerate((13, 8, 3)):
        batch = _batch(call, 2, length)
        own = batch if inputs == "global" else batch.tensor_split([2], -1)[rank]
        step(model, optimizer, *own)
        of_tokens(other, plain, *batch)
        loss, logits = check(model, *own)
        expected_loss, expected = _logits(other, *batch)
        assert loss.shape == expected_loss.shape
        worst = max(worst, (loss - expected_loss).abs().item(), (_whole(logits) - expected).abs().max().item())
    return worst


def _logits(model: Any, ids: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.no_grad():
        return next_token(model, ids, labels), model(ids)


@pytest.mark.usual("gather-local", "ring-global")
@pytest.mark.parametrize("inputs", ["global", "local"])
@pytest.mark.parametrize("method", ["gather", "heads", "ring"])
def test_evaluation_between_steps(method: str, inputs: str) -> None:
    """The mean over all tokens, and the logits in the order of the sequence."""
    assert max(run_ranks(_evaluates, 2, method, inputs)) < 1e-12


def _two_axes(rank: int, world: int) -> float:
    """Each pair of ranks has a batch of its own, of other rows, and averages gradients with the other pair, as DDP."""
    model, optimizer, other, plain = _setup()
    parallel = [ws.DataParallel("fully_shard", axis="dp"), ws.ContextParallel(method="heads")]
    step = ws.compile(of_tokens, mesh="dp=2,cp=2", parallel=parallel)
    worst = 0.0
    for call in range(3):
        batches = [_batch(10 * call + pair, 2 + pair, 13) for pair in range(2)]
        loss = step(model, optimizer, *batches[rank // 2])
        plain.zero_grad()
        losses = [next_token(other, *batch) for batch in batches]
        torch.stack(losses).mean().backward()
        torch.nn.utils.clip_grad_norm_(other.parameters(), 1.0)
        plain.step()
        worst = max(worst, abs(loss.item() - losses[rank // 2].item()))
    return worst


def test_data_parallel_pairs() -> None:
    assert max(run_ranks(_two_axes, 4)) < 1e-12


def _other_rows(rank: int, world: int) -> str:
    """Each pair has other rows in each call; in the second one, rank 1 has others than rank 0."""
    model, optimizer, _, _ = _setup()
    parallel = [ws.DataParallel("fully_shard", axis="dp"), ws.ContextParallel(method="heads")]
    step = ws.compile(of_tokens, mesh="dp=2,cp=2", parallel=parallel)
    for call, rows in ((0, (2, 2, 3, 3)), (1, (4, 5, 2, 2))):
        with pytest.raises(RankMismatchError) if call else nullcontext() as caught:
            step(model, optimizer, *_batch(call, rows[rank], 13))
    return str(caught.value)


def test_ranks_of_a_pair_with_other_rows_are_refused() -> None:
    for text in run_ranks(_other_rows, 4):
        assert "rank 0 and rank 1 compiled different programs" in text or "rank 1 and rank 0" in text, text


def _other_batch(rank: int, world: int) -> str:
    model, optimizer, _, _ = _setup()
    step = ws.compile(of_tokens, mesh="cp=2", parallel=ws.ContextParallel())
    with pytest.raises(RankMismatchError) as caught:
        step(model, optimizer, *_batch(rank, 2, 8))
    return str(caught.value)


def test_ranks_with_other_sequences_are_told() -> None:
    for text in run_ranks(_other_batch, 2):
        assert "argument" in text
        assert "one batch for ranks that compute one result together" in text


def _resumes(rank: int, world: int, folder: str) -> float:
    model, optimizer, other, plain = _setup()
    step = ws.compile(of_tokens, mesh="cp=2", parallel=ws.ContextParallel())
    step(model, optimizer, *_batch(0, 2, 8))
    ws.save(folder, step)
    again = ws.compile(of_tokens, mesh="dp=2", parallel=ws.DataParallel("zero1", semantics="global"))
    ws.load(folder, model=other, optimizer=plain)
    losses = list[float]()
    for compiled, parts in ((step, (model, optimizer)), (again, (other, plain))):
        batch = _batch(1, 2, 8)
        losses.append(compiled(*parts, *(batch if compiled is step else batch[:, rank : rank + 1])).item())
    return abs(losses[0] - losses[1])


def test_a_checkpoint_does_not_know_of_it(tmp_path: Any) -> None:
    assert max(run_ranks(_resumes, 2, str(tmp_path / "saved"))) < 1e-12
