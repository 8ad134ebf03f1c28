"""Pipelines: the programs of all stages, in one process, against one device in float64."""

import json
import operator
import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import checkpoint

import wholestep as ws
from tests.optimizers import Kind, build, data, of_torch, train_by_closure
from tests.random_stages import problem
from tests.simulate import Simulation
from tests.stage_models import SEQUENCE, batches, maker, train
from tests.steps import mse
from tests.together import Double, OneDevice, compare, joined, without_chance
from wholestep.cost.stage_costs import BlockPrices
from wholestep.errors import GraphError, PlanError
from wholestep.graph.graph import LocalGraph
from wholestep.graph.loop import loop_of, with_bodies
from wholestep.graph.messages import send
from wholestep.graph.nodes import is_collective, is_mutating, node_at, operands
from wholestep.graph.region import region_of
from wholestep.graph.stage_part import StagePart, transfer
from wholestep.partition.batch_dependent import batch_dependent
from wholestep.partition.stage_program import stage_program
from wholestep.plan.plan import Plan
from wholestep.planner.staged_plan import staged

pytestmark = pytest.mark.usefixtures("double")

TOLERANCE = 1e-10
ORDERS = ["gpipe", "1f1b", "interleaved", "zero_bubble", "auto"]
TENSOR_PARALLEL = ws.TensorParallel({"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}, axis="tp")


@lru_cache(maxsize=8)
def one_device(layers: int, tied: bool, drop: float, fused: bool = True, rows: int = 8) -> OneDevice:
    return OneDevice(maker(layers, tied, drop, fused), train, batches(rows, 2))


def parts_of(local: LocalGraph) -> list[StagePart]:
    found = [loop.stages for node in local.graph.nodes if (loop := loop_of(node)) and loop.stages]
    return [part for stages in found for part in stages.parts]


@pytest.mark.crossed
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("pieces", [1, 2, 4, 8])
@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("drop", [0.0, 0.2], ids=["", "dropout"])
@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
@pytest.mark.parametrize("placement", ["loop", "v"])
def test_stages_compute_what_one_device_does(
    placement: Any, tied: bool, drop: float, stages: int, pieces: int, order: Any
) -> None:
    """Two steps of AdamW with clipping: losses on every rank, and all parameters."""
    one = one_device(stages + 1, tied, drop)
    pipeline = ws.Pipeline(micro_batches=pieces, schedule=order, placement=placement)
    found = compare(one, f"pp={stages}", pipeline)
    assert found.worst < TOLERANCE, f"{found.where} differs by {found.worst:.1e}"
    assert not found.ruleless


def test_a_v_has_neighbouring_stages_on_a_rank() -> None:
    graph = ws.capture(train, *maker(4, False, 0.0)(), *batches(8, 1)[0])
    plan = ws.plan(graph, "pp=2", ws.Pipeline(stages=[[f"blocks.{n}"] for n in range(4)], placement="v"))
    said = str(plan)
    assert "4 stages on pp, 2 on each rank in a V, auto" in said
    assert [line.split(":")[1][0] for line in said.splitlines() if line.startswith("  stage ")] == ["0", "1", "1", "0"]
    sends = [node.args[1:3] for node in ws.partition(graph, plan).graph.nodes if node.target is transfer]
    assert sends[:2] == [(0, 1), (1, 0)], "nothing between stages 1 and 2"


def checkpointed() -> tuple[nn.Module, Optimizer]:
    """A model whose blocks are computed again in the backward."""
    model, optimizer = maker(3, True, 0.0)()
    for block in model.get_submodule("blocks").children():
        block.forward = partial(checkpoint.checkpoint, block.forward, use_reentrant=False)
    return model, optimizer


@pytest.mark.parametrize(("stages", "order"), [
    (2, "1f1b"), pytest.param(3, "zero_bubble", marks=pytest.mark.full),
    pytest.param(2, "interleaved", marks=pytest.mark.full),
])  # fmt: skip
def test_blocks_that_are_computed_again(stages: int, order: str) -> None:
    one = OneDevice(checkpointed, train, batches(8, 2))
    found = compare(one, f"pp={stages}", ws.Pipeline(micro_batches=4, schedule=order))
    assert found.worst < TOLERANCE, f"{found.where} differs by {found.worst:.1e}"


@pytest.mark.full
@pytest.mark.parametrize("parallel", [
    ("dp=2,pp=2", ws.DataParallel("replicate", axis="dp", semantics="global")),
    ("dp=2,pp=2", ws.DataParallel("zero1", axis="dp", semantics="global")),
    ("dp=2,pp=2", ws.DataParallel("zero2", axis="dp", semantics="global")),
    ("dp=2,pp=2", ws.DataParallel("fully_shard", axis="dp", semantics="global")),
    ("pp=2,dp=2", ws.DataParallel("fully_shard", axis="dp", semantics="global", reshard_after_forward=True)),
    ("pp=2,tp=2", TENSOR_PARALLEL),
], ids=["replicate", "zero1", "zero2", "fully_shard", "re-gathered", "tp"])  # fmt: skip
@pytest.mark.parametrize("order", ["1f1b", "zero_bubble"])
@pytest.mark.parametrize("pieces", [1, 2])
def test_stages_beside_other_axes(parallel: tuple[str, Any], pieces: int, order: str) -> None:
    mesh, beside = parallel
    if pieces > 1 and getattr(beside, "reshard_after_forward", None):  # the tied weight is gathered for each piece
        with pytest.raises(ws.PlanError, match="would send 'transfer_1' for each piece, and computes it in no block"):
            compare(one_device(2, True, 0.0), mesh, [beside, ws.Pipeline(micro_batches=pieces, schedule=order)])
        return
    found = compare(one_device(2, True, 0.0), mesh, [beside, ws.Pipeline(micro_batches=pieces, schedule=order)])
    assert found.worst < TOLERANCE, f"{found.where} differs by {found.worst:.1e}"


@pytest.mark.full
def test_what_is_read_in_several_layouts_is_sent_once() -> None:
    """A gradient between two stages, sharded along tokens: products read it gathered, the residual as it is."""
    sequence = [ws.Pipeline(stages=[["blocks.0"], ["blocks.1"]], micro_batches=2), ws.TensorParallel(SEQUENCE)]
    found = compare(one_device(2, False, 0.0), "pp=2,tp=2", sequence)
    assert found.worst < TOLERANCE, f"{found.where} differs by {found.worst:.1e}"
    graph = ws.capture(train, *maker(2, False, 0.0)(), *batches(8, 1)[0])
    local = ws.partition(graph, ws.plan(graph, "pp=2,tp=2", sequence))
    sent = [(one.source, one.target) for one in parts_of(local)[0].messages.values()]
    assert sorted(sent) == [(0, 1), (1, 0)]


@pytest.mark.full
def test_a_stage_regathers_activations_for_its_backward() -> None:
    pipeline, again = ws.Pipeline(micro_batches=2), ws.TensorParallel(SEQUENCE, reshard_after_forward=True)
    found = compare(one_device(2, False, 0.0), "pp=2,tp=2", [pipeline, again])
    assert found.worst < TOLERANCE, f"{found.where} differs by {found.worst:.1e}"
    gathers = [
        sum("all_gather" in str(node.target) for node in block.body.nodes) for block in parts_of(found.local)[0].blocks
    ]
    assert gathers == [3, 4]  # keys, values, what the MLP reads; in the backward, of a gradient too


def test_a_value_that_other_blocks_still_need_is_not_overwritten() -> None:
    """Blocks that are written out share values with calls of others: no op may write into these before the last call
    has read them.
    """
    parallel = [ws.DataParallel("fully_shard", axis="dp", semantics="global")]
    passes = ws.default_passes(schedule=ws.Schedule(bucket_bytes=1 << 10, first_bucket_bytes=1 << 10))
    found = compare(
        one_device(2, True, 0.0), "dp=2,pp=2", [*parallel, ws.Pipeline(micro_batches=2, schedule="interleaved")],
        passes=passes,
    )  # fmt: skip
    assert found.worst < TOLERANCE, f"{found.where} differs by {found.worst:.1e}"
    for stage in range(2):
        made = ws.run_passes(stage_program(found.local, stage), passes)
        place = {node: number for number, node in enumerate(made.graph.nodes)}
        held = {value: node for node in place if region_of(node) for value in operands(node)}
        assert held
        written = {node_at(node, 0): place[node] for node in place if is_mutating(node) and node.args}
        assert all(written.get(one, place[last] + 1) > place[last] for one, last in held.items())


@pytest.mark.full
@pytest.mark.parametrize("mesh", ["pp=3,tp=2", pytest.param("dp=2,pp=3,tp=2", marks=pytest.mark.full)])
def test_a_rank_between_others_may_have_one_layer_alone_and_one_piece(mesh: str) -> None:
    """What it exchanges depends on the batch only by what other stages send."""
    data = [ws.DataParallel("fully_shard", axis="dp", semantics="global")] if "dp" in mesh else []
    parallel = [*data, ws.Pipeline(schedule="1f1b", placement="v"), TENSOR_PARALLEL]
    found = compare(one_device(3, True, 0.0), mesh, parallel, passes=ws.default_passes())
    assert found.worst < TOLERANCE, f"{found.where} differs by {found.worst:.1e}"


@pytest.mark.crossed
@pytest.mark.parametrize("style", ["replicate", "zero1", "zero2", "fully_shard"])
@pytest.mark.parametrize("order", ["1f1b", "zero_bubble", "gpipe", "interleaved"])
@pytest.mark.parametrize("pieces", [1, 2, 4])
@pytest.mark.parametrize("mesh", ["dp=2,pp=2", "pp=2,dp=2"])
def test_passes_serve_the_programs_of_stages(mesh: str, pieces: int, order: str, style: str) -> None:
    """All passes that run by default, in small buckets: the numbers of one device, and fewer collectives, of which the
    first start before the last products.
    """
    data = ws.DataParallel(style, axis="dp", semantics="global")
    passes = ws.default_passes(schedule=ws.Schedule(bucket_bytes=1 << 10, first_bucket_bytes=1 << 10))
    parallel = [data, ws.Pipeline(micro_batches=pieces, schedule=order)]
    found = compare(one_device(2, True, 0.0), mesh, parallel, passes=passes)
    assert found.worst < TOLERANCE, f"{found.where} differs by {found.worst:.1e}"
    for stage in range(2):
        own = stage_program(found.local, stage)
        made = ws.run_passes(own, passes)
        before, after = (
            [node for node in one.graph.nodes if is_collective(node) and node.args[-1] == "dp"] for one in (own, made)
        )
        assert len(after) < len(before)
        nodes, varying = list(made.graph.nodes), batch_dependent(made)
        last = max(number for number, node in enumerate(nodes) if node.target is torch.ops.aten.mm.default)
        assert nodes.index(next(n for n in after if n in varying)) < last


@pytest.mark.parametrize("parallel", [
    ("dp=2,pp=3", ws.DataParallel("zero1", axis="dp", semantics="global")),
    pytest.param(("pp=3,tp=2", TENSOR_PARALLEL), marks=pytest.mark.full),
], ids=["zero1", "tp"])  # fmt: skip
def test_passes_serve_a_stage_that_is_given_no_batch(parallel: tuple[str, Any]) -> None:
    """The second of three: all that it computes with comes from the first and the last."""
    mesh, beside = parallel
    strategies = [beside, ws.Pipeline(micro_batches=2, schedule="1f1b")]
    found = compare(one_device(3, True, 0.0), mesh, strategies, passes=ws.default_passes())
    assert found.worst < TOLERANCE, f"{found.where} differs by {found.worst:.1e}"


def test_a_program_grows_by_the_calls_of_a_micro_batch() -> None:
    """Two blocks, and both ends of what is sent and received, whatever the blocks compute."""
    data = ws.DataParallel("fully_shard", axis="dp", semantics="global")
    sizes: list[int] = []
    for pieces in (2, 8):
        parallel = [data, ws.Pipeline(micro_batches=pieces, schedule="1f1b")]
        graph = one_device(2, False, 0.0, rows=16).capture.graph
        local = ws.partition(graph, ws.plan(graph, "dp=2,pp=2", parallel))
        program = ws.run_passes(stage_program(local, 0), ws.default_passes())
        sizes.append(sum(node.target is not operator.getitem for node in program.graph.nodes))
    assert sizes[1] - sizes[0] == 6 * (2 + 2 * 2)


def test_three_axes() -> None:
    data = ws.DataParallel("fully_shard", axis="dp", semantics="global")
    found = compare(one_device(2, True, 0.0), "dp=2,pp=2,tp=2", [data, ws.Pipeline(micro_batches=2), TENSOR_PARALLEL])
    assert found.worst < TOLERANCE, f"{found.where} differs by {found.worst:.1e}"


@pytest.mark.full
@pytest.mark.parametrize("pieces", [1, 2])
@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen3", "gemma2", "bert", "vit", "t5", "mixtral"])
def test_hugging_face(name: str, pieces: int) -> None:
    pytest.importorskip("transformers")
    from tests.hf_models import entries, loss_of

    (entry,) = entries([name])
    generator = torch.Generator().manual_seed(0)

    def make() -> tuple[nn.Module, Optimizer]:
        model = without_chance(entry.build().double())
        if hasattr(model, "set_experts_implementation"):
            model.set_experts_implementation("batched_mm")  # the grouped product knows no double precision
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4, fused=True)

    def step(model: nn.Module, optimizer: Optimizer, batch: dict[str, Tensor]) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    with Double():
        given = [(joined([entry.batch(generator) for _ in range(4)]),) for _ in range(2)]
        found = compare(OneDevice(make, step, given), "pp=2", ws.Pipeline(micro_batches=pieces))
    assert found.worst < TOLERANCE, f"{found.where} differs by {found.worst:.1e}"


SOME = (
    "Adam(amsgrad=True,fused=True)",
    "Muon()",
    "Adafactor(foreach=True)",
)
KINDS = [
    kind for kind in of_torch() if not kind.refused and "dampening" not in kind.name
]  # of which the first step differs


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=() if k.name in SOME else pytest.mark.full) for k in KINDS], ids=str
)
def test_every_optimizer(kind: Kind) -> None:
    """Also those that work on whole matrices, which each stage has of its own."""

    def batch(seed: int) -> tuple[Tensor, Tensor]:
        x, y = data(seed, torch.float64)
        return x[:4], y[:4]

    step = train_by_closure if kind.closure else mse
    one = OneDevice(lambda: build(kind, torch.float64), step, [batch(seed) for seed in range(3)])
    found = compare(one, "pp=2", ws.Pipeline(micro_batches=2))
    assert found.worst < TOLERANCE, f"{found.where} differs by {found.worst:.1e}"


