"""Every optimizer, compiled against eager over six calls in one process: equal, or refused with the reason."""

import contextlib
import io
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import wholestep as ws
from tests.conftest import few
from tests.optimizers import Kind, build, data, of_others, of_torch, train_by_closure
from tests.steps import mse as train

CALLS = 6
MOST_USED = {"Adan", "ADOPT", "Lamb", "Lion", "SCION", "Shampoo", "SOAP", "StableAdamW"}  # others are `full`


def refuse(kind: Kind, dtype: torch.dtype) -> None:
    """Nothing else is wrong with it: in eager it runs, but for what wants sparse gradients."""
    model, optimizer = build(kind, dtype)
    step = ws.compile(train_by_closure if kind.closure else train)
    for call in range(CALLS):
        step(model, optimizer, *data(call, dtype))


def differences(kind: Kind, dtype: torch.dtype) -> float:
    """The largest difference of losses, parameters and tensors of state, relative to the largest entry of each."""
    fn, worst = train_by_closure if kind.closure else train, 0.0
    (ours, mine), (theirs, expected) = build(kind, dtype), build(kind, dtype)
    step = ws.compile(fn)
    for call in range(CALLS):
        torch.manual_seed(call)
        there = fn(theirs, expected, *data(call, dtype))
        torch.manual_seed(call)
        worst = max(worst, apart(step(ours, mine, *data(call, dtype)), there))
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        worst = max(worst, apart(a.detach(), b.detach()))
        assert set(mine.state[a]) == set(expected.state[b])
        for key, value in expected.state[b].items():
            found = mine.state[a][key]
            assert type(found) is type(value), key
            for one, other in zip(leaves(found), leaves(value), strict=True):
                if isinstance(other, Tensor):
                    worst = max(worst, apart(one, other))
                else:
                    assert one == other, key
    for a, b in zip(mine.param_groups, expected.param_groups, strict=True):
        assert {k: v for k, v in a.items() if k != "params"} == {k: v for k, v in b.items() if k != "params"}
    return worst


def leaves(value: Any) -> list[Any]:
    """A value of optimizer state, or what is in it."""
    if isinstance(value, dict):
        return [*value, *leaves([*value.values()])]
    return [one for item in value for one in leaves(item)] if isinstance(value, (list, tuple)) else [value]


def apart(found: Tensor, expected: Tensor) -> float:
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    if torch.equal(found, expected):
        return 0.0
    found, expected = found.double(), expected.double()
    return ((found - expected).abs().max() / expected.abs().max().clamp_min(1e-3)).item()


def check(kind: Kind, dtype: torch.dtype, tolerance: float) -> None:
    pytest.importorskip(kind.library)
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")  # of the libraries
        if kind.refused:
            with pytest.raises(ws.WholestepError, match=kind.refused):
                refuse(kind, dtype)
        else:
            assert differences(kind, dtype) <= tolerance


def _of_name(kind: Kind) -> dict[str, str]:
    name, _, given = kind.name.rstrip(")").partition("(")
    form = next((word for word in given.split(",") if word.startswith(("foreach", "fused"))), "")
    return {"class": name, "options": given.removesuffix(form), "form": form}


def _of_library(kind: Kind) -> dict[str, Any]:
    used = kind.name if kind.name in MOST_USED else ""
    return {"library": kind.library, "refused": kind.refused, "closure": kind.closure, "used": used}


@pytest.mark.parametrize("kind", few(of_torch(), _of_name), ids=str)
def test_all_of_torch_in_float64(kind: Kind) -> None:
    """Counters are in float32, as in any script: what eager computes of them in Python is in double here too."""
    check(kind, torch.float64, 1e-12)


@pytest.mark.full
@pytest.mark.parametrize("kind", [k for k in of_torch() if "=" not in k.name or "foreach=True" in k.name], ids=str)
def test_torch_in_float32(kind: Kind) -> None:
    check(kind, torch.float32, 5e-6)


@pytest.mark.parametrize("kind", few(of_others(), _of_library), ids=str)
def test_other_libraries_in_float64(kind: Kind) -> None:
    check(kind, torch.float64, 1e-12)


def test_the_most_used_are_there() -> None:
    kinds = list(of_others())
    assert sum(k.library == "pytorch_optimizer" for k in kinds) >= 40
    assert len({k.name for k in kinds}) == len(kinds)
    assert {k.library for k in kinds} == {"pytorch_optimizer", "schedulefree", "lion_pytorch"}
    equal = [k for k in kinds if not k.refused]
    assert len(equal) >= 30, "what is refused is the smaller part"
