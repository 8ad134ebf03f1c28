"""What a user meets who gives something of another type: the whole text, for one of each door."""

import math
from collections.abc import Callable
from dataclasses import replace
from inspect import isclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim import AdamW

import wholestep as ws
from tests.steps import mean_square
from wholestep.layout import sharded
from wholestep.plan.strategy import Strategy
from wholestep.typed_values import as_plain, is_a, plain_number


@pytest.fixture(scope="module")
def graph() -> ws.TrainGraph:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    return ws.capture(mean_square, model, AdamW(model.parameters()), torch.randn(4, 4))


DOORS: dict[str, tuple[Callable[[ws.TrainGraph], Any], str]] = {
    "an option of compile": (
        lambda graph: ws.compile(mean_square, max_programs="60"),
        "CompileOptions(max_programs='60')\n  needed: max_programs of type int\n  next: correct max_programs=",
    ),
    "a step": (
        lambda graph: ws.compile("train"),
        "compile(train_step='train')\n  needed: train_step of type function | None\n  next: correct train_step=",
    ),
    "no step": (
        lambda graph: ws.compile()(),
        "CompiledStep(options=...): missing a required argument: 'fn'\n  needed: CompiledStep(fn, options)",
    ),
    "a model": (
        lambda graph: ws.compile(mean_square, model=3)(nn.Linear(2, 2), None, torch.ones(2)),
        "CompileOptions(model=3)\n  needed: model of type Module | Sequence[Module] | Mapping[str, Module] | None",
    ),
    "a device": (
        lambda graph: ws.compile(mean_square, device="gpu"),
        "device='gpu'\n  needed: a device of torch, as 'cpu' or 'cuda:0'\n  next: correct the name",
    ),
    "a strategy": (
        lambda graph: ws.DataParallel("zero1", axis=["dp"]),
        "DataParallel(axis=['dp'])\n  needed: axis of type str | tuple[str, ...] | None\n  next: correct axis=",
    ),
    "a graph": (
        lambda graph: ws.plan(graph.graph, "dp=2"),
        "plan(graph=<torch.fx.graph.Graph object",
    ),
    "the class of a strategy": (
        lambda graph: ws.plan(graph, "dp=2", ws.DataParallel),
        "parallel=<class 'wholestep.plan.data_parallel.DataParallel'> is a class\n"
        "  needed: a strategy\n  next: give DataParallel(...)",
    ),
    "a size of many digits": (
        lambda graph: ws.plan(graph, "dp=" + "9" * 5000),
        "axis 'dp' has a size of 5000 digits\n  needed: at most 2147483647 ranks\n  next: correct the size",
    ),
    "a number of many digits": (
        lambda graph: ws.Mesh((ws.Axis("dp", 10**5000),)),
        "Axis(size=a number of 16610 bits)\n  needed: size of type int\n  next: correct size=",
    ),
    "a layout of what is placed": (
        lambda graph: ws.plan(graph, "dp=2", placed={"0.weight": sharded(1, 0, "dp")}),
        "0.weight: layout _@dp has 1 dims, the tensor has 2\n  needed: one entry per tensor dim",
    ),
    "hardware": (
        lambda graph: ws.simulate(ws.partition(graph, ws.plan(graph, "dp=2")), "dgx-h100"),
        "simulate(hardware='dgx-h100')\n  needed: hardware of type Hardware\n  next: correct hardware=",
    ),
    "software": (
        lambda graph: ws.simulate(ws.partition(graph, ws.plan(graph, "dp=2")), ws.Hardware.default(), software=None),
        "software=None\n  needed: software of type Software\n  next: correct software=",
    ),
    "an infinite bucket": (
        lambda graph: ws.ddp_backend(bucket_cap_mb=math.inf),
        "bucket_cap_mb=inf\n  needed: a finite number\n  next: leave it out: DDP's size is taken",
    ),
    "a rule of many brackets": (
        lambda graph: ws.rule(torch.ops.aten.mm, "(" * 100_000),
        f"rule '{'(' * 75} ... has 100000 characters\n  needed: at most 4000\n  next: write a function of the shapes",
    ),
    "an op": (
        lambda graph: ws.rule(3, "m -> m"),
        "3 is no op\n  needed: an op of torch, a custom op, a function, or names\n  next: give one",
    ),
    "a path": (
        lambda graph: ws.Plan.load(3),
        "Plan.load(path=3)\n  needed: path of type str | Path\n  next: correct path=",
    ),
    "a layout": (lambda graph: ws.Layout(3), "Layout(dims=3)\n  needed: dims of type tuple[tuple[str, ...], ...]"),
    "an argument of another name": (
        lambda graph: ws.MicroBatches(nmber=2),
        "MicroBatches(nmber=...): missing a required argument: 'pieces'\n"
        "  needed: MicroBatches(pieces, input_batch_dim)\n  next: correct the call",
    ),
    "no argument": (
        lambda graph: ws.Hardware.preset(),
        "Hardware.preset(): missing a required argument: 'name'\n  needed: Hardware.preset(name)\n  next: correct",
    ),
    "a coordinate that lacks an axis": (
        lambda graph: ws.Mesh("dp=2").rank({"tp": 1}),
        "Mesh.rank({'tp': 1}): KeyError: 'dp'\n  needed: arguments that fit each other, and the value",
    ),
}


