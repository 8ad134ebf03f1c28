"""One runner in a process of its own: a time limit can end it, and the allocator's figures are its own."""

import gc
import importlib
import multiprocessing
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

import wholestep as ws

from .runners import RUNNERS, Built, join_group
from .workload import Setting

TURN_STEPS, UNTIMED_STEPS = 5, 2  # memory is taken anew in the first one
EARLY_STEPS = 5  # recordings and lazy initialization are over
HOST_STEPS, PROFILED_STEPS = 7, 3
START_LIMIT_S, EXIT_LIMIT_S = 120.0, 30.0  # until its imports are done; until it has ended
LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch", "cudaMemcpyAsync", "cudaMemsetAsync")

Figures = dict[str, Any]


class WorkerError(Exception):
    """A runner failed, or did not answer in time."""


def settle(device: str) -> None:
    """Wait until the device has nothing left to do."""
    if device == "cuda":
        torch.cuda.synchronize()


@dataclass
class Session:
    """What the process of a runner does for the one that asks."""

    setting: Setting
    built: Built
    number: int = 0

    def steps(self, count: int) -> tuple[float, list[float]]:
        """Milliseconds of one of `count` steps, each on the next batch, and their losses."""
        batches = [self.setting.batch(self.number + i) for i in range(count)]
        self.number += count
        settle(self.setting.device)
        begun = time.perf_counter()
        losses = [self.built.step(x, y) for x, y in batches]
        settle(self.setting.device)
        return 1e3 * (time.perf_counter() - begun) / count, [float(loss) for loss in losses]

    def early(self, begun: float) -> Figures:
        """The first steps: seconds of the first one, the model's building included, and the peaks of memory."""
        _, losses = self.steps(1)
        first = time.perf_counter() - begun
        losses += self.steps(EARLY_STEPS - 1)[1]
        found: Figures = {"first_step_s": first, "losses": losses, "parameters": self.built.parameters}
        if self.setting.device == "cuda":
            found["allocated_bytes"] = torch.cuda.max_memory_allocated()
            found["reserved_bytes"] = torch.cuda.max_memory_reserved()
        self._free()
        return found

    def turn(self) -> Figures:
        """The time of a step, after ones that nobody times; then the allocator gives its cache to the others."""
        self.steps(UNTIMED_STEPS)
        found = {"step_ms": self.steps(TURN_STEPS)[0]}
        self._free()
        return found

    def look(self) -> Figures:
        """Host time and launches of a step, time in which the device idles, and what was predicted."""
        return {"host_ms": self._host_ms(), **self._profiled(), **self._predicted()}

    def _free(self) -> None:
        if self.setting.device == "cuda":
            torch.cuda.empty_cache()

    def _host_ms(self) -> float:
        """Time until a call returns on a device that has nothing to do."""
        self.steps(UNTIMED_STEPS)
        times: list[float] = []
        for _ in range(HOST_STEPS):
            x, y = self.setting.batch(self.number)
            self.number += 1
            settle(self.setting.device)
            begun = time.perf_counter()
            self.built.step(x, y)
            times.append(1e3 * (time.perf_counter() - begun))
        settle(self.setting.device)
        return statistics.median(times)

    def _profiled(self) -> Figures:
        """Launches and kernels of a step, and the time between the first kernel and the last one that none covers."""
        if self.setting.device != "cuda":
            return {}
        self.steps(1)
        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU], acc_events=True) as found:
            self.steps(PROFILED_STEPS)
        events = list(found.events() or [])
        on_device = [event for event in events if str(event.device_type).endswith("CUDA")]
        if not on_device:
            return {}
        copies = sum(event.name.startswith(("Memcpy", "Memset")) for event in on_device)
        spans = [(event.time_range.start, event.time_range.end) for event in on_device]
        launches = sum(event.name.startswith(LAUNCHES) for event in events)
        return {
            "launches": launches / PROFILED_STEPS,
            "kernels": (len(on_device) - copies) / PROFILED_STEPS,
            "idle_ms": idle_us(spans) / 1e3 / PROFILED_STEPS,
        }

    def _predicted(self) -> Figures:
        """Step and peak by the cost model, for the hardware as wholestep measures it."""
        compiled = self.built.compiled
        if compiled is None or compiled.local_graph is None or compiled.world is None:
            return {}
        measure: Any = importlib.import_module("wholestep.profiling.measure_hardware").measure_hardware
        found = ws.simulate(compiled.local_graph, measure(compiled.world))
        recorded = compiled.cuda_graph.startswith("recorded")
        return {
            "predicted_ms": max(found.step_us, 0.0 if recorded else found.host_us) / 1e3,
            "predicted_bytes": ws.peak_memory(compiled.local_graph).size_bytes,
        }


