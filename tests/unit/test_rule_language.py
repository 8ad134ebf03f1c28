"""The rule language: what parses, what it means on shapes, what is refused and how."""

from typing import Any

import pytest
import torch

from wholestep.errors import RuleError
from wholestep.rules.call import Call
from wholestep.rules.language import RuleText, When, cases
from wholestep.rules.registry import Bind
from wholestep.rules.rule import ANY_PARTIAL, BoundRule, PassThrough


def parse(text: str, *options: Any, **named: Any) -> RuleText:
    (rule,) = cases(text, *options, **named)
    return rule


aten = torch.ops.aten
GRAMMAR = "dims as name, name[argument], (a b), ..., name... or 1, each with an optional '!' or '?'; or (), *, [dims]"


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
    "... x[dim]! -> ... 1[dim]+",
    "... w[#sizes]!, w[#sizes]! -> ... 1[#sizes]",
    "{b m n}, b m k!, b k! n -> b m n",
    "n i s...!, o i k...! -> n o t...",
    "...? a[dim]? -> ...+",
    "... a! b! -> ...*, ... c d*",
    "*+ -> ...!+",
]


@pytest.mark.parametrize("text", SAME)
def test_text_survives(text: str) -> None:
    assert str(parse(text)) == text
    assert parse(str(parse(text))) == parse(text)


def test_cases() -> None:
    found = cases("reduction=0: ...+ -> ... | train: ...! -> () | ... -> ()", reduces=(("...", "max"),))
    assert [str(case) for case in found] == ["reduction=0: ...+ -> ...", "train: ...! -> ()", "... -> ()"]
    assert [case.when for case in found] == [When("reduction", 0), When("train"), None]
    assert all(case.reduces == {"...": "max"} for case in found)


def test_parsed_value() -> None:
    rule = parse("b (h d) s!, b -> b h", linear="0 | 0+1", reduces=(("s", "max"),))
    assert rule.factors == ("b", "h", "d", "s")
    assert rule.unsharded == {"s"}
    assert rule.linear == (frozenset({0}), frozenset({0, 1}))
    assert rule.reduces == {"s": "max"}


ONCE = "each factor at most once in a term"
RENAME = "give the second dim another name, mark both '!'"
REST = "at most one '...', and one in a term with name[argument]"
REFUSED = [
    ("m k, k n", 8, "no '->'", "inputs -> outputs, as in 'm k, k n -> m n'", "add the outputs"),
    ("m & -> m", 2, "cannot read '&'", GRAMMAR, "correct the rule"),
    ("m ? -> m!!", 9, "'!' stands alone", GRAMMAR, "correct the rule"),
    ("m, -> m", 3, "an empty term", GRAMMAR, "write () for a scalar"),
    ("[m -> m", 3, "'->' where ']' belongs", GRAMMAR, "correct the rule"),
    ("{m, k} -> m", 2, "',' where '}' belongs", GRAMMAR, "correct the rule"),
    ("(a -> a", 0, "a merged dim is '(a b)'", GRAMMAR, "correct the rule"),
    ("(a b!) -> a", 0, "a merged dim is '(a b)'", GRAMMAR, "correct the rule"),
    ("! a -> a", 0, "'!' stands alone", GRAMMAR, "correct the rule"),
    ("a -> b -> c", 7, "'->' where '|' or the end belongs", GRAMMAR, "correct the rule"),
    ("a -> b | c", 10, "the end where '->' belongs", GRAMMAR, "correct the rule"),
    ("a a -> a", 0, "'a' stands twice in 'a a'", ONCE, RENAME),
    ("b, ... a ... -> a", 3, "'...' stands twice in '... a ...'", ONCE, RENAME),
    ("s... t... -> s...", 0, "'s... t...' has 2 '...'", REST, "correct the rule"),
    ("x[dim] -> x[dim]", 0, "'x[dim]' has 0 '...'", REST, "correct the rule"),
]


@pytest.mark.parametrize(("text", "at", "found", "needed", "next_step"), REFUSED, ids=[row[0] for row in REFUSED])
def test_refused_text_is_pointed_at(text: str, at: int, found: str, needed: str, next_step: str) -> None:
    with pytest.raises(RuleError) as caught:
        cases(text)
    pointed = f"rule: {found}\n    {text}\n    {' ' * at}^"
    assert str(caught.value) == f"{pointed}\n  needed: {needed}\n  next: {next_step}"


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
    assert [group.splits("m", (n,)) for n in (2, 3, 4, 8)] == [True] * 4


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
    assert [group.splits("a", (n,)) for n in (2, 3, 4)] == [True, False, True]


