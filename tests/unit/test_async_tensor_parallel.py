"""Async tensor parallelism: where it pays, what it leaves whole, and the check of kernels."""

from collections.abc import Callable
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
from wholestep.backend import same_bits
from wholestep.cost.fused import fused_us, is_fused
from wholestep.graph.op_kinds import collective_kind
from wholestep.passes import async_tensor_parallel
from wholestep.passes.async_tensor_parallel import AsyncTensorParallel, Cut
from wholestep.passes.fused_products import FUSED
from wholestep.passes.product_blocks import FUSED_PARTS, blocks
from wholestep.runtime.consistency import program_lines

H100 = ws.Hardware.preset("dgx-h100")
SLOW = ws.Hardware.measured(flops_per_us=10, launch_us=0.001, link_us=0.001, link_bytes_per_us=1)


def normed(async_tp: Any = "exact", hidden: int = 16, mesh: str = "tp=2") -> ws.LocalGraph:
    model = Normed()
    model.mlp.net1, model.mlp.net2 = (torch.nn.Linear(*s, bias=False) for s in ((10, hidden), (hidden, 10)))
    graph = ws.capture(mean_square, model, SGD(model.parameters(), lr=0.1), torch.randn(2, 8, 10))
    return ws.partition(graph, ws.plan(graph, mesh, ws.TensorParallel(NORMED_PLAN, async_tp=async_tp)))


def proposed(local: ws.LocalGraph, hardware: ws.Hardware = SLOW) -> list[Cut]:
    found: list[Cut] = []

    def agree(cuts: Any) -> dict[str, int]:
        found.extend(cuts)
        return {}

    AsyncTensorParallel(hardware, agree)(local)
    return found


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


def large(async_tp: Any, tokens: int = 16384) -> ws.LocalGraph:
    graph, model = large_step(tokens)
    tensor = ws.TensorParallel.of(model, sequence=True, async_tp=async_tp)
    return ws.partition(graph, ws.plan(graph, "tp=8", tensor, hardware=H100))


def test_a_large_step_is_simulated_to_gain() -> None:
    whole, cut = (ws.run_passes(large(mode), ws.pipeline(H100)) for mode in (None, "fast"))
    before, after = ws.simulate(whole, H100), ws.simulate(cut, H100)
    assert after.step_us < 0.97 * before.step_us
    assert after.exposed_us < 0.6 * before.exposed_us
    assert any(is_fused(node) for node in cut.graph.nodes)
    assert after.mfu * after.step_us == pytest.approx(before.mfu * before.step_us)  # the same multiplications


def test_a_small_step_is_left_whole() -> None:
    """Starting more collectives would take longer than they hide."""
    assert not proposed(normed("fast"), H100)


def test_what_is_not_asked_for_is_left_whole() -> None:
    local = normed(None)
    assert local.async_axes == ()
    assert AsyncTensorParallel(SLOW)(local) is not local
    assert str(AsyncTensorParallel(SLOW)(local)) == str(local)


def test_fused_products_send_what_their_collectives_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are counted, and ranks compare them, in their order."""
    chosen: Any = lambda site, *_: (FUSED_PARTS,) if site.can_fuse else ()  # noqa: E731
    monkeypatch.setattr(async_tensor_parallel, "faster_parts", chosen)
    local = normed("fast")
    fused = AsyncTensorParallel(SLOW)(local)
    kinds = [collective_kind(node.target) for node in fused.graph.nodes if is_fused(node)]
    assert set(kinds) == {"all_gather", "reduce_scatter"} == {collective_kind(function) for function in FUSED}
    assert fused.collectives() == local.collectives()
    plan = ws.plan(ws.capture(mean_square, torch.nn.Linear(2, 2), SGD([torch.zeros(1)]), torch.randn(2, 2)), "tp=2")
    lines = [line for line in program_lines(fused, plan) if line.startswith("collective ")]
    assert len(lines) == sum(total.count for total in fused.collectives().values())
    assert lines[0] == "collective multiply_gathered of f32[4, 2, 10], f32[10, 8] over tp (2)"


def test_ranks_of_other_sizes_are_left_whole() -> None:
    """With 17 columns over two ranks, one would run kernels that the other has not checked."""
    assert len(proposed(normed())) == 4
    assert not proposed(normed(hidden=17))
    assert len(proposed(normed("fast", hidden=17))) == 4


def test_gpus_do_not_scatter_exactly_in_blocks() -> None:
    """NCCL adds up in an order that depends on where a number is in the buffer."""
    kinds = {type(cut.site).__name__ for cut in proposed(normed(), replace(SLOW, device=H100.device))}
    assert kinds <= {"GatheredRows"}


def test_another_order_of_sums_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    cut = proposed(normed())[0]
    assert same_bits.same_bits(cut.site, 2, "cpu") in (True, False)  # as the kernels here are

    def rows_matter(node: Any) -> Callable[..., Any]:
        def multiply(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
            return (left.double() @ right.double() * (1 + 1e-6 * left.shape[0])).float()

        return multiply if node.target is torch.ops.aten.mm.default else node.target

    def rows_do_not_matter(node: Any) -> Callable[..., Any]:
        def multiply(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
            return sum((column[:, None] * row for column, row in zip(left.t(), right, strict=True)), torch.zeros(()))

        return multiply if node.target is torch.ops.aten.mm.default else node.target

    state = torch.get_rng_state()
    monkeypatch.setattr(same_bits, "function_of", rows_matter)
    assert not same_bits.same_bits(cut.site, 2, "cpu")
    monkeypatch.setattr(same_bits, "function_of", rows_do_not_matter)
    assert same_bits.same_bits(cut.site, 2, "cpu")
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize(("size", "parts", "found"), [(7, 2, [(0, 4), (4, 7)]), (3, 8, [(0, 1), (1, 2), (2, 3)])])
def test_blocks_of_odd_sizes(size: int, parts: int, found: list[tuple[int, int]]) -> None:
    assert blocks(size, parts) == found


def test_blocks_are_aligned_where_there_is_room() -> None:
    assert blocks(100, 4) == [(0, 32), (32, 64), (64, 96), (96, 100)]


def test_a_fused_product_takes_the_longer_of_sending_and_multiplying() -> None:
    fused = [node for node in ws.run_passes(large("fast"), ws.pipeline(H100)).graph.nodes if is_fused(node)]
    fast = replace(H100, levels=(replace(H100.levels[0], bytes_per_us=1e12), *H100.levels[1:]))
    slow = replace(H100, levels=(replace(H100.levels[0], bytes_per_us=1e3), *H100.levels[1:]))
    for node in fused:
        assert fused_us(node, fast) <= fused_us(node, H100) < fused_us(node, slow)


def test_a_plan_file_keeps_it() -> None:
    model = Normed()
    graph = ws.capture(mean_square, model, SGD(model.parameters(), lr=0.1), torch.randn(2, 8, 10))
    made = ws.plan(graph, "tp=2", ws.TensorParallel(NORMED_PLAN, async_tp="fast"))
    read = ws.Plan.from_json(made.to_json())
    assert read.async_axes == made.async_axes == (("tp", "fast"),)
    assert read.strategies is not None
    assert read.strategies.async_axes(read.mesh) == (("tp", "fast"),)
    assert "async (fast)" in str(read)
