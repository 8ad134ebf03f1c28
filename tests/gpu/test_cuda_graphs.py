"""`cuda_graphs=True` on one GPU: the steps of `cuda_graphs=False`, replayed. Skipped where there is none."""

import copy
import gc
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import wholestep as ws
from tests.backends import Interpreted
from wholestep.backend.cuda_recorder import CudaRecorder, Recording, Work
from wholestep.backend.recordings import WARM_CALLS
from wholestep.runtime import installer

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("error:this step is not recorded"),
]

SCRIPT, LIMIT_S = Path(__file__).with_name("recorded_collective.py"), 50.0
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW-fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "AdamW-foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "AdamW-plain": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False),
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "SGD-plain": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, foreach=False),
}


class Counting(CudaRecorder):
    """Counts what it records and replays."""

    def __init__(self) -> None:
        super().__init__()
        self.recorded, self.replayed = 0, 0

    def record(self, work: Work) -> Recording:
        made = super().record(work)
        self.recorded += 1
        return made

    def replay(self, recording: Recording) -> Sequence[Tensor]:
        self.replayed += 1
        return super().replay(recording)


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> Counting:
    """The recorder of the step that the test compiles."""
    made = Counting()
    monkeypatch.setattr(installer, "cuda_recorder", lambda device: made)
    return made


def train_step(model, optimizer, batch):
    optimizer.zero_grad()
    logits = model(batch["x"])
    loss = F.cross_entropy(logits, batch["y"])
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return {"loss": loss.detach(), "logits": logits.detach()}


class Twins:
    """The same training twice: op by op, and recorded."""

    def __init__(self, recipe: str) -> None:
        torch.manual_seed(0)
        parts = [nn.Linear(50, 33, bias=False), nn.BatchNorm1d(33), nn.GELU(), nn.Dropout(0.3), nn.Linear(33, 8)]
        self.models = [nn.Sequential(*parts).cuda()]
        self.models.append(copy.deepcopy(self.models[0]))
        self.optimizers = [OPTIMIZERS[recipe](m.parameters()) for m in self.models]
        self.steps = [ws.compile(train_step, device="cuda:0", cuda_graphs=graphs) for graphs in (False, True)]
        self.found: list[list[dict[str, Tensor]]] = [[], []]

    def run(self, number: int, rows: int = 16) -> None:
        torch.manual_seed(100 + number)
        batch = {"x": torch.randn(rows, 50, device="cuda"), "y": torch.randint(8, (rows,), device="cuda")}
        for k in (0, 1):
            torch.manual_seed(1000 + number)
            self.found[k].append(self.steps[k](self.models[k], self.optimizers[k], batch))
            self.optimizers[k].param_groups[0]["lr"] = 1e-2 / (number + 2)

    def check(self) -> None:
        for ours, theirs in zip(*self.found, strict=True):
            for key in ours:
                torch.testing.assert_close(theirs[key], ours[key], rtol=1e-4, atol=1e-5)
        for ours, theirs in zip(*(model.state_dict().values() for model in self.models), strict=True):
            torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("recipe", OPTIMIZERS)
def test_ten_steps_equal_those_of_eager(recipe: str, counting: Counting) -> None:
    """Dropout, a schedule, a checkpoint loaded in the middle, results looked at in the end."""
    twins = Twins(recipe)
    both = list(zip(twins.models, twins.optimizers, strict=True))
    saved: list[Any] = []
    for i in range(10):
        twins.run(i)
        if i == 4:
            saved = [copy.deepcopy((model.state_dict(), optimizer.state_dict())) for model, optimizer in both]
        if i == 7:
            for (model, optimizer), (ours, theirs) in zip(both, saved, strict=True):
                model.load_state_dict(ours)
                optimizer.load_state_dict(theirs)
    twins.check()
    assert counting.recorded == 2, "once more after the optimizer's state was loaded"
    assert counting.replayed >= 10 - 1 - 2 * WARM_CALLS


def test_batches_of_several_sizes_share_the_memory_of_the_largest(counting: Counting) -> None:
    """Each size has its recording. What a call returned stays what it was while others are replayed."""
    twins = Twins("AdamW-fused")
    for number, rows in enumerate([65536] * 3 + [16] * 3 + [65536, 16] * 2):
        twins.run(number, rows)
        if number == 2:
            largest = counting.reserved_bytes
    twins.check()
    assert counting.recorded == 2
    assert counting.reserved_bytes <= 1.1 * largest


