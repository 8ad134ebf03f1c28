"""A capture touches its own thread only, and an interruption at any point of a call leaves nothing behind."""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import wholestep as ws
from wholestep import _torch
from wholestep._torch import attributes

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))


def made(depth: int = 4) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(3)
    model = nn.Sequential(*[m for _ in range(depth) for m in (nn.Linear(4, 4), nn.Tanh())])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def beside(work: Callable[[], Callable[[], Any]]) -> list[Any]:
    """What `work()`, called again and again in a thread, returned while a step is compiled in this one."""
    stop, results, began = threading.Event(), list[Any](), threading.Event()
    model, optimizer, _ = made()

    def run() -> None:
        once = work()
        while not stop.is_set():
            try:
                results.append(once())
            except BaseException as error:  # to be compared
                results.append(error)
                stop.set()
            began.set()
            time.sleep(0.002)

    thread = threading.Thread(target=run)
    thread.start()
    began.wait(20)
    try:
        ws.compile(train_step)(model, optimizer, X)
    finally:
        stop.set()
        thread.join(30)
    assert not thread.is_alive()
    return results


def trains() -> Callable[[], Any]:
    model, optimizer, scheduler = made()

    def once() -> float:
        loss = train_step(model, optimizer, X).item()
        scheduler.step()
        return loss + scheduler.get_last_lr()[0] + scheduler.last_epoch

    return once


def draws() -> Callable[[], Any]:
    random.seed(1)
    np.random.seed(1)
    return lambda: (random.random(), random.choice(range(10**9)), np.random.rand(), float(np.random.randn()))


def seeds() -> Callable[[], Any]:
    def once() -> float:
        torch.manual_seed(7)
        return torch.nn.functional.dropout(torch.ones(50), 0.5).sum().item()

    return once


def loads() -> Callable[[], Any]:
    return lambda: [batch[0].sum().item() for batch in DataLoader(TensorDataset(torch.ones(10, 4)), batch_size=5)]


def clips_and_compiles() -> Callable[[], Any]:
    model, optimizer, _ = made()
    scaler = torch.amp.GradScaler("cpu", enabled=True)

    def once() -> Any:
        optimizer.zero_grad()
        scaler.scale(model(X).square().mean()).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
        scaler.step(optimizer)
        scaler.update()
        return norm, torch.compiler.is_compiling() is True, bool(torch.compiler.is_compiling())

    return once


def refuses_bad_arguments() -> Callable[[], Any]:
    def once() -> str:
        with pytest.raises(ValueError, match="scale"):
            torch.distributions.Normal(torch.zeros(1), -torch.ones(1))
        return type(datetime.datetime.now()).__name__ + str(isinstance(time.time(), float))

    return once


