"""Experts stay on their ranks: rows come to them, each is multiplied by one rank, and all equals one device."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Node
from torch.optim import AdamW, Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

import wholestep as ws
from tests.hf_models import loss_of
from tests.steps import mean_square
from tests.together import OneDevice, compare
from tests.unit.test_experts import ORDERED, TOKENS, Sorted, counts_first, mixture, plain_products, to_few
from wholestep.capture.capture_options import CaptureOptions
from wholestep.errors import PlanError
from wholestep.graph import meta
from wholestep.graph.graph import LocalGraph
from wholestep.graph.nodes import is_collective, operands
from wholestep.layout import replicated
from wholestep.rules.aten.rows_in_groups import BACKWARD, FORWARD

pytestmark = pytest.mark.usefixtures("double", plain_products.__name__)

TOLERANCE = 1e-10
ROWS = "gather_rows"
APART = [TOKENS, ws.ExpertParallel("dp", ROWS)]
SENT = [TOKENS, ws.ExpertParallel("dp", "rows")]
IN_ROOM = [TOKENS, ws.ExpertParallel("dp", "rows", host_reads=False)]
BOTH_METHODS = pytest.mark.parametrize("parallel", [APART, SENT], ids=["gathered", "sent"])
ALL_METHODS = pytest.mark.parametrize("parallel", [APART, SENT, IN_ROOM], ids=["gathered", "sent", "in room"])


class _Counting(TorchDispatchMode):
    """Counts rows that grouped products multiply."""

    rows = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func) in (FORWARD, BACKWARD):
            self.rows += int(args[2][-1])
        return func(*args, **(kwargs or {}))


def _rows_of(run: Callable[[], object]) -> int:
    with _Counting() as counting:
        run()
    return counting.rows


def _check(one: OneDevice, mesh: str, parallel: Any) -> None:
    """The plan equals one device, and no rank has the matrices of all experts."""
    comparison = compare(one, mesh, parallel)
    assert comparison.worst < TOLERANCE, f"{comparison.where} differs by {comparison.worst:.1e}"
    assert ws.Plan.from_json(comparison.plan.to_json()) == comparison.plan
    stacks = {i.meta.shape for i in comparison.plan.inputs if "experts" in i.name and len(i.meta.shape) == 3}
    stacks |= {(a, c, b) for a, b, c in stacks}
    shapes = {t.shape for node in comparison.local.graph.nodes for t in meta.tensors(node) if t}
    assert stacks, "experts are three-dimensional"
    assert not stacks & shapes, "experts are gathered"


@pytest.mark.usual("3-mixtral-3-gathered", "3-mixtral-3-sent", "2-mixtral-3-gathered", "4-qwen3_moe-1-sent")
@BOTH_METHODS
@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_ranks_that_divide_experts_or_not(ranks: int, name: str, rows: int, parallel: Any) -> None:
    _check(mixture(name, rows, layers=2 if name == "mixtral" else 1), f"dp={ranks}", parallel)


@ALL_METHODS
@pytest.mark.parametrize("ranks", [2, 3])
def test_groups_that_are_counted_before_the_sort(ranks: int, parallel: Any) -> None:
    _check(counts_first(), f"dp={ranks}", parallel)


@pytest.mark.usual("gpt_oss-gathered", "gpt_oss-sent", "deepseek_v3-in room")
@ALL_METHODS
@pytest.mark.parametrize("name", ["gpt_oss", "olmoe", "deepseek_v3", "granitemoe", "qwen2_moe", "jamba", "phimoe"])
def test_other_models(name: str, parallel: Any) -> None:
    _check(mixture(name, 2, layers=2 if name in ("jamba", "deepseek_v3") else 1), "dp=3", parallel)


@pytest.mark.usual("sent")
@pytest.mark.parametrize("parallel", [SENT, IN_ROOM], ids=["sent", "in room"])
def test_as_many_rows_as_a_matrix(parallel: Any) -> None:
    """48 tokens with two experts each, of a model whose experts have biases of 96 numbers."""
    one = mixture("gpt_oss", 4)
    assert {96} <= {size for i in one.capture.graph.inputs if i.name.endswith("_bias") for size in i.meta.shape}
    _check(one, "dp=2", parallel)


@pytest.mark.usual("1-gathered", "1-sent", "2-in room", "1-in room")
@ALL_METHODS
@pytest.mark.parametrize("top", [1, 2])
def test_experts_without_tokens(top: int, parallel: Any) -> None:
    """Two ranks of four multiply nothing, or three."""
    _check(mixture("mixtral", 2, to_few(top)), "dp=4", parallel)


GLOBAL: dict[str, Any] = {"style": "fully_shard", "semantics": "global"}
SAMPLES = ws.DataParallel(axis="dp", **GLOBAL)
BOTH = ws.DataParallel(axis=("dp", "x"), **GLOBAL)
PROJECTIONS = ws.TensorParallel({"model.layers.*.self_attn.q_proj": "colwise"})


@pytest.mark.usual("tokens-gather_rows", "tensors-gather_rows", "outer-rows", "alone-rows")
@pytest.mark.parametrize("method", [ROWS, "rows"])
@pytest.mark.parametrize(
    ("mesh", "parallel"),
    [
        pytest.param("dp=2,cp=2", [SAMPLES, ws.ContextParallel(), ws.ExpertParallel("cp", ROWS)], id="tokens"),
        pytest.param("dp=2,cp=2", [SAMPLES, ws.ContextParallel(), ws.ExpertParallel("dp", ROWS)], id="samples"),
        pytest.param("dp=2,tp=2", [SAMPLES, PROJECTIONS, ws.ExpertParallel("tp", ROWS)], id="tensors"),
        pytest.param("x=3", ws.ExpertParallel("x", ROWS), id="alone"),
        pytest.param("dp=2,x=2", [ws.DataParallel(axis="dp"), ws.ExpertParallel("x", ROWS)], id="per rank"),
        pytest.param(
            "dp=2,x=2", [ws.DataParallel(axis=("dp", "x"), **GLOBAL), ws.ExpertParallel("x", ROWS)], id="inner"
        ),
        pytest.param(
            "dp=2,x=2", [ws.DataParallel(axis=("dp", "x"), **GLOBAL), ws.ExpertParallel("dp", ROWS)], id="outer"
        ),
        pytest.param(
            "dp=2", [ws.DataParallel("replicate", semantics="global"), ws.ExpertParallel("dp", ROWS)], id="replicated"
        ),
    ],
)
def test_composes(mesh: str, parallel: Any, method: Any) -> None:
    parts: list[Any] = [*parallel] if isinstance(parallel, (list, tuple)) else [parallel]
    parts = [replace(part, method=method) if isinstance(part, ws.ExpertParallel) else part for part in parts]
    _check(mixture("mixtral", 4), mesh, parts)


WAYS = [ws.ExpertParallel("x", ROWS), ws.ExpertParallel("x", "rows"), ws.ExpertParallel("x", "rows", host_reads=False)]


@pytest.mark.usual("sent-x=2-parts0", "in room-x=2,pp=2-parts1")
@pytest.mark.parametrize(
    ("mesh", "parts"),
    [
        ("x=2", [ws.MicroBatches(2)]),
        ("x=2,pp=2", [ws.Pipeline(micro_batches=2)]),
        ("dp=2,x=2", [SAMPLES, ws.MicroBatches(2)]),
    ],
)
@pytest.mark.parametrize("experts", WAYS, ids=["gathered", "sent", "in room"])
def test_composes_with_micro_batches_and_stages(experts: ws.ExpertParallel, mesh: str, parts: list[Any]) -> None:
    """Also where the loss needs counts of the whole batch, so that the backward is a loop of its own."""
    _check(mixture("mixtral", 8, layers=2 if "pp" in mesh else 1), mesh, [*parts, experts])


@pytest.mark.usual("sent-parts1-dp=2", "in room-parts0-dp=2")
@pytest.mark.parametrize("mesh", ["dp=2", "dp=4"])
@pytest.mark.parametrize(
    "parts",
    [
        [SAMPLES, ws.MicroBatches(2)],
        [ws.DataParallel("fully_shard")],
        [ws.DataParallel("zero2"), ws.MicroBatches(2)],
    ],
)
@pytest.mark.parametrize("experts", [SENT[1], IN_ROOM[1]], ids=["sent", "in room"])
def test_ranks_of_samples_send_rows(experts: ws.ExpertParallel, parts: list[Any], mesh: str) -> None:
    """Ranks that have samples of their own, or micro-batches of them."""
    one = mixture("mixtral", 8)
    if parts[0] is SAMPLES or mesh == "dp=2":
        _check(one, mesh, [*parts, experts])


def _multiplies(node: Node) -> bool:
    """Whether a call is the product of the groups of a rank."""
    name = getattr(node.target, "__name__", "")
    return name.startswith("grouped_mm") and name.endswith("of_groups")


def _with_undefined_rows(local: LocalGraph) -> LocalGraph:
    """Products that leave numbers that are none where a rank has no rows, as kernels may."""
    for node in local.graph.nodes:
        if _multiplies(node):
            node.target = _undefined(node.target)
    return local


def _undefined(product: Callable[..., Any]) -> Callable[..., Any]:
    def with_undefined(first: int, count: int, x: Tensor, other: Tensor, of: Tensor, *rest: Tensor) -> Any:
        rows = ((of >= first) & (of < first + count))[:, None]
        out = product(first, count, x, other, of, *rest)
        nan = torch.tensor(float("nan"))
        return torch.where(rows, out, nan) if isinstance(out, Tensor) else (torch.where(rows, out[0], nan), out[1])

    with_undefined.__name__ = "with_undefined"
    return with_undefined


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_rows_of_other_ranks_are_never_read(name: str) -> None:
    one, calls = mixture(name, 2), list[object]()
    assert compare(one, "dp=2", IN_ROOM, edit=_with_undefined_rows).worst < TOLERANCE

    def edit(local: LocalGraph) -> LocalGraph:
        edited = _with_undefined_rows(local)
        calls.extend(node for node in edited.graph.nodes if getattr(node.target, "__name__", "") == "with_undefined")
        return edited

    assert compare(one, "dp=3", APART, edit=edit).worst < TOLERANCE
    assert len(calls) == 4, "two products, forward and backward"


class Normed(Sorted):
    """Rows are normalized with weights, whose gradients are sums over rows."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.norm, self.bias = nn.LayerNorm(8), nn.Parameter(torch.randn(8))
        self.scale = self._normed

    def _normed(self, rows: Tensor) -> Tensor:
        return self.norm(rows) + self.bias


