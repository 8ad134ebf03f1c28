"""The options of `compile`: declared once, and an unknown one is named."""

import inspect
from dataclasses import fields
from typing import Any

import pytest

import wholestep as ws
from wholestep.runtime.compile_options import CompileOptions


def train(model: Any, x: Any) -> Any:
    return model(x)


def test_the_signature_and_the_documentation_are_those_of_the_options() -> None:
    names = [field.name for field in fields(CompileOptions)]
    assert list(inspect.signature(ws.compile).parameters) == ["train_step", *names]
    documented = inspect.getdoc(ws.compile) or ""
    assert [name for name in names if f"\n    {name}: " not in documented] == []


@pytest.mark.parametrize(
    ("name", "next_step"),
    [("paralel", "write parallel="), ("memory_byte", "write memory_bytes="), ("x", "correct the call")],
)
def test_an_unknown_option_is_named_with_the_nearest_one(name: str, next_step: str) -> None:
    known = ", ".join(["train_step", *(field.name for field in fields(CompileOptions))])
    with pytest.raises(ws.CaptureError) as caught:
        ws.compile(train, **{name: None})
    problem = f"compile({name}=...): got an unexpected keyword argument {name!r}"
    assert str(caught.value) == f"{problem}\n  needed: compile({known})\n  next: {next_step}"


@pytest.mark.parametrize(("options", "says"), [
    ({"schedule": "across_steps"}, "a schedule across steps with Pipeline"),
    ({"memory_bytes": "1GiB", "offload": "cpu"}, "memory_bytes with offload='cpu'"),
])  # fmt: skip
def test_what_does_not_go_with_a_pipeline_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ws.WholestepError) as caught:
        ws.compile(train, parallel=ws.Pipeline(micro_batches=2), mesh="pp=2", **options)
    assert caught.value.found == says