@pytest.mark.parametrize("work", [trains, draws, seeds, loads, clips_and_compiles, refuses_bad_arguments])
def test_another_thread_goes_on_untouched(
    work: Callable[[], Callable[[], Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)  # the first torch.compile clears it
    results = beside(work)
    again = work()
    assert results == [again() for _ in results]


def test_another_thread_touches_the_world(tmp_path: Path, capsys: Any) -> None:
    log, records = logging.getLogger("of another thread"), list[str]()
    log.addFilter(lambda record: records.append(record.getMessage()) or False)

    def work() -> Callable[[], Any]:
        def once() -> Any:
            os.environ["OF_A_THREAD"] = "1"
            torch.save({"a": 1}, tmp_path / "saved")
            thread = threading.Thread(target=lambda: None)
            thread.start()
            thread.join()
            log.error("a record")
            print("a line")
            return torch.load(tmp_path / "saved"), os.environ["OF_A_THREAD"], time.time() > 0

        return once

    results = beside(work)
    assert results == [({"a": 1}, "1", True)] * len(results)
    assert capsys.readouterr().out.count("a line") == len(results) == len(records)


def test_another_thread_evaluates_the_model_that_is_captured() -> None:
    model, optimizer, _ = made()
    expected, stop, values, began = model(X).sum().item(), threading.Event(), list[Any](), threading.Event()

    def run() -> None:
        while not stop.is_set():
            with torch.no_grad():
                total = sum(value.sum() for value in model.state_dict().values())
                values.append((type(model(X)), model(X).sum().item(), total.item()))
            began.set()

    thread = threading.Thread(target=run)
    thread.start()
    began.wait(20)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss.detach()

    ws.compile(step, keep_grads=True)(model, optimizer, X)
    stop.set()
    thread.join(30)
    assert set(values) == {(torch.Tensor, expected, values[0][2])}


def test_a_step_that_waits_for_a_thread_that_uses_its_model() -> None:
    from concurrent.futures import ThreadPoolExecutor

    model, optimizer, _ = made()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()

        def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = pool.submit(model, x).result().square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        with pytest.raises(ws.CaptureError, match="waits for this thread while it is captured"):
            ws.compile(step)(model, optimizer, X)


def test_two_threads_compile_at_once() -> None:
    losses: dict[int, list[float]] = {}

    models = [made(4 + number)[:2] for number in range(2)]  # drawn here: threads share torch's generator

    def run(number: int) -> None:
        model, optimizer = models[number]
        step = ws.compile(train_step)
        losses[number] = [step(model, optimizer, X).item() for _ in range(3)]

    threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for number in range(2):
        model, optimizer, _ = made(4 + number)
        expected = [train_step(model, optimizer, X).item() for _ in range(3)]
        torch.testing.assert_close(losses[number], expected)


# -- interruptions -----------------------------------------------------------------------------------------------------
class Trainer:
    """A step with a scheduler, dropout, clipping, checkpointing and a count of Python's."""

    def __init__(self) -> None:
        torch.manual_seed(5)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 2))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.9)
        self.count, self.mean = 0, torch.zeros(())
        self.compiled = ws.compile(self.step)

    def step(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        self.optimizer.zero_grad()
        out = torch.utils.checkpoint.checkpoint(self.model, x, use_reentrant=False)
        loss = F.mse_loss(out, torch.ones(6, 2)) / self.count
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.scheduler.step()
        self.mean = 0.9 * self.mean + loss.detach()
        return loss.detach()

    def everything(self) -> dict[str, Any]:
        found = {f"model.{k}": v.clone() for k, v in self.model.state_dict().items()}
        states = [s for p in self.model.parameters() for s in (self.optimizer.state.get(p, {}),)]
        found |= {f"state.{i}.{k}": torch.as_tensor(v).clone() for i, s in enumerate(states) for k, v in s.items()}
        found |= {"count": torch.tensor(self.count), "mean": self.mean.clone(), "drawn": torch.get_rng_state()}
        return found | {
            "lr": torch.tensor(self.scheduler.get_last_lr()),
            "epoch": torch.tensor(self.scheduler.last_epoch),
        }


def shared_by_all_threads() -> dict[str, Any]:
    """What a capture may replace, by name."""
    from torch._subclasses import fake_tensor
    from torch.fx import _symbolic_trace
    from torch.fx import traceback as fx_traceback
    from torch.fx.experimental import proxy_tensor
    from torch.utils import checkpoint

    owners: list[Any] = [
        torch, torch.random, torch.autograd, torch.autograd.graph, torch.compiler, torch.distributions.Distribution, F,
        nn.Module, nn.Sequential, nn.modules.batchnorm._BatchNorm, torch.optim.Optimizer,
        torch.optim.lr_scheduler.StepLR, torch.optim.swa_utils.AveragedModel, checkpoint, _symbolic_trace,
        sys.modules["torch.optim.optimizer"], torch.amp.GradScaler,
        fx_traceback, proxy_tensor, proxy_tensor.ProxyTorchDispatchMode, fake_tensor, fake_tensor.FakeTensorMode,
        random, np.random, time, os, logging.Logger, threading.Thread, datetime, sys.stdout, Trainer, torch.distributed,
    ]  # fmt: skip
    changing = ("_lazy", "last_", "_warned", "__warningregistry__", "cache_", "current_meta")
    places = {(str(o), n): v for o in owners for n, v in vars(o).items() if not n.startswith(changing)}
    places |= {(*place, "code"): v.__code__ for place, v in places.items() if hasattr(v, "__code__")}
    optim: Any = sys.modules["torch.optim.optimizer"]
    dicts = optim._global_optimizer_pre_hooks, fx_traceback.current_meta.get("custom", {})
    flags = (
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
        torch._C._get_mkldnn_enabled(),
        torch.compiler.is_compiling(),
    )
    modes = torch._C._len_torch_function_stack(), torch.utils._python_dispatch._len_torch_dispatch_stack()
    infra = [torch._C._get_dispatch_mode(key) for key in (*torch._C._TorchDispatchModeKey.__members__.values(),)]
    filters = [len(logging.getLogger(name).filters) for name in ("torch._subclasses.fake_tensor", "torch._dynamo")]
    return {**places, "dicts": [dict(d) for d in dicts], "flags": flags, "modes": (modes, infra), "filters": filters}


class Interrupts:
    """Sends Ctrl-C at one of the events of a profile of this thread: calls and returns."""

    def __init__(self, at: int = -1) -> None:
        self.at, self.events = at, 0

    def _on_event(self, *_: Any) -> None:
        self.events += 1
        if self.events == self.at:
            sys.setprofile(None)
            signal.raise_signal(signal.SIGINT)

    def __enter__(self) -> Interrupts:
        sys.setprofile(self._on_event)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)


