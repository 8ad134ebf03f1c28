"""Steps recorded as CUDA graphs on null devices: one launch a call, one pool of memory, ranks that go together."""

import gc
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import wholestep as ws
from tests.backends import Interpreted

nullcuda: Any = pytest.importorskip("nullcuda", reason="needs the null CUDA device", exc_type=ImportError)
SCRIPT = Path(__file__).with_name("recorded.py")


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    scaled = F.dropout(model(x), 0.1) * torch.tensor(0.5) * torch.full((), 2.0).to(x.device)
    loss = scaled.square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def job(fused: bool | None = True, foreach: bool | None = None, **options: Any) -> tuple[Any, ...]:
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(6))).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused, foreach=foreach)
    return ws.compile(train_step, **options), model, optimizer


def did(step: ws.CompiledStep, *state: Any, rows: int = 4096) -> str:
    x = torch.zeros(rows, 256, device="cuda")
    with nullcuda.counting() as counted:
        step(*state, x)
    counts = counted.counts
    if counts.graphs and not counts.captured:
        assert (counts.launches, counts.blas, counts.memcpys) == (2, 0, 2), "two of the generator; the batch, the loss"
    return "record" if counts.captured else "replay" if counts.graphs else "run"


def test_sizes_of_batches_share_one_pool() -> None:
    """Numbers on the host do not stop it: a constant, one that is copied to the device, a learning rate."""
    gc.collect()
    torch.cuda.empty_cache()
    step, *state = job(dynamic={"x": (0,)})
    assert [did(step, *state) for _ in range(4)] == ["run", "run", "record", "replay"]
    reserved = torch.cuda.memory_reserved()
    assert [did(step, *state, rows=64) for _ in range(4)] == ["run", "run", "record", "replay"]
    assert [did(step, *state, rows=rows) for rows in (4096, 64)] == ["replay"] * 2
    assert torch.cuda.memory_reserved() <= reserved + (4 << 20)
    assert step.cuda_graph.startswith("2 programs recorded at x.shape[0] = 4096 and at x.shape[0] = 64, ")
    assert len(step.programs) == 1
    del step, state
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= reserved - (32 << 20), "the pool goes with the step"


def test_more_sizes_than_recordings() -> None:
    step, *state = job(dynamic={"x": (0,)}, max_recordings=2)
    for rows in (64, 32):
        assert [did(step, *state, rows=rows) for _ in range(3)] == ["run", "run", "record"]
    assert [did(step, *state, rows=16) for _ in range(4)] == ["run"] * 4
    assert [did(step, *state, rows=rows) for rows in (64, 16, 32)] == ["replay", "run", "replay"]
    assert step.cuda_graph.endswith(
        "not recorded: max_recordings=2 sizes of the batch are recorded; others run op by op"
    )


def test_padded_batches_share_recordings() -> None:
    step = ws.compile(summed, pad_to=ws.PadTo((32, 64), {"x": 0, "mask": 0}))
    model = nn.Linear(256, 256).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    found: list[str] = []
    for rows in (20, 30, 25, 32, 50, 31, 60, 64):
        x, mask = torch.zeros(rows, 256, device="cuda"), torch.ones(rows, device="cuda")
        with nullcuda.counting() as counted:
            step(model, optimizer, x, mask)
        found.append("record" if counted.counts.captured else "replay" if counted.counts.graphs else "run")
    assert found == ["run", "run", "record", "replay", "run", "replay", "run", "record"]
    assert len(step.programs) == 1, step.misses


def summed(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss = (model(x).square().sum(-1) * mask).sum() / mask.sum()
    loss.backward()
    optimizer.step()
    return loss.detach()


@pytest.mark.parametrize(("fused", "foreach"), [(True, None), (None, None), (None, False)])
def test_optimizers_whose_numbers_start_on_the_host_are_recorded(fused: bool | None, foreach: bool | None) -> None:
    step = job(fused, foreach)
    assert [did(*step) for _ in range(4)] == ["run", "run", "record", "replay"]


def test_steps_share_one_pool_also_on_other_streams() -> None:
    """A step waits for the one before it where that ran on another stream."""
    gc.collect()
    torch.cuda.empty_cache()
    train, other = job(), job()
    assert [did(*train) for _ in range(4)] == ["run", "run", "record", "replay"]
    reserved = torch.cuda.memory_reserved()
    assert [did(*other) for _ in range(4)] == ["run", "run", "record", "replay"]
    assert torch.cuda.memory_reserved() <= reserved + (8 << 20)
    side, x = torch.cuda.Stream(), torch.zeros(4096, 256, device="cuda")
    with nullcuda.tracing() as calls:
        train[0](*train[1:], x)
        with torch.cuda.stream(side):
            other[0](*other[1:], x)
    first, second = (call for call in calls if call.kind == "graph")
    assert first.before(second)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs NULLCUDA_DEVICES=2")
def test_a_step_on_another_device_than_the_current_one() -> None:
    """Nothing of a replay happens outside of the recording."""
    model = nn.Linear(256, 256).to("cuda:1")
    step, optimizer = ws.compile(train_step, device="cuda:1"), torch.optim.AdamW(model.parameters(), fused=True)
    x = torch.zeros(8, 256, device="cuda:1")
    for _ in range(4):
        with nullcuda.counting() as counted:
            step(model, optimizer, x)
    assert (counted.counts.graphs, counted.counts.blas) == (1, 0)
    assert torch.cuda.current_device() == 0


class Waiting(Interpreted):
    """Waits for the device, which no recording can."""

    name, recordable = "waiting", True

    def compile(self, *args: Any) -> Callable[..., Any]:
        run = super().compile(*args)

        def waited(values: Any) -> Any:
            made = run(values)
            made[0].item()
            return made

        return waited


def test_a_failed_recording_leaves_torch_as_it_was() -> None:
    """Draws and the allocator go on, on the current stream; another step is recorded again."""
    good, other = job(), job(backend=Waiting(), cuda_graphs=True)
    assert [did(*good) for _ in range(4)] == ["run", "run", "record", "replay"]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(4):
            did(*other)
    assert "it cannot be recorded: CUDA error: operation not permitted when stream is capturing" in str(said[0].message)
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    torch.rand(3, device="cuda")
    assert [did(*good) for _ in range(2)] == ["record", "replay"]


def test_two_ranks_replay_together_and_let_go_before_nccl_ends() -> None:
    """The second rank has a batch of another size in one call."""
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(SCRIPT)]
    environment = {**os.environ, "LOCAL_WORLD_SIZE": "2", "NULLCUDA_DEVICES": "2"}
    found = subprocess.run(words, capture_output=True, text=True, timeout=200, check=False, env=environment)
    assert found.returncode == 0, found.stderr[-3000:]
    lines = re.findall(r"calls ([a-z ]+); recorded from call 3 on", found.stdout)
    assert lines == ["run run record replay run replay"] * 2