def test_draws_go_on_from_step_to_step() -> None:
    """Two replays do not drop the same elements, and the generator is where eager mode leaves it."""

    def step(model, x):
        return F.dropout(model(x), 0.5)

    model = nn.Linear(64, 64).cuda()
    x = torch.ones(8, 64, device="cuda")
    outs, states = [], []
    for graphs in (False, True):
        compiled = ws.compile(step, cuda_graphs=graphs, device="cuda:0")
        torch.manual_seed(0)
        outs.append([compiled(model, x) for _ in range(6)])
        states.append(torch.cuda.get_rng_state())
    for a, b in zip(*outs, strict=True):
        torch.testing.assert_close(a, b)
    assert not torch.equal(outs[1][4], outs[1][5])
    assert torch.equal(*states)


def test_what_copies_to_the_host_runs_op_by_op() -> None:
    def step(model, x):
        return model(x).cpu().sum()

    model, x = nn.Linear(8, 8).cuda(), torch.ones(4, 8, device="cuda")
    compiled = ws.compile(step, device="cuda:0")
    results = [compiled(model, x) for _ in range(5)]
    assert all(torch.equal(r, results[0]) for r in results)
    assert "computes on cpu" in compiled.cuda_graph


class Waiting(Interpreted):
    """Waits for the device, which no recording can."""

    name, recordable = "waiting", True

    def compile(self, *args: Any) -> Callable[..., Any]:
        run = super().compile(*args)

        def waited(values: Any) -> Any:
            made = run(values)
            torch.cuda.synchronize()
            return made

        return waited


def test_what_cannot_be_recorded_runs_op_by_op_and_harms_nothing_else(counting: Counting) -> None:
    """Draws, memory and other recordings are as if nothing had been tried."""
    twins = Twins("AdamW-fused")
    for number in range(4):
        twins.run(number)

    def step(model, x):
        return F.dropout(model(x), 0.5).sum()

    model, x = nn.Linear(8, 8).cuda(), torch.ones(4, 8, device="cuda")
    plain, waiting = ws.compile(step, cuda_graphs=False), ws.compile(step, backend=Waiting())
    states, outs = [], []
    for compiled in (plain, waiting):
        torch.manual_seed(0)
        outs.append([compiled(model, x).item() for _ in range(5)])
        states.append(torch.cuda.get_rng_state())
    assert outs[0] == outs[1]
    assert torch.equal(*states)
    assert waiting.cuda_graph.startswith("not recorded: it cannot be recorded: ")
    for number in range(4, 8):
        twins.run(number)
    twins.check()


def test_a_recording_takes_as_much_memory_as_running_op_by_op() -> None:
    def train(model, optimizer, words):
        optimizer.zero_grad()
        loss = model(words).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    peaks = []
    for graphs in (False, True):
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        torch.cuda.reset_peak_memory_stats()
        layers = [nn.Sequential(nn.Linear(1024, 1024), nn.GELU()) for _ in range(8)]
        model = nn.Sequential(nn.Embedding(512, 1024), *layers).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        step = ws.compile(train, cuda_graphs=graphs)
        words = torch.randint(512, (16384,), device="cuda")
        for _ in range(5):
            step(model, optimizer, words)
        peaks.append(torch.cuda.max_memory_reserved() - before)
        assert step.cuda_graph.startswith("recorded, " if graphs else "cuda_graphs=False")
        del step, model, optimizer, layers, words
    assert peaks[1] <= 1.1 * peaks[0], peaks


def test_a_process_ends_while_recordings_of_collectives_live() -> None:
    """NCCL waits for them where a group ends before they do: by itself, at exit, after an exception."""
    ways = {"destroy": 0, "exit": 0, "raise": 1}
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    jobs = [subprocess.Popen([sys.executable, str(SCRIPT), way], env=environment, **pipes) for way in ways]
    try:
        for job, (way, code) in zip(jobs, ways.items(), strict=True):
            out, err = job.communicate(timeout=LIMIT_S)
            assert (job.returncode, "replayed" in out) == (code, True), (way, err[-3000:])
    finally:
        for job in jobs:
            job.kill()
