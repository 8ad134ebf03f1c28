"""Prices of ops and collectives: bounds that physics sets, and measured kernels."""

import json
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW

import wholestep as ws
from wholestep.cost.compute import alone_us, flops, node_us, work
from wholestep.cost.simulation import kind_of, whole_bytes
from wholestep.cost.software import OWN
from wholestep.graph import meta
from wholestep.graph.nodes import is_collective
from wholestep.hardware.device import Device

PRESETS = [name for name in ws.Hardware.presets() if name != "loopback"]
H100 = ws.Hardware.preset("dgx-h100")


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (8, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        return x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


def train_step(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = model(x).float().square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


@pytest.fixture(scope="module")
def local() -> ws.LocalGraph:
    with torch.device("meta"):
        model, x = nn.Sequential(*[Block(1024) for _ in range(2)]), torch.empty(4, 2048, 1024)
    half = ws.MixedPrecision(torch.bfloat16, torch.float32)
    graph = ws.capture(train_step, model, AdamW(model.parameters(), fused=True), x,
                       options=ws.CaptureOptions(mixed_precision=half))  # fmt: skip
    made = ws.partition(graph, ws.plan(graph, "dp=16", ws.DataParallel("fully_shard")))
    return ws.run_passes(made, ws.default_passes(H100))


def device_of(hardware: ws.Hardware) -> Device:
    assert isinstance(hardware.device, Device)
    return hardware.device


def check_peaks(local: ws.LocalGraph, hardware: ws.Hardware, times: dict[Any, float] | None) -> None:
    """No op that computes takes less than the peak rate of its dtype allows."""
    for node in local.graph.nodes:
        made = work(node) if node.op == "call_function" and not is_collective(node) else None
        if made is None or not flops(node):
            continue
        us = node_us(node, hardware) if times is None else times[node]
        computed = flops(node) * (0.5 if made.causal else 1.0)
        assert us >= computed / hardware.peak_flops_per_us(made.dtype), node.name


# -- what physics allows -------------------------------------------------------------------------------
@pytest.mark.parametrize("name", PRESETS)
def test_no_op_is_faster_than_the_peak(local: ws.LocalGraph, name: str) -> None:
    """Operations by the peak, and bytes by the peak memory rate, are below every op's time."""
    hardware = ws.Hardware.preset(name)
    check_peaks(local, hardware, OWN.op_times(local.graph, hardware))


@pytest.mark.parametrize("name", PRESETS)
def test_utilization_is_at_most_what_tiles_reach(local: ws.LocalGraph, name: str) -> None:
    """Attention counts masked elements, twice what it computes."""
    hardware = ws.Hardware.preset(name)
    top = device_of(hardware).ceiling("bfloat16")
    most = max(
        max((t.rate for t in top.tiles), default=top.rate) * device_of(hardware).sustained,
        2 * (top.attention or top.rate),
    )
    assert 0 < ws.simulate(local, hardware).mfu <= most


@pytest.mark.parametrize("name", PRESETS)
def test_no_collective_is_faster_than_its_slowest_link(local: ws.LocalGraph, name: str) -> None:
    hardware = ws.Hardware.preset(name)
    rates = [level.bytes_per_us for level in hardware.levels]
    slowest = min(rates) if (hardware.ranks_per_node or 16) < 16 else rates[0]
    sent = [node for node in local.graph.nodes if is_collective(node)]
    assert sent
    for node in sent:
        ranks = local.mesh.axis_size(str(node.args[-1]))
        bound = whole_bytes(node) / ranks / slowest  # at the least, a rank's own part leaves a node or enters it
        assert hardware.collective_us(kind_of(node), whole_bytes(node), local.mesh, "dp") >= bound


def test_less_power_and_a_slower_rank_make_products_slower() -> None:
    shape = 1, 8192, 8192, 8192
    fast = replace(H100, device=replace(device_of(H100), sustained=1.0))
    capped = ws.Hardware.preset("h100-96gb-500w")
    assert fast.matmul_us(*shape) < H100.matmul_us(*shape) < capped.matmul_us(*shape)
    assert capped.peak_flops_per_us("bfloat16") == H100.peak_flops_per_us("bfloat16")


def test_a_kernel_that_computes_less_runs_at_a_higher_clock() -> None:
    """Products set the clock that lasts; attention, which reaches less of the peak, loses less by a lower limit of
    power, and the slowest kernels lose nothing.
    """
    capped = ws.Hardware.preset("h100-96gb-500w")
    full = {name: replace(device_of(one), sustained=1.0) for name, one in (("700", H100), ("500", capped))}

    def slower(hardware: ws.Hardware, name: str, speed: float) -> float:
        shape = 1, 32, 16384, 16384, 128, "bfloat16"
        return device_of(hardware).attention_us(*shape, speed=speed) / full[name].attention_us(*shape, speed=speed)

    products = 1 / device_of(capped).sustained
    assert slower(H100, "700", 0.5) == 1.0
    assert 1.0 <= slower(H100, "700", 1.0) < slower(capped, "500", 1.0) < slower(capped, "500", 1.6) < products
    ceiling = device_of(capped).ceiling("bfloat16")
    assert device_of(capped).clock(ceiling, 0.859) == pytest.approx(device_of(capped).sustained)


# -- measured kernels ----------------------------------------------------------------------------------
def product(local: ws.LocalGraph) -> tuple[Any, list[list[int]]]:
    """The largest product, and the shapes of its operands."""
    node = max((n for n in local.graph.nodes if n.op == "call_function" and "mm" in str(n.target)), key=flops)
    return node, [list(meta.one_tensor(given).shape) for given in node.all_input_nodes]


def write(path: Path, body: object) -> Path:
    path.write_text(json.dumps(body))
    return path


def test_measured_kernels_count_as_measured(local: ws.LocalGraph, tmp_path: Path) -> None:
    node, shapes = product(local)
    op = str(node.target.overloadpacket.__name__)
    row = {"op": op, "shapes": shapes, "dtype": "bfloat16", "us": 12345.0}
    given = ws.KernelTimes.load(write(tmp_path / "kernels.json", {"kernels": [row, {**row, "dtype": "float32"}]}))
    assert given.us(node) == 12345.0
    assert ws.simulate(local, H100, profile=given).step_us > ws.simulate(local, H100).step_us + 12000
    compiled = ws.simulate(local, H100, compiled=True, profile=given).step_us
    assert compiled > ws.simulate(local, H100, compiled=True).step_us + 12000


def test_what_was_not_measured_follows_from_what_was(local: ws.LocalGraph, tmp_path: Path) -> None:
    """Products half as fast as predicted make all products so, and nothing else."""
    node, shapes = product(local)
    predicted = alone_us(local.graph, H100)
    row = {"shapes": shapes, "dtype": "bfloat16", "us": 2 * predicted[node]}
    op = str(node.target.overloadpacket.__name__)

    def ratios(kernels: list[dict[str, Any]], **rates: float) -> dict[Any, float]:
        given = ws.KernelTimes.load(write(tmp_path / "kernels.json", {"kernels": kernels, **rates}))
        found = OWN.measured(False, given).op_times(local.graph, H100)
        assert found is not None
        return {n: round(found[n] / us, 6) for n, us in predicted.items() if us > 0}

    products = {n for n, us in predicted.items() if us > 0 and (made := work(n)) is not None and made.matmul}
    assert len(products) > 2
    assert ratios([row | {"op": op}]) == {n: 2.0 if n in products else 1.0 for n in ratios([], device=1.0)}
    assert set(ratios([row | {"op": op}], device=3.0).values()) == {2.0, 3.0}
    assert set(ratios([], device=3.0).values()) == {3.0}


def test_an_export_of_the_profiler_is_read(local: ws.LocalGraph, tmp_path: Path) -> None:
    """Two kernels of one op add up; of two calls the median counts."""
    node, shapes = product(local)
    name = f"aten::{node.target.overloadpacket.__name__}"
    types = ["c10::BFloat16"] * len(shapes)
    events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "args": {"name": "python"}}]
    for number, parts in enumerate(([30.0, 10.0], [60.0])):
        told = {"External id": number, "Input Dims": shapes, "Input type": types}
        events.append({"ph": "X", "cat": "cpu_op", "name": name, "ts": 0, "dur": 5, "args": told})
        args = {"External id": number}
        events += [{"ph": "X", "cat": "kernel", "name": "k", "dur": us, "args": args} for us in parts]
    found = ws.KernelTimes.load(write(tmp_path / "trace.json", {"traceEvents": events}))
    assert found.us(node) == 50.0
    q = [4, 8, 2048, 128]
    types = [*["c10::BFloat16"] * 3, "Scalar", ""]
    attention = {"External id": 9, "Input Dims": [q, q, q, [], []], "Input type": types}
    events = [
        {"ph": "X", "cat": "cpu_op", "name": "aten::_scaled_dot_product_flash_attention", "args": attention},
        {"ph": "X", "cat": "kernel", "name": "flash_fwd", "dur": 77, "args": {"External id": 9}},
    ]
    found = ws.KernelTimes.load(write(tmp_path / "trace.json", {"traceEvents": events}))
    known = [n for n in local.graph.nodes if n.op == "call_function" and found.us(n)]
    assert [found.us(n) for n in known] == [77.0, 77.0]
    done = [made.attention for n in known if (made := work(n))]
    assert all(prod(one or ()) == prod(q) * 2048 for one in done)


