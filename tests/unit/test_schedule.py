"""Passes that merge, split and order: how many collectives are left, what is refused, what the simulation says."""

from collections import Counter
from dataclasses import replace
from functools import cache
from typing import cast

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Node
from torch.optim import SGD, Adam, Optimizer
from torch.utils.checkpoint import checkpoint

import wholestep as ws
from tests.catalogue import CASES
from tests.simulate import index_of
from tests.steps import clipped
from tests.steps import mean_square as train
from wholestep.backend.rank_binding import bound_arguments
from wholestep.cost.simulation import simulate
from wholestep.cost.software import Fills
from wholestep.graph import meta
from wholestep.graph.graph import Role
from wholestep.graph.meta import one_tensor
from wholestep.graph.nodes import add_call, is_collective, is_wait, node_at, operands
from wholestep.graph.op_kinds import PRODUCTS
from wholestep.graph.verify import check_local_graph
from wholestep.hardware.curves import CollectiveCost
from wholestep.hardware.hardware import Hardware
from wholestep.passes.base import Pass
from wholestep.passes.bucket import GATHER, REDUCE, SCATTER, Bucket, in_pieces, join_rows
from wholestep.passes.bucket_sizes import Route, SizeBuckets, even_bytes
from wholestep.passes.context import CollectiveTraffic, Context
from wholestep.passes.cross_step import CrossStep
from wholestep.passes.order_collectives import with_collectives_in
from wholestep.passes.overlap import Overlap
from wholestep.passes.reinplace import GATHER_INTO, Reinplace
from wholestep.passes.schedule import Schedule
from wholestep.passes.sink_waits import SinkWaits
from wholestep.passes.split_optimizer import SplitOptimizer
from wholestep.passes.write_into_buckets import (
    WriteIntoBuckets,
    multiply_into,
    part_of_average,
    put_pieces,
    put_together,
)
from wholestep.proof.interpret import run_all

MB = 1 << 20


def layers(
    count: int, width: int, style: str = "replicate", fused: bool = True, rows: int = 2, ranks: int = 2, mesh: str = ""
) -> ws.LocalGraph:
    """The program of one of `ranks`, or of `mesh`, for so many square linear layers, on `meta`."""
    graph = step_of(count, width, fused, rows)
    return ws.partition(graph, ws.plan(graph, mesh or f"dp={ranks}", ws.DataParallel(style)))  # type: ignore[arg-type]


@cache
def step_of(count: int, width: int, fused: bool, rows: int) -> ws.TrainGraph:
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(width, width) for _ in range(count)])
        x = torch.empty(rows, width)
    optimizer: Optimizer = Adam(model.parameters(), fused=True) if fused else SGD(model.parameters(), lr=0.1)
    return ws.capture(train, model, optimizer, x)


def count(local: ws.LocalGraph) -> dict[str, int]:
    return {kind: total.count for kind, total in local.collectives().items()}


@pytest.mark.parametrize(
    ("many", "width", "cap_mb", "left"), [(5, 600, 2, 3), (2, 600, 100, 2), (2, 4096, 100, 2), (5, 4096, 100, 3)]
)
def test_reductions_left_after_merging(many: int, width: int, cap_mb: int, left: int) -> None:
    """The first bucket closes at 1 MiB, later ones at the given size."""
    local = layers(many, width)
    assert count(local) == {"all_reduce": 2 * many}
    assert count(ws.run_passes(local, [Bucket(cap_mb * MB)])) == {"all_reduce": left}


@pytest.mark.smoke
def test_waits_stand_just_before_their_first_reader() -> None:
    local = ws.run_passes(layers(3, 16, "zero1"), [SinkWaits()])
    order = list(local.graph.nodes)
    for node in order:
        if is_wait(node):
            reader = min(node.users, key=order.index)
            between = order[order.index(node) + 1 : order.index(reader)]
            assert all(is_wait(n) for n in between), "other waits of the same reader at most"


@pytest.mark.parametrize("style", ["zero1", "zero2", "fully_shard"])
def test_uneven_parts_go_in_as_many_buckets_as_even_ones(style: str) -> None:
    """What was padded to be gathered is cut again behind the wait: a view, which reads nothing before it is read."""
    even, uneven = (Schedule(SLOW, 40 << 10, 40 << 10)(layers(8, 64, style, ranks=ranks)) for ranks in (2, 3))
    assert count(even) == count(uneven)
    assert count(uneven)["all_gather"] < 16


@pytest.mark.parametrize(
    ("style", "hops"),
    [
        ("replicate", {"all_reduce": "ab"}),
        ("hybrid", {"reduce_scatter": "b", "all_reduce": "a", "all_gather": "b"}),
        ("zero1", {"reduce_scatter": "ab", "all_gather": "ba"}),
        ("fully_shard", {"reduce_scatter": "ab", "all_gather": "ba"}),
    ],
)
def test_a_bucket_goes_on_along_further_axes(style: str, hops: dict[str, str]) -> None:
    """Along each axis as many collectives, and for each bucket one update, as along the first one alone."""
    apart = layers(8, 64, style, mesh="a=2,b=2")
    local = Schedule(SLOW, 40 << 10, 40 << 10)(apart)
    sent = Counter(
        (str(n.target).split(".")[1].split("_into")[0].split("_tensor")[0], n.args[-1]) for n in sends(local)
    )
    assert sent == {(kind, axis): 3 for kind, axes in hops.items() for axis in axes}
    assert [total.bytes for total in local.collectives().values()] == [
        total.bytes for total in apart.collectives().values()
    ]
    assert len([n for n in local.graph.nodes if "_fused_adam" in str(n.target)]) == 3


