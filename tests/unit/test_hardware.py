"""Described hardware: the seed's formulas to the last digit, groups on nodes, JSON, and its use in simulation."""

import json
import pickle
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.fx import Graph
from torch.optim import SGD

import wholestep as ws
from tests.steps import mean_square as train
from wholestep.cache.key import text_of
from wholestep.cost.compute import flops, node_us, peak_us, work
from wholestep.cost.simulation import Clock
from wholestep.graph.meta import contiguous, meta_of, set_tensors, size_bytes
from wholestep.graph.nodes import is_collective
from wholestep.hardware import presets
from wholestep.hardware.curves import ALGORITHMS, Curve, Regime
from wholestep.hardware.device import Device
from wholestep.hardware.hardware import Level, units_of
from wholestep.layout import Layout
from wholestep.reshard import reshard

SEED = ws.Hardware.seed()
# every rank its own host: the outer level of the seed alone
APART = replace(SEED, levels=SEED.levels[1:])
LINE, SQUARE = ws.Mesh("x=4"), ws.Mesh("x=2,y=2")
MIB, GIB = 1 << 20, 1 << 30
S0, S1, R = Layout((("x",), ())), Layout(((), ("x",))), Layout(((), ()))
P = Layout(((), ()), partial=(("x", "sum"),))
INFINITE = float("inf")


def cost(source, target, shape=(10, 10), mesh=LINE, hardware=APART):
    """The cheapest path in microseconds. DTensor's planner, of which these are the values, lets no shard and no other
    partial value become partial.
    """
    states = [(source.state(axis), target.state(axis)) for axis in source.axes | target.axes]
    if any(want.kind == "P" and have.kind in ("S", "P") and have != want for have, want in states):
        return INFINITE
    return reshard(source, target, shape, 4, mesh, hardware).cost_us


@pytest.mark.parametrize(
    ("kind", "whole", "ranks", "per_node", "expected"),
    [
        ("all_gather", MIB, 4, 4, 16.75144669327252),
        ("all_reduce", MIB, 4, 4, 26.90289338654504),
        ("all_gather", GIB, 8, 8, 9987.994982896236),
        ("all_reduce", GIB, 8, 8, 19969.389965792474),
        ("all_gather", GIB, 8, 1, 45376.38628589198),
        ("reduce_scatter", GIB, 8, 1, 45376.38628589198),
        ("all_reduce", GIB, 8, 1, 90746.17257178396),
    ],
)
def test_the_seeds_formulas(kind, whole, ranks, per_node, expected):
    assert SEED.group_us(kind, whole, ranks, per_node) == pytest.approx(expected, rel=1e-12, abs=1e-9)


def test_the_seeds_values_of_one_axis():
    assert cost(S0, R) == pytest.approx(14.714481018574928, abs=1e-9)
    assert cost(P, S0) == pytest.approx(14.714481018574928, abs=1e-9)
    assert cost(P, R) == pytest.approx(22.828962037149857, abs=1e-9)


def test_the_seeds_values_of_two_axes():
    both = Layout((("x", "y"), ()))
    partial = Layout(((), ()), partial=(("x", "sum"), ("y", "sum")))
    assert cost(both, R, (8, 8), SQUARE) == pytest.approx(18.609268, abs=1e-6)
    assert cost(partial, R, (8, 8), SQUARE) == pytest.approx(24.024714, abs=1e-6)
    assert cost(partial, both, (8, 8), SQUARE) == pytest.approx(18.609268, abs=1e-6)


@pytest.mark.smoke
@pytest.mark.parametrize("layout", [S0, S1, R, P])
def test_staying_is_free(layout):
    assert cost(layout, layout) == 0


def test_relations_of_the_seed():
    gather, scatter, reduce = (SEED.group_us(k, MIB, 4) for k in ("all_gather", "reduce_scatter", "all_reduce"))
    assert reduce + 1 < gather + scatter
    average = Layout(((), ()), partial=(("x", "avg"),))
    assert cost(S0, P) == INFINITE
    assert cost(P, average) == INFINITE
    mesh = ws.Mesh("x=4,y=4")
    both = Layout((("x", "y"), ()))
    outer, inner = Layout((("x",), ())), Layout((("y",), ()))
    assert cost(both, inner, (16, 16), mesh) > cost(both, outer, (16, 16), mesh)


