"""Host time, launches and collectives of a deep step on several ranks: FSDP2 beside wholestep, on null devices.

    build/nullcuda/nullcuda torchrun --standalone --nproc-per-node 2 -m benchmarks.gpu.host_time

A Llama of as many layers as the 8B one, made narrow: what the host does for a step depends on its ops, not on their
sizes. Steps of both take turns; the figure is the median. Kernels compute nothing there, so the time is the host's.
"""

import argparse
import importlib
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

import wholestep as ws

from .runners import fsdp2
from .workload import SIZES, Setting, train_step_of

UNTIMED = 4


def wholestep_step(setting: Setting, options: dict[str, Any]) -> Callable[..., Any]:
    """The step under fully_shard, for eight GPUs of one node."""
    schedule = ws.Schedule(hardware=ws.Hardware.preset("dgx-h100"))
    model, optimizer = setting.build()
    parallel = ws.DataParallel("fully_shard")
    compiled = ws.compile(train_step_of(setting), parallel=parallel, schedule=schedule, progress=None, **options)
    return lambda x, y: compiled(model, optimizer, x, y)


def main() -> None:
    """Measure and print; the first rank writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--optimizer", default="fused", choices=["default", "foreach", "fused"])
    chosen = parser.parse_args()
    nullcuda: Any = importlib.import_module("nullcuda")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.backends.cuda.enable_cudnn_sdp(False)  # cuDNN's attention is not emulated
    torch.set_num_threads(1)
    dist.init_process_group("nccl")
    setting = Setting("deep", replace(SIZES["tiny-llama"], layers=chosen.layers), optimizer=chosen.optimizer)
    steps: dict[str, Callable[..., Any]] = {
        "FSDP2": fsdp2(setting).step,
        "wholestep": wholestep_step(setting, {"cuda_graphs": False}),
        "recorded": wholestep_step(setting, {}),
    }
    x, y = setting.batch(0)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(UNTIMED + chosen.steps):
        for name, step in steps.items():
            begun = time.perf_counter()
            step(x, y)
            times[name] += [1e3 * (time.perf_counter() - begun)] if turn >= UNTIMED else []
    for name, step in steps.items():
        with nullcuda.counting() as counted:
            step(x, y)
        with nullcuda.tracing() as calls:
            step(x, y)
        kinds: dict[str, int] = {}
        for call in calls:
            if call.kind == "nccl":
                kinds[call.name] = kinds.get(call.name, 0) + 1
        if dist.get_rank() == 0:
            print(
                f"{name:10} {statistics.median(times[name]):7.2f} ms of the host  {counted.counts}  {kinds}", flush=True
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
