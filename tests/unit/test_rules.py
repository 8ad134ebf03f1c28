"""Every sharding rule against the real op; changed rules, which must fail; rules of the user's and discovered ones."""

import ast
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from torch import Tensor
from typer.testing import CliRunner

import wholestep as ws
from tests.rule_samples import Row, check_op, samples_of, table
from tests.unit.test_imports import imports
from tools.check_rules import check_rules
from tools.mutate_rules import Mutation, mutate_table
from wholestep.graph import meta
from wholestep.layout import resolve
from wholestep.rules import registry
from wholestep.rules.call import Call
from wholestep.rules.dsl import ints, rand, sample
from wholestep.rules.find_rule import find_rule
from wholestep.rules.localize import localize
from wholestep.rules.registry import Bind, bind_rule
from wholestep.rules.rule import BoundRule
from wholestep.rules.testing.check import Sample, case_of, ways
from wholestep.rules.testing.discover import discover
from wholestep.rules.testing.harness import piece, tensors_in, with_tensors

aten = torch.ops.aten
OPS = {str(target): target for target in table() if str(target).startswith(("aten.", "wholestep."))}
# one or two of each kind of rule, for the default tier
FEW = [
    "aten.mm.default",
    "aten.addmm.default",
    "aten.view.default",
    "aten.sum.dim_IntList",
    "aten.amax.default",
    "aten.add.Tensor",
    "aten.native_layer_norm.default",
    "aten.native_layer_norm_backward.default",
    "aten._softmax.default",
    "aten.expand.default",
    "aten.embedding.default",
    "aten.embedding_dense_backward.default",
    "aten.nll_loss_forward.default",
    "aten.cat.default",
    "aten.index_put.default",
    "aten.squeeze.default",
    "aten.convolution_backward.default",
    "aten._foreach_norm.Scalar",
    "aten._fused_adamw.default",
    "aten.topk.default",
    "aten.adaptive_max_pool2d_backward.default",
]


@pytest.fixture(scope="module")
def samples() -> dict[Any, list[Sample]]:
    return samples_of(OPS.values())


@pytest.fixture
def table_restored() -> Iterator[None]:
    kept = [(known, dict(known)) for known in (registry.RULES, registry.SAMPLES)]
    yield
    for known, rows in kept:
        known.clear()
        known.update(rows)
    registry.bound = {}


@pytest.fixture(scope="module")
def row_of(samples: dict[Any, list[Sample]]) -> Callable[[str], Row]:
    """What the check says of an op; each is checked once."""
    return cache(lambda op: check_op(OPS[op], samples[OPS[op]]))


# -- the table ----------------------------------------------------------------------------
@pytest.mark.parametrize("op", OPS)
def test_rule_holds(op: str, row_of: Callable[[str], Row]) -> None:
    row = row_of(op)
    assert row.ok, "\n".join([row.verdict, *map(str, row.result.failures[:3])])


def of_no_place(op: str, sample: Sample, wrong: int) -> Iterator[tuple[Any, ...]]:
    """The calls of the ranks that have a piece of the dim, with one index that is none."""
    target = OPS[op]
    args = tuple(opened_with(sample.args, wrong))
    with pytest.raises((IndexError, RuntimeError), match=r"out of|Target"):
        target(*args)
    case = case_of(target, sample)
    bound = bind_rule(case.call)
    assert bound is not None
    for way in ways(case, bound):
        if way.factor in bound.local and len(way.mesh.axes) == 1:
            for rank in range(way.mesh.size):
                at = way.mesh.coordinate(rank)
                tensors = zip(tensors_in(args), way.takes, strict=True)
                pieces = [piece(t, layout, way.mesh, at) for t, layout in tensors]
                local = localize(bound, case.call, way.takes, way.gives, way.mesh, *with_tensors(args, {}, pieces))
                yield local.target, *resolve(local.args, at)


def opened_with(args: Any, wrong: int) -> Iterator[Any]:
    """The arguments with `wrong` in place of the first index."""
    for value in args:
        if isinstance(value, Tensor) and not value.is_floating_point():
            value = torch.where(torch.arange(value.numel()).view(value.shape) == 0, wrong, value)
        yield [*opened_with(value, wrong)] if isinstance(value, list) else value


