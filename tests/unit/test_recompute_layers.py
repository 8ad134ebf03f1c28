"""Layers recomputed by a rule: the same bits, less memory, and arithmetic that is counted once in MFU."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import wholestep as ws
from tests.steps import mean_square
from tests.unit.test_recompute import bits, captured, parallel, same
from wholestep.passes.recompute_layers import RecomputeLayers
from wholestep.passes.saved_tensors import SavedTensors
from wholestep.planner.recompute_kinds import passes_of

H100 = ws.Hardware.preset("dgx-h100")


class Block(nn.Module):
    """A residual block: norm, wide layer, activation, narrow layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def next_token(model: Any, optimizer: Any, tokens: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss = model(tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    return loss.detach()


def blocks(layers: int = 4, width: int = 64) -> ws.TrainGraph:
    with torch.device("meta"):
        model = nn.Sequential(*(Block(width) for _ in range(layers)))
        x = torch.empty(512, width)
    return ws.capture(mean_square, model, torch.optim.AdamW(model.parameters(), fused=True), x)


@pytest.mark.crossed
@pytest.mark.parametrize("kind", ["full", "selective"])
@pytest.mark.parametrize("case", ["twice", "micro-batches", "tokens"])
def test_the_same_bits(case: str, kind: Any) -> None:
    capture = captured(case, "AdamW-plain")
    plan = ws.plan(capture.graph, "dp=2", parallel("fully_shard", True))
    local = ws.partition(capture.graph, plan)
    try:
        changed = ws.run_passes(local, [RecomputeLayers(kind), *ws.default_passes()])
    except ws.PlanError as error:
        assert "found no list of layers" in str(error)  # noqa: PT017  # two of the cases
        assert case != "micro-batches"
        return
    assert same(bits(capture, plan, changed, case), bits(capture, plan, local, case))


def test_the_more_is_recomputed_the_less_is_held() -> None:
    graph = blocks()
    plan = ws.plan(graph, "dp=2", ws.DataParallel("replicate"), hardware=H100)
    local = ws.partition(graph, plan)
    made = {kind: ws.run_passes(local, passes_of(kind, H100)) for kind in ("none", "selective", "full")}
    peaks = [ws.peak_memory(program).by_kind()["activation"] for program in made.values()]
    assert peaks == sorted(peaks, reverse=True)
    assert len({*peaks}) == 3
    took = {kind: ws.simulate(program, H100) for kind, program in made.items()}
    assert took["none"].step_us < took["selective"].step_us < took["full"].step_us
    assert took["none"].mfu == took["none"].hfu
    assert took["selective"].mfu == took["selective"].hfu, "no product runs twice"
    assert took["full"].mfu < took["full"].hfu


def test_full_keeps_what_layers_hand_on() -> None:
    """With one more layer, `full` keeps one more result of a layer and nothing else."""
    held: list[int] = []
    for layers in (4, 5, 6):
        graph = blocks(layers)
        local = ws.partition(graph, ws.plan(graph, "dp=2", ws.DataParallel("replicate"), hardware=H100))
        kept = SavedTensors(RecomputeLayers("full")(local))
        held.append(sum(v.storage.size_bytes for v in kept.candidates if v.storage.node in kept.batch_dependent))
    assert held[1] - held[0] == held[2] - held[1] == 512 * 64 * 4


@pytest.mark.parametrize("method", [pytest.param("gather", marks=pytest.mark.full), "heads"])
def test_full_keeps_nothing_that_ranks_exchanged(method: Any) -> None:
    """With one more layer, a rank keeps one more hidden state of its tokens."""
    held = list[int]()
    for layers in (2, 3, 4):
        sizes = {"vocab_size": 11, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": layers}
        config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, use_cache=False)
        with torch.device("meta"):
            model, tokens = LlamaForCausalLM(config), torch.ones(2, 16, dtype=torch.int64)
        graph = ws.capture(next_token, model, torch.optim.SGD(model.parameters(), 0.1), tokens)
        local = ws.partition(graph, ws.plan(graph, "cp=2", ws.ContextParallel(method=method), hardware=H100))
        saved = SavedTensors(RecomputeLayers("full")(local))
        kept = (s for s in saved.storages if s.node in saved.batch_dependent and s.node.op == "call_function")
        held.append(sum(s.size_bytes for s in kept if saved.last_segment[id(s)] > saved.segment[s.node]))
    assert held[1] - held[0] == held[2] - held[1] == 2 * 8 * 32 * 4


def test_auto_fits_a_budget() -> None:
    graph = blocks()
    local = ws.partition(graph, ws.plan(graph, "dp=2", ws.DataParallel("replicate"), hardware=H100))
    most = ws.peak_memory(ws.run_passes(local, passes_of("none", H100))).size_bytes
    fitted = ws.run_passes(local, passes_of("auto", H100, int(most * 0.9)))
    assert ws.peak_memory(fitted).size_bytes <= most * 0.9


def test_what_is_refused() -> None:
    with pytest.raises(ws.PlanError, match=r"kind of type 'full' \| 'selective'"):
        RecomputeLayers("some")  # type: ignore[arg-type]
    model = nn.Linear(4, 4)
    graph = ws.capture(mean_square, model, torch.optim.SGD(model.parameters()), torch.ones(2, 4))
    local = ws.partition(graph, ws.plan(graph, "dp=2"))
    with pytest.raises(ws.PlanError, match="recompute full: found no list of layers"):
        ws.run_passes(local, [RecomputeLayers("full")])


class Attends(nn.Module):
    """A residual block of attention, with dropout in it or without."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.qkv, self.dropout = nn.Linear(64, 192), dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = [part.unflatten(-1, (2, 32)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1)]
        made = nn.functional.scaled_dot_product_attention(*parts, is_causal=True, dropout_p=self.dropout)
        return x + made.transpose(1, 2).flatten(2)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_fused_attention_runs_again_where_it_draws_nothing(dropout: float) -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(Attends(dropout) for _ in range(3))).bfloat16()
        x = torch.empty(2, 128, 64, dtype=torch.bfloat16)
    options = ws.CaptureOptions(kernels="cuda")
    graph = ws.capture(mean_square, model, torch.optim.SGD(model.parameters(), 0.1), x, options=options)
    local = ws.partition(graph, ws.plan(graph, "dp=2", ws.DataParallel("fully_shard")))
    for kind, expected in (("selective", 3), ("full", 3 if dropout else 6)):
        made = RecomputeLayers(kind)(local)
        attention = [n for n in made.graph.nodes if str(n.target) == "aten._scaled_dot_product_flash_attention.default"]
        assert len(attention) == expected, (kind, [n.name for n in attention])