class FilledTargets(nn.Module):
    """Fills memory of its targets' shape itself, as T5 does for what its decoder reads."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up, self.down = nn.Embedding(9, 8), nn.Linear(8, 16), nn.Linear(16, 9)

    def forward(self, y: Tensor) -> Tensor:
        shifted = y.new_zeros(y.shape)
        shifted[:, 1:] = y[:, :-1].clone()
        return self.down(torch.relu(self.up(self.embed(shifted))))


@pytest.mark.parametrize(
    "parallel", [("pp=2", ws.Pipeline(micro_batches=2)), ("dp=1", ws.MicroBatches(2))], ids=["stages", "loop"]
)
def test_memory_of_the_shape_of_the_batch_is_the_same_for_all_pieces(parallel: tuple[str, Any]) -> None:
    def make() -> tuple[nn.Module, Optimizer]:
        model = FilledTargets()
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4, fused=True)

    def step(model: nn.Module, optimizer: Optimizer, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(y).flatten(0, 1), y.flatten())
        loss.backward()
        optimizer.step()
        return loss.detach()

    one = OneDevice(make, step, [(torch.randint(9, (4, 5)),) for _ in range(2)])
    found = compare(one, *parallel)
    assert found.worst < TOLERANCE, f"{found.where} differs by {found.worst:.1e}"


@pytest.mark.parametrize("seeds", [[1968], pytest.param(range(40), marks=pytest.mark.full)], ids=["one", "40"])
def test_random_steps_in_random_pipelines(seeds: Sequence[int]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = {seed: problem(seed) for seed in seeds}
    assert {seed: text for seed, text in found.items() if text and not text.startswith("refused")} == {}
    assert sum(not text for text in found.values()) > len(seeds) / 2


@pytest.mark.full
@pytest.mark.parametrize("room", [0, 1, 3])
def test_whatever_channels_hold(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Simulation, "room", room)
    found = compare(one_device(4, True, 0.0), "pp=2", ws.Pipeline(micro_batches=8, schedule="interleaved"))
    assert found.worst < TOLERANCE


def test_the_comparison_sees_a_piece_that_one_stage_leaves_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_one(graph: ws.TrainGraph, plan: ws.Plan) -> LocalGraph:
        local = ws.partition(graph, plan)
        for part in parts_of(local):
            last = max(part.blocks, key=lambda block: block.level)
            kept = [
                a for a in part.actions if not (part.stage == 0 and (a.kind, a.name) == ("run", last.name) and a.piece)
            ]
            object.__setattr__(part, "actions", tuple(kept))
        return local

    monkeypatch.setattr("tests.together.partition", without_one)
    assert compare(one_device(2, False, 0.0), "pp=2", ws.Pipeline(micro_batches=4, schedule="1f1b")).worst > 1e-3


@lru_cache(maxsize=4)
def planned(ranks: int, pieces: int) -> tuple[Plan, LocalGraph]:
    graph = one_device(4, False, 0.0).capture.graph
    made = ws.plan(graph, f"pp={ranks}", ws.Pipeline(micro_batches=pieces, schedule="1f1b"))
    return made, ws.partition(graph, made)


def test_a_stage_has_only_its_own() -> None:
    made, local = planned(2, 4)
    own = [stage_program(local, stage) for stage in range(2)]
    whole, *by_stage = (
        sum(isinstance(node.target, torch._ops.OpOverload) for node, _ in with_bodies(program.graph))
        for program in (local, *own)
    )
    assert max(by_stage) < 0.75 * whole
    assert not any(node.target is transfer for program in own for node, _ in with_bodies(program.graph))
    updated = [{out.target for out in program.outputs if out.kind == "update"} for program in own]
    assert "tokens.weight" in updated[0] - updated[1]
    assert "head.weight" in updated[1] - updated[0]
    assert made.stored_bytes("param") < sum(i.meta.size_bytes for i in made.inputs if i.role.value == "param")


def test_what_is_received_starts_before_the_block_in_front() -> None:
    _, local = planned(2, 4)
    for part in parts_of(local):
        ran = [number for number, action in enumerate(part.actions) if action.kind == "run"]
        posted = {(a.name, a.piece): number for number, a in enumerate(part.actions) if a.kind == "post"}
        waited = {(a.name, a.piece): number for number, a in enumerate(part.actions) if a.kind == "wait"}
        assert posted.keys() == waited.keys()
        overlapped = [key for key, number in posted.items() if any(number < at < waited[key] for at in ran)]
        assert len(overlapped) >= len(posted) - 1, "all but the first"


def test_a_plan_says_what_each_stage_has() -> None:
    stages = [["tokens", "places", "blocks.[01]"], ["blocks.[23]", "norm", "head"]]
    pipeline = ws.Pipeline(stages=stages, micro_batches=4, schedule="1f1b")
    made = ws.plan(one_device(4, False, 0.0).capture.graph, "pp=2", pipeline)
    lines = str(made).splitlines()
    assert lines[0] == "plan  2 stages on pp, 1f1b; 4 micro-batches; mesh time=4,pp=2"
    assert [line.partition(";")[0] for line in lines if line.startswith("  stage ")] == [
        "  stage 0 on pp:0: tokens, places, blocks.0, blocks.1",
        "  stage 1 on pp:1: blocks.2, blocks.3, norm, head",
    ]
    assert Plan.from_json(made.to_json()) == made
    assert "pp: runs at 1, with what it reads" in made.explain("mm")


def test_stages_of_equal_layers_are_equal() -> None:
    made, _ = planned(4, 4)
    assert made.strategies is not None
    assert made.strategies.pipeline is not None
    stages = made.strategies.pipeline.stages or ()
    blocks = [{name.split(".")[1] for name in names if name.startswith("blocks")} for names in stages]
    assert [len(one) for one in blocks] == [1, 1, 1, 1]


@pytest.mark.parametrize(("given", "says"), [
    ({"stages": [["tokens"], ["nothing"]]}, "stage 1 names 'nothing', which nothing has"),
    ({"stages": [["blocks"], ["blocks"]]}, "stages 0 and 1 both have 'blocks'"),
    ({"stages": [["blocks"]] * 3}, "Pipeline has 3 stages, axis 'pp' of mesh time=4,pp=2 has 2 ranks"),
    ({"micro_batches": 0}, "Pipeline(micro_batches=0)"),
    ({"chunks": 40}, "a forward that can be cut in"),
])  # fmt: skip
def test_what_does_not_fit_is_refused(given: dict[str, Any], says: str) -> None:
    one = one_device(4, False, 0.0)
    with pytest.raises(PlanError) as error:
        ws.plan(one.capture.graph, "pp=2", ws.Pipeline(**{"micro_batches": 4, **given}))
    assert error.value.found.startswith(says)


def test_two_numbers_of_pieces_are_refused() -> None:
    one = one_device(4, False, 0.0)
    with pytest.raises(PlanError, match=r"Pipeline\(micro_batches=4\) beside MicroBatches\(2\)"):
        ws.plan(one.capture.graph, "pp=2", [ws.Pipeline(micro_batches=4), ws.MicroBatches(2)])


def test_an_axis_of_stages_needs_a_pipeline() -> None:
    one = one_device(4, False, 0.0)
    for parallel, says in (
        (ws.DataParallel(), "axis 'pp' is used by DataParallel"),
        (ws.DataParallel(axis="dp"), "axis 'pp' is used by no strategy"),
        ([ws.DataParallel(), ws.Pipeline()], "axis 'pp' is used by DataParallel and by Pipeline"),
    ):
        with pytest.raises(PlanError) as error:
            ws.plan(one.capture.graph, "dp=2,pp=2", parallel)
        assert error.value.found == says


def test_passes_keep_the_order_of_what_stages_exchange() -> None:
    _, local = planned(2, 2)
    with pytest.raises(GraphError, match="passes on the program of all stages"):
        ws.run_passes(local, ws.default_passes())
    own = stage_program(local, 0)

    def later(given: LocalGraph) -> LocalGraph:
        made = given.copy()
        sent = next(node for node in made.graph.nodes if node.target is send)
        list(made.graph.nodes)[-2].append(sent)
        return made

    assert ws.run_passes(own, ws.default_passes(schedule=None)).stage == 0
    _, tied = planned_tied()
    with pytest.raises(GraphError, match="pass later changed what stages of a pipeline exchange"):
        ws.run_passes(stage_program(tied, 0), [later])


def planned_tied() -> tuple[Plan, LocalGraph]:
    graph = one_device(2, True, 0.0).capture.graph
    made = ws.plan(graph, "pp=2", ws.Pipeline(micro_batches=2))
    return made, ws.partition(graph, made)


def test_the_timeline_has_all_stages_and_their_bubbles(tmp_path: Path) -> None:
    hardware = ws.Hardware.preset("dgx-h100")
    _, local = planned(2, 4)
    found = ws.timeline(local, hardware)
    assert found.streams == ("stage 0", "stage 1")
    twelve = tuple(replace(found.spans[0], stream=f"stage {n}", stage=n) for n in range(12))
    assert replace(found, spans=twelve).streams == tuple(f"stage {n}" for n in range(12)), "by number"
    assert [span.name for span in found.spans if span.stream == "stage 0" and " of piece " in span.name][:3] == [
        "stage 0, forward 0 of piece 0", "stage 0, forward 0 of piece 1", "stage 0, backward 2 of piece 0",
    ]  # fmt: skip
    for stream in found.streams:
        spans = [span for span in found.spans if span.stream == stream]
        assert all(a.start_us + a.us <= b.start_us + 1e-6 for a, b in pairwise(spans)), (
            "a stage runs one thing at a time"
        )
    idle = sum(found.simulated.step_us - found.busy_us(stream) for stream in found.streams)
    waited = staged(local, BlockPrices(hardware, local.mesh)).waited_us  # for collectives, while it runs nothing else
    assert found.simulated.exposed_us == pytest.approx(idle / 2 + waited)
    found.save(tmp_path / "trace.json")
    names = {event["args"]["name"] for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
             if event["name"] == "thread_name"}  # fmt: skip
    assert names == {"stage 0", "stage 1"}
    with pytest.raises(PlanError, match="stage 1 alone has no time"):
        ws.simulate(stage_program(local, 1), hardware)


def test_printed_programs_name_blocks_and_their_order() -> None:
    _, local = planned(2, 2)
    assert "    stage 0: forward 0[0]; forward 0[1]; backward 2[0]; backward 2[1]" in str(local)
    own = stage_program(local, 1)
    assert "stage 1 of pp" in str(own).splitlines()[0]
    assert any(region_of(node) for node in own.graph.nodes)
    assert "    stage 1, backward 1: from" in str(own)