@pytest.mark.parametrize("wrong", [-99, 5, 50])
@pytest.mark.parametrize(
    ("op", "args"),
    [
        ("aten.embedding.default", (rand(5, 3), ints(5, 6))),
        ("aten.gather.default", (rand(5, 6), 0, ints(5, 4, 6))),
        ("aten.scatter.src", (rand(5, 6), 0, ints(5, 4, 6), rand(4, 6))),
        ("aten.scatter.value", (rand(5, 6), 0, ints(5, 4, 6), 1.0)),
        ("aten.index_select.default", (rand(5, 6), 0, ints(5, 4))),
        ("aten.index.Tensor", (rand(5, 6), [ints(5, 4)])),
        ("aten.index_put.default", (rand(5, 6), [ints(5, 4)], rand(4, 6))),
        ("aten.nll_loss_forward.default", (rand(4, 5), ints(5, 4), None, 2, -100)),
        ("aten.nll_loss2d_forward.default", (rand(4, 5, 2, 3), ints(5, 4, 2, 3), None, 2, -100)),
    ],
    ids=lambda value: value.split(".")[1] if isinstance(value, str) else "",
)  # fmt: skip
def test_ranks_refuse_an_index_that_the_whole_dim_lacks(op: str, args: tuple[Any, ...], wrong: int) -> None:
    calls = [*of_no_place(op, Sample(args, {}), wrong)]
    assert len(calls) >= 2
    for target, *local in calls:
        with pytest.raises((IndexError, RuntimeError), match=r"out of|Target"):
            target(*local)


def test_table_is_large() -> None:
    assert len(OPS) >= 700, "ops that lost their rule"


def test_samples_cut_many_factors(row_of: Callable[[str], Row]) -> None:
    pairs = {pair for op in OPS for pair in row_of(op).result.pairs}
    assert len(pairs) >= 1400, "factors that are not cut by any sample any more"


def test_imports_of_rules_point_one_way() -> None:
    package = Path(registry.__file__).parent
    may = {"__init__.py": {"aten"}, "find_rule.py": {"testing"}}
    for path in sorted(package.rglob("*.py")):
        module = path.relative_to(package).as_posix()
        tree = ast.parse(path.read_text())
        names = [name.split(".")[2:3] for _, name in imports(tree, f"wholestep/rules/{module}") if ".rules." in name]
        folders = {name for found in names for name in found} & {"aten", "testing"} - {module.split("/")[0]}
        assert folders <= may.get(module, set()), f"{module} imports {folders}"
        nested = [n for n in ast.walk(tree) if isinstance(n, (ast.Import, ast.ImportFrom)) and n not in tree.body]
        assert not nested, f"{module}:{nested[0].lineno} imports within a function"


@pytest.mark.smoke
def test_most_rows_are_one_text() -> None:
    rows = [row for target, row in registry.RULES.items() if str(target).startswith("aten.")]
    texts = [row for row in rows if isinstance(row.body, Bind)]
    assert len(rows) >= 490
    assert len(texts) >= 0.8 * len(rows), "rules that became functions"


@pytest.mark.smoke
@pytest.mark.usefixtures("table_restored")
def test_ops_by_name() -> None:
    assert registry.targets_of("sum.dim_IntList no_such_op relu") == [aten.sum.dim_IntList, aten.relu.default]
    registry.rule("rules_late::op.default", "a! b -> a! b", origin="rules_late")
    late = torch.library.custom_op("rules_late::op", lambda x: x * 2, mutates_args=(), schema="(Tensor x) -> Tensor")
    bound = bind_rule(Call.on(late._opoverload, (torch.ones(4, 5),), {}, torch.ones(4, 5)))
    assert bound is not None
    assert (bound.origin, bound.groups[0].operands) == ("rules_late", {0: (None, "b")})


@pytest.mark.parametrize("text", ["... x[dmi]! -> ... x[dmi]!", "dmi: ... -> ... | ...! -> ...!"])
def test_arguments_that_the_op_lacks(text: str) -> None:
    with pytest.raises(ws.RuleError) as caught:
        ws.rule(aten.cumsum, text)
    assert str(caught.value) == (
        f"rule {text!r} names an argument 'dmi'\n"
        "  needed: one of aten.cumsum.default: self, dim, dtype\n"
        "  next: correct the rule"
    )


def test_rows_name_arguments_of_their_ops() -> None:
    rows: dict[int, tuple[Bind, list[Any]]] = {}
    for target, found in registry.RULES.items():
        if isinstance(found.body, Bind):
            rows.setdefault(id(found.body), (found.body, []))[1].append(target)
    for bind, targets in rows.values():
        registry.check_named(bind, targets)