def test_further_hops_start_while_others_are_computed() -> None:
    """Sums between nodes do not wait for the end of the backward, though no bucket is merged."""
    local = layers(8, 300, "hybrid", rows=128, mesh="node=2,rank=2")
    for changed in (Overlap(SLOW)(SizeBuckets(SLOW)(local)), Schedule(SLOW, 512 << 10, 256 << 10)(local)):
        order = ["all_reduce" in str(n.target) for n in sends(changed)]
        assert order.index(True) < len(order) - 1 - order[::-1].index(False)
        assert simulate(changed, SLOW).exposed_us < 0.25 * simulate(local, SLOW).exposed_us


def sends(local: ws.LocalGraph) -> list[torch.fx.Node]:
    return [n for n in local.graph.nodes if is_collective(n)]


@pytest.mark.smoke
def test_one_optimizer_for_each_bucket() -> None:
    local = ws.run_passes(layers(5, 600), [SinkWaits(), Bucket(2 * MB), SplitOptimizer()])
    fused = [n for n in local.graph.nodes if "_fused_adam" in str(n.target)]
    assert sorted(lengths(fused)) == [2, 4, 4]


@pytest.mark.crossed
@pytest.mark.parametrize("lists", [False, True], ids=["one by one", "lists, as on GPUs"])
@pytest.mark.parametrize(("style", "ops"), [("replicate", 1), ("fully_shard", 1), ("zero1", 3)])
def test_one_optimizer_where_a_norm_over_all_gradients_scales_them(style: str, ops: int, lists: bool) -> None:
    """All updates wait for the norm; ZeRO-1's stay apart, so that each bucket is gathered while the next is updated."""

    def clipped(model: nn.Module, optimizer: Optimizer, x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=lists)
        optimizer.step()
        return loss.detach()

    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(32, 32) for _ in range(5)]).double()
    optimizer = Adam(model.parameters(), fused=True)
    graph = ws.capture(clipped, model, optimizer, torch.randn(4, 32, dtype=torch.float64))
    before = ws.partition(graph, ws.plan(graph, "dp=2", ws.DataParallel(style)))  # type: ignore[arg-type]
    after = ws.run_passes(before, [SinkWaits(), Bucket(10000, 10000), SplitOptimizer()])
    fused = [n for n in after.graph.nodes if "_fused_adam" in str(n.target)]
    assert (len(fused), sum(lengths(fused))) == (ops, 10)
    assert sum("_foreach_mul" in str(n.target) for n in after.graph.nodes) == ops * lists
    assert_same_on_all_ranks(before, after, 2)


