"""Float8 along tp: the products and collectives of a rank, beside those in bfloat16."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import RowwiseParallel
from torch.nn import functional as F

import wholestep as ws
from wholestep.graph.meta import module_path, one_tensor
from wholestep.graph.op_kinds import PRODUCTS, collective_kind

H100 = ws.Hardware.preset("dgx-h100")
PLAN: dict[str, Any] = {"0": "sequence", "*.gate": "colwise", "*.up": "colwise"}
STYLES = {
    "tp": {**PLAN, "*.down": "rowwise"},
    "tp, sequence": {**PLAN, "*.down": RowwiseParallel(output_layouts=Shard(1))},
}
HALF = ws.MixedPrecision(torch.bfloat16, torch.float32)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(4096, 14336, bias=False) for _ in range(2))
        self.down = nn.Linear(14336, 4096, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


def train_step(model: nn.Module, optimizer: Any, x: Tensor) -> None:
    optimizer.zero_grad()
    model(x).float().square().mean().backward()
    optimizer.step()


def program(recipe: Any, plan: Any) -> ws.LocalGraph:
    """The layer in the sizes of Llama-3-8B, planned on the links of a DGX H100."""
    with torch.device("meta"):
        model, x = nn.Sequential(nn.LayerNorm(4096, bias=False), Mlp()), torch.empty(2, 8192, 4096)
    float8 = ws.Float8(recipe, ["1.*"]) if recipe else None
    options = ws.CaptureOptions(mixed_precision=HALF, float8=float8)
    graph = ws.capture(train_step, model, torch.optim.SGD(model.parameters(), lr=0.1), x, options=options)
    return ws.partition(graph, ws.plan(graph, "tp=8", ws.TensorParallel(plan), hardware=H100))


def picture(local: ws.LocalGraph) -> list[str]:
    lines: list[str] = []
    for node in local.graph.nodes:
        name = collective_kind(node.target) or ("product" if node.target in PRODUCTS else "")
        if name:
            made = one_tensor(node)
            lines.append(
                f"  {name:14} {str(made.dtype).removeprefix('torch.'):13} {list(made.shape)} {module_path(node)}"
            )
    return [line.rstrip() for line in lines]


def sent(local: ws.LocalGraph) -> int:
    return sum(total.bytes for total in local.collectives().values())


def large(local: ws.LocalGraph) -> list[tuple[str, tuple[int, ...]]]:
    """The collectives of activations."""
    found = [(kind, one_tensor(n).shape) for n in local.graph.nodes if (kind := collective_kind(n.target))]
    return sorted((kind, shape) for kind, shape in found if math.prod(shape) > 1e6)


def test_float8_layers_have_the_layouts_of_bfloat16(golden: Any) -> None:
    text: list[str] = []
    for style, plan in STYLES.items():
        plain, *others = [(recipe, program(recipe, plan)) for recipe in (None, "tensorwise", "rowwise")]
        for recipe, local in (plain, *others):
            text += [f"{recipe or 'bfloat16'}, {style}", *picture(local), ""]
        for recipe, local in others:
            assert set(local.collectives()) == set(plain[1].collectives())
            assert sent(local) <= sent(plain[1]) + 1e6, (recipe, style)  # besides activations, maxima of rows
            assert recipe == "rowwise" or large(local) == large(plain[1])
    golden("float8_layouts", "\n".join(text))