def test_views_of_tensors_without_elements() -> None:
    bound = bind_rule(Call.on(aten.view.default, (torch.ones(0, 2), [3, 0]), {}, torch.ones(3, 0)))
    assert bound is not None
    assert bound.groups[0].factors == ()


@pytest.mark.usefixtures("table_restored")
def test_samples_stand_beside_rows() -> None:
    ws.rule([double, aten.relu], "... -> ...")
    sample([double], lambda: [(torch.randn(4, 5),)])
    row = check_op(DOUBLE, samples_of([DOUBLE])[DOUBLE])
    assert (row.verdict, row.result.samples) == ("holds", 1)


@pytest.mark.usefixtures("table_restored")
def test_a_rule_without_samples_is_not_ok() -> None:
    ws.rule(double, "... -> ...", linear="0")
    row = check_op(DOUBLE, samples_of([DOUBLE])[DOUBLE])
    assert (row.verdict, row.ok) == ("no sample", False)
    ws.rule(double, "... -> ...", linear="0", samples=lambda: [(torch.randn(4, 5),)])
    row = check_op(DOUBLE, samples_of([DOUBLE])[DOUBLE])
    assert (row.verdict, row.ok, row.result.factors) == ("holds", True, (".2", ".1"))


# -- changed rules --------------------------------------------------------------------------
def survivors(ops: Sequence[str], samples: dict[Any, list[Sample]]) -> tuple[list[Mutation], int]:
    found = [m for _, ms in mutate_table([OPS[op] for op in ops], samples.__getitem__) for m in ms]
    passed = [m for m in found if m.verdict == "survived"]
    # Attention with a mask is not causal where ranks have pieces of the queries: the op itself is right for these.
    passed = [m for m in passed if not (m.change == "the op itself on ranks" and "q k! ->" in m.rule)]
    return passed, sum(m.caught for m in found)


def test_changed_rules_fail(samples: dict[Any, list[Sample]]) -> None:
    passed, caught = survivors(FEW, samples)
    assert passed == []
    assert caught >= 1000


@pytest.mark.full
def test_every_changed_rule_fails(samples: dict[Any, list[Sample]]) -> None:
    passed, caught = survivors(list(OPS), samples)
    assert passed == []
    assert caught >= 15_000


# -- what the check says ----------------------------------------------------------------------
@torch.library.custom_op("rules_test::double", mutates_args=())
def double(x: Tensor) -> Tensor:
    return x * 2


@torch.library.custom_op("in_place_test::scale_rows_", mutates_args={"x"})
def scale_rows(x: Tensor, w: Tensor) -> Tensor:
    x.mul_(w)
    return w.sum()


@scale_rows.register_fake
def _(x: Tensor, w: Tensor) -> Tensor:
    return w.new_empty(())


def test_an_op_that_writes_in_place_has_the_rule_of_its_results() -> None:
    ws.rule(scale_rows, "rows d, d -> (), rows d", reduces={"d": "sum", "rows": ""})
    assert ws.check_rule(scale_rows, torch.rand(4, 6), torch.rand(6)).ok
    ws.rule(scale_rows, "rows d, d -> (), d rows", reduces={"d": "sum", "rows": ""})
    with pytest.raises(ws.RuleError, match="scale_rows_"):
        ws.check_rule(scale_rows, torch.rand(4, 6), torch.rand(6))


DOUBLE = torch.ops.rules_test.double.default
WRONG = [
    (
        aten.mm.default,
        {"text": "m k, k n -> m n", "reduces": {"k": "max"}},
        (torch.ones(4, 6), torch.ones(6, 5)),
        "the rule of aten.mm.default is wrong in 4 ways; factor 'k' cut into 2\n"
        "  needed: 6; output 0 differs in 20 of 20 values, the first at [0, 0]: 3\n"
        "  next: correct the rule: mark a factor that must stay whole with '!'",
    ),
    (
        aten._softmax.default,
        {"text": "a b -> a b"},
        (torch.zeros(4, 8), 1, False),
        "the rule of aten._softmax.default is wrong in 5 ways; factor 'b' cut into 2\n"
        "  needed: 0.125; output 0 differs in 32 of 32 values, the first at [0, 0]: 0.25\n"
        "  next: correct the rule: mark a factor that must stay whole with '!'",
    ),
    (
        aten.sum.dim_IntList,
        {"text": "a b! -> b!", "linear": "0"},
        (torch.ones(4, 5), [1]),
        "rule 'a b! -> b!' does not fit aten.sum.dim_IntList: output 0: factor b is 4 here and 5 before\n"
        "  needed: a rule whose terms have the dims of the tensors\n"
        "  next: correct the rule, or make it a function of the shapes",
    ),
    (
        aten.t.default,
        {"text": "a b! -> a b!"},
        (torch.ones(4, 4),),
        "the rule of aten.t.default is wrong in 5 ways; factor 'a' cut into 2\n"
        "  needed: shape [2, 4]; output 0 on rank 0 has shape [4, 2]\n"
        "  next: correct the rule: mark a factor that must stay whole with '!'",
    ),
]