@pytest.mark.parametrize("door", DOORS)
def test_text(graph: ws.TrainGraph, door: str) -> None:
    call, text = DOORS[door]
    with pytest.raises(ws.WholestepError) as caught:
        call(graph)
    assert str(caught.value).startswith(text)


def test_every_public_call_names_an_argument_that_it_does_not_have() -> None:
    exported = [getattr(ws, name) for name in ws.__all__]
    kinds = [public for public in exported if callable(public) and not getattr(public, "_is_protocol", False)]
    for public in kinds:
        if not (isclass(public) and issubclass(public, Exception)):
            with pytest.raises(
                ws.WholestepError,
                match=r"\(of_another_name=\.\.\.\): (missing a required|got an unexpected keyword) arg",
            ):
                public(of_another_name=1)


@pytest.mark.parametrize("kind", ["plan", "hardware", "kernels", "timeline", "page"])
def test_what_cannot_be_written_is_named(graph: ws.TrainGraph, tmp_path: Path, kind: str) -> None:
    plan, hardware = ws.plan(graph, "dp=2"), ws.Hardware.default()
    write: dict[str, Callable[[Path], object]] = {
        "plan": plan.save, "hardware": hardware.save, "kernels": ws.KernelTimes(()).save,
        "timeline": ws.timeline(ws.partition(graph, plan), hardware).save,
        "page": lambda path: ws.report(path, plan, graph, hardware),
    }  # fmt: skip
    (tmp_path / "file").write_text("")
    with pytest.raises(ws.PlanError, match=r"file/a\.json' cannot be written: (Not a directory|File exists)\n"):
        write[kind](tmp_path / "file" / "a.json")


def test_half_a_character_is_shown(graph: ws.TrainGraph) -> None:
    with pytest.raises(ws.MeshError) as caught:
        ws.Mesh("dp=\ud800")
    assert str(caught.value).encode().startswith(b"mesh 'dp=\\ud800'")


# -- plans that were changed by hand ---------------------------------------------------------------------------
def changed(plan: ws.Plan, name: str, **layouts: Any) -> ws.Plan:
    return replace(plan, decisions={**plan.decisions, name: replace(plan.decisions[name], **layouts)})


def test_a_plan_by_hand_has_layouts_that_the_rules_allow(graph: ws.TrainGraph) -> None:
    plan = ws.plan(graph, "dp=2", ws.DataParallel("zero1"))
    ws.partition(graph, plan)
    name = next(n for n, d in plan.decisions.items() if n.startswith("relu"))
    whole = plan.decisions[name].operands[0].put("dp", ws.Layout(((),)).state("dp"))
    with pytest.raises(ws.PlanError) as caught:
        ws.partition(graph, changed(plan, name, operands=(whole,), outputs=(sharded(2, 0, "dp"),)))
    assert (
        caught.value.found
        == f"the plan's layouts are wrong: %{name} (aten.relu.default) cannot compute R -> S(0) along dp"
    )
    assert caught.value.needed == "layouts that the rule of the op allows"


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"operands": ()}, "the plan has 0 and 1 layouts for %relu"),
        ({"outputs": (ws.Layout(((),)),)}, "%relu: layout _ has 1 dims, the tensor has 2"),
        ({"outputs": (ws.Layout((("tp",), ())),)}, "mesh dp=2 has no axis 'tp'"),
        ({"outputs": 3}, "Decision(outputs=3)"),
    ],
)
def test_a_layout_that_does_not_fit_is_named(graph: ws.TrainGraph, change: dict[str, Any], found: str) -> None:
    plan = ws.plan(graph, "dp=2", ws.DataParallel("zero1"))
    with pytest.raises(ws.WholestepError) as caught:
        ws.partition(graph, changed(plan, "relu", **change))
    assert caught.value.found == found