def test_the_seed_chooses_for_addmm():
    shapes = ((8,), (50, 6), (6, 8))
    whole, cut = Layout(((),)), Layout((("x",),))
    given = (cut, P, S1)
    ways = {
        "(S0,R,S1)->S1": (cut, R, S1),
        "(R,S0,R)->S0": (whole, S0, R),
        "(R,R,R)->R": (whole, R, R),
        "(P,S1,S0)->P": (Layout(((),), partial=(("x", "sum"),)), S1, S0),
    }
    price = {
        name: sum(cost(a, b, shape) for a, b, shape in zip(given, wanted, shapes, strict=True))
        for name, wanted in ways.items()
    }
    assert min(price, key=price.__getitem__) == "(S0,R,S1)->S1"
    assert price["(S0,R,S1)->S1"] < price["(R,S0,R)->S0"]


@pytest.mark.parametrize(
    ("mesh", "axis", "units"),
    [
        ("dp=4,tp=8", "tp", (8, 1, 1)),
        ("dp=4,tp=8", "dp", (4, 4, 1)),
        ("dp=8,tp=4", "dp", (8, 4, 1)),
        ("dp=2,tp=16", "tp", (16, 2, 1)),
        ("dp=32", "dp", (32, 4, 1)),
        ("a=3,b=3", "b", (3, 2, 1)),  # ranks 6, 7, 8 stand on two nodes
        ("a=2,b=4", "a", (2, 1, 1)),
    ],
)
def test_an_axis_crosses_nodes_by_its_stride_and_size(mesh, axis, units):
    assert units_of(ws.Mesh(mesh), axis, (8, 0)) == units


@pytest.mark.parametrize("algorithm", sorted(ALGORITHMS))
@pytest.mark.parametrize("units", [(8, 1), (16, 2, 1), (4, 4, 1), (12, 2, 1), (32, 4, 2, 1)])
def test_algorithms_load_every_level_they_cross(algorithm, units):
    kind = "all_to_all" if algorithm in ("pairwise", "copy_engine") else "all_reduce"
    loads = ALGORITHMS[algorithm](kind, units)
    assert len(loads) == len(units) - 1
    for load, (under, over) in zip(loads, pairwise(units), strict=True):
        assert load.share >= 0
        assert load.hops >= 0
        if algorithm != "flat" and under > over:
            assert load.share > 0


def test_what_goes_between_nodes_is_shared_by_the_ranks_of_a_node():
    h100 = ws.Hardware.preset("dgx-h100")
    spread, together = (h100.group_us("all_gather", GIB, 16, per) for per in (1, 8))
    assert together < spread / 4
    assert h100.group_us("all_gather", GIB, 8, 8) < together


@pytest.mark.parametrize("name", ws.Hardware.presets())
def test_presets(name):
    found = ws.Hardware.preset(name)
    for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send"):
        for ranks in (2, 4, 8, 64, 1024):
            times = [found.group_us(kind, 4**i, ranks) for i in range(17)]
            assert times == sorted(times), (kind, ranks)
            assert times[0] > 0
    assert found.group_us("all_reduce", GIB, 1) == 0
    assert ws.Hardware.preset(f"{name}").device.memory_bytes > GIB


def test_other_links_between_nodes():
    fast, slow = (ws.Hardware.preset(f"dgx-a100+{link}") for link in ("infiniband-400", "ethernet-10"))
    assert fast.group_us("all_gather", GIB, 64) < slow.group_us("all_gather", GIB, 64) / 10
    assert fast.group_us("all_gather", GIB, 8) == slow.group_us("all_gather", GIB, 8)
    with pytest.raises(ws.PlanError, match="there is no hardware 'dgx-x'"):
        ws.Hardware.preset("dgx-x")


ISSUED = {  # TFLOPS of the fastest half precision, GB/s of memory, GB of memory, processors: as the makers publish them
    "dgx-a100": (312, 2039, 80, 108), "dgx-h100": (989, 3350, 80, 132), "h200": (989, 4800, 141, 132),
    "b200-nvl72": (2250, 8000, 192, 148),
}  # fmt: skip


@pytest.mark.parametrize("name", ISSUED)
def test_numbers_of_data_sheets(name):
    check_sheet(ws.Hardware.preset(name), *ISSUED[name])


def check_sheet(found, tera, rate, size, processors):
    device = found.device
    assert device.peak_flops_per_us("float16") == pytest.approx(tera * 1e6)
    assert device.memory_bytes_per_us == rate * 1e3
    assert device.memory_bytes in (
        (size << 30) * 15 // 16 if found.name == "l40s" else size << 30,
        size * 10**9,
    )  # ECC of GDDR
    assert device.processors == processors
    assert found.sources, "each preset says where its numbers are from"