@pytest.mark.crossed
@pytest.mark.parametrize(("style", "mesh"), [("fully_shard", "dp=2"), ("fully_shard", "dp=3"), ("hybrid", "a=2,b=2")])
@pytest.mark.parametrize("bucket_bytes", [20_000, None])
def test_gpus_send_tensors_from_where_they_are(style: str, mesh: str, bucket_bytes: int | None) -> None:
    """No copy into or out of buckets, also of uneven parts, and in place the same bits as one by one."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(37, 37) for _ in range(5)]).double()
    graph = ws.capture(clipped, model, Adam(model.parameters(), fused=True), torch.randn(4, 37, dtype=torch.float64))
    plan = ws.plan(graph, mesh, ws.DataParallel(style, reshard_after_forward=True))  # type: ignore[arg-type]
    before = ws.partition(graph, plan)
    schedule = Schedule(Hardware.preset("dgx-h100"), bucket_bytes, min(bucket_bytes or MB, MB))
    after = schedule(before)
    targets = {getattr(n.target, "__name__", "") for n in after.graph.nodes}
    assert not targets & {"part_of_gather", "part_of_scatter"}
    assert {"coalesce", "part_of_coalesced_gather", "part_of_coalesced_scatter"} <= targets
    assert_same_on_all_ranks(before, after, before.mesh.size)
    assert_same_on_all_ranks(
        ws.run_passes(before, [Reinplace()]), ws.run_passes(after, [Reinplace()]), before.mesh.size
    )


def assert_same_on_all_ranks(before: ws.LocalGraph, after: ws.LocalGraph, ranks: int) -> None:
    """Both programs give each rank the same bits, from the same state and batches that differ."""
    wholes = {i.name: torch.rand(i.meta.shape, dtype=i.meta.dtype) for i in before.inputs}
    given = [
        [wholes[i.name][index_of(i.meta.shape, at, before.mesh, r)] + (r if i.name == "x" else 0)
         for i, at in zip(before.inputs, before.layouts, strict=True)]
        for r in range(ranks)
    ]  # fmt: skip
    held = [[[x.clone() for x in row] for row in given] for _ in range(2)]
    ours, plain = (run_all(local, rows, bound_arguments) for local, rows in zip((after, before), held, strict=True))
    for mine, theirs in (*zip(ours, plain, strict=True), *zip(*held, strict=True)):
        for a, b in zip(mine, theirs, strict=True):
            assert torch.equal(a, b)


@pytest.mark.crossed
@pytest.mark.parametrize("style", ["zero1", "fully_shard"])
@pytest.mark.parametrize("bucket_bytes", [1000, 20000, None])
def test_what_two_axes_cut_is_gathered_and_scattered_in_two_hops(style: str, bucket_bytes: int | None) -> None:
    """The second hop waits for the first; merged, bounded and moved, all four ranks get the same bits."""
    model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)])
    graph = ws.capture(train, model, SGD(model.parameters(), lr=0.1, momentum=0.9), torch.randn(4, 256))
    data = ws.DataParallel(style, reshard_after_forward=False)  # type: ignore[arg-type]
    before = ws.partition(graph, ws.plan(graph, "a=2,b=2", data))
    after = ws.run_passes(before, [Schedule(bucket_bytes=bucket_bytes, in_flight_bytes=40000)])
    assert sum(count(after).values()) <= sum(count(before).values())
    assert_same_on_all_ranks(before, after, 4)


def test_what_tensor_parallel_cuts_is_gathered_again_over_the_other_axis() -> None:
    """`reshard_after_forward` holds for parameters that are gathered over one axis and stay cut by another."""
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])
    graph = ws.capture(train, model, SGD(model.parameters(), lr=0.1), torch.randn(4, 64))
    tensor = ws.TensorParallel({"0": "colwise", "1": "rowwise", "2": "colwise", "3": "rowwise"})
    gathers = []
    for again in (False, True):
        data = ws.DataParallel("fully_shard", axis="dp", reshard_after_forward=again)
        gathers.append(count(ws.partition(graph, ws.plan(graph, "dp=2,tp=2", [data, tensor])))["all_gather"])
    assert gathers == [8, 11]  # three weights more, for the gradients of the activations


def lengths(optimizers: list[torch.fx.Node]) -> list[int]:
    return [len(list(node.args[0])) for node in optimizers]  # type: ignore[call-overload]


def slow_hardware(flops_per_us: float = 2000, link_bytes_per_us: float = 400) -> Hardware:
    return Hardware.measured(
        flops_per_us=flops_per_us, memory_bytes_per_us=8000, launch_us=4, link_us=100,
        link_bytes_per_us=link_bytes_per_us,
    )  # fmt: skip


SLOW = slow_hardware()


@pytest.mark.parametrize("style", ["replicate", "zero1", "zero2", "fully_shard"])
def test_less_is_exposed(style: str) -> None:
    """Where communication fits under arithmetic, little of it is left to wait for."""
    local = layers(8, 300, style, rows=128)
    before, after = simulate(local, SLOW), simulate(Schedule(SLOW, 512 << 10, 256 << 10)(local), SLOW)
    assert after.exposed_us < before.exposed_us
    assert after.step_us < 1.01 * before.step_us  # merging copies
    assert after.exposed_us < 0.1 * after.step_us


def test_updates_run_while_other_gradients_travel() -> None:
    """ZeRO-1: a bucket's update and the gather of its parameters stand before the last reduction starts."""
    local = Schedule(SLOW, 512 << 10, 256 << 10)(layers(8, 300, "zero1", rows=128))
    order = [n for n in local.graph.nodes if is_collective(n)]
    kinds = ["gather" if "all_gather" in str(n.target) else "scatter" for n in order]
    assert kinds.index("gather") < len(kinds) - 1 - kinds[::-1].index("scatter")


def test_gathers_wait_for_room() -> None:
    """No more gathered parameters wait for their use than `in_flight_bytes`, but for one that is needed."""
    most = 800_000
    local = Overlap(SLOW)(SizeBuckets(SLOW, in_flight_bytes=most)(layers(8, 300, "fully_shard", rows=128)))
    flying: dict[torch.fx.Node, int] = {}
    worst = 0
    for node in local.graph.nodes:
        if is_collective(node) and "all_gather" in str(node.target):
            made = meta.tensor(node)
            assert made is not None
            flying[node] = made.size_bytes
            worst = max(worst, sum(flying.values()))
        elif is_wait(node):
            flying.pop(node_at(node, 0), None)
    assert 400_000 < worst <= most


