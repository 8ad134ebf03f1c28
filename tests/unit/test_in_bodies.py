"""Collectives of each piece of a batch: merged and overlapped, with the numbers and the memory of a step without."""

from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Node
from torch.nn import functional as F
from torch.optim import AdamW, Optimizer

import wholestep as ws
from tests.alone import fake_group, predicted_and_measured
from tests.together import OneDevice, compare
from wholestep.cost.stage_costs import BlockPrices
from wholestep.cost.stage_orders import simulated_orders
from wholestep.errors import RankMismatchError
from wholestep.graph import meta
from wholestep.graph.graph import LocalGraph
from wholestep.graph.loop import named_bodies
from wholestep.graph.nodes import is_collective, is_wait, node_at
from wholestep.graph.written_out import blocks_in
from wholestep.partition.stage_program import orders_in
from wholestep.passes.bucket import GATHER
from wholestep.passes.in_bodies import InBodies
from wholestep.passes.order_collectives import collectives_of, with_collectives_in
from wholestep.passes.order_stages import named_orders, with_orders
from wholestep.planner.staged_plan import ShortStages, stage_passes, staged

pytestmark = pytest.mark.usefixtures("double")

CPUS, GPUS = ws.Hardware.default(), ws.Hardware.preset("dgx-h100")
AGAIN = ws.DataParallel("fully_shard", semantics="global", reshard_after_forward=True)
ZERO2 = ws.DataParallel("zero2", semantics="global")
STYLES = {
    "zero2": ZERO2, "again": AGAIN,
    "kept": ws.DataParallel("fully_shard", semantics="global", reshard_after_forward=False),
    "hybrid": ws.DataParallel("hybrid", semantics="global", reshard_after_forward=True),
}  # fmt: skip


def _step(model: nn.Module, optimizer: Optimizer, batch: dict[str, Tensor]) -> Tensor:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(batch["x"]), batch["y"])
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    return loss.detach()


@lru_cache(maxsize=3)
def one_device(rows: int, width: int = 12, layers: int = 3, steps: int = 2) -> OneDevice:
    generator = torch.Generator().manual_seed(3)

    def make() -> tuple[nn.Module, Optimizer]:
        blocks = [nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.ReLU()) for _ in range(layers)]
        model = nn.Sequential(*blocks, nn.Linear(width, 8))
        return model, AdamW(model.parameters(), lr=0.01, eps=1e-4, fused=True)

    batches = [
        {"x": torch.randn(rows, width, generator=generator), "y": torch.randint(0, 8, (rows,), generator=generator)}
        for _ in range(steps)
    ]
    return OneDevice(make, _step, [(batch,) for batch in batches])


def _program(parallel: Any, mesh: str, passes: Any, width: int = 12, layers: int = 3) -> LocalGraph:
    graph = one_device(16, width, layers).capture.graph
    return ws.run_passes(ws.partition(graph, ws.plan(graph, mesh, parallel)), passes)


def _passes(hardware: ws.Hardware, **sizes: Any) -> tuple[Any, ...]:
    return ws.default_passes(schedule=ws.Schedule(hardware, **sizes))


def _without(passes: Any) -> tuple[Any, ...]:
    return tuple(one for one in passes if not isinstance(one, InBodies))


def _flat(passes: Any) -> tuple[Any, ...]:
    return tuple(single for one in passes for single in getattr(one, "passes", (one,)))


def _each_piece(local: LocalGraph) -> list[str]:
    return [n.name for body in named_bodies(local.graph).values() for n in body.nodes if is_collective(n)]


@pytest.mark.crossed
@pytest.mark.parametrize("hardware", [CPUS, GPUS], ids=["cpus", "gpus"])
@pytest.mark.parametrize("bucket_bytes", [None, 900])
@pytest.mark.parametrize("rows", [16, 10], ids=["even", "uneven"])
@pytest.mark.parametrize("pieces", [1, 2, 3, 8])
@pytest.mark.parametrize("style", STYLES)
def test_numbers(style: str, pieces: int, rows: int, bucket_bytes: int | None, hardware: ws.Hardware) -> None:
    sizes = {} if bucket_bytes is None else {"bucket_bytes": bucket_bytes, "first_bucket_bytes": bucket_bytes}
    passes, mesh = _passes(hardware, **sizes), "r=2,s=2" if style == "hybrid" else "dp=2"
    parallel = [STYLES[style], ws.MicroBatches(pieces)]
    found = compare(one_device(rows), mesh, parallel, edit=lambda local: ws.run_passes(local, passes))
    assert found.worst < 1e-10, f"{found.where} differs by {found.worst:.1e}"