def _sorted(kind: type[Sorted] = Sorted, tokens: tuple[int, int] = (2, 12), **options: Any) -> OneDevice:
    def make() -> tuple[nn.Module, Optimizer]:
        model = kind(**options)
        return model, AdamW(model.parameters(), lr=0.05, eps=1e-4, fused=True)

    return OneDevice(make, mean_square, [(torch.randn(*tokens, 8),) for _ in range(3)])


@ALL_METHODS
@pytest.mark.parametrize("inverse", ["put", "argsort"])
def test_sums_over_rows(inverse: str, parallel: Any) -> None:
    """Each row is in one sum of one rank; the third of three experts is alone on its rank."""
    _check(_sorted(Normed, inverse=inverse), "dp=2", parallel)


@ALL_METHODS
def test_each_row_is_multiplied_once(parallel: Any) -> None:
    """Each rank multiplies a third of 24 rows, forward and backward, where experts have as many tokens."""
    tokens = torch.eye(3).repeat(8, 1)

    def make() -> tuple[nn.Module, Optimizer]:
        model = Sorted()
        with torch.no_grad():
            model.gate.weight.copy_(5 * torch.eye(3, 8))
            model.gate.bias.zero_()
        return model, AdamW(model.parameters(), lr=1e-3, eps=1e-4, fused=True)

    batch = torch.cat([tokens, 0.1 * torch.randn(24, 5)], -1).reshape(2, 12, 8)
    one = OneDevice(make, mean_square, [(batch,)])
    calls = _Calls()
    assert compare(one, "dp=3", parallel, edit=calls.counted).worst < TOLERANCE
    assert calls.rows == [8] * 6