def test_a_link_has_its_source():
    """That of the link in the name, and no longer that of the link it replaces."""
    sheets = {one for name in ws.Hardware.presets() for one in ws.Hardware.preset(name).sources if "data sheet" in one}
    assert len(sheets) >= 4
    for link, said in {
        "roce-400": "RoCE",
        "efa-400": "EFA",
        "ethernet-100": "TCP",
        "infiniband-800": "InfiniBand",
    }.items():
        sources = ws.Hardware.preset(f"dgx-h100+{link}").sources
        assert any(said in one for one in sources), link
        assert any("NVIDIA H100 data sheet" in one for one in sources)
        assert link.startswith("infiniband") or not any("bandwidths of InfiniBand" in one for one in sources)
    assert "leaf switches" in ws.Hardware.preset("dgx-h100+roce-400:rail/2").sources[-1]


@pytest.mark.parametrize(
    ("name", "ranks", "gb_per_s"),
    [("h200", 4, 363.3), ("h200", 8, 473.1)],
)
def test_all_reduces_by_the_number_of_gpus_of_a_node(name: str, ranks: int, gb_per_s: float):
    """Published bus bandwidths of all-reduces of 4 to 8 GiB (stas00/ml-engineering, network)."""
    us = ws.Hardware.preset(name).group_us("all_reduce", 8 * GIB, ranks)
    assert 2 * (ranks - 1) / ranks * 8 * GIB / us / 1e3 == pytest.approx(gb_per_s, rel=0.1)


def test_a_spine_that_has_fewer_links():
    """Inside one group of leaves nothing changes; what crosses takes the longer, the more is shared."""
    names = ["dgx-h100+infiniband-400", *(f"dgx-h100+infiniband-400:{how}" for how in ("rail", "rail/2", "rail/8"))]
    plain, rail, two, eight = (ws.Hardware.preset(name) for name in names)
    assert rail.levels[1].ranks == 32 * 8
    assert ws.Hardware.preset("dgx-h100+infiniband-400:fat-tree").levels[1].ranks == 4 * 8
    inside, across = ([one.group_us("all_to_all", GIB, ranks) for one in (plain, rail, two, eight)]
                      for ranks in (256, 1024))  # fmt: skip
    assert len({*inside}) == 1
    assert across[1:] == sorted(across[1:])
    assert across[3] > across[2] > across[1] == pytest.approx(across[0])
    assert ws.Hardware.preset("b200-nvl72+infiniband-400/2").levels[1].bytes_per_us == 25_000


@pytest.mark.parametrize("link", ["infiniband-400:ring", "infiniband-400/0.5", "infiniband-400/x", "nothing:rail", ":"])
def test_wires_that_do_not_exist(link):
    with pytest.raises(ws.PlanError, match="with K of at least 1 and one of infiniband-100"):
        ws.Hardware.preset(f"dgx-h100+{link}")
    with pytest.raises(ws.PlanError, match="there is no hardware"):
        ws.Hardware.preset(f"loopback+{link}")


def test_a_hash_stays_in_its_process():
    """Hashes of text differ between processes: in a key of the compile cache, one would never be found again."""
    made = ws.Hardware.preset("dgx-h100")
    assert hash(made) == hash(ws.Hardware.preset("dgx-h100"))
    assert str(hash(made)) not in text_of("hardware", made)
    assert "_hash" not in vars(pickle.loads(pickle.dumps(made)))


def test_json(tmp_path):
    for name in ws.Hardware.presets():
        made = ws.Hardware.preset(name)
        made.save(tmp_path / "hardware.json")
        assert ws.Hardware.load(tmp_path / "hardware.json") == made


def test_presets_of_other_packages_are_named_where_they_are_absent(monkeypatch):
    monkeypatch.setattr(presets, "_by_sheet", tuple)
    assert "l40s" not in ws.Hardware.presets()
    with pytest.raises(
        ws.PlanError, match=r"pip install 'wholestep\[foresight\]' has presets from data sheets, as l40s"
    ):
        ws.Hardware.preset("l40s")


def _without(body):
    del body["device"]["memory_bytes"]


def _unknown(body):
    body["levels"][0]["curves"][1]["colour"] = 1


def _wrong_kind(body):
    body["levels"][0]["curves"][2]["regimes"][0]["base_us"] = "fast"


def _negative(body):
    body["levels"][1]["bytes_per_us"] = -1.0