def test_outer_factors_of_size_one_do_not_count() -> None:
    group = bind("a b -> (a b)", aten.view.default, torch.ones(1, 6), [6]).groups[0]
    assert group.operands == {0: (None, "b")}
    assert group.outputs == {0: ("b",)}
    assert group.even == {}


def test_filled_factors_are_not_cut_into_empty_pieces() -> None:
    group = bind("a -> ()", aten.amax.default, torch.ones(5), reduces={"a": "max"}).groups[0]
    assert [group.splits("a", (n,)) for n in (2, 3, 4)] == [True, True, False]


def test_lists_are_cut_entry_by_entry() -> None:
    tensors = [torch.ones(4), torch.ones(2, 3)]
    bound = bind("[...], [...] -> [...]", aten._foreach_add.List, tensors, tensors)
    assert [g.operands for g in bound.groups] == [
        {0: (".1",), 2: (".1",)},
        {1: (".2", ".1"), 3: (".2", ".1")},
    ]
    assert [g.outputs for g in bound.groups] == [{0: (".1",)}, {1: (".2", ".1")}]


def test_dims_that_an_argument_names() -> None:
    x = torch.ones(4, 5, 6)
    group = bind("... x[dim]! -> ... x[dim]!", aten.cumsum.default, x, -2).groups[0]
    assert (group.operands, group.outputs) == ({0: (".2", None, ".1")}, {0: (".2", None, ".1")})
    group = bind("... x[dim] -> ...", aten.sum.dim_IntList, x, [0, -1], reduces={"x": "max"}).groups[0]
    assert (group.operands, group.outputs) == ({0: ("x.0", ".1", "x.1")}, {0: (".1",)})
    assert group.reduces == {"x.0": "max", "x.1": "max"}
    assert group.filled == {"x.0": 4, "x.1": 6}
    group = bind("... x[dim] -> ...", aten.sum.dim_IntList, torch.ones(4), [0]).groups[0]
    assert group.operands == {0: ("x",)}
    group = bind("... x[dim] -> ...", aten.sum.dim_IntList, torch.ones(()), [0]).groups[0]
    assert group.operands == {0: ()}
    group = bind("... -> ... s[dim]", aten.select_backward.default, torch.ones(4, 6), [4, 5, 6], -2, 0).groups[0]
    assert group.outputs == {0: (".2", "s", ".1")}
    group = bind("... x[dimension]! -> ... s[dimension] w", aten.unfold.default, x, -3, 2, 1).groups[0]
    assert (group.operands, group.outputs) == ({0: (None, ".2", ".1")}, {0: ("s", ".2", ".1", "w")})


@pytest.mark.parametrize("keep", [False, True])
def test_dims_that_are_kept(keep: bool) -> None:
    group = bind("... x[dim] -> ... 1[dim]", aten.sum.dim_IntList, torch.ones(4, 5, 6), [1], keep).groups[0]
    assert group.outputs == {0: (".2", None, ".1") if keep else (".2", ".1")}
    group = bind("... x[dim] -> ... 1[dim]", aten.argmax.default, torch.ones(4, 5), None, keep).groups[0]
    assert group.operands == {0: ("x.0", "x.1")}
    assert group.outputs == {0: (None, None) if keep else ()}


def test_a_dim_for_each_entry_of_an_argument() -> None:
    text = "... w[#normalized_shape]!, w[#normalized_shape]!, w[#normalized_shape]! -> ..., ... 1[#normalized_shape], *"
    given = torch.ones(4, 5, 6), [5, 6], torch.ones(5, 6), None, 1e-5
    with pytest.raises(RuleError, match=r"output 0 has shape|factor .1 is"):
        bind(text, aten.native_layer_norm.default, *given)
    full = text.replace("-> ...,", "-> ... w[#normalized_shape],")
    group = bind(full, aten.native_layer_norm.default, *given).groups[0]
    assert group.operands == {0: (".1", None, None), 1: (None, None)}
    assert group.outputs == {0: (".1", None, None), 1: (".1", None, None), 2: (None, None, None)}