def idle_us(spans: list[tuple[float, float]]) -> float:
    """Time between the first start and the last end that no span covers."""
    idle, until = 0.0, None
    for start, end in sorted(spans):
        idle += max(0.0, start - until) if until is not None else 0.0
        until = end if until is None else max(until, end)
    return idle


def serve(connection: Connection, setting: Setting, name: str) -> None:
    """Answer `early`, `turn` and `look` with figures or an error, until asked for anything else; then leave."""
    runner = RUNNERS[name]
    session: Session | None = None
    asked = ""
    while True:
        try:
            if asked == "early":
                begun = time.perf_counter()
                if runner.group:
                    join_group(setting.device)
                session = Session(setting, runner.build(setting))
                gc.collect()
                connection.send(session.early(begun))
            elif asked:
                connection.send(cast(Callable[[], Figures], getattr(session, asked))())
            else:
                connection.send({})
        except Exception as error:  # out of memory, a compiler's refusal: the row says it
            connection.send(said(error))
        asked = str(connection.recv())
        if asked == "leave":
            break
    if runner.group:
        dist.destroy_process_group()


def said(error: Exception) -> str:
    """The first line of an error."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:200].replace("|", "/")


class Worker:
    """The process of a runner, as its parent sees it.

    Raises:
        WorkerError: from `ask`: the runner failed, or took longer than the limit; its process is gone then.
    """

    def __init__(self, setting: Setting, name: str) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, setting, name), daemon=True)
        self.process.start()
        theirs.close()
        self._started = False

    def ask(self, what: str, limit_s: float) -> Mapping[str, Any]:
        """The figures for `early`, `turn` or `look`."""
        if not self._started:
            self._receive(START_LIMIT_S, "starting")
            self._started = True
        self.connection.send(what)
        return self._receive(limit_s, what)

    def _receive(self, limit_s: float, what: str) -> Mapping[str, Any]:
        try:
            if not self.connection.poll(limit_s):
                self.kill()
                raise WorkerError(f"no answer within {limit_s:.0f} s ({what})")
            found = self.connection.recv()
        except (EOFError, OSError):
            self.process.join(EXIT_LIMIT_S)
            raise WorkerError(f"its process ended with code {self.process.exitcode} ({what})") from None
        if isinstance(found, str):
            self.kill()
            raise WorkerError(found)
        return found

    def leave(self) -> float:
        """Let the process end by itself; returns the seconds that it took.

        Raises:
            WorkerError: it hung, or ended with an error.
        """
        begun = time.perf_counter()
        self.connection.send("leave")
        self.process.join(EXIT_LIMIT_S)
        took = time.perf_counter() - begun
        if self.process.exitcode is None:
            self.kill()
            raise WorkerError(f"its process did not end within {EXIT_LIMIT_S:.0f} s")
        if self.process.exitcode:
            raise WorkerError(f"its process ended with code {self.process.exitcode}")
        return took

    def kill(self) -> None:
        """End the process at once."""
        self.process.kill()
        self.process.join()