def test_gradients_on_the_wire_are_bounded() -> None:
    """What waits to be scattered is at most `in_flight_bytes`, and the step takes about as long as without it."""
    slow = slow_hardware(link_bytes_per_us=60)
    local = layers(12, 300, "fully_shard", rows=128)
    few, many = (Schedule(slow, 512 << 10, 256 << 10, flying)(local) for flying in (3 * MB // 2, 1 << 30))
    assert scattering(few) <= 3 * MB // 2 < scattering(many) - MB
    assert simulate(few, slow).step_us <= 1.01 * simulate(many, slow).step_us
    assert count(few) == count(many)


def scattering(local: ws.LocalGraph) -> int:
    """The most bytes that reduce-scatters read before they are waited for."""
    flying: dict[torch.fx.Node, int] = {}
    worst = 0
    for node in local.graph.nodes:
        if is_wait(node):
            flying.pop(node_at(node, 0), None)
        elif is_collective(node) and "reduce_scatter" in str(node.target):
            given = meta.tensor(node_at(node, 0))
            assert given is not None
            flying[node] = given.size_bytes
            worst = max(worst, sum(flying.values()))
    return worst


def test_plain_optimizers_need_no_splitting() -> None:
    local = layers(4, 64, "zero1", fused=False)
    assert count(Schedule(SLOW, 16 << 10, 4 << 10)(local))["reduce_scatter"] < count(local)["reduce_scatter"]


def test_buckets_by_the_link() -> None:
    """The faster a link, the larger its buckets."""
    sizes = [Hardware.measured(link_us=200, link_bytes_per_us=rate).bucket_bytes for rate in (30, 119, 1500, 100_000)]
    assert sorted(set(sizes)) == sizes


def test_all_reduces_that_processors_send_are_few() -> None:
    """Nothing hides what takes the processors, so it is merged; a bucket size that is given is kept to."""
    local, left = layers(10, 600), list[int]()
    for busy in (0.2, 0.6, 1.0):
        wire = CollectiveCost("all_reduce", start_us=50.0, byte_us=0.001, cpu_byte_us=busy * 0.001)
        hardware = Hardware.measured(link_us=50.0, link_bytes_per_us=1000.0, collectives=(wire,))
        chosen, given = Schedule(hardware)(local), Schedule(hardware, bucket_bytes=MB)(local)
        left.append(count(chosen)["all_reduce"])
        assert left[-1] <= count(given)["all_reduce"]
        assert simulate(chosen, hardware).step_us <= 1.01 * simulate(given, hardware).step_us
    assert left[0] > left[1] > left[2]


def test_few_bytes_go_in_smaller_buckets() -> None:
    """Nothing hides the last bucket: a link that starts slowly wants large ones, but not of a step that sends few."""
    local, hardware = layers(10, 600), Hardware.measured(link_us=2000, link_bytes_per_us=120)
    most = hardware.bucket_bytes
    even, large = Schedule(hardware)(local), Schedule(hardware, bucket_bytes=most)(local)
    assert count(large)["all_reduce"] < count(even)["all_reduce"] < count(local)["all_reduce"]
    assert simulate(even, hardware).step_us <= 1.05 * simulate(large, hardware).step_us
    routes, sent = [Route("all_reduce", "dp")], (0, MB, 14 * MB, 100 * MB, 1 << 40)
    unknown, *late = (even_bytes(hardware, local.mesh, reduced, most, routes) for reduced in sent)
    assert late == sorted(late), "the more there is to send, the larger"
    assert unknown == late[-1] == most
    assert 0 < late[0] < MB


def test_part_of_a_step_has_the_buckets_of_the_whole() -> None:
    """By what all of it carries, where the part itself carries little and gathers nothing again."""
    local, hardware = layers(10, 600), Hardware.measured(link_us=2000, link_bytes_per_us=120)

    def of_whole(hardware: Hardware, whole: CollectiveTraffic) -> ws.LocalGraph:
        return ws.run_passes(local, [Schedule(hardware)], context=Context(traffic=whole))

    alone = count(Schedule(hardware)(local))["all_reduce"]
    assert count(of_whole(hardware, CollectiveTraffic(1000 * MB, 0)))["all_reduce"] < alone, "much is sent after it"
    hardware = Hardware.measured(link_us=200, link_bytes_per_us=100_000)
    alone = count(Schedule(hardware)(local))["all_reduce"]
    of_few, of_many = (count(of_whole(hardware, CollectiveTraffic(n, n)))["all_reduce"] for n in (12 * MB, 36 * MB))
    assert of_few > of_many > alone, "what the whole gathers again bounds what is in flight"


def test_gathering_again_holds_less_on_any_link() -> None:
    """Buckets as large as a fast link wants would hold all parameters, gathered, more than once."""
    with torch.device("meta"):
        model, x = nn.Sequential(*[nn.Linear(500, 500) for _ in range(24)]), torch.empty(8, 500)
    graph = ws.capture(train, model, Adam(model.parameters(), fused=True), x)
    rates = (100.0, 2_000.0, 100_000.0)
    for hardware in (Hardware.measured(link_us=200, link_bytes_per_us=rate) for rate in rates):
        kept, again = (
            ws.peak_memory(
                ws.run_passes(ws.partition(graph, ws.plan(graph, "dp=2", data)), ws.default_passes(hardware))
            ).size_bytes
            for data in (ws.DataParallel("fully_shard", reshard_after_forward=now) for now in (False, True))
        )
        assert again < 0.9 * kept


def test_the_order_of_another_rank() -> None:
    """A rank that would order its collectives in another way, its batch being larger, takes the first rank's order."""
    small, large = (layers(6, 64, "zero1", rows=rows) for rows in (2, 4096))
    schedule = Schedule(SLOW, 16 << 10, 8 << 10)
    first, mine = schedule(small), schedule(large)
    names = [[n.name for n in one.graph.nodes if is_collective(n)] for one in (first, mine)]
    assert names[0] != names[1], "the case is of use"
    taken = with_collectives_in(mine, names[0])
    assert [n.name for n in taken.graph.nodes if is_collective(n)] == names[0]
    check_local_graph(taken)
    with pytest.raises(ws.RankMismatchError, match="in the order of the first rank's"):
        with_collectives_in(mine, names[0][::-1])
    with pytest.raises(ws.RankMismatchError, match="in the order of the first rank's"):
        with_collectives_in(mine, names[0][1:])


# -- order of passes ------------------------------------------------------------------
def test_passes_are_named_in_what_they_made() -> None:
    local = ws.run_passes(layers(2, 16), [SinkWaits(), Bucket(), SplitOptimizer()])
    assert local.passes == ("SinkWaits", "Bucket", "SplitOptimizer")
    assert Schedule(SLOW)(local).passes[-2:] == ("Overlap", "LimitInflight")


@pytest.mark.parametrize(
    ("passes", "message"),
    [
        ([SplitOptimizer()], "pass SplitOptimizer must be applied after Bucket; applied so far: none"),
        ([Reinplace(), Bucket()], "pass Bucket must be applied before Reinplace; applied so far: Reinplace"),
        ([Reinplace(), Schedule(SLOW)], "pass SizeBuckets must be applied before Reinplace"),
    ],
)
def test_order_of_passes_is_checked(passes: list[Pass], message: str) -> None:
    with pytest.raises(ws.GraphError, match=message):
        ws.run_passes(layers(2, 16), passes)


def test_moving_needs_split_optimizers() -> None:
    with pytest.raises(ws.GraphError, match="pass CrossStep must be applied after SplitOptimizer"):
        ws.run_passes(layers(2, 16), [CrossStep()])


@pytest.mark.crossed
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("style", ["replicate", "zero1", "fully_shard"])
def test_no_copies_are_left_behind_the_optimizer(style: str, fused: bool) -> None:
    """Parameters and state are updated where they are; ZeRO-1's gathered parameters are copied, once a bucket."""
    local = ws.run_passes(layers(4, 64, style, fused), [Schedule(SLOW), Reinplace()])
    names = [getattr(n.target, "__name__", str(n.target)) for n in local.graph.nodes]
    copies, gathers = sum("copy_" in name for name in names), sum("all_gather" in name for name in names)
    assert copies == (gathers if style == "zero1" else 0)
    assert gathers or style == "replicate"


def test_gathered_parameters_are_copied_to_where_they_rest() -> None:
    """ZeRO-1's new parameters go there from their bucket, and the old ones are not read after that."""
    merged = Schedule(SLOW, 40 << 10, 40 << 10)(layers(4, 64, "zero1"))
    landed = ws.run_passes(merged, [Reinplace()])
    names = [[getattr(n.target, "__name__", "") for n in one.graph.nodes] for one in (merged, landed)]
    assert (names[0].count("part_of_gather"), names[1].count("part_of_gather")) == (8, 0)
    params = {n: i.name for i, n in landed.placeholders() if i.role is Role.PARAM}
    order = {n: at for at, n in enumerate(landed.graph.nodes)}
    homes = [n for n in landed.graph.nodes if n.target is in_pieces]
    landing = [(home, param) for home in homes for param in cast("list[Node]", home.args[0])]
    assert sorted(params[param] for _, param in landing) == sorted(params.values())
    for home, param in landing:
        assert all(order[user] <= order[home] for user in param.users), f"{params[param]} is read once it is written"
        assert home.args[2] == "dp", "the own part is there already"


def test_an_own_part_that_was_not_updated_in_place_is_copied_too() -> None:
    """Where the optimizer makes new tensors, what a rank sent is not what its parameters hold."""
    merged = Schedule(SLOW, 40 << 10, 40 << 10)(layers(4, 64, "zero1"))
    for join in [n for n in merged.graph.nodes if n.target is join_rows and n.args[1] == 1]:
        pieces = cast("list[Node]", join.args[0])
        with merged.graph.inserting_before(join):
            join.args = (
                [add_call(merged.graph, torch.ops.aten.neg.default, (p,), one_tensor(p), p) for p in pieces],
                1,
            )
    homes = [n for n in ws.run_passes(merged, [Reinplace()]).graph.nodes if n.target is in_pieces]
    assert homes
    assert all(home.args[2] is None for home in homes)


def test_on_gpus_a_bucket_is_copied_at_once() -> None:
    """ZeRO-1's new parameters: one kernel takes the pieces of all of them, however small they are."""
    schedule = Schedule(Hardware.preset("dgx-h100"), 40 << 10, 40 << 10)
    landed = ws.run_passes(layers(4, 64, "zero1"), [schedule, Reinplace()])
    gathers = [n for n in landed.graph.nodes if n.target is GATHER]
    copies = [n for n in landed.graph.nodes if "copy_" in str(n.target)]
    assert 1 < len(gathers) < 8
    assert [n.target for n in copies] == [torch.ops.aten._foreach_copy_.default] * len(gathers)
    homes = [param for copy in copies for param in operands(node_at(copy, 0))]
    assert sorted(n.name for n in homes) == sorted(n.name for i, n in landed.placeholders() if i.role is Role.PARAM)
    order = {n: at for at, n in enumerate(landed.graph.nodes)}
    for copy in copies:
        for param in operands(node_at(copy, 0)):
            assert all(order[user] < order[copy] for user in param.users), f"{param} is read once it is written"


def test_what_would_be_copied_goes_alone() -> None:
    """Of gathers and reduce-scatters; an all-reduce's bucket is filled as gradients are made, without a copy."""
    styles = "replicate", "zero1", "fully_shard"
    merged = {style: ws.run_passes(layers(4, 300, style), [Bucket(MB, MB, alone_bytes=300 << 10)]) for style in styles}
    assert count(merged["fully_shard"]) == {"all_gather": 5, "reduce_scatter": 5}
    assert count(merged["replicate"]) == {"all_reduce": 2}
    for style in ("zero1", "fully_shard"):
        joined = [n for join in merged[style].graph.nodes if join.target is join_rows for n in operands(join)]
        assert len(joined) >= 4, "biases"
        assert max(one_tensor(n).size_bytes for n in joined) < 300 << 10


def test_a_parameter_that_is_gathered_alone_is_received_where_it_rests() -> None:
    """ZeRO-1's new parameters take no other memory, and nothing reads the old ones while they arrive."""
    landed = ws.run_passes(Schedule(SLOW, 1, 1)(layers(4, 64, "zero1")), [Reinplace()])
    check_local_graph(landed)
    gathers = [n for n in landed.graph.nodes if n.target is GATHER_INTO]
    assert {i.name for i, n in landed.placeholders() if n in {g.kwargs["out"] for g in gathers}} == {
        i.name for i in landed.inputs if i.role is Role.PARAM
    }
    assert not [n for n in landed.graph.nodes if "copy_" in str(n.target)]
    assert count(landed) == {"reduce_scatter": 8, "all_gather": 8}


@pytest.mark.parametrize("late", [True, False])
def test_a_parameter_that_is_read_meanwhile_is_received_elsewhere(late: bool) -> None:
    local = Schedule(SLOW, 1, 1)(layers(1, 64, "zero1"))
    gather = next(n for n in local.graph.nodes if n.target is GATHER and one_tensor(n).shape == (64, 64))
    home = next(n for _, n in local.placeholders() if one_tensor(n).shape == (64, 64))
    loss = next(n for out, n in local.results() if out.kind == "result")
    with local.graph.inserting_before(next(iter(gather.users)) if late else next(iter(home.users))):
        read = add_call(local.graph, torch.ops.aten.sum.default, (home,), one_tensor(loss), home)
    with local.graph.inserting_before(next(iter(reversed(local.graph.nodes)))):
        both = add_call(local.graph, torch.ops.aten.add.Tensor, (loss, read), one_tensor(loss), home)
    loss.replace_all_uses_with(both, lambda user: user.op == "output")  # pyright: ignore[reportUnknownLambdaType, reportUnknownMemberType]
    landed = ws.run_passes(local, [Reinplace()])
    into = [n.kwargs["out"].name for n in landed.graph.nodes if n.target is GATHER_INTO]
    assert (home.name in into) != late
    assert any("copy_" in str(n.target) for n in landed.graph.nodes) == late


def test_graphs_that_others_hold_are_left_as_they_are() -> None:
    """Passes that follow each other change one copy; not what was given, nor what a pass of the user's has kept."""
    kept: list[tuple[ws.LocalGraph, str]] = []

    def keep(local: ws.LocalGraph) -> ws.LocalGraph:
        kept.append((local, str(local)))
        return local

    given = layers(4, 64, "zero1")
    before = str(given)
    made = ws.run_passes(given, [Schedule(SLOW, 40 << 10, 40 << 10), keep, WriteIntoBuckets(), Reinplace()])
    assert str(given) == before
    assert all(str(local) == text for local, text in kept)
    assert len({before, kept[0][1], str(made)}) == 3


def test_products_are_made_in_their_bucket() -> None:
    """Gradients of weights need no copy; those of biases, and what else is reduced with them, are copied at once."""
    merged = Schedule(SLOW, 40 << 10, 40 << 10)(layers(4, 64))
    filled = ws.run_passes(merged, [WriteIntoBuckets()])
    names = [[getattr(n.target, "__name__", "") for n in one.graph.nodes] for one in (merged, filled)]
    assert (names[0].count("join_rows"), names[0].count("multiply_into")) == (2, 0)
    assert names[1].count("join_rows") == 0
    assert (names[1].count("multiply_into"), names[1].count("put_pieces")) == (4, 2)


@pytest.mark.crossed
@pytest.mark.parametrize(
    ("ranks", "dtype", "scale"),
    [(2, torch.float32, 0.5), (4, torch.bfloat16, 0.25), (3, torch.float32, 1.0), (2, torch.float16, 1.0)],
)
@pytest.mark.parametrize("merged", [True, False])
def test_averages_are_sums_of_parts_where_these_are_exact(
    merged: bool, ranks: int, dtype: torch.dtype, scale: float
) -> None:
    """What is multiplied or copied for an all-reduce is scaled then, what is reduced alone before it."""
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)]).to("meta", dtype)
    x = torch.empty(2, 64, dtype=dtype, device="meta")
    graph = ws.capture(train, model, SGD(model.parameters(), lr=0.1), x)
    local = ws.partition(graph, ws.plan(graph, f"dp={ranks}", ws.DataParallel("replicate")))
    passes = [Bucket(20 << 10, 20 << 10), WriteIntoBuckets()] if merged else [WriteIntoBuckets()]
    nodes = ws.run_passes(local, passes).graph.nodes
    ops = [node.args[1] for node in nodes if node.target is REDUCE]
    assert ops.count("sum") == (0 if scale == 1 else len(ops))
    scaled = [n.args[-1] for n in nodes if n.target in (multiply_into, put_pieces, part_of_average)]
    assert set(scaled) <= {scale}
    assert len(scaled) >= (4 if merged or scale != 1 else 0)


