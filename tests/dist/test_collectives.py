"""Mesh collectives and reshards on gloo: on 1-D, 2x2 and 2x2x2 meshes, even, uneven, empty, and what is refused."""

from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode

import wholestep as ws
from tests.dist.launch import run_ranks
from tests.simulate import index_of
from wholestep import collectives
from wholestep.dtensor import layout_from
from wholestep.layout import replicated, sharded

R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial("sum")
SHAPES = {"line": (4,), "square": (2, 2), "cube": (2, 2, 2)}


def mesh_of(sizes: tuple[int, ...]) -> DeviceMesh:
    return init_device_mesh("cpu", sizes, mesh_dim_names=tuple("abc"[: len(sizes)]))


def whole_of(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """The same tensor on every rank."""
    return torch.randint(-99, 99, shape, generator=torch.Generator().manual_seed(seed)).double()


def source_of(devices: DeviceMesh, dim: int, group_src: int = 0) -> int:
    """The global rank that is number `group_src` of this rank's line along `dim`."""
    at = list(devices.get_coordinate() or ())
    at[dim] = group_src
    return int(devices.mesh[tuple(at)])


def sent_by(rank: int, index: int, shape: tuple[int, ...] = (3, 2)) -> Tensor:
    return torch.full(shape, 100.0 * rank + index)


def loose(tensor: Tensor) -> Tensor:
    """The same values with other strides."""
    return tensor.t().contiguous().t() if tensor.dim() == 2 else tensor


# -- scatter and broadcast ----------------------------------------------------------------
def _scatter_and_broadcast(rank: int, world: int, sizes: tuple[int, ...]) -> int:
    devices, checked = mesh_of(sizes), 0
    for dim, source, named, strided in product(range(len(sizes)), (0, 1), (False, True), (False, True)):
        key: Any = "abc"[dim] if named else dim
        at = (devices.get_coordinate() or ())[dim]
        pieces = [sent_by(rank, i) for i in range(sizes[dim])]
        pieces = [loose(p) for p in pieces] if strided else pieces
        output = loose(torch.zeros(3, 2)) if strided else torch.zeros(3, 2)
        given = pieces if at == source else None
        assert collectives.mesh_scatter(output, given, devices, key, group_src=source) is None
        assert torch.equal(output, sent_by(source_of(devices, dim, source), at))
        value = loose(sent_by(rank, 7)) if strided else sent_by(rank, 7)
        assert collectives.mesh_broadcast(value, devices, key, group_src=source) is None
        assert torch.equal(value, sent_by(source_of(devices, dim, source), 7))
        checked += 1
    first = sent_by(rank, 1)
    for dim in range(len(sizes)):  # dim by dim, every rank gets what the first one has
        collectives.mesh_broadcast(first, devices, dim)
    assert torch.equal(first, sent_by(0, 1))
    return checked


def _work(rank: int, world: int) -> None:
    devices = mesh_of((world,))
    output, value = torch.zeros(3, 2), sent_by(rank, 0)
    work = collectives.mesh_scatter(output, [sent_by(rank, i) for i in range(world)], devices, async_op=True)
    also = collectives.mesh_broadcast(value, devices, async_op=True, group_src=world - 1)
    assert work is not None
    assert also is not None
    work.wait()
    also.wait()
    assert torch.equal(output, sent_by(0, rank))
    assert torch.equal(value, sent_by(world - 1, 0))


def _meta(rank: int, world: int) -> None:
    devices = mesh_of((2, world // 2))
    meta = torch.empty(12, 4, device="meta")
    with CommDebugMode() as seen:
        for async_op in (False, True):
            assert collectives.mesh_scatter(meta, [meta] * 2, devices, 0, async_op) is None
            assert collectives.mesh_broadcast(meta, devices, 0, async_op) is None
        made = collectives.shard_dim_alltoall(meta, 0, 1, devices, 0)
        assert (made.shape, made.stride(), made.is_meta) == ((24, 2), (2, 1), True)
        again = collectives.reshard(meta, [S0, S0], [R, S1], devices, (48, 4))
        assert (again.shape, again.is_meta) == ((48, 2), True)
    assert seen.get_total_counts() == 0


def test_scatter_and_broadcast():
    for sizes in [(4,), (2, 2)]:
        assert run_ranks(_scatter_and_broadcast, 4, sizes, timeout=60) == [8 * len(sizes)] * 4


def test_the_work_is_returned_and_meta_tensors_send_nothing():
    run_ranks(_work, 3, timeout=60)
    run_ranks(_meta, 4, timeout=60)


# -- one dim of the mesh ------------------------------------------------------------------
def _counted(kind: str, run: Any) -> Tensor:
    """What `run` gives; it must take one collective, whose name holds `kind`."""
    run()  # torch's mode knows our variants from the first program on that was bound
    with CommDebugMode() as seen:
        made = run()
    counts = {str(op): n for op, n in seen.get_comm_counts().items() if n}
    assert sum(counts.values()) == 1, counts
    assert all(kind in op for op in counts), counts
    return made


def _exchange(rank: int, world: int) -> None:
    devices = mesh_of((2, world // 2))
    at, line = (devices.get_coordinate() or (0,))[0], source_of(devices, 0)
    shapes = [(24, 4), (8, 8), (8, 5), (5, 8), (5, 5), (1, 3), (3, 1), (8, 8, 8), (2, 5, 3)]
    for shape, (gather, shard) in product(shapes, [(0, 1), (1, 0), (-1, 0)]):
        whole, ndim = whole_of(shape, seed=line), len(shape)
        before, after = sharded(ndim, gather % ndim, "a"), sharded(ndim, shard, "a")
        if before == after:
            continue
        mesh = ws.Mesh("a=2")
        piece = whole[index_of(shape, before, mesh, at)]
        for given in (piece.contiguous(), loose(piece)):
            run = lambda: collectives.shard_dim_alltoall(given, gather, shard, devices, 0, size=shape[gather])  # noqa: B023, E731
            made = _counted("all_to_all", run)
            assert made.is_contiguous()
            assert torch.equal(made, whole[index_of(shape, after, mesh, at)])
    made = collectives.shard_dim_alltoall(torch.full((12, 4), float(rank)), 0, 1, devices, 0)
    assert (made.shape, made.stride()) == ((24, 2), (2, 1))
    assert made[:12].eq(line).all()
    assert made[12:].eq(source_of(devices, 0, 1)).all()


def _uneven(rank: int, world: int) -> None:
    devices, mesh = mesh_of((world,)), ws.Mesh(f"a={world}")
    sizes = [world + 3, world + 1, 11, 9, 10, 5, 1, 3 * world, 3 * world + 1, 3 * world + 2]
    for shape, dim, strided in product([(n, world + 1) for n in sizes], (0, 1), (False, True)):
        whole, layout = whole_of(shape), sharded(2, dim, "a")
        mine = whole[index_of(shape, layout, mesh, rank)]
        own = whole if rank == world - 1 else whole + rank + 1
        own = loose(own) if strided else own
        made = collectives.shard_dim_scatter(own, dim, devices, group_src=world - 1)
        assert torch.equal(made, mine)
        piece = loose(mine) if strided else mine.contiguous()
        joined = _counted("all_gather", lambda: collectives.shard_dim_all_gather(piece, dim, devices, size=shape[dim]))  # noqa: B023
        assert torch.equal(joined, whole)
        part = whole * (rank + 1)
        part = loose(part) if strided else part
        added = _counted("all_to_all", lambda: collectives.shard_dim_reduce_scatter(part, dim, devices))  # noqa: B023
        assert torch.equal(added, mine * (world * (world + 1) // 2))
        mean = collectives.shard_dim_reduce_scatter(part, dim, devices, op="avg")
        assert torch.allclose(mean, mine * (world + 1) / 2)
        high = collectives.shard_dim_reduce_scatter(part, dim, devices, op="max")
        assert torch.equal(high, torch.maximum(mine, mine * world))


def test_one_all_to_all_between_two_dims():
    run_ranks(_exchange, 4, timeout=60)


@pytest.mark.parametrize("world", [2, 3, pytest.param(4, marks=pytest.mark.full)])
def test_uneven_sizes_along_one_dim(world: int):
    run_ranks(_uneven, world, timeout=60)


# -- layouts ------------------------------------------------------------------------------
def _reshards(rank: int, world: int, sizes: tuple[int, ...], shapes: list[tuple[int, ...]]) -> int:
    devices, mesh, n = mesh_of(sizes), ws.Mesh(",".join(f"{a}={s}" for a, s in zip("abc", sizes, strict=False))), 0
    for shape in shapes:
        whole = whole_of(shape)
        for source, target in product(
            product([R, S0, S1, P], repeat=len(sizes)), product([R, S0, S1], repeat=len(sizes))
        ):
            before, after = layout_from(source, 2, mesh), layout_from(target, 2, mesh)
            piece = whole[index_of(shape, before, mesh, rank)]
            holders = 1
            for axis, _ in before.partial:
                holders *= mesh.axis_size(axis)
                piece = piece * (2 * mesh.coordinate(rank)[axis] + 1)  # 1 + 3 + ... is the square of their number
            made = collectives.reshard(loose(piece), source, target, devices, shape)
            assert torch.equal(made, whole[index_of(shape, after, mesh, rank)] * holders**2), f"{source} -> {target}"
            assert made.is_contiguous()
            n += 1
    return n


@pytest.mark.parametrize("shapes", [[(9, 5), (1, 3)], pytest.param([(10, 5), (3, 5)], marks=pytest.mark.full)])
def test_every_layout_becomes_every_other(shapes: list[tuple[int, int]]):
    assert run_ranks(_reshards, 3, (3,), [(8, 8), (7, 3), (1, 3), (0, 4)], timeout=60) == [4 * 12] * 3
    assert run_ranks(_reshards, 4, (2, 2), shapes, timeout=120) == [2 * 144] * 4


def _cube(rank: int, world: int) -> list[str]:
    _scatter_and_broadcast(rank, world, (2, 2, 2))
    devices, mesh, shape = mesh_of((2, 2, 2)), ws.Mesh("a=2,b=2,c=2"), (11, 5)
    whole, done = whole_of(shape), list[str]()
    for placed in [(S0, S0, S0), (S0, S1, S0), (S1, R, S1), (S1, S1, R)]:
        layout = layout_from(placed, 2, mesh)
        piece = collectives.reshard(whole, replicated(2), layout, devices, shape)
        assert torch.equal(piece, whole[index_of(shape, layout, mesh, rank)])
        back = collectives.reshard(piece, layout, replicated(2), devices, shape)
        assert torch.equal(back, whole)
        done.append(str(tuple(piece.shape)))
    summed = collectives.reshard(whole, [P, P, P], [S0, S0, S0], devices, shape)
    assert torch.equal(summed, 8 * whole[index_of(shape, layout_from([S0] * 3, 2, mesh), mesh, rank)])
    return done


@pytest.mark.full
def test_eight_ranks_as_a_cube():
    """11 rows over 2 x 2 x 2, cut axis by axis: 6 and 5, then 3, 3, 3, 2, then pieces of 2 and 1."""
    rows = [made[0] for made in run_ranks(_cube, 8, timeout=120)]
    assert rows == ["(2, 5)", "(1, 5)", "(2, 5)", "(1, 5)", "(2, 5)", "(1, 5)", "(1, 5)", "(1, 5)"]


def _counts(rank: int, world: int) -> dict[str, int]:
    out: dict[str, int] = {}
    square, thin = mesh_of((2, 2)), mesh_of((1, 4))
    tensor = whole_of((8, 8))
    pieces = {R: tensor, S0: tensor[2 * rank : 2 * rank + 2]}
    for name, devices, source, target in [
        ("[S0,S0] -> R", square, (S0, S0), (R, R)),
        ("R -> [S0,S1]", square, (R, R), (S0, S1)),
        ("S0 -> S0", thin, (S0, S0), (S0, S0)),
        ("S0 -> S0 of a dim of one rank", thin, (R, S0), (S0, S0)),
        ("P of a dim of one rank -> R", thin, (P, R), (R, R)),
        ("S0 -> S1", thin, (R, S0), (R, S1)),
        ("P -> S0", thin, (R, P), (R, S0)),
        ("P -> R", thin, (R, P), (R, R)),
    ]:
        collectives.reshard(pieces[S0 if source[1] == S0 else R], source, target, devices, (8, 8))
        with CommDebugMode() as seen:
            collectives.reshard(pieces[S0 if source[1] == S0 else R], source, target, devices, (8, 8))
        out[name] = seen.get_total_counts()
    return out


def test_how_many_collectives_a_reshard_takes():
    for found in run_ranks(_counts, 4, timeout=60):
        assert found == {
            "[S0,S0] -> R": 2,
            "R -> [S0,S1]": 0,
            "S0 -> S0": 0,
            "S0 -> S0 of a dim of one rank": 0,
            "P of a dim of one rank -> R": 0,
            "S0 -> S1": 1,
            "P -> S0": 1,
            "P -> R": 1,
        }


def _own_memory(rank: int, world: int) -> None:
    devices, tensor = mesh_of((world,)), torch.ones(4, 4)
    for target in ([R], [S0], [S1]):
        collectives.reshard(tensor, [R], target, devices, (4, 4)).zero_()
        assert tensor.eq(1).all(), f"{target} shares memory"
    odd = collectives.reshard(torch.ones(4, 4, requires_grad=True), [R], [S0], devices, (4, 4))
    assert not odd.requires_grad


def test_the_result_has_memory_of_its_own():
    run_ranks(_own_memory, 2, timeout=60)


# -- refusals -----------------------------------------------------------------------------
def _refused(run: Any) -> str:
    try:
        run()
    except ws.WholestepError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def _refusals(rank: int, world: int) -> list[str]:
    devices, x = mesh_of((2,)), torch.zeros(3, 2)
    strided = loose(x)
    part = DeviceMesh("cpu", [1])
    turned = DeviceMesh("cpu", [1, 0])
    c = collectives
    found = [
        _refused(lambda: c.reshard(x, [S0], [P], devices, (6, 2))),
        _refused(lambda: c.reshard(x, [S0], [R], devices, (7, 2))) if rank == 0 else "",
        _refused(lambda: c.reshard(x, [S0], [R, R], devices, (6, 2))),
        _refused(lambda: c.mesh_scatter(x, [x], devices)) if rank == 0 else "",
        _refused(lambda: c.mesh_scatter(x, [x, x[:2]], devices)) if rank == 0 else "",
        _refused(lambda: c.mesh_scatter(strided, [x, x], devices, async_op=True)),
        _refused(lambda: c.mesh_broadcast(x, devices, group_src=2)),
        _refused(lambda: c.mesh_broadcast(x, devices, 1)),
        _refused(lambda: c.mesh_broadcast(x, devices, "tp")),
        _refused(lambda: c.shard_dim_alltoall(x, 1, 1, devices)),
        _refused(lambda: c.shard_dim_alltoall(x, 0, 2, devices)),
        _refused(lambda: c.shard_dim_reduce_scatter(x, 0, devices, op="norm2")),
        _refused(lambda: c.mesh_broadcast(x, part)) if rank == 0 else "",
        _refused(lambda: c.mesh_broadcast(x, turned)),
    ]
    dist.barrier()
    return found


def test_what_is_refused():
    """Before anything is sent: no rank is left waiting."""
    first = run_ranks(_refusals, 2, timeout=60)[0]
    assert first == [
        "LayoutError: a tensor laid out as _@a _ cannot become _ _ +a(sum): 'a' shards it\n"
        "  needed: a partial or replicated tensor along this axis\n"
        "  next: gather it first: zeros on all ranks except one then make it a partial sum",
        "LayoutError: a local tensor of shape [3, 2] at {'a': 0} of mesh a=2\n"
        "  needed: [4, 2]: the shard of [7, 2] with layout 7@a 2\n"
        "  next: pass this rank's shard, unpadded, and the shape of the whole tensor",
        "LayoutError: 2 placements (Replicate(), Replicate())\n  needed: one for each axis of mesh a=2",
        "LayoutError: a scatter_list of 1 tensors\n  needed: 2: one for each rank along the dim",
        "LayoutError: scatter_list[1] of shape [2, 2] and torch.float32\n"
        "  needed: the shape [3, 2] and torch.float32 of output\n"
        "  next: pad uneven pieces, as wholestep.collectives.split does",
        "LayoutError: output of shape [3, 2] and stride [1, 3] with async_op\n"
        "  needed: a contiguous tensor\n"
        "  next: pass output.contiguous(), or async_op=False",
        "MeshError: group_src=2 along 'a' of DeviceMesh((a=2), 'cpu', stride=(1,))\n"
        "  needed: a rank along it, from 0 to 1\n  next: correct it",
        "MeshError: mesh_dim=1 of DeviceMesh((a=2), 'cpu', stride=(1,))\n"
        "  needed: from 0 to 0, or a name\n  next: correct it",
        "MeshError: mesh a=2 has no axis 'tp'\n  needed: one of 'a'\n  next: correct the axis name or the mesh",
        "LayoutError: gather_dim and shard_dim are both 1\n  needed: two dims\n  next: keep the shard as it is",
        "LayoutError: dim 2 of a tensor of shape [3, 2]\n  needed: a dim from -2 to 1",
        "LayoutError: op='norm2'\n  needed: one of sum, avg, max, min",
        first[12],
        first[13],
    ]
    assert first[12].startswith("MeshError: rank 0 is not in DeviceMesh(")
    assert first[13].startswith("MeshError: ranks [1, 0] along 'd0' of DeviceMesh(")