ROW = {"op": "mm", "shapes": [[2, 2]], "dtype": "bfloat16", "us": 1.0}


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"kernels": [{"op": "mm", "shapes": [[1]], "dtype": "bfloat16"}]}, "field kernels[0].us is missing"),
        ({"kernels": [ROW | {"shapes": [["a"]]}]}, "kernels[0].shapes[0][0] is 'a'"),
        ({"kernels": [ROW | {"us": -1.0}]}, "kernels[0].us is -1.0"),
        ({"kernels": []}, "has no kernel"),
        ({"kernels": [], "device": -1.0}, "device is -1.0"),
        ({"traceEvents": [{"cat": "kernel", "dur": "long"}]}, "traceEvents[0].dur is 'long'"),
        ([], "the file is []"),
    ],
)
def test_a_malformed_profile_names_its_entry(body: object, said: str, tmp_path: Path) -> None:
    with pytest.raises(ws.PlanError) as error:
        ws.KernelTimes.load(write(tmp_path / "kernels.json", body))
    assert said in str(error.value)
    with pytest.raises(ws.PlanError, match="cannot be read"):
        ws.KernelTimes.load(tmp_path / "none.json")


# -- tensor parallelism --------------------------------------------------------------------------------
class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(64, 64, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (made(x).unflatten(-1, (4, -1)).transpose(1, 2) for made in (self.q, self.k, self.v))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def test_attention_of_some_heads_copies_nothing_before_it() -> None:
    """How a transposed piece of a product lies in memory is known; and what returns its operand costs nothing."""
    from wholestep.partition.rank_ops import in_order

    with torch.device("meta"):
        model, x = Heads(), torch.empty(2, 16, 64)
    graph = ws.capture(train_step, model, AdamW(model.parameters(), fused=True), x)
    split = ws.TensorParallel({"q": "colwise", "k": "colwise", "v": "colwise", "out": "rowwise"}, axis="tp")
    made = ws.partition(graph, ws.plan(graph, "tp=2", split))
    attention = next(node for node in made.graph.nodes if "attention" in str(node.target))
    assert [one.target for one in attention.all_input_nodes] == [torch.ops.aten.transpose.int] * 3
    rest = [node for node in made.graph.nodes if node.target is in_order]
    assert all(node_us(node, H100) == 0 for node in rest)
