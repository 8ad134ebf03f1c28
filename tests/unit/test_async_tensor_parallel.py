"""Async tensor parallelism: where it pays, and what it leaves whole."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch.optim import SGD
from transformers import LlamaConfig, LlamaForCausalLM

import wholestep as ws
from tests.steps import mean_square
from tests.tp_models import NORMED_PLAN, Normed
from wholestep.cost.fused import fused_us, is_fused
from wholestep.graph.op_kinds import collective_kind
from wholestep.passes import async_tensor_parallel
from wholestep.passes.async_tensor_parallel import AsyncTensorParallel
from wholestep.passes.fused_products import FUSED
from wholestep.passes.fusible_products import sites
from wholestep.runtime.consistency import program_lines

H100 = ws.Hardware.preset("dgx-h100")


def normed(async_tp: bool = True) -> ws.LocalGraph:
    model = Normed()
    graph = ws.capture(mean_square, model, SGD(model.parameters(), lr=0.1), torch.randn(2, 8, 10))
    return ws.partition(graph, ws.plan(graph, "tp=2", ws.TensorParallel(NORMED_PLAN, async_tp=async_tp)))


@cache
def large_step(tokens: int) -> tuple[ws.TrainGraph, LlamaForCausalLM]:
    """Two layers as wide as those of Llama-3-8B, on meta."""
    sizes: Any = {"hidden_size": 4096, "intermediate_size": 14336, "num_key_value_heads": 8, "vocab_size": 1024}
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, **sizes)).to(torch.bfloat16)
        tokens_ = torch.empty(1, tokens, dtype=torch.int64)

    def train_step(model: Any, optimizer: Any, x: torch.Tensor) -> None:
        optimizer.zero_grad()
        model.model(x).last_hidden_state.float().square().mean().backward()
        optimizer.step()

    return ws.capture(train_step, model, SGD(model.parameters(), lr=0.1), tokens_), model


def large(async_tp: bool, tokens: int = 16384) -> ws.LocalGraph:
    graph, model = large_step(tokens)
    tensor = ws.TensorParallel.of(model, sequence=True, async_tp=async_tp)
    return ws.partition(graph, ws.plan(graph, "tp=8", tensor, hardware=H100))


def test_a_large_step_is_simulated_to_gain() -> None:
    whole, cut = (ws.run_passes(large(mode), ws.default_passes(H100)) for mode in (False, True))
    before, after = ws.simulate(whole, H100), ws.simulate(cut, H100)
    assert after.step_us < 0.97 * before.step_us
    assert after.exposed_us < 0.6 * before.exposed_us
    assert any(is_fused(node) for node in cut.graph.nodes)
    assert after.mfu * after.step_us == pytest.approx(before.mfu * before.step_us)  # the same multiplications


def test_a_small_step_is_left_whole() -> None:
    """Barriers would take longer than is hidden. Nor is anything fused on CPUs."""
    for hardware in (H100, ws.Hardware.default()):
        assert AsyncTensorParallel(hardware)(normed()).collectives() == normed().collectives()
        assert not any(is_fused(node) for node in AsyncTensorParallel(hardware)(normed()).graph.nodes)


def test_what_is_not_asked_for_is_left_whole() -> None:
    local = normed(False)
    assert local.async_axes == ()
    assert str(AsyncTensorParallel(H100)(local)) == str(local)


def test_fused_products_send_what_their_collectives_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are counted, and ranks compare them, in their order."""
    monkeypatch.setattr(async_tensor_parallel, "faster_sites", lambda local, axes, _: sites(local.graph, axes))
    local = normed()
    fused = AsyncTensorParallel(H100)(local)
    kinds = [collective_kind(node.target) for node in fused.graph.nodes if is_fused(node)]
    assert set(kinds) == {"all_gather", "reduce_scatter"} == {collective_kind(function) for function in FUSED}
    assert fused.collectives() == local.collectives()
    plan = ws.plan(ws.capture(mean_square, torch.nn.Linear(2, 2), SGD([torch.zeros(1)]), torch.randn(2, 2)), "tp=2")
    lines = [line for line in program_lines(fused, plan) if line.startswith("collective ")]
    assert len(lines) == sum(total.count for total in fused.collectives().values())
    assert lines[0] == "collective multiply_gathered of f32[4, 2, 10], f32[10, 8] over tp (2)"


def test_a_fused_product_takes_the_longer_of_sending_and_multiplying() -> None:
    fused = [node for node in ws.run_passes(large(True), ws.default_passes(H100)).graph.nodes if is_fused(node)]
    fast = replace(H100, levels=(replace(H100.levels[0], bytes_per_us=1e12), *H100.levels[1:]))
    slow = replace(H100, levels=(replace(H100.levels[0], bytes_per_us=1e3), *H100.levels[1:]))
    for node in fused:
        assert fused_us(node, fast) <= fused_us(node, H100) < fused_us(node, slow)


def test_a_plan_file_keeps_it() -> None:
    model = Normed()
    graph = ws.capture(mean_square, model, SGD(model.parameters(), lr=0.1), torch.randn(2, 8, 10))
    made = ws.plan(graph, "tp=2", ws.TensorParallel(NORMED_PLAN, async_tp=True))
    read = ws.Plan.from_json(made.to_json())
    assert read.async_axes == made.async_axes == ("tp",)
    assert read.strategies is not None
    assert read.strategies.async_axes(read.mesh) == ("tp",)
    assert ", async" in str(read)
