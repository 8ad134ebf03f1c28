"""One rank of pipelines on null devices: writes what a step of each asked of its device, as JSON, into a folder."""

import importlib
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

import wholestep as ws
from tests.steps import clipped
from wholestep.errors import PlanError
from wholestep.runtime.random_state import of_steps

nullcuda: Any = importlib.import_module("nullcuda")
WIDTH, LAYERS = 64, 8
MESSAGE = re.compile(r"(Send|Recv) (\d+)")


def made(drop: float) -> tuple[nn.Module, Optimizer]:
    layers = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(drop)) for _ in range(LAYERS))
    model = nn.Sequential(*layers).cuda()
    return model, AdamW(model.parameters(), fused=True)


def drawn(state: Tensor) -> int:
    """How many random numbers a generator of CUDA has drawn."""
    return int(state[8:16].view(torch.int64))


def drawn_alone(drop: float, x: Tensor) -> int:
    """How many random numbers a step of eager torch draws on one device."""
    model, optimizer = made(drop)
    before = drawn(torch.cuda.get_rng_state())
    clipped(model, optimizer, x)
    return drawn(torch.cuda.get_rng_state()) - before


def found(order: Any, mesh: str, rows: list[int], drop: float, style: str, options: dict[str, Any]) -> dict[str, Any]:
    """What the last of the calls of a step asked for."""
    of_steps.clear()
    parallel: list[Any] = [ws.Pipeline(micro_batches=4, schedule=order)]
    parallel += [ws.DataParallel(style, axis="dp", semantics="global")] if style else []  # type: ignore[arg-type]
    hardware = ws.Hardware.preset("dgx-h100")
    step = ws.compile(clipped, parallel=parallel, mesh=mesh, hardware=hardware, timeout=None, check_every=0, **options)
    model, optimizer = made(drop)
    for number in rows[:-1]:
        step(model, optimizer, torch.zeros(number, WIDTH, device="cuda"))
    x = torch.zeros(rows[-1], WIDTH, device="cuda")
    before = {name: drawn(states["cuda"]) for name, states in of_steps.items()}
    with nullcuda.counting() as counted, nullcuda.tracing() as calls:
        step(model, optimizer, x)
        torch.cuda.synchronize()
    made_here = {name: drawn(states["cuda"]) - before[name] for name, states in of_steps.items()}
    refused = ""
    try:
        step.profile(model, optimizer, x)
    except PlanError as error:
        refused = error.found
    messages = [(*at.groups(), call.stream, call.bytes) for call in calls if (at := MESSAGE.match(call.name))]
    return {
        "messages": messages, "computing": sorted({call.stream for call in calls if call.kind == "blas"}),
        "unordered": str(nullcuda.unordered(calls)), "syncs": counted.counts.syncs, "blas": counted.counts.blas,
        "graph": step.cuda_graph, "profile": refused, "programs": len(step.programs), "drawn": made_here,
        "alone": drawn_alone(drop, x),
    }  # fmt: skip


def main(folder: str, cases: str, bound: bool) -> None:
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    if not bound:
        dist.init_process_group("nccl")
    seen = {name: found(**case) for name, case in json.loads(cases).items()}
    Path(folder, f"{rank}.json").write_text(json.dumps(seen))
    dist.destroy_process_group()


main(sys.argv[1], sys.argv[2], sys.argv[3] == "bound")