def _no_algorithm(body):
    body["levels"][0]["curves"][0]["algorithm"] = "star"


def _levels(body):
    body["levels"][0]["ranks"] = 0


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (_without, "field device.memory_bytes is missing"),
        (_unknown, r"unknown field levels\[0\].curves\[1\].colour"),
        (_wrong_kind, r"levels\[0\].curves\[2\].regimes\[0\].base_us is 'fast'\n  needed: a finite number"),
        (_negative, r"levels\[1\].bytes_per_us is -1.0\n  needed: a number above 0"),
        (_no_algorithm, r"levels\[0\].curves\[0\].algorithm is 'star'\n  needed: one of ring"),
        (_levels, r"levels\[0\].ranks is 0\n  needed: a multiple of 1, above it"),
        (lambda body: body.pop("format"), "format is None"),
    ],
)
def test_json_that_is_wrong_names_the_field(tmp_path, spoil, said):
    path = tmp_path / "hardware.json"
    ws.Hardware.preset("dgx-h100").save(path)
    body = json.loads(path.read_text())
    spoil(body)
    path.write_text(json.dumps(body))
    with pytest.raises(ws.PlanError, match=said):
        ws.Hardware.load(path)


def test_eight_lines_make_a_machine():
    device = replace(ws.Hardware.preset("dgx-h100").device, name="mine")
    mine = ws.Hardware("mine", device, (Level("bus", 4, 20_000.0, 3.0), Level("net", 0, 1_250.0, 20.0)))
    assert mine.group_us("all_reduce", GIB, 4, 4) == pytest.approx(10 + 6 * 3 + 1.5 * GIB / 20_000, rel=1e-9)
    quick = Curve("all_reduce", "ring", (Regime(1.0), Regime(5.0, rate=2.0)))
    faster = replace(mine, levels=(replace(mine.levels[0], curves=(quick,)), mine.levels[1]))
    assert faster.group_us("all_reduce", GIB, 4, 4) == pytest.approx(5 + 6 * 3 + 0.75 * GIB / 20_000, rel=1e-9)


def test_products_pay_for_whole_tiles_and_whole_waves():
    h100 = ws.Hardware.preset("dgx-h100")
    one, more = h100.matmul_us(1, 4224, 4096, 4096), h100.matmul_us(1, 4225, 4096, 4096)  # 1056 tiles, 8 waves of 132
    assert one < more
    assert h100.matmul_us(1, 128, 128, 128) < 2 * h100.matmul_us(1, 1, 1, 1)
    assert h100.matmul_us(1, 8192, 8192, 8192, "float32") > 5 * h100.matmul_us(1, 8192, 8192, 8192)
    long = 1 << 16
    assert h100.matmul_us(1, 1, long, long) == pytest.approx(h100.bytes_us(2 * (long * long + 2 * long)))


@pytest.mark.parametrize(("tokens", "share"), [(512, 5 / 8), (1024, 9 / 16), (8192, 65 / 128)])
def test_causal_attention_computes_whole_blocks(tokens: int, share: float) -> None:
    """Of 128 queries: of the last block all keys, of the first one its own."""
    device = ws.Hardware.preset("dgx-h100").device
    assert isinstance(device, Device)
    half, whole = (device.attention_us(8, 32, tokens, tokens, 128, "bfloat16", causal=c) for c in (True, False))
    assert half / whole == pytest.approx(share)


def step_of_a_rank():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4096, 4096), nn.GELU(), nn.Linear(4096, 4096))
        x = torch.empty(512, 4096)
    graph = ws.capture(train, model, SGD(model.parameters(), lr=0.1), x)
    return ws.partition(graph, ws.plan(graph, "dp=16", ws.DataParallel("fully_shard")))


def test_a_step_is_simulated_and_scheduled_on_described_hardware():
    local, h100 = step_of_a_rank(), ws.Hardware.preset("dgx-h100")
    slow = ws.Hardware.preset("dgx-h100+ethernet-10")
    assert ws.simulate(local, h100).step_us < ws.simulate(local, slow).step_us
    ordered = ws.run_passes(local, [ws.Schedule(hardware=h100, bucket_bytes=MIB)])
    assert ws.simulate(ordered, h100).step_us <= ws.simulate(local, h100).step_us
    products = [n for n in local.graph.nodes if n.op == "call_function" and "mm" in str(n.target)]
    found = work(products[0])
    assert found is not None
    assert found.matmul == (1, 512, 4096, 4096)
    assert node_us(products[0], h100) == pytest.approx(h100.matmul_us(1, 512, 4096, 4096, "float32"))


