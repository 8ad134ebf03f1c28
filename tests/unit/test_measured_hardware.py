"""Measured hardware: costs of ops and of collectives, overlap with computing, classes of ops."""

import json
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

import wholestep as ws
from tests.steps import mean_square as train
from wholestep.cost.compute import node_us, work
from wholestep.cost.simulation import Clock, kind_of, simulate, whole_bytes
from wholestep.distributed.launch import join
from wholestep.graph.nodes import is_collective, is_wait
from wholestep.graph.op_kinds import streams
from wholestep.hardware.curves import CollectiveCost
from wholestep.hardware.device import Work
from wholestep.hardware.hardware_file import from_json, to_json
from wholestep.passes.bucket import Bucket
from wholestep.passes.write_into_buckets import WriteIntoBuckets, multiply_into, new_bucket, put_pieces
from wholestep.profiling.measure_hardware import (
    PRODUCTS,
    measure_hardware,
    of_products,
    usual,
)

MESH = ws.Mesh("dp=2")
RATES = {
    "flops_per_us": 1000, "memory_bytes_per_us": 1000, "launch_us": 1, "link_us": 10, "link_bytes_per_us": 100
}  # fmt: skip


def hardware_with(**changed: Any) -> ws.Hardware:
    return ws.Hardware.measured(**{**RATES, **changed})


PLAIN = hardware_with()
aten = torch.ops.aten


def training() -> ws.TrainGraph:
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(3)])
        x = torch.empty(32, 64)
    return ws.capture(train, model, SGD(model.parameters(), lr=0.1), x)


def program(passes: bool = True) -> ws.LocalGraph:
    """The program of one of two ranks for three layers whose gradients are reduced in one bucket."""
    graph = training()
    local = ws.partition(graph, ws.plan(graph, "dp=2", ws.DataParallel("replicate")))
    return ws.run_passes(local, [ws.Schedule(PLAIN), WriteIntoBuckets()]) if passes else local


def test_figures_that_are_not_given_are_those_of_others() -> None:
    attention = Work(8, 4000.0, attention=(1, 1, 10, 10, 10))
    math = Work(8000, streams=False)
    assert PLAIN.work_us(attention) == pytest.approx(1 + 4)
    assert PLAIN.work_us(math) == pytest.approx(1 + 8)
    known = hardware_with(attention_flops_per_us=500, math_bytes_per_us=250)
    assert known.work_us(attention) == pytest.approx(1 + 8)
    assert known.work_us(math) == pytest.approx(1 + 32)
    assert known.work_us(replace(math, streams=True)) == pytest.approx(1 + 8)


def test_each_kind_of_collective_has_its_figures() -> None:
    """An all-reduce is a reduce-scatter and an all-gather at most: 520 us as measured, 67.5 + 510 us of the two."""
    wires = (
        CollectiveCost("all_reduce", 20, 0.5, cpu_us=3, cpu_byte_us=0.25),
        CollectiveCost("all_gather", 5, 0.125),
        CollectiveCost("reduce_scatter", 10, 1.0),
    )
    hardware = hardware_with(collectives=wires)
    assert hardware.collective_us("all_reduce", 1000, MESH, "dp") == pytest.approx(20 + 1000 * 0.5)
    assert hardware.collective_us("all_gather", 1000, MESH, "dp") == pytest.approx(5 + 500 * 0.125)
    assert hardware.collective_us("all_to_all", 1000, MESH, "dp") == pytest.approx(10 + 500 / 100)
    assert hardware.compute_steal_us("all_reduce", 1000, MESH, "dp") == pytest.approx(3 + 250)
    assert hardware.compute_steal_us("all_to_all", 1000, MESH, "dp") == 0
    assert PLAIN.compute_steal_us("all_reduce", 1000, MESH, "dp") == 0
    assert PLAIN.host_us("all_reduce", 1000, MESH, "dp") == (1, 0)
    own = hardware_with(
        collectives=(CollectiveCost("reduce_scatter", 1, 1, host_us=5, host_byte_us=0.01, reduce_byte_us=0.5),)
    )
    assert own.host_us("reduce_scatter", 1000, MESH, "dp") == pytest.approx((5 + 5, 250))
    assert own.host_us("all_gather", 1000, MESH, "dp") == (1, 0)
    late = hardware_with(collectives=(CollectiveCost("all_gather", 5, 0.125, overlap_slowdown=1.5),))
    assert [late.overlap_slowdown(kind, MESH, "dp") for kind in ("all_gather", "all_reduce")] == [1.5, 1]
    assert from_json(json.loads(json.dumps(to_json(late)))) == late