@pytest.mark.usefixtures("table_restored")
@pytest.mark.parametrize(("op", "words", "args", "message"), WRONG, ids=[str(row[0]) for row in WRONG])
def test_wrong_rules_are_named(op: Any, words: dict[str, Any], args: tuple[Any, ...], message: str) -> None:
    ws.rule(op, **words)
    with pytest.raises(ws.RuleError) as caught:
        ws.check_rule(op, *args)
    assert str(caught.value) == message


@pytest.mark.usefixtures("table_restored")
def test_false_linearity_is_named() -> None:
    ws.rule(aten.relu.default, "... -> ...", linear="0")
    with pytest.raises(ws.RuleError, match=r"partial avg in operands 0 in 2 parts(?s:.*)linear= names inputs"):
        ws.check_rule(aten.relu.default, torch.randn(4, 5))


@pytest.mark.usefixtures("table_restored")
def test_values_said_to_be_unread_are_changed() -> None:
    ws.rule(aten.relu.default, "... -> ...", by_shape=[0])
    with pytest.raises(ws.RuleError, match="operands 0, never read, given other values"):
        ws.check_rule(aten.relu.default, torch.randn(4, 5))


def test_no_rule() -> None:
    with pytest.raises(ws.RuleError) as caught:
        ws.check_rule(double, torch.ones(4))
    assert str(caught.value) == (
        "rules_test.double.default has no rule for these arguments\n"
        "  needed: a rule to check\n"
        "  next: write one with @ws.rule, or leave the op to discovery"
    )


def test_result() -> None:
    result = ws.check_rule(aten.mm, torch.randn(4, 6), torch.randn(6, 5))
    assert result.ok
    assert result.pairs == tuple(("aten.mm.default", f) for f in "mkn")
    assert str(result) == "aten.mm.default: holds; factors m k n; 1 samples"
    assert ws.check_rule(aten.bernoulli.p, torch.rand(8, 5), 0.5).shapes_only


# -- rules of one's own ------------------------------------------------------------------------
@pytest.mark.usefixtures("table_restored")
def test_own_rule_goes_first() -> None:
    call = Call.on(aten.relu.default, (torch.ones(4, 5),), {}, torch.ones(4, 5))
    built_in = bind_rule(call)
    assert built_in is not None
    assert built_in.origin == "built in"
    ws.rule(aten.relu, "a b! -> a b!")
    mine = bind_rule(call)
    assert mine is not None
    assert (mine.origin, mine.groups[0].operands) == ("yours", {0: ("a", None)})


@pytest.mark.usefixtures("table_restored")
def test_own_rule_holds_for_a_graph_that_was_planned_before() -> None:
    graph = torch.fx.Graph()
    given, made = graph.placeholder("x"), torch.ones(4, 5)
    node = graph.call_function(aten.relu.default, (given,))
    for one in (given, node):
        meta.set_value(one, made)
    first = find_rule(node)
    assert first is not None
    assert first is find_rule(node)
    ws.rule(aten.relu, "a b! -> a b!")
    mine = find_rule(node)
    assert mine is not None
    assert (first.origin, mine.origin) == ("built in", "yours")


@pytest.mark.usefixtures("table_restored")
def test_own_rule_as_a_function() -> None:
    @ws.rule([double])
    def by_rank(call: Call) -> str | None:
        return "a b -> a b" if len(call.shape(0)) == 2 else None

    assert ws.check_rule(double, torch.ones(4, 5)).factors == ("a", "b")
    with pytest.raises(ws.RuleError, match="has no rule for these arguments"):
        ws.check_rule(double, torch.ones(4))


# -- discovery -----------------------------------------------------------------------------------
@torch.library.custom_op("rules_test::row_softmax", mutates_args=())
def row_softmax(x: Tensor, scale: float) -> Tensor:
    return torch.softmax(x * scale, -1)