def test_compute_beside_a_collective_takes_longer():
    """A collective, then compute: the part that runs beside it takes a quarter longer."""
    local = step_of_a_rank()
    calls = [n for n in local.graph.nodes if n.op == "call_function"]
    compute = next(n for n in calls if "mm" in str(n.target))
    sent = next(n for n in calls if is_collective(n))
    h100 = ws.Hardware.preset("dgx-h100")
    hardware = replace(h100, device=replace(h100.device, contention=1.25))
    long = node_us(compute, hardware)
    for wire, expected in ((0.0, long), (1e6, 1.25 * long), (0.5 * long, long + 0.1 * long)):
        clock = Clock(hardware, local.mesh, begun={sent: 0.0}, ends={sent: wire}, stolen_us={sent: 0.2 * wire})
        clock.run(compute)
        assert clock.now == pytest.approx(expected)


class Experts(nn.Module):
    """Four experts, the tokens sorted by expert; as one product of groups, or as one product each."""

    ends = (8, 24, 24, 64)  # one expert has no token

    def __init__(self, grouped):
        super().__init__()
        self.weight, self.grouped = nn.Parameter(torch.randn(4, 32, 48).bfloat16()), grouped

    def forward(self, x):
        if self.grouped:
            return torch._grouped_mm(x, self.weight, torch.tensor(self.ends, dtype=torch.int32))
        starts = (0, *self.ends)
        return torch.cat([x[a:b] @ w for a, b, w in zip(starts, self.ends, self.weight.unbind(), strict=False)])


def products(module):
    """Flops of the products of a step, by the number of products, and the graph."""
    graph = ws.capture(train, module, SGD(module.parameters(), lr=0.1), torch.randn(64, 32).bfloat16())
    found = [node for node in graph.graph.nodes if flops(node)]
    return sum(flops(node) for node in found), found, graph


def test_experts_in_groups_count_as_products_of_their_own():
    total, found, graph = products(Experts(grouped=True))
    apart, _, _ = products(Experts(grouped=False))
    assert total == apart == 2 * (2 * 64 * 32 * 48)  # forward, gradient of the weights: rows of the batch have none
    assert {node.target for node in found} == {torch.ops.aten._grouped_mm.default}
    hopper = ws.Hardware.preset("dgx-h100")
    assert peak_us(graph.graph, hopper)[0] == pytest.approx(total / hopper.peak_flops_per_us("bfloat16"))
    for node in found:
        peak = flops(node) / hopper.peak_flops_per_us("bfloat16")
        assert node_us(node, hopper) >= peak
        assert work(node).moved_bytes == sum(map(size_bytes, {*node.all_input_nodes, node}))


@pytest.mark.parametrize(
    ("one", "other", "ends", "expected", "matmul"),
    [
        ((5, 16, 32), (5, 32, 48), False, 2 * 5 * 16 * 32 * 48, (5, 16, 48, 32)),
        ((81, 32), (5, 32, 48), True, 2 * 81 * 32 * 48, (5, 17, 48, 32)),
        ((5, 16, 32), (32, 80), True, 2 * 16 * 32 * 80, (5, 16, 16, 32)),
        ((16, 80), (80, 48), True, 2 * 16 * 80 * 48, (5, 16, 48, 16)),
        ((2, 32), (5, 32, 48), True, 2 * 2 * 32 * 48, (2, 1, 48, 32)),  # at most two experts have a token
    ],
)
def test_forms_of_products_in_groups(one, other, ends, expected, matmul):
    graph = Graph()
    given = [graph.placeholder(name) for name in ("one", "other", "ends")]
    made = torch._grouped_mm(
        torch.empty(one, device="meta", dtype=torch.bfloat16),
        torch.empty(other, device="meta", dtype=torch.bfloat16),
        torch.empty(5, dtype=torch.int32, device="meta") if ends else None,
    )
    node = graph.call_function(torch.ops.aten._grouped_mm.default, tuple(given[: 3 if ends else 2]))
    for one_, shape in zip([*given, node], [one, other, (5,), tuple(made.shape)], strict=True):
        set_tensors(one_, [contiguous(shape, meta_of(made))])
    assert flops(node) == expected
    assert work(node).matmul == matmul
    largest = ws.Hardware.preset("dgx-h100")
    assert node_us(node, largest) >= expected / largest.peak_flops_per_us("bfloat16")