@pytest.mark.parametrize("style", ["zero2", "again"])
def test_tensor_parallel_beside_it(style: str) -> None:
    """Results of activations are not merged: their shapes differ between uneven pieces."""
    tensor = ws.TensorParallel({"0.0": "colwise", "1.0": "rowwise"}, axis="tp")
    data = replace(STYLES[style], axis="dp")
    passes = _passes(GPUS)
    found = compare(
        one_device(10), "dp=2,tp=2", [data, tensor, ws.MicroBatches(3)],
        edit=lambda local: ws.run_passes(local, passes),
    )  # fmt: skip
    assert found.worst < 1e-10, f"{found.where} differs by {found.worst:.1e}"


TENSOR = ws.TensorParallel(
    {"0.0": "colwise", "1.0": "rowwise", "2.0": "colwise"}, axis="tp", reshard_after_forward=True
)


@pytest.mark.crossed
@pytest.mark.parametrize("beside", [[TENSOR], [replace(ZERO2, axis="dp")]], ids=["tp", "zero2"])
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_stages(schedule: Any, beside: list[Any]) -> None:
    """Blocks of stages, whose first and last runs are written out."""
    mesh = f"pp=2,{'tp' if beside[0] is TENSOR else 'dp'}=2"
    parallel = [*beside, ws.Pipeline(micro_batches=4, schedule=schedule)]
    found = compare(one_device(16), mesh, parallel, passes=_passes(CPUS, bucket_bytes=900, first_bucket_bytes=900))
    assert found.worst < 1e-10, f"{found.where} differs by {found.worst:.1e}"


ACROSS = ws.TensorParallel({f"{i}.0": "colwise" if i % 2 == 0 else "rowwise" for i in range(6)}, axis="tp")
INSIDE = {
    "tp": ("pp=2,tp=4", ACROSS), "zero2": ("dp=4,pp=2", replace(ZERO2, axis="dp")),
    "again": ("dp=4,pp=2", replace(AGAIN, axis="dp")),
}  # fmt: skip


def _in_stages(
    inside: str, schedule: Any = "auto", pieces: int = 4, rows: int = 64, placement: Any = "loop"
) -> LocalGraph:
    """The program of all stages of a step whose blocks communicate."""
    graph, (mesh, beside) = one_device(rows, 512, 6).capture.graph, INSIDE[inside]
    parallel = [beside, ws.Pipeline(micro_batches=pieces, schedule=schedule, placement=placement)]
    return ws.partition(graph, ws.plan(graph, mesh, parallel, hardware=GPUS))


@pytest.mark.usual("loop-tp-4")
@pytest.mark.parametrize(
    "pieces", [4, pytest.param(2, marks=pytest.mark.full), pytest.param(16, marks=pytest.mark.full)]
)
@pytest.mark.parametrize(("placement", "inside"), [
    ("loop", "tp"), ("v", "zero2"),
    *(pytest.param("loop", inside, marks=pytest.mark.full) for inside in ("zero2", "again")),
    *(pytest.param("v", inside, marks=pytest.mark.full) for inside in ("tp", "again")),
])  # fmt: skip
def test_auto_is_the_fastest_order_of_what_runs(placement: str, inside: str, pieces: int) -> None:
    """Of those that hold about as much as `1f1b`, by prices of the final programs. First and last runs of blocks, which
    have a share of other collectives, are not what an order is chosen by: where blocks gather, that share is larger.
    """
    local = _in_stages(inside, pieces=pieces, placement=placement)
    prices = BlockPrices(GPUS, local.mesh)
    made, again = staged(local, prices), staged(local, prices, "auto")
    assert (made.order, made.step_us) == (again.order, again.step_us)
    assert made.tried == pytest.approx(again.tried)
    passes = stage_passes(local.mesh, local.stage_axis, prices)
    short = ShortStages(local)
    found = simulated_orders(*(short.costs(prices, apart, passes) for apart in (False, True)), pieces, 2)
    fits = found.fitting([work.loop_bytes for work in short.works(prices, False, passes)])
    assert fits[0] == made.order
    for name in {"1f1b", "gpipe", "zero_bubble"}.intersection(fits):
        other = staged(_in_stages(inside, name, pieces, placement=placement), prices)
        assert other.order == name
        assert made.step_us <= (1.05 if inside == "again" else 1.01) * other.step_us


@pytest.mark.parametrize("inside", INSIDE)
def test_blocks_are_scheduled_once(inside: str) -> None:
    """What an order is chosen by is what runs."""
    local = _in_stages(inside)
    for stage, part in enumerate(orders_in(local)[0].parts):
        made = ws.run_passes(ws.stage_program(local, stage), ws.Schedule(GPUS).passes)
        ran = {block.name: block.body for block in blocks_in(made.graph.nodes)}
        assert {name: id(body) for name, body in ran.items()} == {
            block.name: id(block.as_run.body) for block in part.blocks
        }  # fmt: skip
        assert all(block.scheduled for block in part.blocks if any(map(is_collective, block.body.nodes)))


