"""One rank of a job on null devices: writes how messages of a ring of attention are ordered with what attends."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import nullcuda
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import wholestep as ws
from tests.steps import mean_square

HEADS, WIDTH, TOKENS, LAYERS = 4, 64, 512, 2


class Layer(nn.Module):
    """Causal attention in half precision, by FlashAttention."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(HEADS * WIDTH, 3 * HEADS * WIDTH, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, WIDTH)).permute(2, 0, 3, 1, 4).unbind(0)
        return x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def main(folder: str) -> None:
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    torch.backends.cuda.enable_cudnn_sdp(False)
    model = nn.Sequential(*(Layer() for _ in range(LAYERS))).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = ws.Schedule(hardware=ws.Hardware.preset("dgx-h100"))
    options: dict[str, Any] = {"schedule": schedule, "backend": "eager", "timeout": None, "check_every": 0}
    ring = ws.ContextParallel(method="ring", style="replicate", balance=False)
    step = ws.compile(mean_square, mesh="cp=2", parallel=ring, cuda_graphs=False, **options)
    x = torch.zeros(1, TOKENS, HEADS * WIDTH, device="cuda", dtype=torch.bfloat16)
    for _ in range(3):
        step(model, optimizer, x)
    with nullcuda.counting() as counted, nullcuda.tracing() as calls:
        step(model, optimizer, x)
    sent = [c for c in calls if c.name.startswith("Send") and c.bytes]  # to the other rank
    kernels = [c for c in calls if c.kind == "launch" and ("fwd_kernel" in c.name or "dq_dk_dv" in c.name)]
    says = {
        "syncs": counted.counts.syncs,
        "read_bytes": counted.counts.d2h_bytes,
        "unordered": len(nullcuda.unordered(calls)),
        "streams": [len({c.stream for c in some}) for some in (sent, kernels)],
        "shared": bool({c.stream for c in sent} & {c.stream for c in kernels}),
        "beside": [[not (c.before(k) or k.before(c)) for k in kernels] for c in sent],
        "waited_for": [[c.before(k) for k in kernels] for c in sent],
    }
    Path(folder, f"{rank}.json").write_text(json.dumps(says))
    dist.destroy_process_group()


main(*sys.argv[1:])
