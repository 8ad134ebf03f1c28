"""Values that a step reads while it is captured: those that follow from integers of the batch are known and guarded."""

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import wholestep as ws
from tests.eager import batches, same_as_eager
from wholestep.capture import batch_reads, capture_step
from wholestep.errors import CaptureError

Step = Any
BEFORE = torch.get_rng_state()


def compiled(loss: Any) -> tuple[Any, nn.Module, torch.optim.Optimizer]:
    """A compiled step that minimises `loss(model(x), batch)`, and what it trains."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)

    def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        optimizer.zero_grad()
        value = loss(model(batch["x"]), batch)
        value.backward()
        optimizer.step()
        return value.detach()

    return (
        ws.compile(train_step, parallel=ws.DataParallel("replicate")),
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
    )


def batch(**more: Any) -> dict[str, torch.Tensor]:
    return {"x": torch.arange(12.0).reshape(4, 3), **{k: torch.tensor(v) for k, v in more.items()}}


def branch_on_mask(out: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return out.sum() if batch["mask"].all() else (out * batch["mask"][:, None]).sum()


def test_a_branch_on_a_mask_is_captured_once_for_each_answer() -> None:
    step, model, optimizer = compiled(branch_on_mask)
    for mask, captures in (([1, 1, 1, 1], 1), ([1, 1, 0, 0], 2), ([1, 0, 1, 1], 2), ([1, 1, 1, 1], 2)):
        given = batch(mask=mask)
        expected = branch_on_mask(model(given["x"]), given)
        assert torch.equal(step(model, optimizer, given), expected.detach())
        assert step.captures == captures
    assert step.misses[0].endswith(
        'return out.sum() if batch["mask"].all() else (out * batch["mask"][:, None]).sum() is another one'
    )


def test_numbers_read_after_a_change_in_place_are_those_of_that_moment() -> None:
    def loss(out: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        ids = batch["ids"].clone()
        first = int(ids.sum())
        ids[1:] = 0
        second = ids.sum().item()
        ids.fill_(7)
        return out.sum() * first + second

    step, model, optimizer = compiled(loss)
    given = batch(ids=[5, 2, 3])
    expected = loss(model(given["x"]), given)
    assert torch.equal(step(model, optimizer, given), expected.detach())
    assert torch.equal(given["ids"], torch.tensor([5, 2, 3]))


def test_counts_of_labels_of_the_batch_have_the_size_of_eager() -> None:
    def loss(out: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        labels = batch["y"]
        counts = torch.bincount(labels, minlength=3)
        weighted = torch.bincount(labels, out.detach()[:, 0])
        empty = torch.bincount(labels[:0], minlength=2)
        sizes = counts.numel() + weighted.numel() + empty.sum()
        return (out * (counts[labels] + weighted[labels])[:, None]).mean() + sizes

    step, model, optimizer = compiled(loss)
    for labels, captures in (([2, 0, 1, 2], 1), ([0, 2, 2, 2], 1), ([4, 0, 1, 1], 2), ([1, 1, 2, 0], 2)):
        given = batch(y=labels)
        expected = loss(model(given["x"]), given)
        assert torch.equal(step(model, optimizer, given), expected.detach())
        assert step.captures == captures


@pytest.mark.smoke
def test_sizes_from_a_list_and_from_a_mask() -> None:
    def loss(out: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        parts = out.split(batch["lengths"].tolist())
        return (
            sum(p.square().mean() for p in parts) + out[batch["keep"]].sum() + out[batch["keep"].nonzero()[:, 0]].mean()
        )

    step, model, optimizer = compiled(loss)
    for lengths, keep in (([1, 3], [True, False, True, False]), ([2, 2], [True, False, False, False])):
        given = batch(lengths=lengths, keep=keep)
        expected = loss(model(given["x"]), given)
        torch.testing.assert_close(step(model, optimizer, given), expected.detach())
    assert step.captures == 2


@pytest.mark.parametrize(
    "read",
    [
        lambda out, batch: out.sum() if out.sum().item() > 0 else -out.sum(),
        lambda out, batch: out.sum() if float(batch["x"].sum()) > 0 else -out.sum(),
        lambda out, batch: out.sum() * torch.randint(0, 9, ()).item(),
        lambda out, batch: out.sum() * batch["ids"].double().copy_(out[0, 0].detach()).sum().item(),
        lambda out, batch: out.sum() * float(np.linalg.norm(out.detach())),
        lambda out, batch: out.sum() * complex(out.detach().sum()).real,
        lambda out, batch: out.sum() * (1.0 in out),
    ],
    ids=["weights", "floats", "chance", "weights-in-place", "numpy", "complex", "in"],
)
def test_other_values_are_refused_with_the_line(read: Any) -> None:
    step, model, optimizer = compiled(read)
    with pytest.raises(ws.CaptureError, match="reads the value of a tensor") as caught:
        step(model, optimizer, batch(ids=[1, 2]))
    assert "test_capture_values.py" in str(caught.value)


@pytest.mark.full
def test_a_value_that_keeps_changing_is_refused() -> None:
    step, model, optimizer = compiled(lambda out, batch: out.sum() * batch["ids"].sum().item())
    for i in range(16):
        step(model, optimizer, batch(ids=[i]))
    with pytest.raises(ws.CaptureError, match="reads a value of the batch that keeps changing: 16 captures so far"):
        step(model, optimizer, batch(ids=[16]))
    step(model, optimizer, batch(ids=[3]))
    assert step.captures == 16


@pytest.mark.parametrize("draw", [random.random, np.random.rand], ids=["random", "numpy.random"])
def test_random_numbers_of_python_are_refused(draw: Any, request: pytest.FixtureRequest) -> None:
    step, model, optimizer = compiled(lambda out, batch: out.sum() * torch.tensor(draw()))
    with pytest.raises(ws.CaptureError) as caught:
        step(model, optimizer, batch())
    where = str(caught.value).splitlines()[1]
    name = request.node.callspec.id
    assert str(caught.value).startswith(f"the step draws numbers from {name} while it is captured: all later steps")
    assert where.startswith("  at: ")
    assert "test_capture_values.py" in where


def test_ctc_loss_of_labels_with_another_length_each() -> None:
    def loss(out: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        scores = out.log_softmax(-1)[:, None].expand(-1, 2, -1)
        lengths = (batch["labels"] > 0).sum(-1)
        return nn.functional.ctc_loss(scores, batch["labels"], torch.tensor([4, 4]), lengths, zero_infinity=True)

    step, model, optimizer = compiled(loss)
    for labels in ([[1, 1], [1, 0]], [[1, 0], [1, 0]]):
        given = batch(labels=labels)
        expected = loss(model(given["x"]), given)
        torch.testing.assert_close(step(model, optimizer, given), expected.detach())
    assert step.captures == 1


@pytest.mark.parametrize(
    ("reset", "found"),
    [
        (lambda: torch.manual_seed(3), "the step seeds torch's random numbers"),
        (lambda: torch.random.manual_seed(3), "the step seeds torch's random numbers"),
        (
            lambda: torch.set_rng_state(BEFORE),
            "the step seeds torch's random numbers",
        ),
    ],
)
def test_a_generator_that_is_set_anew_in_each_step_is_refused(reset: Any, found: str) -> None:
    def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        reset()
        return nn.functional.dropout(model(x)).sum().detach()

    with pytest.raises(ws.CaptureError) as caught:
        capture_step(step, (nn.Linear(4, 4), torch.ones(2, 4)), {})
    assert caught.value.found.startswith(found)
    assert "test_capture_values.py" in caught.value.where
    assert torch.manual_seed(1).initial_seed() == torch.random.manual_seed(1).initial_seed() == 1


def test_a_generator_that_is_set_back_goes_on() -> None:
    def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.random.fork_rng(devices=[]):
            return nn.functional.dropout(model(x)).sum().detach()

    assert capture_step(step, (nn.Linear(4, 4), torch.ones(2, 4)), {}).graph.outputs


def test_values_are_read_beside_a_number_that_changes() -> None:
    class Trainer:
        def __init__(self) -> None:
            self.calls = 0
            self.model = nn.Linear(3, 2)

        def step(self, x: Tensor, first: Tensor, second: Tensor, third: Tensor) -> tuple[Tensor, Any]:
            self.calls += 1
            return (self.model(x) * self.calls).sum().detach(), first.item()

    trainer = Trainer()
    step = ws.compile(trainer.step)
    x, numbers = torch.ones(4, 3), [torch.tensor(n) for n in (2, 5, 7)]
    once = trainer.model(x).sum().detach()
    for call in (1, 2):
        found, first = step(x, *numbers)
        assert first == 2
        torch.testing.assert_close(found, once * call)
    assert step.captures == 1


def test_tensors_made_of_traced_numbers_and_tensors() -> None:
    """`torch.tensor` of lists, and `copy.deepcopy`, have the bits and dtypes of eager, from one capture."""

    class Trainer:
        def __init__(self) -> None:
            self.calls, self.rate = 0, 0.1
            self.kept = torch.ones(2, dtype=torch.float64)

        def step(self, model: nn.Module, x: Tensor) -> list[Tensor]:
            self.calls += 1
            self.rate *= 0.7
            self.kept = self.kept * self.rate
            loss = model(x).sum().detach()
            return [
                torch.tensor(self.rate), torch.tensor([self.calls, 2]), torch.as_tensor([self.calls, 0.1]),
                torch.tensor([0.1, self.rate], dtype=torch.float64), torch.tensor([loss, 1]),
                torch.tensor(([loss], [self.rate])), torch.tensor([self.calls > 2, True]),
                copy.deepcopy(self.kept).mul_(2) + self.kept, copy.deepcopy(loss * 2), copy.deepcopy(model.weight),
            ]  # fmt: skip

    ours, theirs, model = Trainer(), Trainer(), nn.Linear(3, 2)
    step = ws.compile(ours.step)
    for call in range(4):
        x = torch.full((4, 3), call + 0.5)
        for found, expected in zip(step(model, x), theirs.step(model, x), strict=True):
            assert (found.dtype, found.tolist()) == (expected.dtype, expected.tolist())
    assert step.captures == 1


def test_a_rate_is_not_read_from_the_batch() -> None:
    class Counting(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for p in group["params"]:
                    state = self.state[p]
                    state["n"] = state.get("n", 0) + 1
                    p.add_(p.grad / (1 - 0.9 ** state["n"]), alpha=-group["lr"])

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(3, 2)
        return model, Counting(model.parameters(), {"lr": 0.1})

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    calls = [(torch.randn(1, 3), torch.tensor([1])) for _ in range(4)]
    same_as_eager(train, make, calls, tolerance=1e-6)


@pytest.mark.usefixtures("double")
def test_a_tensor_in_place_of_a_number_is_read_in_each_call() -> None:
    """C++ reads its value, where no code of Python asks for it; two names of it may part."""
    rate = {"a": torch.tensor(0.5)}
    rate["b"] = rate["a"]

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = torch.add(nn.functional.leaky_relu(model(x), rate["b"]), x, alpha=rate["b"]).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    def doubled(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
        loss = train(model, optimizer, x) * rate["b"] + rate["a"]
        rate["a"] = rate["a"] * 2
        return loss

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(3, 3)
        return model, torch.optim.SGD(model.parameters(), 0.1)

    def losses(step: Any, change: Callable[[], object]) -> list[Tensor]:
        torch.manual_seed(0)
        rate["a"] = rate["b"] = torch.tensor(0.5)
        state = make()
        return [(step(*state, *call), change())[0] for call in batches((4, 3), count=4)]

    for step, change in ((train, lambda: rate["b"].mul_(0.9)), (doubled, int)):
        compiled = ws.compile(step)
        found, expected = losses(compiled, change), losses(step, change)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-14)
        assert compiled.captures == (4 if step is train else 2)

    def twice(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
        torch._foreach_mul_([rate["a"], rate["b"]], 2)  # pyright: ignore[reportPrivateUsage]
        return train(model, optimizer, x)

    rate["a"] = rate["b"]
    with pytest.raises(CaptureError, match="with one tensor twice in a list"):
        ws.compile(twice)(*make(), torch.randn(4, 3))


def test_a_rate_that_is_read_for_each_parameter_copies_no_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[Any] = []
    copy_node = batch_reads.copy_node
    monkeypatch.setattr(batch_reads, "copy_node", lambda *args: (copies.append(args), copy_node(*args))[1])
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(3)))

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x.float()).square().sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    ws.capture(train, model, torch.optim.SGD(model.parameters(), lr=0.1), torch.arange(6).reshape(2, 3))
    assert not copies