def test_ranks_take_the_order_of_a_rank_with_another_batch() -> None:
    one, other = (_in_stages("zero2", schedule) for schedule in ("gpipe", "zero_bubble"))
    made = with_orders(other.copy(), "", GPUS, named_orders(one))
    assert named_orders(made) == named_orders(one) != named_orders(other)
    assert staged(made, BlockPrices(GPUS, made.mesh)).step_us == staged(one, BlockPrices(GPUS, one.mesh)).step_us
    fewer = _in_stages("zero2", "gpipe", pieces=2)
    taken = with_orders(fewer.copy(), "", GPUS, named_orders(one))
    assert named_orders(taken) == named_orders(fewer), "of other pieces: its own"


def test_products_run_beside_exchanges_of_activations() -> None:
    """A stage adds up gradients of weights while it would wait for activations, and is simulated so."""
    local = _in_stages("tp", "1f1b")
    prices = BlockPrices(GPUS, local.mesh)
    passes = _flat(stage_passes(local.mesh, local.stage_axis, prices))
    made, plain = (staged(local, prices, passes=some) for some in (passes, _without(passes)))
    assert made.step_us < plain.step_us
    assert made.waited_us < plain.waited_us


@pytest.mark.crossed
@pytest.mark.parametrize("hardware", [CPUS, GPUS], ids=["cpus", "gpus"])
@pytest.mark.parametrize("style", ["zero2", "again"])
def test_fewer_and_hidden(style: str, hardware: ws.Hardware) -> None:
    """Numbers of collectives fall, and so does the time in which a rank waits for them."""
    passes = _flat(_passes(hardware))
    plain, made = (
        _program([STYLES[style], ws.MicroBatches(4)], "dp=8", some, 256, 8) for some in (_without(passes), passes)
    )
    assert len(_each_piece(made)) < len(_each_piece(plain)) / 2
    before, after = (ws.simulate(one, hardware) for one in (plain, made))
    assert after.exposed_us < before.exposed_us
    assert after.step_us < before.step_us


def test_gathers_are_ahead_within_bounds() -> None:
    """The next bucket is under way while one computes, and no more of them than the sizes allow."""
    made = _program([AGAIN, ws.MicroBatches(4)], "dp=8", _passes(GPUS, bucket_bytes=1 << 20), 256, 8)
    body, sizes = named_bodies(made.graph)["loop_1"], made.sizes
    assert sizes is not None
    under_way, computing = dict[Node, int](), list[int]()
    for node in body.nodes:
        if node.target is GATHER:
            under_way[node] = meta.size_bytes(node)
            assert len(under_way) <= sizes.in_flight or sum(under_way.values()) <= sizes.in_flight_bytes
        elif is_wait(node):
            under_way.pop(node_at(node, 0), None)
        elif node.target is torch.ops.aten.mm.default:
            computing.append(len(under_way))
    assert sum(map(bool, computing)) > len(computing) / 2, "products hide gathers"


@pytest.mark.crossed
@pytest.mark.parametrize("exchange", [False, True], ids=["scatters", "exchanges"])
@pytest.mark.parametrize("hardware", [CPUS, GPUS], ids=["cpus", "gpus"])
@pytest.mark.parametrize("style", ["zero2", "again"])
def test_memory_is_as_predicted(style: str, hardware: ws.Hardware, exchange: bool) -> None:
    """But for what collectives read: those of the fake group hold nothing."""
    made = _program([STYLES[style], ws.MicroBatches(4)], "dp=2", _passes(hardware), 64, 6)
    with fake_group(2) as group:
        predicted, measured = predicted_and_measured(made, group, exchange=exchange)
    sent = predicted.by_kind().get("sent", 0)
    assert 0.95 * measured <= predicted.size_bytes <= 1.05 * measured + sent


def test_memory_of_a_stage_is_as_predicted() -> None:
    """With values that runs of blocks hand each other: each view keeps what it is a view of."""
    local = _in_stages("again", "1f1b")
    with fake_group(4) as group:
        for stage in range(2):
            made = ws.run_passes(ws.stage_program(local, stage), _passes(GPUS))
            predicted, measured = predicted_and_measured(made, group, exchange=False)
            assert predicted.size_bytes == pytest.approx(measured, rel=0.001)


def test_ranks_have_one_order() -> None:
    """Names of bodies count: a rank takes the order of another one there, or says that it cannot."""
    made = _program([AGAIN, ws.MicroBatches(4)], "dp=2", _passes(CPUS, bucket_bytes=600), 12, 3)
    names = collectives_of(made)
    inside = [name for name in names if "/" in name]
    assert len(inside) == len(_each_piece(made)) > 2
    gathers = [name for name in inside if "gather" in name]
    first, second = names.index(gathers[0]), names.index(gathers[1])
    names[first], names[second] = names[second], names[first]
    assert collectives_of(with_collectives_in(made, names)) == names
    with pytest.raises(RankMismatchError, match="in the order of the first rank's"):
        with_collectives_in(made, names[:-1])