class _Calls:
    def __init__(self) -> None:
        self.rows = list[int]()

    def counted(self, local: LocalGraph) -> LocalGraph:
        """`local` with products that note how many rows they multiply."""
        for node in local.graph.nodes:
            if _multiplies(node):
                node.target = self._noting(node.target)
        return local

    def _noting(self, product: Callable[..., Any]) -> Callable[..., Any]:
        def noting(*args: Any) -> Any:
            out = list[Any]()
            self.rows.append(_rows_of(lambda: out.append(product(*args))))
            return out[0]

        return noting


def _refused(one: OneDevice, mesh: str, parallel: Any) -> str:
    with pytest.raises(PlanError) as error:
        ws.plan(one.capture.graph, mesh, parallel)
    return re.sub(r"\n  at: .*", "", str(error.value))


def test_fewer_experts_than_ranks() -> None:
    assert _refused(mixture("mixtral", 2), "dp=5", APART) == (
        "ExpertParallel, model.layers.0.mlp.experts: 4 experts over dp=5\n"
        "  needed: experts that are parameters, one at least for each rank, and sums over rows alone\n"
        '  next: give a smaller axis, or method="weights"'
    )


@pytest.mark.parametrize(
    "parallel", [[ws.DataParallel("fully_shard")], [ws.DataParallel("zero2", semantics="global"), ws.MicroBatches(2)]]
)
def test_ranks_with_batches_of_their_own(parallel: list[Any]) -> None:
    assert _refused(mixture("mixtral", 4), "dp=2", [*parallel, APART[1]]) == (
        "ExpertParallel along 'dp', of which each rank has a batch or micro-batches of its own\n"
        "  needed: ranks that share one batch: each computes the rows of all for its experts\n"
        '  next: give method="rows", or semantics="global" without MicroBatches, or another axis'
    )