def test_a_plan_stores_every_input_whole_or_in_shards(graph: ws.TrainGraph) -> None:
    plan = ws.plan(graph, "dp=2", ws.DataParallel("zero1"))
    missing = replace(plan, storage={k: v for k, v in plan.storage.items() if k != "0.bias"})
    with pytest.raises(ws.PlanError, match=r"the plan has no storage layout for '0\.bias'"):
        ws.partition(graph, missing)
    partial = ws.Layout(((),), (("dp", "sum"),))
    with pytest.raises(ws.PlanError, match=r"the plan stores '0.bias' as _ \+dp\(sum\)"):
        ws.partition(graph, replace(plan, storage={**plan.storage, "0.bias": partial}))


def test_numbers_of_numpy_are_taken_as_pythons(tmp_path: Path) -> None:
    three, half = np.int64(3), np.float32(0.5)
    step = ws.compile(mean_square, max_programs=three, check_every=np.int32(10), timeout=half, agree_timeout=three)
    assert repr(step.options.user.max_programs) == "3"
    assert ws.Mesh((ws.Axis("dp", three),)) == ws.Mesh("dp=3")
    assert repr(ws.Mesh((ws.Axis("dp", three),)).axes[0].size) == "3"
    assert repr(ws.Schedule(bucket_bytes=three).bucket_bytes) == "3"
    model = nn.Linear(2, 2)
    ws.save(tmp_path, model=model, number=three, keep=np.uint8(2))
    assert ws.load(tmp_path, model=model).number == 3
    for wrong in (np.bool_(True), np.float64(3.0), np.array(3), torch.tensor(3), 3.0):
        with pytest.raises(ws.PlanError, match="max_programs of type int"):
            ws.compile(mean_square, max_programs=wrong)  # type: ignore[arg-type]
    with pytest.raises(ws.PlanError, match="max_programs of type int"):
        ws.compile(mean_square, max_programs=np.uint64(1 << 63))  # type: ignore[arg-type]


@given(st.one_of(st.integers(-(2**63), 2**63 - 1).map(np.int64), st.floats(width=32).map(np.float32), st.booleans()))
def test_a_number_of_another_library_is_one_of_its_type(value: Any) -> None:
    plain = plain_number(value)
    assert type(plain) in (int, float, bool)
    assert plain == value or value != value
    assert is_a(value, float) == is_a(plain, float) == (not isinstance(value, bool) and value == value)
    assert is_a(value, int) == is_a(plain, int) == (type(plain) is int)
    assert as_plain((value, "x"), tuple[float | str, ...]) == (plain, "x") or value != value


@pytest.mark.parametrize("wrong", [3, None, ("0",), b"0", 1.5])
def test_what_is_no_text_names_no_module(wrong: Any) -> None:
    makers: list[Callable[[], Any]] = [
        lambda: ws.TensorParallel({wrong: "colwise"}),
        lambda: ws.Pipeline(stages=[[wrong], ["1"]]),
        lambda: ws.Pipeline(stages=[["0"], wrong] if wrong != ("0",) else object()),  # pyright: ignore[reportArgumentType]
    ]
    for make in makers:
        with pytest.raises(ws.PlanError):
            make()


def test_a_strategy_names_what_it_lacks() -> None:
    """Where it is made; what a strategy does not change it need not say. One with a plan by module is a key, too."""
    lacking = type("Lacking", (Strategy,), {"axes": lambda self, mesh: ("dp",)})
    with pytest.raises(
        TypeError, match=r"abstract class Lacking with(out an implementation for)? abstract method '?describe"
    ):
        lacking()
    plans: list[Any] = ["auto", {"*.w1": "colwise"}]
    assert all(hash(ws.TensorParallel(p)) == hash(ws.TensorParallel(p)) for p in plans)
    assert ws.TensorParallel(plans[0]) != ws.TensorParallel(plans[1])
