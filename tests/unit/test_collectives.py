"""Reshards between layouts on meshes of up to eight ranks, all in one process; padding; what is refused."""

from itertools import product

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard

import wholestep as ws
from tests.simulate import cut, join
from wholestep.backend.rank_binding import bound_arguments
from wholestep.collectives import pad, split, unpad
from wholestep.collectives.reshards import program
from wholestep.dtensor import layout_from
from wholestep.layout import AxisState, Layout, replicated, sharded
from wholestep.proof.interpret import run_all

R, S0, S1, S2 = Replicate(), Shard(0), Shard(1), Shard(2)
P = Partial("sum")
MESHES = {1: ["a=4", "a=2", "a=3"], 2: ["a=2,b=2"], 3: ["a=2,b=2,c=2"]}


def simulated(pieces: list[Tensor], source: Layout, target: Layout, shape: tuple[int, ...], mesh: ws.Mesh):
    local = program(source, target, shape, pieces[0].dtype, "cpu", mesh)
    made = run_all(local, [[piece] for piece in pieces], bound_arguments)
    return [row[0] for row in made], {kind: total.count for kind, total in local.collectives().items()}


def held(whole: Tensor, layout: Layout, mesh: ws.Mesh) -> list[Tensor]:
    """What ranks hold of a tensor; along partial axes they hold different parts of its sum."""
    pieces = cut(whole, layout, mesh)
    for axis, op in layout.partial:
        assert op == "sum"
        for rank in range(mesh.size):
            at = mesh.coordinate(rank)[axis]
            parts = mesh.axis_size(axis)
            others = sum(7.0 * (i + 1) for i in range(parts - 1))
            pieces[rank] = 7.0 * (at + 1) * torch.ones_like(pieces[rank]) if at < parts - 1 else pieces[rank] - others
    return pieces


@pytest.mark.parametrize(
    ("size", "parts", "rows"),
    [
        (11, 8, [2, 2, 2, 2, 2, 1, 0, 0]),
        (9, 8, [2, 2, 2, 2, 1, 0, 0, 0]),
        (10, 4, [3, 3, 3, 1]),
        (5, 4, [2, 2, 1, 0]),
        (1, 4, [1, 0, 0, 0]),
        (8, 4, [2, 2, 2, 2]),
        (0, 3, [0, 0, 0]),
    ],
)
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_pieces_and_their_padding(size: int, parts: int, rows: list[int], dim: int):
    whole = torch.randn(size, 3) if dim == 0 else torch.randn(3, size)
    pieces, pads = split(whole, dim, parts)
    assert pads == [rows[0] - n for n in rows]
    assert [p.shape[dim] for p in pieces] == [rows[0]] * parts
    assert all(p.is_contiguous() for p in pieces)
    plain, same = split(whole, dim, parts, padded=False)
    assert same == pads
    assert [p.shape[dim] for p in plain] == rows
    assert torch.equal(torch.cat(plain, dim), whole)
    for piece, bare, rest in zip(pieces, plain, pads, strict=True):
        assert torch.equal(unpad(piece, dim, rest), bare)
        assert torch.equal(pad(bare, dim, rest), piece)
        assert not piece.narrow(dim, rows[0] - rest, rest).any()


def test_eleven_rows_over_eight_lack_0_0_0_0_0_1_2_2():
    assert split(torch.zeros(11, 2), 0, 8)[1] == [0, 0, 0, 0, 0, 1, 2, 2]


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda x: split(x, 2, 2), "dim 2 of a tensor of shape [4, 2]\n  needed: a dim from -2 to 1"),
        (lambda x: split(x, 0, 0), "0 parts of dim 0\n  needed: at least one part"),
        (
            lambda x: unpad(x, 0, 5),
            "5 rows of padding in dim 0 of a tensor of shape [4, 2]\n  needed: from 0 to 4",
        ),
        (lambda x: pad(x, 0, -1), "-1 rows of padding in dim 0 of a tensor of shape [4, 2]\n  needed: 0 or more"),
    ],
)
def test_padding_refuses(call, text: str):
    with pytest.raises(ws.LayoutError) as refused:
        call(torch.zeros(4, 2))
    assert str(refused.value) == text


@pytest.mark.parametrize("mesh", [m for meshes in MESHES.values() for m in meshes])
def test_every_layout_becomes_every_other(mesh: str):
    """1-D, 2x2 and 2x2x2, even, uneven, with empty shards and of no rows; P is only ever a source."""
    on, n = ws.Mesh(mesh), 0
    axes = len(on.axes)
    shapes = [(8, 8), (5, 3), (1, 3), (0, 4)] if axes < 3 else [(5, 3)]
    for source in product([R, S0, S1, P], repeat=axes):
        for target in product([R, S0, S1], repeat=axes):
            for shape in shapes:
                whole = torch.randint(-9, 9, shape).double()
                a, b = layout_from(source, 2, on), layout_from(target, 2, on)
                made, _ = simulated(held(whole, a, on), a, b, shape, on)
                assert torch.equal(join(made, b, on, shape), whole), f"{source} -> {target} of {shape}"
                n += 1
    assert n == len(shapes) * (4 * 3) ** axes