def test_what_the_thread_that_computes_does_for_collectives_is_not_hidden() -> None:
    """To start them, and to add up what came."""
    graph = training()
    plan = ws.plan(graph, "dp=2", ws.DataParallel("zero1"))
    local = ws.run_passes(ws.partition(graph, plan), [Bucket(20_000, 20_000)])
    sent = [n for n in local.graph.nodes if is_collective(n) and kind_of(n) == "reduce_scatter"]
    assert len(sent) > 1
    wire = CollectiveCost("reduce_scatter", 10, 1 / 100)
    plain, own, adds = (
        simulate(local, hardware_with(collectives=(one,))).step_us
        for one in (wire, replace(wire, host_us=1001.0), replace(wire, reduce_byte_us=1.0))
    )
    assert own - plain == pytest.approx(1000 * len(sent), rel=0.05)
    assert adds - plain == pytest.approx(sum(whole_bytes(n) for n in sent) / 2, rel=0.05)


def test_copies_of_buckets_have_their_rate() -> None:
    nodes = [n for n in program().graph.nodes if n.op == "call_function"]
    pieces = next(n for n in nodes if n.target is put_pieces)
    made = work(pieces)
    assert made is not None
    assert made.bucketed
    assert node_us(pieces, hardware_with(bucket_copy_bytes_per_us=10)) == 1 + made.moved_bytes / 10
    assert node_us(pieces, PLAIN) == 1 + made.moved_bytes / 1000
    assert not any(m.bucketed for n in nodes if n.target is multiply_into and (m := work(n)) is not None)


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        (aten.add.Tensor, True), (aten.add_.Tensor, True), (aten.cat.default, True), (aten._to_copy.default, True),
        (aten._foreach_add_.Scalar, True), (aten._fused_adamw_.default, True), (put_pieces, True),
        (aten.gelu.default, False), (aten.exp_.default, False), (aten.sum.dim_IntList, False),
        (aten.native_layer_norm.default, False), (aten._log_softmax.default, False),
    ],
)  # fmt: skip
def test_what_is_bound_by_its_bytes(op: object, expected: bool) -> None:
    assert streams(op) is expected


def test_a_bucket_that_is_filled_is_not_read() -> None:
    nodes = [n for n in program().graph.nodes if n.op == "call_function"]
    product = work(next(n for n in nodes if n.target is multiply_into))
    assert product is not None
    assert product.moved_bytes == 4 * (64 * 32 + 32 * 64 + 64 * 64)
    pieces = work(next(n for n in nodes if n.target is put_pieces))
    assert pieces is not None
    assert pieces.moved_bytes == 2 * 3 * 64 * 4, "three biases, read and written"
    assert work(next(n for n in nodes if n.target is new_bucket)) is None


def test_a_view_costs_its_call_where_the_host_computes() -> None:
    local = program()
    view = next(n for n in local.graph.nodes if n.target is aten.t.default)
    assert node_us(view, PLAIN) == 0
    assert node_us(view, hardware_with(view_us=7.0)) == 7
    slower = simulate(local, hardware_with(view_us=7.0)).step_us
    assert slower > simulate(local, PLAIN).step_us
    assert node_us(view, ws.Hardware.preset("dgx-h100")) == 0


def test_a_collective_takes_from_computing_what_is_left_of_it() -> None:
    """One of 100 us that takes 40: 60 us of arithmetic beside it take 100, what follows takes as long as ever."""
    local = program()
    calls = [n for n in local.graph.nodes if n.op == "call_function"]
    sent, op = next(n for n in calls if is_collective(n)), next(n for n in calls if n.target is aten.add.Tensor)

    def after(us: float, taken: float) -> float:
        clock = Clock(hardware_with(launch_us=us, memory_bytes_per_us=1e12), MESH)
        clock.begun[sent], clock.ends[sent], clock.stolen_us[sent] = 0.0, 100.0, taken
        clock.run(op)
        return clock.now

    assert after(30, 40) == pytest.approx(50)
    assert after(60, 40) == pytest.approx(100)
    assert after(90, 40) == pytest.approx(130)
    assert after(30, 400) == pytest.approx(120), "something is left for computing"
    assert after(5, 400) == pytest.approx(50)