def test_a_step_without_experts() -> None:
    def make() -> tuple[nn.Module, Optimizer]:
        model = nn.Linear(8, 8)
        return model, AdamW(model.parameters())

    one = OneDevice(make, mean_square, [(torch.randn(2, 12, 8),)])
    assert _refused(one, "dp=2", APART).startswith("ExpertParallel: the step has no such layer\n")
    assert 'set_experts_implementation("grouped_mm")' in _refused(one, "dp=2", APART)


@pytest.mark.parametrize("name", ["running sum", "dropout"])
def test_a_layer_in_one_order_is_named(name: str) -> None:
    """Beside others too, whose experts would be apart without it."""
    text = _refused(_sorted(scale=ORDERED[name]), "dp=2", APART)
    assert text.startswith("ExpertParallel, ")
    assert "a result may depend on the order of rows\n" in text
    assert text.endswith('next: give method="auto", which gathers these experts')
    auto = ws.plan(_sorted(scale=ORDERED[name]).capture.graph, "dp=2", [APART[0], ws.ExpertParallel("dp")])
    assert any("experts of 0 of 1 layers stay" in note for note in auto.notes)


@pytest.mark.parametrize("rows", [0, 1])
def test_a_layer_without_rows_is_named(rows: int) -> None:
    """What a rank of the data may have, whose batch is empty."""
    text = _refused(_sorted(tokens=(1, rows)), "dp=2", [ws.DataParallel(), SENT[1]])
    assert f"{rows} rows, which have no pieces\n  needed: two rows or more\n" in text
    assert text.endswith("next: give a rank without tokens some whose loss is zero")


ALL_ROWS: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "a maximum": ("scale", lambda rows: rows + rows.amax(0, keepdim=True)),
    "no places": ("keys", lambda groups: groups.clamp(max=1)),
}


@pytest.mark.parametrize("name", ALL_ROWS)
def test_results_of_all_rows(name: str) -> None:
    """A maximum over rows needs all of them; what is computed of keys is no place."""
    options: dict[str, Any] = dict([ALL_ROWS[name]])
    assert _refused(_sorted(**options), "dp=2", APART).startswith("ExpertParallel")


def test_a_plan_that_takes_other_rows_is_refused() -> None:
    one = _sorted()
    plan = ws.plan(one.capture.graph, "dp=2", APART)
    decision = plan.decisions["grouped_mm_fallback"]
    whole = replace(decision, operands=tuple(replicated(len(layout.dims)) for layout in decision.operands))
    with pytest.raises(PlanError, match="the plan's layouts are wrong: %grouped_mm_fallback"):
        ws.partition(one.capture.graph, replace(plan, decisions={**plan.decisions, "grouped_mm_fallback": whole}))


def test_weights_travel() -> None:
    """By the other method all is as without the strategy."""
    one, mesh = mixture("mixtral", 2), "dp=2"
    plain, weights = (
        ws.plan(one.capture.graph, mesh, p) for p in (TOKENS, [TOKENS, ws.ExpertParallel(method="weights")])
    )
    assert (plain.storage, plain.decisions) == (weights.storage, weights.decisions)


