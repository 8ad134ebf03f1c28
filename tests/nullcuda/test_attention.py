"""The attention kernel that is traced without a GPU is the one that torch takes on a GPU. Skipped elsewhere."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import wholestep as ws
from wholestep.capture.cuda_attention import choice

nullcuda: Any = pytest.importorskip(
    "nullcuda", reason="needs the null CUDA device: make test-nullcuda", exc_type=ImportError
)

KERNELS = {0: "math", 1: "flash", 2: "efficient"}
WIDTHS = [(64, 64, 64), (128, 128, 128), (60, 60, 60), (6, 6, 6), (256, 256, 256), (264, 264, 264), (64, 64, 32)]
MASKS = [None, (2, 1, 16, 16), (16, 16)]


def of_torch(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, causal: bool, g: bool
) -> str:
    chosen: Any = torch._fused_sdp_choice  # type: ignore[attr-defined]
    found = chosen(query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=causal, enable_gqa=g)
    return KERNELS[found]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_the_choice_is_that_of_torch(dtype: torch.dtype) -> None:
    """Without cuDNN, whose kernels are not told from flash attention."""
    torch.backends.cuda.enable_cudnn_sdp(False)
    seen = set[str]()
    for widths, shape, dropout, causal, heads, keys in itertools.product(
        WIDTHS, MASKS, (0.0, 0.1), (False, True), ((4, 4), (4, 2), (4, 3)), (16, 24)
    ):
        if (shape is not None and (causal or keys != 16)) or (heads[0] != heads[1] and shape is not None):
            continue
        for transposed, grouped in itertools.product((False, True), (False, True)):
            made = [
                torch.empty(2, h, n, width, dtype=dtype, device="cuda", requires_grad=True)
                for h, n, width in zip((heads[0], heads[1], heads[1]), (16, keys, keys), widths, strict=True)
            ]
            if transposed:
                made = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in made]
            mask = None if shape is None else torch.empty(shape, dtype=dtype, device="cuda")
            given = *made, mask, dropout, causal, grouped
            assert choice(*given) == of_torch(*given), (widths, shape, dropout, causal, heads, keys, grouped)
            seen.add(choice(*given))
    assert seen == ({"math"} if dtype is torch.float64 else {"efficient", "math"} if dtype is torch.float32 else
                    {"flash", "efficient", "math"})  # fmt: skip


def test_switches_of_torch_count() -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    x = torch.empty(2, 4, 16, 64, dtype=torch.bfloat16, device="cuda")
    given = x, x, x, None, 0.0, True, False
    for allowed in (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH):
        with sdpa_kernel(allowed):
            assert choice(*given) == of_torch(*given)


def attending(text: list[str], graph: Any) -> list[str]:
    """What attention ops of a graph are called with."""
    return text + [
        f"{node.target} {[tuple(n.meta['val'].shape) for n in node.all_input_nodes if hasattr(n.meta['val'], 'shape')]}"
        f" {[a for a in node.args if isinstance(a, (bool, float))]} {node.kwargs}"
        for node in graph.graph.nodes
        if "scaled_dot_product" in str(node.target)
    ]


class Attention(torch.nn.Module):
    """Heads of a width that flash attention pads, with dropout; with a mask if `masked`."""

    def __init__(self, masked: bool) -> None:
        super().__init__()
        self.project, self.masked = torch.nn.Linear(60, 180, dtype=torch.bfloat16), masked

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).view(2, 10, 3, 3, 20).permute(2, 0, 3, 1, 4).unbind(0)
        mask = torch.ones(10, 10, dtype=torch.bool, device=x.device).tril() if self.masked else None
        q, k, v = (t[..., :16] for t in (q, k, v)) if self.masked else (q, k, v)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, 0.1, not self.masked)


def trained(model: torch.nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss


@pytest.mark.parametrize("masked", [False, True])
def test_the_graph_is_that_of_a_gpu(masked: bool) -> None:
    torch.backends.cuda.enable_cudnn_sdp(False)

    def captured(device: str, kernels: Any) -> list[str]:
        model = Attention(masked).to(device)
        x = torch.randn(2, 10, 60, dtype=torch.bfloat16, device=device)
        options = ws.CaptureOptions(kernels=kernels)
        return attending([], ws.capture(trained, model, torch.optim.SGD(model.parameters()), x, options=options))

    found = captured("cpu", "cuda")
    assert found == captured("cuda", None)
    assert len(found) == 2
