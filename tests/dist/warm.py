"""Imported last by the server that ranks are forked from: what a process builds in its first step is there already.

Nothing is built where torch may use an accelerator: its first backward starts threads, and a fork has none of them.
"""

import gc

import torch
from torch import nn

import wholestep as ws
from tests.steps import clipped
from wholestep.runtime.consistency import versions


def step_once() -> None:
    """Capture, plan and run a step of one device, and plan it for two."""
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Embedding(8, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    args = model, torch.optim.AdamW(model.parameters()), torch.zeros(4, 2, dtype=torch.int64)
    graph = ws.capture(clipped, *args)
    ws.partition(graph, ws.plan(graph, "dp=2", ws.DataParallel("fully_shard")))
    ws.compile(clipped)(*args)
    versions()


if not torch.backends.cuda.is_built() and not torch.accelerator.is_available():
    state = torch.get_rng_state()
    step_once()
    torch.set_rng_state(state)
gc.collect()
gc.freeze()  # ranks walk over what they make themselves, and share the pages of the rest