CALLS = 3


def interrupted(before: int, at: int) -> tuple[list[dict[str, Any]], int]:
    """The states of a run after each call, whose call after `before` calls was interrupted at an event; the events."""
    one, states = Trainer(), list[dict[str, Any]]()
    for _ in range(before):
        one.compiled(X)
        states.append(one.everything())
    had, was = shared_by_all_threads(), one.everything()
    with Interrupts(at) as seen, contextlib.suppress(KeyboardInterrupt):
        one.compiled(X)
    now = shared_by_all_threads()
    left = {name: now.get(name) for name in had if had[name] is not now.get(name) and had[name] != now.get(name)}
    assert left == {}, left
    if same(one.everything(), was):
        one.compiled(X)
    states.append(one.everything())
    for _ in range(CALLS - before - 1):
        one.compiled(X)
        states.append(one.everything())
    return states, seen.events


class Mode(_torch.FunctionMode):
    """Calls what it intercepts."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_autograd_has_a_reference_to_what_a_thread_leaves_for_it() -> None:
    """Torch 2.11 drops one that it did not take: memory of Python was freed twice in each capture."""
    with attributes.flags_set([(torch.distributions.Distribution, "_validate_args", False)]):
        served = attributes._served()
        assert served == threading.get_ident()
        assert sys.getrefcount(served) >= 3, "here, as an argument, and for autograd"


def test_a_mode_that_is_gone_is_left() -> None:
    """A mode is away while it handles a call, and Ctrl-C may come before torch can put it back."""
    with Mode():
        before = _torch.modes_now()
        with contextlib.suppress(KeyboardInterrupt), Mode():
            _torch.drop_modes(before)
            raise KeyboardInterrupt
        assert _torch.modes_now() == before


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


@pytest.mark.parametrize("before", [0, pytest.param(2, marks=pytest.mark.full)], ids=["first", "later"])
def test_an_interruption_at_any_point_leaves_nothing(before: int) -> None:
    for _ in range(2):
        Trainer().compiled(X)  # imports, and what torch makes once
    expected, events = interrupted(before, -1)
    points = int(os.environ.get("WHOLESTEP_TEST_POINTS", 4 if before == 0 else 12))
    for point in range(points):
        at = 20 + events * (point + 1) * 24 // (points * 25)  # the first events are of this test, the last of the run
        states, _ = interrupted(before, at)
        assert [same(a, b) for a, b in zip(states, expected, strict=True)] == [True] * CALLS, (at, events)


def test_a_handler_of_signals_is_no_part_of_the_step_that_it_interrupts(tmp_path: Path) -> None:
    model, asked = nn.Linear(2, 1), tmp_path / "asked to end"

    def handle(number: int, frame: object) -> None:
        asked.write_text(f"{os.environ['PATH']} {time.time()}")
        os.kill(os.getpid(), 0)

    def step(x: torch.Tensor) -> torch.Tensor:
        signal.raise_signal(signal.SIGUSR1)
        return model(x).sum().detach()

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        compiled = ws.compile(step, model=model)
        for n in range(3):
            x = torch.full((2, 2), n + 1.0)
            assert compiled(x) == model(x).sum()
        assert asked.read_text()
    finally:
        signal.signal(signal.SIGUSR1, before)