def test_what_sends_less() -> None:
    """24 tokens travel to experts; 480 tokens of the same layer have more numbers than these, which are gathered."""
    few, many = (mixture("mixtral", rows).capture.graph for rows in (2, 40))
    parallel = [TOKENS, ws.ExpertParallel(host_reads=False)]
    plans = [ws.plan(graph, "dp=2", parallel) for graph in (few, many)]
    notes = [[note for note in plan.notes if note.startswith("experts")] for plan in plans]
    assert notes == [[f"experts of {n} of 1 layers stay on their ranks of dp"] for n in (1, 0)]
    assert plans[0].decisions == ws.plan(few, "dp=2", APART).decisions
    assert plans[1].decisions == ws.plan(many, "dp=2", TOKENS).decisions
    assert notes[0][0] in str(plans[0])


def test_rows_are_sent_where_that_is_less() -> None:
    """Of a token with four experts, two ranks gather the token; of one with one expert, they send its row."""
    note = "experts of 2 of 2 layers stay on their ranks of dp"
    for top, sent in ((4, ""), (1, ", in 2 of them rows are sent to experts, with sizes as if each had as many")):
        graph = mixture("mixtral", 3, to_few(top), layers=2).capture.graph
        plan = ws.plan(graph, "dp=2", [TOKENS, ws.ExpertParallel()])
        assert f"{note}{sent}" in plan.notes
        assert any("a rank sends for each of 2 layers of experts" in line for line in str(plan).splitlines())
        assert plan.decisions == ws.plan(graph, "dp=2", SENT if sent else APART).decisions


def _with_zeros(rows: Tensor) -> Tensor:
    return rows + torch.zeros(24, 8)


def _by_their_number(rows: Tensor) -> Tensor:
    return rows / torch.ones_like(rows).sum()


@pytest.mark.parametrize("scale", [_with_zeros, _by_their_number])
def test_rows_whose_number_is_written_are_gathered(scale: Callable[[Tensor], Tensor]) -> None:
    one = _sorted(scale=scale)
    assert "a call takes the number of rows, or some do not come back\n" in _refused(one, "dp=2", SENT)
    _check(one, "dp=2", APART)


@pytest.mark.parametrize(
    ("mesh", "parallel"),
    [
        ("dp=5", [TOKENS]),
        ("dp=2", [ws.DataParallel("replicate")]),
        ("dp=2", [ws.DataParallel("zero2", semantics="global"), ws.MicroBatches(2)]),
    ],
)
def test_where_experts_cannot_be_apart_weights_travel(mesh: str, parallel: list[Any]) -> None:
    graph = mixture("mixtral", 4).capture.graph
    assert ws.plan(graph, mesh, [*parallel, ws.ExpertParallel()]).storage == ws.plan(graph, mesh, parallel).storage


def mean_loss(model: nn.Module, optimizer: Optimizer, batch: dict[str, Tensor]) -> Tensor:
    optimizer.zero_grad()
    loss = loss_of(model, batch)
    loss.backward()
    optimizer.step()
    return loss.detach()


@pytest.mark.crossed
@pytest.mark.parametrize("reduce", [None, torch.bfloat16], ids=["in float32", "in 16 bits"])
@pytest.mark.parametrize("param", [None, torch.bfloat16], ids=["as they are", "cast"])
def test_weights_that_travel_are_priced_as_they_do(param: torch.dtype | None, reduce: torch.dtype | None) -> None:
    """A rank gathers what is cast of experts, and reduces their gradients: counted in its program."""
    one = mixture("mixtral", layers=2)
    model, optimizer = one.make()
    precision = ws.MixedPrecision(param=param, reduce=reduce) if param or reduce else None
    (batch,) = one.batches[0]
    options = CaptureOptions(mixed_precision=precision)
    graph = ws.capture(mean_loss, model.float(), optimizer, batch, options=options)
    plan = ws.plan(graph, "dp=2", [TOKENS, ws.ExpertParallel("dp", "weights")])
    calls = [n for n in ws.partition(graph, plan).graph.nodes if is_collective(n)]
    sent = [
        max(meta.size_bytes(n), meta.size_bytes(operands(n)[0]))
        for n in calls
        if len(meta.one_tensor(n).shape) == 3
        and meta.one_tensor(n).shape[0] in (2, 4)
        and meta.one_tensor(n).shape[1:] in ((96, 32), (32, 48))
    ]
    assert len(sent) == 2 * 2 * 2
    (price,) = re.findall(r"of 2 layers of experts .*?([\d.]+) kB by weights", str(plan))
    assert float(price) == pytest.approx(sum(sent) / 2 / 2 / 1e3, abs=0.06), "two layers, half of which stays"
