"""Dims that a view merges behind others are shared out: tokens or heads behind rows, samples behind tokens."""

from collections.abc import Callable
from contextlib import suppress
from itertools import permutations, product
from math import prod
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import Graph
from torch.optim import AdamW, Optimizer

import wholestep as ws
from tests.steps import mean_square
from tests.together import OneDevice, compare
from tests.tp_models import VOCAB, Llama, next_token, step_of
from wholestep.dtensor import placements
from wholestep.errors import LayoutError
from wholestep.graph import meta
from wholestep.layout import AxisState, Extent, Layout, cut, replicated, resolve, split_at_blocks
from wholestep.mesh import Mesh

pytestmark = pytest.mark.usefixtures("double")

aten = torch.ops.aten
TOLERANCE = 1e-10


def multiplications(graph: Graph) -> int:
    """Those of all products of matrices."""
    found = 0
    for node in graph.nodes:
        if node.target in (aten.mm.default, aten.addmm.default, aten.bmm.default, aten.matmul.default):
            made, right = meta.one_tensor(node), meta.one_tensor(node.all_input_nodes[-1])
            found += prod(made.shape) * right.shape[-2]
    return found


def stepped(make: Callable[[], nn.Module], step: Any, batches: list[tuple[Any, ...]]) -> OneDevice:
    def both() -> tuple[nn.Module, Optimizer]:
        model = make()
        return model, AdamW(model.parameters(), lr=0.05, eps=1e-4, fused=True)

    return OneDevice(both, step, batches)


@pytest.mark.usual("2-8-dp=2-0.55", "2-7-dp=2-0.62")
@pytest.mark.parametrize(
    ("rows", "tokens", "mesh", "share"), [(2, 8, "dp=2", 0.55), (3, 8, "dp=4", 0.31), (2, 7, "dp=2", 0.62)]
)
def test_tokens_of_several_rows(rows: int, tokens: int, mesh: str, share: float) -> None:
    """Attention by hand merges rows and tokens, and rows and heads. Pieces of tokens may differ in length."""
    batches = [tuple(torch.randint(0, VOCAB, (2, rows, tokens))) for _ in range(2)]
    one = stepped(lambda: Llama(by_hand=True, kv=4), step_of(next_token), batches)
    for style in ("replicate", "fully_shard"):
        found = compare(one, mesh, ws.DataParallel(style, semantics="global", input_batch_dim=1))
        assert found.worst < TOLERANCE, f"{style}: {found.where} differs by {found.worst:.1e}"
        whole = multiplications(one.capture.graph.graph)
        assert multiplications(found.local.graph) <= share * whole
        if not tokens % (ranks := Mesh(mesh).size):
            repeated = sum(work.share for work in found.plan.repeated)
            assert multiplications(found.local.graph) == pytest.approx((repeated + (1 - repeated) / ranks) * whole)
        assert ws.Plan.from_json(found.plan.to_json()) == found.plan


@pytest.mark.parametrize("batch_first", [True, False])
def test_micro_batches_of_an_encoder(batch_first: bool) -> None:
    """`nn.MultiheadAttention` puts tokens before samples, and merges both."""

    def encoder() -> nn.Module:
        layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=batch_first, norm_first=True)
        return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    shape = (8, 5, 8) if batch_first else (5, 8, 8)
    one = stepped(encoder, mean_square, [(torch.randn(shape),) for _ in range(2)])
    dim = 1 - batch_first
    parallel = [
        ws.DataParallel("zero1", semantics="global", input_batch_dim=dim),
        ws.MicroBatches(2, input_batch_dim=dim),
    ]
    found = compare(one, "dp=2", parallel)
    assert found.worst < TOLERANCE, f"{found.where} differs by {found.worst:.1e}"


@pytest.mark.parametrize("axes", ["a=2", "b=3,a=2", "a=2,b=2", "b=2,a=2,c=2"])
def test_torch_has_the_same_pieces(axes: str) -> None:
    """`_StridedShard` is how DTensor says blocks."""
    mesh, whole, tried = Mesh(axes), torch.arange(48), 0
    for order in permutations(mesh.names):
        for blocks in product((1, 2, 4, 8), repeat=len(order)):
            layout = replicated(1)
            for axis, count in zip(order, blocks, strict=True):
                layout = layout.put(axis, AxisState("S", 0, blocks=count))
            with suppress(LayoutError):
                layout.check((48,), mesh)
                if any(isinstance(length, Extent) for length in layout.extents((48,), mesh)):
                    continue  # torch cuts evenly
                for rank in range(mesh.size):
                    at, piece = mesh.coordinate(rank), whole
                    for axis, placement in zip(mesh.axes, placements(layout, mesh), strict=True):
                        pieces = placement._split_tensor(piece, axis.size, with_padding=False, contiguous=True)[0]
                        piece = pieces[at[axis.name]]
                    assert torch.equal(cut(whole, layout, mesh, at), piece), (layout, at)
                tried += 1
    assert tried >= 4


def test_pieces_of_blocks() -> None:
    """Each rank has its places of every block."""
    mesh, whole = Mesh("a=2,b=3"), torch.arange(24)
    layout = replicated(1).put("a", AxisState("S", 0)).put("b", AxisState("S", 0, blocks=4))
    assert layout.show((24,)) == "24@a,b in 4"
    for a, b in product(range(2), range(3)):
        expected = whole.view(2, 2, 3, 2)[a, :, b].reshape(-1)
        assert torch.equal(cut(whole, layout, mesh, {"a": a, "b": b}), expected)
    assert split_at_blocks((layout,), (24,), mesh) == ((Layout((("a",), ("b",))),), (4, 6))
    uneven = replicated(1).put("b", AxisState("S", 0, blocks=4))
    for b, places in enumerate([[0, 1], [2, 3], [4]]):
        expected = whole[:20].view(4, 5)[:, places].reshape(-1)
        assert torch.equal(cut(whole[:20], uneven, mesh, {"a": 0, "b": b}), expected)
        assert uneven.local_shape((20,), mesh, {"a": 0, "b": b}) == (len(expected),)
        assert resolve(uneven.extents((20,), mesh), {"b": b}) == [len(expected)]
    with pytest.raises(LayoutError, match="the innermost alone may be shared unevenly"):
        uneven.put("a", AxisState("S", 0, blocks=20)).check((60,), mesh)
    with pytest.raises(LayoutError, match="10 in blocks of 2"):
        uneven.check((10,), mesh)