@pytest.mark.parametrize("style", ["replicate", "zero1"])
@pytest.mark.parametrize("most_bytes", [1, 1 << 20])
def test_how_many_micro_batches_there_are_changes_no_collective(most_bytes: int, style: str) -> None:
    """One rank's gradients are products, another's are sums of products: all ranks add up, or all take the mean."""

    def several(model: nn.Module, optimizer: Optimizer, xs: list[Tensor]) -> None:
        optimizer.zero_grad()
        for x in xs:
            model(x).square().mean().backward()
        optimizer.step()

    found: list[list[str]] = []
    for count in (1, 3):
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64, bias=False))
        graph = ws.capture(several, model, SGD(model.parameters(), lr=0.1), [torch.ones(2, 64)] * count)
        local = ws.partition(graph, ws.plan(graph, "dp=2", ws.DataParallel(style)))  # type: ignore[arg-type]
        nodes = ws.run_passes(local, [Bucket(most_bytes, most_bytes), WriteIntoBuckets()]).graph.nodes
        found.append([f"{n.target} {n.args[1:]}" for n in nodes if n.target in (REDUCE, SCATTER)])
    assert found[0] == found[1]
    assert len(found[0]) == (1 if most_bytes > 1 else 3)


def test_parts_of_an_average() -> None:
    torch.manual_seed(3)
    a, b, piece = torch.randn(6, 5), torch.randn(5, 4), torch.randn(3, 2)
    assert torch.equal(part_of_average(a, b, 0.25), (a @ b) / 4)
    bucket = torch.full((30,), float("nan"))
    bucket = put_pieces(multiply_into(bucket, 6, a, b, 0.25), [6, 24], [0], [piece], 0.25)
    assert torch.equal(bucket, torch.cat([piece.flatten(), (a @ b).flatten()]) / 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_pieces_that_a_gpu_writes_together_are_the_same_bits(dtype: torch.dtype, scale: float) -> None:
    rows = [torch.randn(size).to(dtype) for size in (6, 1, 24)]
    one_by_one = put_pieces(torch.empty(31, dtype=dtype), [6, 1, 24], [0, 1, 2], rows, scale)
    together = torch.empty(31, dtype=dtype)
    put_together(together.split([6, 1, 24]), rows, scale)
    assert torch.equal(together, one_by_one)


@pytest.mark.crossed
@pytest.mark.parametrize("case", ["convolutions", "recurrent", "micro-batches"])
@pytest.mark.parametrize("style", ["zero1", "fully_shard"])
def test_bounds_on_gradients_where_several_are_made_at_once(case: str, style: str) -> None:
    """No wait comes before its collective, also where a later reduction's gradient is there before an earlier one's."""
    model = CASES[case].build()
    arguments = model, Adam(model.parameters()), CASES[case].batches(0)
    graph = ws.capture(CASES[case].step, *arguments)
    local = ws.partition(graph, ws.plan(graph, "dp=2", ws.DataParallel(style)))  # type: ignore[arg-type]
    check_local_graph(Schedule(SLOW, bucket_bytes=1, first_bucket_bytes=1, in_flight_bytes=1)(local))


# -- products beside exchanges of activations -------------------------------------------
class Mlp(nn.Module):
    """`again`: with a product in front, so that the backward computes its sum of activations again."""

    def __init__(self, width: int, again: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.before = Mlp(width) if again else None

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.before is None else self.before(x)
        return x + self.down(self.up(x.tanh()).relu())


class Recomputing(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = cast(Tensor, checkpoint(layer, x, use_reentrant=False))
        return x


def exchanging(mesh: str, again: bool = False, layers: int = 3) -> ws.LocalGraph:
    """Layers whose ranks along `tp` sum activations; `zero1` beside it."""
    several = [Mlp(64, again) for _ in range(layers)]
    model, x = (Recomputing if again else nn.Sequential)(*several), torch.empty(64, 64)
    graph = ws.capture(train, model, Adam(model.parameters(), fused=True), x)
    tensor = ws.TensorParallel({"*.up": "colwise", "*.down": "rowwise"}, axis="tp")
    beside = [ws.DataParallel("zero1", axis="dp")] if "dp" in mesh else []
    return ws.partition(graph, ws.plan(graph, mesh, [*beside, tensor]))


def filled(local: ws.LocalGraph, fills: Fills, in_flight_bytes: int | None = None) -> ws.LocalGraph:
    passes = Schedule(SLOW, 16 << 10, 16 << 10, in_flight_bytes).passes
    return ws.run_passes(local, [replace(one, fills=fills) if isinstance(one, Overlap) else one for one in passes])


def products_beside_sums(local: ws.LocalGraph, recomputed: bool) -> list[int]:
    """How many products run while each sum of activations of the backward, or of what it recomputes, travels."""
    nodes = list(local.graph.nodes)
    found = list[int]()
    for place, node in enumerate(nodes):
        if is_collective(node) and node.args[-1] == "tp" and meta.is_backward(node):
            (wait,) = node.users
            if bool(meta.module_path(node)) is recomputed:
                found.append(sum(one.target in PRODUCTS for one in nodes[place : nodes.index(wait)]))
    return found


@pytest.mark.parametrize("fills", ["own", "all"])
@pytest.mark.parametrize("mesh", ["tp=4", "dp=2,tp=2"])
def test_sums_of_activations_are_hidden_behind_gradients_of_weights(mesh: str, fills: Fills) -> None:
    local = exchanging(mesh)
    plain, made = filled(local, "none"), filled(local, fills)
    assert not any(products_beside_sums(plain, recomputed=False))
    assert all(products_beside_sums(made, recomputed=False)[:-1])  # gradients alone read the last one
    before, after = simulate(plain, SLOW), simulate(made, SLOW)
    assert after.exposed_us < before.exposed_us
    assert after.step_us < before.step_us
    assert count(made) == count(plain)
    assert_same_on_all_ranks(plain, made, 4)


@pytest.mark.parametrize("flops_per_us", [20.0, 2000.0, 200_000.0])
@pytest.mark.parametrize("mesh", ["tp=4", "dp=2,tp=2"])
def test_gradients_of_weights_wait_only_where_that_gains(mesh: str, flops_per_us: float) -> None:
    hardware, local = slow_hardware(flops_per_us), exchanging(mesh)
    sized = SizeBuckets(hardware)(local)
    plain, made = (simulate(Overlap(hardware, fills)(sized), hardware).step_us for fills in ("none", "all"))
    assert made <= plain


@pytest.mark.parametrize("fills", ["own", "all"])
def test_only_the_own_linear_fills_a_wait(fills: Fills) -> None:
    """Megatron's sums of what is recomputed are exposed: the gradients of the next layer are there already."""
    made = filled(exchanging("tp=4", again=True), fills)
    assert any(products_beside_sums(made, recomputed=True)) is (fills == "all")
    assert all(products_beside_sums(made, recomputed=False)[:-1])


def most_put_off(plain: ws.LocalGraph, made: ws.LocalGraph) -> int:
    """The most products for weights, which read a transposed gradient, that are behind a product that they were in
    front of.
    """
    orders = [[n for n in one.graph.nodes if n.target in PRODUCTS] for one in (plain, made)]
    late = {n.name for n in orders[0] if meta.is_backward(n) and node_at(n, 0).target is torch.ops.aten.t.default}
    before, after = ([n.name for n in one] for one in orders)
    done = [(set(before[: before.index(name)]), set(after[: after.index(name)])) for name in before if name not in late]
    return max(len((first - then) & late) for first, then in done)


@pytest.mark.parametrize(("in_flight_bytes", "most"), [(1, 1), (1 << 30, 3)])
def test_gradients_that_wait_are_bounded(in_flight_bytes: int, most: int) -> None:
    local = exchanging("tp=4", layers=5)
    plain, made = (filled(local, fills, in_flight_bytes) for fills in ("none", "all"))
    assert most_put_off(plain, made) == most
    assert ws.peak_memory(made).size_bytes == ws.peak_memory(plain).size_bytes


@pytest.mark.parametrize("fills", ["own", "all"])
def test_gradients_wait_where_reductions_are_carried(fills: Fills) -> None:
    across = replace(Schedule(SLOW, 16 << 10, 16 << 10), across_steps=True).passes
    plain, made = (
        ws.run_passes(exchanging("dp=2,tp=2"), [replace(p, fills=f) if isinstance(p, Overlap) else p for p in across])
        for f in ("none", fills)
    )
    assert made.across is not None
    assert any(products_beside_sums(made, recomputed=False))
    assert simulate(made, SLOW).step_us < simulate(plain, SLOW).step_us


# -- across steps -----------------------------------------------------------------------
@pytest.mark.parametrize("style", ["replicate", "zero1", "zero2", "fully_shard"])
def test_less_is_exposed_across_steps(style: str) -> None:
    hardware = slow_hardware(flops_per_us=80_000)  # the wire is nearly as busy as the rank
    local = layers(8, 300, style, rows=128)
    schedule = Schedule(hardware, 256 << 10, 128 << 10)
    across = replace(schedule, across_steps=True)(local)
    assert across.across is not None
    alone, steady = simulate(schedule(local), hardware), simulate(across, hardware)
    assert steady.exposed_us < alone.exposed_us
    assert steady.step_us < 1.001 * alone.step_us


def test_what_is_read_first_goes_first() -> None:
    """On a link that is too slow the reduction of the first layer overtakes those that became ready before it."""
    slow = Hardware.measured(
        flops_per_us=20_000, memory_bytes_per_us=8000, launch_us=4, link_us=10, link_bytes_per_us=100
    )
    schedule = Schedule(slow, bucket_bytes=1, first_bucket_bytes=1)
    local = layers(6, 64, fused=False, rows=64)
    across = replace(schedule, across_steps=True)(local)
    assert across.across is not None
    names = [[n.name for n in one.graph.nodes if is_collective(n)] for one in (schedule(local), across)]
    assert sorted(names[0]) == sorted(names[1])
    ready = {name: place for place, name in enumerate(names[0])}
    layer = [ready[name] // 2 for name in names[1]]  # 0 is the last layer, whose gradients exist first
    assert layer[0] == 0
    late = layer[layer.index(5) :]
    assert len(late) > 4, "several wait for the first layer's"
    assert late == sorted(late, reverse=True)
    assert [n.name for n in across.across[0].graph.nodes if is_collective(n)] == names[1]


@pytest.mark.parametrize("style", ["zero1", "zero2", "fully_shard"])
def test_a_flush_and_a_first_call_send_what_a_steady_call_sends(style: str) -> None:
    """In one order, so that a rank may complete its step while another goes on with the next one.

    Layers are updated in the order in which they were made, and read in another.
    """

    class Backwards(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            for layer in reversed(list(self)):
                x = layer(x)
            return x

    with torch.device("meta"):
        model, x = Backwards(*[nn.Linear(64, 64) for _ in range(8)]), torch.empty(16, 64)
    graph = ws.capture(train, model, Adam(model.parameters(), fused=True), x)
    local = ws.partition(graph, ws.plan(graph, "dp=2", ws.DataParallel(style)))  # type: ignore[arg-type]
    across = Schedule(SLOW, 8 << 10, 8 << 10, across_steps=True)(local)
    assert across.across is not None
    flush, first, steady = (
        [n.name for n in one.graph.nodes if is_collective(n)] for one in (*reversed(across.across), across)
    )
    assert [*flush, *first] == steady


@pytest.mark.parametrize("style", ["replicate", "zero1", "fully_shard"])
def test_gradients_of_micro_batches_are_summed_at_once(style: str) -> None:
    """More micro-batches hold no more than two do."""

    def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, parts: list[torch.Tensor]) -> torch.Tensor:
        optimizer.zero_grad()
        for part in parts:
            loss = model(part).square().mean() / len(parts)
            loss.backward()
        optimizer.step()
        return loss.detach()

    peaks: list[int] = []
    for count in (2, 4):
        model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        graph = ws.capture(train_step, model, optimizer, [torch.randn(8, 256) for _ in range(count)])
        local = ws.partition(graph, ws.plan(graph, "dp=8", ws.DataParallel(style)))  # type: ignore[arg-type]
        peaks.append(ws.peak_memory(ws.run_passes(local, ws.default_passes())).size_bytes)
    assert peaks[1] < peaks[0] * 1.2