@pytest.mark.parametrize("shape", [(8, 8), (8, 8, 8), (8, 5), (5, 8), (5, 5)])
@pytest.mark.parametrize("parts", [2, 3, 4, 8])
def test_between_two_dims_there_is_one_collective(shape: tuple[int, ...], parts: int):
    mesh, whole = ws.Mesh(f"a={parts}"), torch.randn(shape)
    zero, one = sharded(len(shape), 0, "a"), sharded(len(shape), 1, "a")
    for source, target in [(zero, one), (one, zero)]:
        made, counts = simulated(cut(whole, source, mesh), source, target, shape, mesh)
        assert torch.equal(join(made, target, mesh, shape), whole)
        assert counts == {"all_to_all": 1}


@pytest.mark.parametrize("shape", [(10, 5), (9, 5), (3, 5), (1, 3)])
@pytest.mark.parametrize("placed", [(S0, S0), (S0, S1)])
def test_round_trips_on_two_by_two(shape: tuple[int, ...], placed: tuple[Shard, Shard]):
    mesh, whole = ws.Mesh("a=2,b=2"), torch.randn(shape)
    target = layout_from(placed, 2, mesh)
    made, none = simulated([whole] * 4, replicated(2), target, shape, mesh)
    assert not none
    back, counts = simulated(made, target, replicated(2), shape, mesh)
    assert counts == {"all_gather": 2}
    assert all(torch.equal(piece, whole) for piece in back)


@pytest.mark.parametrize("parts", [2, 3, 4])
@pytest.mark.parametrize("more", [0, 1, 2])
@pytest.mark.parametrize("dim", [0, 1])
def test_a_partial_sum_is_scattered_once(parts: int, more: int, dim: int):
    mesh, size = ws.Mesh(f"a={parts}"), 3 * parts + more
    whole = torch.randint(-9, 9, (size, size)).double()
    partial, target = replicated(2).put("a", AxisState("P", op="sum")), sharded(2, dim, "a")
    made, counts = simulated(held(whole, partial, mesh), partial, target, (size, size), mesh)
    assert torch.equal(join(made, target, mesh, (size, size)), whole)
    assert counts == {"reduce_scatter": 1}


@pytest.mark.parametrize("source", [S0, S1, P, R])
@pytest.mark.parametrize("target", [S0, S1, R, P])
def test_a_mesh_dim_of_one_rank_takes_no_collective(source, target):
    mesh, whole = ws.Mesh("a=1,b=1"), torch.randn(3, 4)
    a, b = (replicated(2).put("a", _state(placed)) for placed in (source, target))
    made, counts = simulated([whole], a, b, (3, 4), mesh)
    assert not counts
    assert torch.equal(made[0], whole)


def _state(placed) -> AxisState:
    return (
        AxisState("S", placed.dim)
        if isinstance(placed, Shard)
        else AxisState("P", op="sum")
        if placed is P
        else AxisState("R")
    )


def test_shards_never_become_partial_values():
    mesh = ws.Mesh("a=2")
    with pytest.raises(ws.LayoutError) as refused:
        program(
            sharded(2, 0, "a"), replicated(2).put("a", AxisState("P", op="sum")), (4, 4), torch.float32, "cpu", mesh
        )
    assert str(refused.value) == (
        "a tensor laid out as _@a _ cannot become _ _ +a(sum): 'a' shards it\n"
        "  needed: a partial or replicated tensor along this axis\n"
        "  next: gather it first: zeros on all ranks except one then make it a partial sum"
    )


def test_an_average_of_integers_is_refused():
    partial = replicated(1).put("a", AxisState("P", op="avg"))
    with pytest.raises(ws.LayoutError, match=r"an average of torch.int64 over 'a'\n  needed: a floating-point dtype"):
        program(partial, replicated(1), (4,), torch.int64, "cpu", ws.Mesh("a=2"))


@pytest.mark.parametrize(
    ("placed", "text"),
    [
        ((S0,), "(Shard(dim=0),)\n  needed: one for each axis of mesh a=2,b=2"),
        ((S0, "r"), "'r' for axis 'b'\n  needed: Shard(dim), Replicate() or Partial(op)"),
        ((S2, R), "Shard(dim=2) of a tensor of 2 dims\n  needed: a dim from 0 to 1"),
    ],
)
def test_placements_that_do_not_fit(placed, text: str):
    with pytest.raises(ws.LayoutError) as refused:
        layout_from(placed, 2, ws.Mesh("a=2,b=2"))
    assert str(refused.value).endswith(text)
