"""What a step asks of a CUDA device, null or real: launches, products, copies, syncs, collectives."""

import gc
import importlib
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from .runners import RUNNERS, join_group
from .worker import LAUNCHES, said
from .workload import Setting

UNCOUNTED_STEPS, COUNTED_STEPS = 5, 4


def on_null_device(step: Callable[[], object]) -> str:
    """The counters of tools/nullcuda, for one step."""
    nullcuda: Any = importlib.import_module("nullcuda")
    with nullcuda.counting() as counted:
        for _ in range(COUNTED_STEPS):
            step()
    return str(counted.counts / COUNTED_STEPS)


def on_gpu(step: Callable[[], object]) -> str:
    """The calls of CUDA's runtime that torch's profiler sees in one step."""
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU], acc_events=True) as found:
        for _ in range(COUNTED_STEPS):
            step()
        torch.cuda.synchronize()
    names = [event.name for event in found.events() or []]
    kinds = {**{name: name for name in LAUNCHES}, "syncs": "cudaStreamSynchronize"}
    counts = {kind: sum(name.startswith(start) for name in names) / COUNTED_STEPS for kind, start in kinds.items()}
    return " ".join(f"{kind} {count:g}" for kind, count in counts.items() if count)


def counts_table(settings: Sequence[Setting], names: Sequence[str]) -> str:
    """One row for each setting and runner that needs no compiler: what one of its steps asks of the device."""
    counted = on_null_device if importlib.util.find_spec("nullcuda") else on_gpu
    if counted is on_null_device:
        torch.backends.cuda.enable_cudnn_sdp(False)  # cuDNN's attention is not emulated
    lines = ["| size | AdamW | runner | a step |", "| --- | --- | --- | --- |"]
    for setting in settings:
        for name in names:
            if RUNNERS[name].inductor and counted is on_null_device:
                continue  # Triton is not emulated
            cells = setting.size_name, setting.optimizer, name, _of(setting, name, counted)
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _of(setting: Setting, name: str, counted: Callable[[Callable[[], object]], str]) -> str:
    runner = RUNNERS[name]
    try:
        if runner.group:
            join_group(setting.device)
        built = runner.build(setting)
        x, y = setting.batch(0)
        for _ in range(UNCOUNTED_STEPS):
            built.step(x, y)
        return counted(lambda: built.step(x, y))
    except Exception as error:  # the other runners are counted
        return said(error)
    finally:
        gc.collect()
        if runner.group and dist.is_initialized():
            dist.destroy_process_group()
