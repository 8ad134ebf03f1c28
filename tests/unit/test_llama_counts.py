"""What a step of Llama-3-8B in bfloat16 asks of 8 GPUs, beside FSDP2 with one group for each layer.

FSDP2 by `MixedPrecisionPolicy(param_dtype=torch.bfloat16)`, which gathers and reduces in bfloat16.
"""

from collections import Counter

import pytest
import torch

import wholestep as ws
from wholestep.cli.hf import ModelSpec, build
from wholestep.graph.op_kinds import BUCKET_COPIES

FSDP2 = {"all_gather": 66, "reduce_scatter": 33, "copies": 66, "adamw": 1}


@pytest.mark.full
def test_at_most_what_fsdp2_asks_for() -> None:
    pytest.importorskip("transformers")
    target = build(ModelSpec("llama-3-8b"))
    hardware = ws.Hardware.preset("dgx-h100")
    half = ws.CaptureOptions(mixed_precision=ws.MixedPrecision(torch.bfloat16, torch.bfloat16))
    graph = ws.capture(target.step, *target.args, options=half, **target.kwargs)
    plan = ws.plan(graph, "dp=8", ws.DataParallel("fully_shard"), hardware=hardware)
    local = ws.run_passes(ws.partition(graph, plan), ws.default_passes(hardware))
    asked = Counter({kind: total.count for kind, total in local.collectives().items()})
    asked["copies"] = sum(node.target in BUCKET_COPIES for node in local.graph.nodes)
    asked["adamw"] = sum("_fused_adamw" in str(node.target) for node in local.graph.nodes)
    assert min(asked["all_gather"], asked["reduce_scatter"], asked["adamw"]) > 0
    assert all(asked[kind] <= most for kind, most in FSDP2.items()), asked
