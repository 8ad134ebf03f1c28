"""CPU seconds to capture, plan and partition a step of Llama-3-8B's shapes on a mesh of two axes, by number of layers.

    python benchmarks/planning.py 8 32 126

The model is on `meta`: no weights, no device, no process group. Run it with OMP_NUM_THREADS=1.
"""

import resource
import sys
import time
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import wholestep as ws

COLWISE = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"]
ROWWISE = ["self_attn.o_proj", "mlp.down_proj"]
STYLES = dict.fromkeys(COLWISE, "colwise") | dict.fromkeys(ROWWISE, "rowwise")


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, ids: Tensor) -> Tensor:
    """Forward with loss, backward, update."""
    optimizer.zero_grad()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    return loss.detach()


def situation(layers: int) -> tuple[nn.Module, torch.optim.Optimizer, Tensor, list[Any]]:
    """The model on `meta`, its optimizer, a batch, the strategies."""
    config = LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=layers, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=128256, use_cache=False,
    )  # fmt: skip
    make: Any = LlamaForCausalLM
    with torch.device("meta"):
        model = make(config)
    optimizer = torch.optim.AdamW(model.parameters())
    cut = ws.TensorParallel({f"model.layers.*.{name}": style for name, style in STYLES.items()}, axis="tp")
    strategies = [ws.DataParallel("fully_shard", axis="dp", semantics="global"), cut]
    return model, optimizer, torch.zeros(16, 128, dtype=torch.long), strategies


def measure(layers: int) -> str:
    """One row of the table."""
    model, optimizer, ids, strategies = situation(layers)
    times = [time.process_time()]
    graph = ws.capture(train_step, model, optimizer, ids)
    times.append(time.process_time())
    plan = ws.plan(graph, "dp=4,tp=2", strategies)
    times.append(time.process_time())
    ws.partition(graph, plan)
    times.append(time.process_time())
    capture, planning, partition = (b - a for a, b in pairwise(times))
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return f"{layers:6} {len(graph.graph.nodes):8} {capture:10.1f} {planning:6.1f} {partition:10.1f} {peak_mb:8.0f}"


if __name__ == "__main__":
    print("layers    nodes  capture s  plan s  partition s  peak MB")
    for count in sys.argv[1:] or ["8"]:
        print(measure(int(count)), flush=True)