def test_collectives_are_faster_while_a_rank_waits() -> None:
    """Two of 50 us each that take 100 beside computing: after 40 us of that, 30 us of waiting bring the first."""
    local = program(passes=False)
    calls = [n for n in local.graph.nodes if n.op == "call_function"]
    first, second = [n for n in calls if is_collective(n)][:2]
    op = next(n for n in calls if n.target is aten.add.Tensor)
    made, wire = work(op), CollectiveCost("all_reduce", 50.0, 0.0, overlap_slowdown=2.0)
    gather = CollectiveCost("all_gather", 50.0, 0.0)  # an all-reduce takes no longer than it and a reduce-scatter
    assert made is not None
    speed = made.moved_bytes / 40
    clock = Clock(hardware_with(launch_us=0.0, memory_bytes_per_us=speed, collectives=(wire, gather)), MESH)
    clock.run(first)
    clock.run(second)
    assert [clock.ends[n] for n in (first, second)] == pytest.approx([100, 200]), "if it computes all the while"
    clock.run(op)
    clock.run(next(n for n in first.users if is_wait(n)))
    assert (clock.now, clock.waited) == pytest.approx((40 + 30, 30))
    assert (clock.begun[second], clock.ends[second], clock.links_free) == pytest.approx((70, 170, 170))
    clock.run(next(n for n in second.users if is_wait(n)))
    assert (clock.now, clock.waited) == pytest.approx((70 + 50, 30 + 50))


def test_steps_whose_collectives_take_processors_are_longer() -> None:
    local = program(passes=False)
    wire = CollectiveCost("all_reduce", 10, 1 / 100)
    free, busy = (
        simulate(local, hardware_with(collectives=(replace(wire, cpu_us=us),))).step_us for us in (0.0, 5.0)
    )  # fmt: skip
    assert simulate(local, PLAIN).step_us == free
    assert free < busy <= free + 6 * 5.0 + 1e-6, "three weights, three biases"


def test_a_rank_alone_measures_no_link() -> None:
    found = measure_hardware(join(ws.Mesh("dp=1"), "cpu"))
    figures = asdict(found.device)
    unmeasured = ("name", "bucket_copy_bytes_per_us", "product_bytes_per_us")
    assert all(figures[name] > 0 for name in figures if name not in unmeasured)
    assert all(cost.start_us == 0 for cost in found.levels[0].costs)


def test_samples_that_another_process_disturbed_do_not_count() -> None:
    """A thread that had its core for a part of the time says how long the rest took, not how fast the core is."""
    quiet, disturbed = [(10.0, 10.0), (11.0, 10.9), (12.0, 11.8), (10.5, 10.4)], [(40.0, 10.0), (30.0, 11.0)] * 3
    samples = torch.tensor([*quiet, *disturbed], dtype=torch.float64)
    assert usual(samples, 1.0) == 10.5
    assert usual(samples, 2.0) == pytest.approx(20.8)  # a step meets the other rank, a short probe may not
    assert usual(samples[1:], 1.0) == 30.0  # three are too few to go by


def test_two_products_say_what_arithmetic_and_bytes_take() -> None:
    """The device that is made of the rates prices both products, and those between them, as they were timed."""

    def took(m: int, k: int, n: int) -> float:
        return 2.0 * m * k * n * 1e-5 + 4.0 * (m * k + k * n + m * n) * 4e-4

    each_us, byte_us = of_products(*(took(*shape) for shape in PRODUCTS))
    assert (each_us, byte_us) == pytest.approx((1e-5, 4e-4))
    device = hardware_with(flops_per_us=1 / each_us, product_bytes_per_us=1 / byte_us, memory_bytes_per_us=10_000)
    assert device.matmul_us(1, 256, 256, 256, "float32") == pytest.approx(1 + took(256, 256, 256))
    large_us = took(*PRODUCTS[0])
    assert of_products(large_us, large_us / 4) == (large_us / (2.0 * 512 * 384 * 768), 0.0), "a faster small one"
