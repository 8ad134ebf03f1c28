"""What is moved to the next call: parameters are a step late, and after a flush what they would have been."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from tests.catalogue import CASES, DIFFERENT_CASES, OPTIMIZERS
from tests.simulate import Simulation
from wholestep import DataParallel, partition, plan
from wholestep.capture import Capture, capture_step
from wholestep.graph.verify import check_local_graph
from wholestep.passes.base import run_passes
from wholestep.passes.reinplace import Reinplace
from wholestep.passes.schedule import Schedule

pytestmark = pytest.mark.usefixtures("double")

STYLES = ("replicate", "zero1", "zero2", "fully_shard")
SMALL = Schedule(bucket_bytes=2000, first_bucket_bytes=300, across_steps=True)
STEPS = 4


def captured(case: str, recipe: str) -> Capture:
    """A later step, in which the optimizer's state exists."""
    model = CASES[case].build()
    optimizer, batch = OPTIMIZERS[recipe].make(model.parameters()), CASES[case].batches(0)
    CASES[case].step(model, optimizer, batch)
    return capture_step(CASES[case].step, (model, optimizer, batch), {})


def both(capture: Capture, style: str, mesh: str = "dp=2") -> tuple[Simulation, Simulation]:
    """The same step as it is, and across steps."""
    planned = plan(capture.graph, mesh, DataParallel(style))  # type: ignore[arg-type]
    local = partition(capture.graph, planned)
    across = run_passes(local, [SMALL, Reinplace()])
    assert across.across is not None
    for one in (across, *across.across):
        check_local_graph(one)
    plain = Simulation(capture, planned, run_passes(local, [replace(SMALL, across_steps=False), Reinplace()]))
    late = Simulation(capture, planned, across)
    plain.start()
    late.start()
    return plain, late


def train(one: Simulation, case: str, steps: range, rates: bool = False) -> list[list[Tensor]]:
    world, losses = one.plan.mesh.size, list[list[Tensor]]()
    for step in steps:
        if rates:
            for hyper in one.capture.hypers:
                group = list(one.capture.state.optimizers.values())[hyper.optimizer].param_groups[hyper.group]
                group[hyper.key] = 0.01 * (step + 1) if hyper.key == "lr" else group[hyper.key]
        batches = [CASES[case].batches(10 * step + rank) for rank in range(world)]
        found = one.step([{f"batch['{k}']": v for k, v in batch.items()} for batch in batches])
        losses.append([row[0] for row in found])
    return losses


def same(one: Simulation, other: Simulation) -> bool:
    return all(
        torch.equal(a, b) for name in one.pieces for a, b in zip(one.pieces[name], other.pieces[name], strict=True)
    )


@pytest.mark.crossed
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("recipe", ["SGD-plain", "SGD-momentum-foreach", "AdamW-plain", "Adam-fused", "AdamW-foreach"])
def test_optimizers(recipe: str, style: str) -> None:
    plain, late = both(captured("tiny", recipe), style)
    for start in (0, STEPS):  # and again after a flush
        expected = train(plain, "tiny", range(start, start + STEPS), rates=True)
        found = train(late, "tiny", range(start, start + STEPS), rates=True)
        assert all(torch.equal(a, b) for x, y in zip(expected, found, strict=True) for a, b in zip(x, y, strict=True))
        assert not same(plain, late), "something is carried"
        late.flush()
        assert same(plain, late)


@pytest.mark.crossed
@pytest.mark.parametrize("style", [*STYLES, "hybrid"])
@pytest.mark.parametrize("case", ["tiny", "uneven"])
def test_further_hops_are_left_to_the_next_call_too(case: str, style: str) -> None:
    plain, late = both(captured(case, "Adam-fused"), style, "a=2,b=2")
    expected, found = (train(one, case, range(STEPS)) for one in (plain, late))
    assert all(torch.equal(a, b) for x, y in zip(expected, found, strict=True) for a, b in zip(x, y, strict=True))
    assert not same(plain, late), "something is carried"
    late.flush()
    assert same(plain, late)


@pytest.mark.crossed
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("case", DIFFERENT_CASES)
def test_models(case: str, style: str) -> None:
    capture = captured(case, "AdamW-plain")
    local = partition(capture.graph, plan(capture.graph, "dp=2", DataParallel(style)))  # type: ignore[arg-type]
    if SMALL(local).across is None:
        pytest.skip("nothing of this step can wait")
    plain, late = both(capture, style)
    expected, found = (train(one, case, range(STEPS)) for one in (plain, late))
    assert all(torch.equal(a, b) for x, y in zip(expected, found, strict=True) for a, b in zip(x, y, strict=True))
    late.flush()
    assert same(plain, late)


@pytest.mark.parametrize("counts", [False, True], ids=["a plain update", "an update that counts rows"])
def test_what_computes_with_sizes_of_the_batch_stays_in_its_call(counts: bool) -> None:
    """The next call has a batch of another size, which its programs know."""

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        for param in model.parameters() if counts else ():
            assert param.grad is not None
            param.grad.clamp_(max=1 / x.shape[0])
        optimizer.step()
        return loss.detach()

    model = nn.Linear(4, 4)
    arguments = model, torch.optim.SGD(model.parameters(), 0.1), torch.randn(5, 4)
    capture = capture_step(step, arguments, {}, dynamic={"x": (0,)})
    planned = plan(capture.graph, "dp=2", DataParallel("replicate"))
    across = run_passes(partition(capture.graph, planned), [SMALL, Reinplace()]).across
    assert (across is None) is counts
