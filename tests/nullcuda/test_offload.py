"""`offload="cpu"` and `OffloadSaved` on the null device: copies run beside the step, in order with what reads them."""

from typing import Any

import pytest
import torch
from torch import nn

import wholestep as ws
from wholestep.partition.host_copies import arrived, fetched, kept, kept_on_host

nullcuda: Any = pytest.importorskip("nullcuda", reason="needs the null CUDA device", exc_type=ImportError)
WIDTH, LAYERS = 256, 6


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def decayed(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    """Also writes parameters for which no gradient has to arrive."""
    loss = train_step(model, optimizer, x)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(0.99)
    return loss


@pytest.mark.parametrize("step_of", [train_step, decayed])
def test_copies_run_beside_the_step_and_are_waited_for(step_of: Any) -> None:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    step, x = ws.compile(step_of, offload="cpu", device="cuda:0"), torch.zeros(8, WIDTH, device="cuda")
    for _ in range(2):
        step(model, optimizer, x)
    assert all(param.is_pinned() for param in model.parameters())
    with nullcuda.tracing() as calls:
        step(model, optimizer, x)
        torch.cuda.synchronize()
    of_matrices = [c for c in calls if c.kind == "memcpy" and c.bytes == 4 * WIDTH * WIDTH]
    to_device, to_host = ([c for c in of_matrices if c.name == name] for name in ("HtoD", "DtoH"))
    assert (len(to_device), len(to_host)) == (LAYERS, LAYERS)
    computing = {c.stream for c in calls if c.kind == "blas"}
    assert len(computing) == 1
    assert not computing & {c.stream for c in of_matrices}
    products = [c for c in calls if c.kind == "blas"]
    for copy in to_device:  # in order with all that is computed in its memory, before and after
        others = [c for c in products if any(copy.ranges[1][0] == at for at, _ in c.ranges)]
        assert all(copy.before(c) or c.before(copy) for c in others)
        assert any(copy.before(c) for c in others)
    for copy in to_host:
        others = [c for c in products if any(copy.ranges[0][0] == at for at, _ in c.ranges)]
        assert any(c.before(copy) for c in others)
    started = [calls.index(copy) for copy in to_device]
    first_read = [min(i for i, c in enumerate(calls) if c.kind == "blas" and copy.before(c)) for copy in to_device]
    assert all(start < read for start, read in zip(started[1:], first_read, strict=False)), "one copy ahead"


def test_saved_activations_go_and_come_beside_what_computes() -> None:
    """A product runs beside each copy, the next one waits for it, and the host for none."""
    weight, x = torch.zeros(WIDTH, WIDTH, device="cuda"), torch.zeros(1000, WIDTH, device="cuda")

    def run(x: torch.Tensor) -> None:
        start = kept_on_host(x)
        first = x @ weight
        host = kept(start, x)
        assert host.is_pinned()
        second = first @ weight
        coming = fetched(host, "cuda:0")
        _ = second @ weight
        _ = arrived(coming) @ weight

    run(x)
    with nullcuda.counting() as counted, nullcuda.tracing() as calls:
        run(x)
    assert counted.counts.syncs == 0
    gone, back = (c for c in calls if c.kind == "memcpy")
    products = [c for c in calls if c.kind == "blas"]
    assert (gone.name, back.name, gone.bytes, back.bytes) == ("DtoH", "HtoD", 4000 * WIDTH, 4000 * WIDTH)
    assert [gone.before(c) for c in products] == [False, True, True, True]
    assert [c.before(gone) for c in products] == [False] * 4
    assert [back.before(c) for c in products] == [False, False, False, True]
    assert [c.before(back) for c in products] == [True, True, False, False]
    assert gone.before(back)