def test_dims_whose_sizes_differ_stay_whole() -> None:
    text = "... x[dim]? -> ... x[dim]?"
    group = bind(text, aten.slice.Tensor, torch.ones(4, 6), 1, 0, 3).groups[0]
    assert (group.operands, group.outputs) == ({0: (".1", None)}, {0: (".1", None)})
    group = bind(text, aten.slice.Tensor, torch.ones(4, 6), 1, 0, 6).groups[0]
    assert (group.operands, group.outputs) == ({0: (".1", "x")}, {0: (".1", "x")})
    group = bind(text, aten.slice.Tensor, torch.ones(4, 6), 1, 0, 1).groups[0]
    assert (group.operands, group.reduces) == ({0: (".1", None)}, {}), "a dim of size one does not broadcast"


@pytest.mark.parametrize(
    ("shape", "expected"),
    [((), ()), ((6,), ("n",)), ((1,), (None,)), ((5, 1), ("m", None)), ((1, 6), (None, "n")), ((5, 6), ("m", "n"))],
)
def test_braces_broadcast(shape: tuple[int, ...], expected: tuple[str | None, ...]) -> None:
    bound = bind("{m n}, m k!, k! n -> m n", aten.addmm.default, torch.ones(shape), torch.ones(5, 4), torch.ones(4, 6))
    assert bound.groups[0].operands == {0: expected, 1: ("m", None), 2: (None, "n")}


def test_runs_of_dims_have_names() -> None:
    given = torch.ones(2, 3, 6, 7), torch.ones(4, 3, 2, 2), None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1
    group = bind("n i s...!, o i k...!, o -> n o t...", aten.convolution.default, *given).groups[0]
    assert group.operands == {0: ("n", "i", None, None), 1: ("o", "i", None, None)}
    assert group.outputs == {0: ("n", "o", "t.2", "t.1")}


def test_the_last_term_repeats() -> None:
    x = torch.ones(4, 6)
    group = bind("...+ -> ...+", aten.where.self, x > 0, x, x[0]).groups[0]
    assert group.operands == {0: (".2", ".1"), 1: (".2", ".1"), 2: (".1",)}
    group = bind("... x[dim]! -> ... k[dim]+", aten.topk.default, x, 2).groups[0]
    assert group.outputs == {0: (".1", "k"), 1: (".1", "k")}


def test_the_first_case_that_holds_and_fits() -> None:
    text = "reduction=0: n c, n c -> n c | n, n -> () | ...!+ -> ()"
    x = torch.ones(4, 6)
    assert bind(text, aten.mse_loss.default, x, x, 0).groups[0].outputs == {0: ("n", "c")}
    assert bind(text, aten.mse_loss.default, x[0], x[0], 2).groups[0].reduces == {"n": "sum"}
    assert bind(text, aten.mse_loss.default, x, x, 2).groups[0].operands == {0: (None, None), 1: (None, None)}
    with pytest.raises(RuleError) as caught:
        bind("reduction=0: n, n -> n | n, n -> ()", aten.mse_loss.default, x, x, 0)
    assert str(caught.value) == (
        "rule 'reduction=0: n, n -> n | n, n -> ()' does not fit aten.mse_loss.default: "
        "it has no case for [4, 6], [4, 6]\n"
        "  needed: a case whose terms have the dims of the tensors\n"
        "  next: add one, or make the rule a function of the shapes"
    )


def test_optional_tensors_are_opaque_where_they_do_not_fit() -> None:
    text = "... a! b! -> ... c d*, ... e*, ... f g*"
    group = bind(text, aten._linalg_svd.default, torch.ones(2, 3, 4)).groups[0]
    assert (group.outputs[0], group.opaque) == ((".1", None, None), frozenset())
    group = bind(text, aten._linalg_svd.default, torch.ones(2, 3, 4), False, False).groups[0]
    assert (group.outputs[0], group.opaque) == ((None,), frozenset({0, 2}))
    assert group.reduces == {}


def test_moved_values_may_be_partial_in_any_way() -> None:
    group = bind("... -> ...", aten.clone.default, torch.ones(4), moves="0").groups[0]
    assert group.partial == (PassThrough(frozenset({0}), ANY_PARTIAL),)
    group = bind("*, n -> n", aten.maximum.default, torch.ones(4), torch.ones(4), moves="0 | 1").groups[0]
    assert group.partial == (PassThrough(frozenset({1}), ANY_PARTIAL),), "nothing is said of what is opaque"


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