@torch.library.custom_op("rules_test::norm_backward", mutates_args=())
def norm_backward(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
    return grad * weight * scale, (grad * x * scale).sum((0, 1))


@torch.library.custom_op("rules_test::mixed_rows", mutates_args=())
def mixed_rows(x: Tensor) -> Tensor:
    return x.flip(0) * 2 + x.sin().mean()


@torch.library.custom_op("rules_test::mixed_columns", mutates_args=())
def mixed_columns(x: Tensor, y: Tensor) -> Tensor:
    return x.flip(1).exp() * y


@torch.library.custom_op("rules_test::fixed", mutates_args=())
def fixed(x: Tensor) -> Tensor:
    return x.view(64, 512).cos().clone()


CALLS = {"count": 0}


@torch.library.custom_op("rules_test::counted", mutates_args=())
def counted(x: Tensor) -> Tensor:
    CALLS["count"] += 1
    return x.abs()


def found(op: Any, *args: Any) -> BoundRule | None:
    target = op._opoverload
    return discover(Call.on(target, args, {}, target(*args)))


def test_discovers_rows() -> None:
    bound = found(row_softmax, torch.randn(64, 512), 2.0)
    assert bound is not None
    assert (bound.origin, len(bound.groups)) == ("discovered", 1)
    group = bound.groups[0]
    assert (group.operands, group.outputs) == ({0: ("f0", None)}, {0: ("f0", None)})
    assert (group.reduces, group.partial) == ({}, ())


def test_discovers_sums_and_linear_inputs() -> None:
    bound = found(norm_backward, torch.randn(8, 16, 512), torch.randn(8, 16, 512), torch.randn(512))
    assert bound is not None
    group = bound.groups[0]
    assert group.operands == {0: ("f0", "f1", None), 1: ("f0", "f1", None), 2: (None,)}
    assert group.outputs == {0: ("f0", "f1", None), 1: (None,)}
    assert group.reduces == {"f0": "sum", "f1": "sum"}
    assert [set(through.operands) for through in group.partial] == [{0}]


def test_equal_sizes_are_told_apart() -> None:
    bound = found(mixed_columns, torch.randn(256, 256), torch.randn(256, 256))
    assert bound is not None
    group = bound.groups[0]
    assert group.operands == {0: ("f0", None), 1: ("f0", None)}
    assert group.outputs == {0: ("f0", None)}
    assert [set(through.operands) for through in group.partial] == [{1}]


def test_discovers_nothing_where_everything_mixes() -> None:
    assert found(mixed_rows, torch.randn(64, 512)) is None


def test_real_sizes_where_small_ones_do_not_run() -> None:
    assert found(fixed, torch.randn(64, 512)) is None, "it runs on no piece"


def test_aten_is_not_discovered() -> None:
    x = torch.randn(4, 5)
    assert discover(Call.on(aten.relu.default, (x,), {}, x.relu())) is None


def test_discovery_is_remembered() -> None:
    first = found(counted, torch.randn(64, 512))
    before = CALLS["count"]
    assert found(counted, torch.randn(64, 512)) is first
    assert CALLS["count"] == before + 1, "the call of the test"
    assert first is not None


@pytest.mark.usefixtures("table_restored")
def test_own_rule_goes_before_discovery() -> None:
    call = Call.on(DOUBLE, (torch.ones(64, 32),), {}, torch.ones(64, 32))
    assert bind_rule(call) is None
    discovered = bind_rule(call, fallback=discover)
    assert discovered is not None
    assert discovered.origin == "discovered"
    ws.rule(double, "a! b -> a! b")
    mine = bind_rule(call, fallback=discover)
    assert mine is not None
    assert mine.origin == "yours"


# -- the command ------------------------------------------------------------------------------
APP = typer.Typer()
APP.command()(check_rules)


def test_command() -> None:
    done = CliRunner().invoke(APP, ["--op", "mm.default"])
    assert done.exit_code == 0, done.output
    assert "aten.mm.default" in done.output
    assert "1 ops, 3 (op, factor) pairs" in done.output
    assert "0 wrong" in done.output


def test_command_without_a_match() -> None:
    done = CliRunner().invoke(APP, ["--op", "no_such_op"])
    assert done.exit_code == 2
    assert "no op with a rule matches 'no_such_op'" in done.output


@pytest.mark.usefixtures("table_restored")
def test_command_fails_on_a_wrong_rule() -> None:
    ws.rule(double, "a b -> b a", samples=lambda: [(torch.ones(4, 4),)])
    done = CliRunner().invoke(APP, ["--op", "rules_test*"])
    assert done.exit_code == 1
    assert "1 wrong" in done.output
