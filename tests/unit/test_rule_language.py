"""The rule language: what parses, what it means on shapes, what is refused and how."""

import pytest
import torch

from wholestep.errors import RuleError
from wholestep.rules.call import Call
from wholestep.rules.language import parse
from wholestep.rules.registry import Bind
from wholestep.rules.rule import BoundRule

aten = torch.ops.aten
GRAMMAR = "dims as names, (a b), ..., 1, each with an optional '!'; or (), *, [dims]"


def bind(text: str, target: object, *args: object, **words: object) -> BoundRule:
    """The rule `text` on the call `target(*args)`."""
    call = Call.on(target, args, {}, target(*args))  # type: ignore[operator]
    return Bind(text, **words).on(call)  # type: ignore[arg-type]


# -- grammar ------------------------------------------------------------------------------
SAME = [
    "m k, k n -> m n",
    "..., ... -> ...",
    "... d!, d!, d! -> ... d!, ... 1, ... 1",
    "(a b) c -> a b c",
    "(a b)! c -> c",
    "[...], [...], () -> [...]",
    "n c, * -> (), *",
    "[d0 d1], [*] -> [()]",
    "-> d0 d1",
]


@pytest.mark.parametrize("text", SAME)
def test_text_survives(text: str) -> None:
    assert str(parse(text)) == text
    assert parse(str(parse(text))) == parse(text)


def test_parsed_value() -> None:
    rule = parse("b (h d) s!, b -> b h", linear="0 | 0+1", reduces=(("s", "max"),))
    assert rule.factors == ("b", "h", "d", "s")
    assert rule.whole == {"s"}
    assert rule.linear == (frozenset({0}), frozenset({0, 1}))
    assert rule.reduces == {"s": "max"}


REFUSED = [
    ("m k, k n", "rule 'm k, k n' has no '->'", "inputs -> outputs, as in 'm k, k n -> m n'", "add the outputs"),
    ("m ? -> m", "rule 'm ? -> m': cannot read '?'", GRAMMAR, "correct the rule"),
    ("m, -> m", "rule 'm, -> m': an empty term", GRAMMAR, "write () for a scalar"),
    ("[m -> m", "rule '[m -> m': a list without ']'", GRAMMAR, "close it"),
    ("(a -> a", "rule '(a -> a': a merged dim is '(a b)'", GRAMMAR, "correct the rule"),
    ("(a b!) -> a", "rule '(a b!) -> a': a merged dim is '(a b)'", GRAMMAR, "correct the rule"),
    ("! a -> a", "rule '! a -> a': '!' stands alone", GRAMMAR, "correct the rule"),
    (
        "a a -> a",
        "rule 'a a -> a': 'a' stands twice in 'a a'",
        "each factor at most once in a term",
        "give the second dim a name of its own and mark both '!'",
    ),
    (
        "... a ... -> a",
        "rule '... a ... -> a': '...' stands twice in '... a ...'",
        "each factor at most once in a term",
        "give the second dim a name of its own and mark both '!'",
    ),
]


@pytest.mark.parametrize(("text", "found", "needed", "next_step"), REFUSED, ids=[row[0] for row in REFUSED])
def test_refused_text(text: str, found: str, needed: str, next_step: str) -> None:
    with pytest.raises(RuleError) as caught:
        parse(text)
    assert str(caught.value) == f"{found}\n  needed: {needed}\n  next: {next_step}"


def test_refused_options() -> None:
    with pytest.raises(RuleError, match=r"linear='x'"):
        parse("a -> a", "x")
    with pytest.raises(RuleError, match=r"linear in input 1"):
        parse("a -> a", "1")
    with pytest.raises(RuleError, match=r"reduces=\{'b': 'sum'\}"):
        parse("a -> ()", "", (("b", "sum"),))
    with pytest.raises(RuleError, match="by sum, max, min, avg"):
        parse("a -> ()", "", (("a", "median"),))


# -- on shapes ------------------------------------------------------------------------------
def test_matmul() -> None:
    group = bind("m k, k n -> m n", aten.mm.default, torch.ones(4, 6), torch.ones(6, 5)).groups[0]
    assert group.operands == {0: ("m", "k"), 1: ("k", "n")}
    assert group.outputs == {0: ("m", "n")}
    assert group.reduces == {"k": "sum"}
    assert [group.splits("m", n) for n in (2, 3, 4, 8)] == [True] * 4


def test_rest_is_aligned_from_the_right() -> None:
    group = bind("..., ... -> ...", aten.add.Tensor, torch.ones(2, 4, 6), torch.ones(4, 1)).groups[0]
    assert group.operands == {0: (".3", ".2", ".1"), 1: (".2", None)}
    assert group.outputs == {0: (".3", ".2", ".1")}
    assert group.reduces == {}


def test_whole_dims_are_not_cut() -> None:
    group = bind("n c! -> n c!", aten.relu.default, torch.ones(4, 6)).groups[0]
    assert group.operands == {0: ("n", None)}
    assert group.outputs == {0: ("n", None)}


def test_only_the_outer_factor_cuts_a_merged_dim_and_evenly() -> None:
    group = bind("a b -> (a b)", aten.view.default, torch.ones(4, 6), [24]).groups[0]
    assert group.operands == {0: ("a", None)}
    assert group.outputs == {0: ("a",)}
    assert group.even == {"a": 4}
    assert [group.splits("a", n) for n in (2, 3, 4)] == [True, False, True]


def test_outer_factors_of_size_one_do_not_count() -> None:
    group = bind("a b -> (a b)", aten.view.default, torch.ones(1, 6), [6]).groups[0]
    assert group.operands == {0: (None, "b")}
    assert group.outputs == {0: ("b",)}
    assert group.even == {}


def test_filled_factors_are_not_cut_into_empty_pieces() -> None:
    group = bind("a -> ()", aten.amax.default, torch.ones(5), reduces={"a": "max"}).groups[0]
    assert [group.splits("a", n) for n in (2, 3, 4)] == [True, True, False]


def test_lists_are_cut_entry_by_entry() -> None:
    tensors = [torch.ones(4), torch.ones(2, 3)]
    bound = bind("[...], [...] -> [...]", aten._foreach_add.List, tensors, tensors)
    assert [g.operands for g in bound.groups] == [
        {0: (".1",), 2: (".1",)},
        {1: (".2", ".1"), 3: (".2", ".1")},
    ]
    assert [g.outputs for g in bound.groups] == [{0: (".1",)}, {1: (".2", ".1")}]


def test_opaque_tensors_are_whole() -> None:
    group = bind("n, * -> n", aten.maximum.default, torch.ones(4), torch.ones(4)).groups[0]
    assert group.operands == {0: ("n",)}


def test_rules_that_do_not_fit() -> None:
    with pytest.raises(RuleError) as caught:
        bind("m k, k n -> m n", aten.relu.default, torch.ones(3))
    assert str(caught.value) == (
        "rule 'm k, k n -> m n' does not fit aten.relu.default: input 0 has shape [3], the rule says 'm k'\n"
        "  needed: a rule whose terms have the dims of the tensors\n"
        "  next: correct the rule, or make it a function of the shapes"
    )
    with pytest.raises(RuleError, match="factor k is 4 here and 6 before"):
        bind("m k -> k m", aten.relu.default, torch.ones(4, 6))
    with pytest.raises(RuleError, match=r"a dim of 24 is not \(a b c\)"):
        bind("a d -> (a b c)", aten.view.default, torch.ones(4, 6), [24])
