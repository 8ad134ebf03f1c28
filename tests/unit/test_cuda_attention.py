"""Attention is captured with the kernels that CUDA would choose, for steps that are planned here and run there.

tests/nullcuda compares the choice with torch's own.
"""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.functional import scaled_dot_product_attention

import wholestep as ws
from tests.steps import mean_square
from wholestep.capture.cuda_attention import attention, choice, recorded_kernels
from wholestep.cost.compute import flops
from wholestep.graph.op_kinds import packet_name

HOPPER = ws.Hardware.preset("dgx-h100")
FLASH, EFFICIENT = "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention"


class Attention(nn.Module):
    """Four heads; `how` calls attention with three operands of (batch, heads, tokens, width)."""

    def __init__(self, how: Any, tokens: int = 64, width: int = 64, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.how, self.heads, self.width = how, 4, width
        self.project = nn.Linear(width, 12 * width, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        split = self.project(x).view(batch, tokens, 3, self.heads, self.width)
        return self.how(*split.permute(2, 0, 3, 1, 4).unbind(0))


def captured(model: nn.Module, width: int = 64, tokens: int = 64, kernels: Any = "cuda") -> ws.TrainGraph:
    x = torch.randn(2, tokens, width, dtype=next(model.parameters()).dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return ws.capture(mean_square, model, optimizer, x, options=ws.CaptureOptions(kernels=kernels))


def ops(graph: ws.TrainGraph) -> Counter[str]:
    return Counter(packet_name(node.target) for node in graph.graph.nodes)


def called(dropout: float) -> Any:
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, None, dropout, is_causal=True)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_flash_attention_with_and_without_dropout(dropout: float) -> None:
    found = ops(captured(Attention(called(dropout))))
    assert (found[FLASH], found[f"{FLASH}_backward"]) == (1, 1)
    assert not {"bernoulli", "_safe_softmax", "bmm"} & set(found)


def masked(dropout: float, dtype: torch.dtype) -> Any:
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, torch.ones(64, 64, dtype=dtype), dropout)


@pytest.mark.parametrize(
    ("how", "dtype"),
    [
        (masked(0.0, torch.bool), torch.bfloat16),
        (masked(0.1, torch.bfloat16), torch.bfloat16),
        (called(0.1), torch.float32),
    ],
)
def test_a_mask_or_float32_takes_the_memory_efficient_kernel(how: Any, dtype: torch.dtype) -> None:
    found = ops(captured(Attention(how, dtype=dtype)))
    assert (found[EFFICIENT], found[f"{EFFICIENT}_backward"]) == (1, 1)


def test_what_no_kernel_takes_is_computed_step_by_step() -> None:
    found = ops(captured(Attention(called(0.1), dtype=torch.float64)))
    assert found["bmm"]
    assert not {FLASH, EFFICIENT} & set(found)


def test_names_that_a_step_imported_and_modules_of_torch() -> None:
    by_name = Attention(lambda q, k, v: scaled_dot_product_attention(q, k, v, dropout_p=0.1))
    assert ops(captured(by_name))[FLASH] == 1
    layer = nn.TransformerEncoderLayer(64, 4, 64, dropout=0.1, batch_first=True, dtype=torch.bfloat16)
    assert ops(captured(layer))[FLASH] == 1


def test_a_step_that_runs_on_a_cpu_has_its_kernels() -> None:
    found = ops(captured(Attention(called(0.0)), kernels=None))
    assert found["_scaled_dot_product_flash_attention_for_cpu"] == 1
    assert "bernoulli" in ops(captured(Attention(called(0.1)), kernels=None))
    with pytest.raises(
        ws.PlanError, match=r"CaptureOptions\(kernels='rocm'\)\n  needed: kernels of type 'cuda' \| None"
    ):
        ws.CaptureOptions(kernels="rocm")  # type: ignore[arg-type]


def test_a_cuda_device_that_is_not_there_is_asked_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for there, kernels in ((False, "cuda"), (True, None)):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
        assert recorded_kernels(None, "cuda:0") == kernels
        assert recorded_kernels(None, "cpu") is None


def test_dropout_takes_no_memory_and_no_arithmetic() -> None:
    def simulated(dropout: float) -> tuple[float, float]:
        graph = captured(Attention(called(dropout)), tokens=512)
        local = ws.partition(graph, ws.plan(graph, "dp=8", hardware=HOPPER))
        return ws.timeline(local, HOPPER).peak.size_bytes, sum(flops(n) for n in local.graph.nodes)

    plain, dropped = simulated(0.0), simulated(0.1)
    assert dropped == plain
    tokens, heads, width, batch = 512, 4, 64, 2
    of_attention = 14 * batch * heads * tokens * tokens * width  # two products forward, five backward
    of_projection = 2 * 2 * batch * tokens * width * 12 * width  # forward, and the gradient of the weight
    assert plain[1] == of_attention + of_projection
    assert plain[0] < batch * heads * tokens * tokens * 2 * 4, "no scores"


@pytest.mark.parametrize("masked", [None, torch.bool, torch.float64])
def test_without_a_kernel_the_numbers_are_torchs(masked: torch.dtype | None) -> None:
    q, k, v = (torch.randn(2, 3, 5, 7, dtype=torch.float64) for _ in range(3))
    mask = None if masked is None else (torch.randn(5, 5) > -1).to(masked)
    assert choice(q, k, v, mask, 0.0, False, False) == "math"
    found = attention(None, q, k, v, mask, is_causal=mask is None)
    wanted = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-14)


def _of_transformers(model, ids, positions=None):
    return model(input_ids=ids, position_ids=positions, labels=ids).loss


@pytest.mark.parametrize("packs", [False, True])
def test_a_mask_that_transformers_builds_while_it_is_traced(packs: bool) -> None:
    """Positions that the model counts itself need none: attention is causal. Given ones may begin anew in a row."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    ids = torch.randint(64, (2, 32))
    positions = torch.arange(32).remainder(16).expand(2, 32).contiguous() if packs else None
    graph = ws.capture(_of_transformers, model, ids, positions, options=ws.CaptureOptions(kernels="cuda"))
    calls = {packet_name(node.target): node for node in graph.graph.nodes if node.op == "call_function"}
    assert {FLASH, EFFICIENT} & {*calls} == {EFFICIENT if packs else FLASH}
    assert packs or calls[FLASH].args[-1] is True, "causal"
