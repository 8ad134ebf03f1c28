"""The kinds of cases. Each draws an input and returns a call to judge, and a text that shows the input."""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel
from torch.optim import AdamW
from typer.testing import CliRunner

import wholestep as ws
from tests.simulate import Simulation
from tests.steps import mean_square
from wholestep.cache import step_cache
from wholestep.cache.key import Key
from wholestep.capture.capture import Capture, capture_step
from wholestep.cli import app
from wholestep.distributed.rendezvous import Rendezvous
from wholestep.distributed.typed_messages import plain
from wholestep.errors import shown
from wholestep.graph.graph import Role
from wholestep.hardware.curves import CollectiveCost, Curve, Regime
from wholestep.hardware.device import Ceiling, Device, MeasuredDevice, Tile
from wholestep.hardware.hardware import Level
from wholestep.hardware.hardware_file import to_json
from wholestep.layout import AxisState
from wholestep.passes.context import Choice, Fitting
from wholestep.passes.fit_memory import FITTING, FitMemory
from wholestep.passes.reinplace import Reinplace
from wholestep.plan.decision import Decision
from wholestep.plan.strategies import Strategies
from wholestep.rules.registry import RULES, SAMPLES
from wholestep.runtime.choose_strategy import AUTO, AutoChoice, strategies_in, strategies_of, text_of
from wholestep.runtime.compile_options import CompileOptions
from wholestep.runtime.compiler import PLAN
from wholestep.runtime.finalize import HARDWARE
from wholestep.typed_json import MalformedError, parse
from wholestep.units import parse_bytes

from . import doors
from .inputs import Draw, mutated_json, mutated_text, with_odd

Case = tuple[str, Callable[[], Any]]


@dataclass(frozen=True)
class Kind:
    """`quick` and `full`: how many cases of this kind `make test` and `make test-all` try."""

    name: str
    draw: Callable[[Draw], Case]
    quick: int
    full: int


KINDS: dict[str, Kind] = {}


def kind(quick: int, full: int) -> Callable[[Callable[[Draw], Case]], Callable[[Draw], Case]]:
    def add(draw: Callable[[Draw], Case]) -> Callable[[Draw], Case]:
        KINDS[draw.__name__] = Kind(draw.__name__, draw, quick, full)
        return draw

    return add


# -- what the cases are about ------------------------------------------------------------------------------
def _model() -> tuple[nn.Module, torch.optim.Optimizer, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    return model, AdamW(model.parameters()), torch.randn(4, 4)


@cache
def graph() -> ws.TrainGraph:
    return ws.capture(mean_square, *_model())


@cache
def plans() -> tuple[ws.Plan, ...]:
    two = [ws.DataParallel("fully_shard", axis="dp"), ws.TensorParallel({"0": "colwise", "2": "rowwise"}, axis="tp")]
    return (
        ws.plan(graph(), "dp=2", ws.DataParallel("zero1")),
        ws.plan(graph(), "dp=2,tp=2", two),
        ws.plan(graph(), "dp=2,tp=2", ws.Auto("1GiB")),
    )


@cache
def local() -> ws.LocalGraph:
    return ws.partition(graph(), plans()[0])


@cache
def documents() -> tuple[Any, ...]:
    return tuple(json.loads(plan.to_json()) for plan in plans())


# -- files ---------------------------------------------------------------------------------------------------
@kind(quick=70, full=2000)
def plan_files(draw: Draw) -> Case:
    text = mutated_json(draw, draw(st.sampled_from(documents())))

    def call() -> None:
        used(ws.Plan.from_json(text))

    return text, call


def used(plan: ws.Plan) -> None:
    """Everything that is asked of a plan."""
    assert ws.Plan.from_json(plan.to_json()) == plan
    str(plan), repr(plan), plan._repr_html_(), plan.stored_bytes()
    for name in [*list(plan.storage)[:2], *list(plan.decisions)[:2]]:
        plan.explain(name)
    run = ws.partition(graph(), plan)
    str(run), ws.simulate(run, plan.hardware)
    if plan.strategies is not None:
        ws.compile(mean_square, parallel=plan)
        ws.plan(graph(), plan.mesh, list(plan.strategies.parts))


@cache
def _captured() -> Capture:
    model, optimizer, x = _model()
    return capture_step(mean_square, (model, optimizer, x), {})


def _trained(plan: ws.Plan) -> dict[str, torch.Tensor]:
    """Parameters and state after a step by `plan`, in which each rank has its own batch."""
    run = ws.run_passes(ws.partition(_captured().graph, plan), [Reinplace()])
    simulation = Simulation(_captured(), plan, run)
    simulation.start()
    (name,) = (given.name for given in plan.inputs if given.role is Role.BATCH)
    axes = set(plan.storage[name].varies)
    seeds = [[n for axis, n in plan.mesh.coordinate(rank).items() if axis in axes] for rank in range(plan.mesh.size)]
    simulation.step([{name: torch.full((4, 4), 0.5) + torch.eye(4) * (1 + sum(seed))} for seed in seeds])
    stored = [given.name for given in plan.inputs if given.role in (Role.PARAM, Role.STATE)]
    return {name: simulation.whole(name) for name in stored}


@cache
def _expected(number: int) -> dict[str, torch.Tensor]:
    return _trained(plans()[number])


@kind(quick=30, full=1000)
def layouts_of_plans(draw: Draw) -> Case:
    """Other layouts of a few tensors: refused, or ranks compute what they do by the right plan."""
    number = draw(st.integers(0, 1))
    plan = plans()[number]
    axes = plan.mesh.names
    changes: dict[str, Any] = {}
    for _ in range(draw(st.integers(1, 2))):
        storage, decisions = dict(changes.get("storage", plan.storage)), dict(changes.get("decisions", plan.decisions))
        if draw(st.integers(0, 3)) == 3:
            name = draw(
                st.sampled_from([given.name for given in plan.inputs if given.role in (Role.PARAM, Role.STATE)])
            )
            storage[name] = _layout(draw, storage[name], axes)
            changes["storage"] = storage
            continue
        name = draw(st.sampled_from([n for n, d in decisions.items() if d.operands and not d.gradient_of]))
        one = decisions[name]
        for field in ("operands", "outputs"):
            found = list(getattr(one, field))
            at = draw(st.integers(0, len(found) - 1)) if draw(st.booleans()) else None
            found = [_layout(draw, x, axes) if i == at else x for i, x in enumerate(found)]
            one = replace(one, **{field: tuple(found)})
        if len(one.outputs) == 1 and draw(st.integers(0, 5)) == 5:
            one = replace(one, reshards_to=_layout(draw, one.outputs[0], axes))
        decisions[name] = one
        changes["decisions"] = decisions
    changed = replace(plan, **changes)

    def call() -> None:
        for name, value in _trained(changed).items():
            assert torch.allclose(value, _expected(number)[name], rtol=1e-4, atol=1e-5), f"{name} has other values"

    return f"plan {number}: {plan_difference(plan, changed)}", call


def _layout(draw: Draw, have: ws.Layout, axes: tuple[str, ...]) -> ws.Layout:
    axis = draw(st.sampled_from(axes))
    states = [
        AxisState("R"),
        AxisState("V"),
        AxisState("P", op="sum"),
        AxisState("P", op="avg"),
        AxisState("P", op="max"),
    ]
    states += [AxisState("S", dim) for dim in range(len(have.dims))]
    return have.put(axis, draw(st.sampled_from(states)))


def plan_difference(plan: ws.Plan, changed: ws.Plan) -> str:
    """The layouts in which two plans differ."""
    stored = [f"{n}: {x} -> {changed.storage[n]}" for n, x in plan.storage.items() if x != changed.storage[n]]
    decided = [(n, x, changed.decisions[n]) for n, x in plan.decisions.items() if x != changed.decisions[n]]
    lines = [f"%{n}: {_shown_decision(x)} becomes {_shown_decision(y)}" for n, x, y in decided]
    return "; ".join((*stored, *lines))


def _shown_decision(one: Decision) -> str:
    takes, gives = (", ".join(map(str, layouts)) for layouts in (one.operands, one.outputs))
    return f"({takes} -> {gives}, {one.reshards_to})"


@kind(quick=40, full=1200)
def hardware_files(draw: Draw) -> Case:
    name = draw(st.sampled_from(("dgx-h100", "loopback", "a3-mega+ethernet-100")))
    text = mutated_json(draw, json.loads(_saved(ws.Hardware.preset(name))))

    def call() -> None:
        found = _loaded(text)
        str(found), found.bucket_bytes
        for size in (0, 1 << 30):
            found.collective_us("all_gather", size, ws.Mesh("dp=4,tp=2"), "dp")
        found.matmul_us(1, 8, 8, 8), found.attention_us(1, 2, 8, 8, 4)
        ws.simulate(local(), found)
        assert _loaded(_saved(found)) == found

    return text, call


def _saved(hardware: ws.Hardware) -> str:
    return json.dumps(to_json(hardware))


def _loaded(text: str) -> ws.Hardware:
    Path("hardware.json").write_text(text, errors="surrogatepass")
    return ws.Hardware.load("hardware.json")


@cache
def _decided() -> tuple[tuple[Choice[Any], Any], ...]:
    """Decisions of each kind that is kept."""
    plan = plans()[2]
    assert plan.objective is not None
    solved = ws.plan(graph(), "dp=2,tp=2", [ws.DataParallel(axis="dp"), ws.TensorParallel("auto")]).strategies
    assert solved is not None
    text = text_of(solved, solved)
    auto = AutoChoice(plan.objective, text, ("a note",))
    return (HARDWARE, ws.Hardware.preset("loopback")), (AUTO, auto), (PLAN, text), (FITTING, Fitting(1, ("relu",)))


OPTIONS = {"mesh": "x", "options": "y"}
KEY = Key.of(OPTIONS)


@kind(quick=25, full=700)
def cache_files(draw: Draw) -> Case:
    """Changed on disk, or sealed again with a right checksum, and then used where it is found."""
    body = {"key": dict(KEY.parts), "choices": {c.name: ["", plain(decision)] for c, decision in _decided()}}
    text = mutated_json(draw, body)
    with suppress(MalformedError):
        changed = parse(text)
        changed = changed if isinstance(changed, dict) else {"choices": changed}
        body = {"key": changed.get("key") if draw(st.booleans()) else body["key"], "choices": changed.get("choices")}
        entry = {"format": step_cache.FORMAT, "version": step_cache.VERSION, "sum": step_cache.sum_of(body), **body}
        text = json.dumps(entry) if draw(st.integers(0, 3)) else mutated_json(draw, entry)

    def call() -> None:
        folder = Path("cache")
        folder.mkdir()
        step_cache.path_of(folder, KEY).write_text(text, errors="surrogatepass")
        cache = step_cache.StepCache(folder, lambda *_: None)
        kept = step_cache.KeptChoices(Rendezvous(None, 0, 1, 1.0), cache, lambda: OPTIONS, "first")
        with warnings.catch_warnings(action="ignore"):  # that it cannot be read
            event, choices, _ = cache.find(KEY)
            decided = {choice.name: kept.of(choice) for choice, _ in _decided()}
        assert event == "hit" or not choices
        if auto := decided[AUTO.name]:
            strategies_of(auto, ws.Auto(), ws.Mesh("dp=2,tp=2"))
        if parts := decided[PLAN.name]:
            base = Strategies((ws.DataParallel(axis="dp"), ws.TensorParallel("auto")))
            ws.plan(graph(), "dp=2,tp=2", list(strategies_in(parts, base).parts))
        if fitting := decided[FITTING.name]:
            FitMemory(1 << 30, after=ws.default_passes()).applied(local(), fitting)

    return text, call


@cache
def _checkpoints() -> tuple[dict[str, bytes], tuple[dict[str, torch.Tensor], ...]]:
    """The files of a folder with two checkpoints, and the parameters in each."""
    model, optimizer, x = _model()
    states: list[dict[str, torch.Tensor]] = []
    with tempfile.TemporaryDirectory() as folder:
        for number in (1, 2):
            mean_square(model, optimizer, x)
            ws.save(folder, model=model, optimizer=optimizer, number=number, extra={"epoch": number})
            states.append({name: value.clone() for name, value in model.state_dict().items()})
        files = {str(f.relative_to(folder)): f.read_bytes() for f in Path(folder).rglob("*") if f.is_file()}
    files = {name: data for name, data in files.items() if not name.startswith(".")}  # whose job saves there
    return files, tuple(states)


@kind(quick=15, full=500)
def checkpoints(draw: Draw) -> Case:
    """Manifests, sealed again with a right checksum or not, `latest`, and any other byte of the folder."""
    files = dict(_checkpoints()[0])
    name = next(one for one in files if one.startswith("step-00000002") and one.endswith("manifest.json"))
    how, sealed = draw(st.sampled_from(("manifest", "manifest", "manifest", "latest", "byte"))), False
    if how == "manifest":
        content = json.loads(files[name])
        text = mutated_json(draw, {k: v for k, v in content.items() if k != "checksum"})
        if draw(st.integers(0, 3)):
            with suppress(MalformedError):
                changed, sealed = parse(text), True
                if isinstance(changed, dict):
                    checksum = zlib.crc32(json.dumps(changed, sort_keys=True).encode())
                    text = json.dumps({**changed, "checksum": checksum})
        files[name] = text.encode("utf-8", "surrogatepass")
    elif how == "latest":
        name = "latest"
        files[name] = mutated_text(draw, "step-00000002", ("/", "..", "step-")).encode("utf-8", "surrogatepass")
    else:
        name = draw(st.sampled_from(sorted(files)))
        at, value = draw(st.integers(0, len(files[name]) - 1)), draw(st.integers(0, 255))
        files[name] = files[name][:at] + bytes([value]) + files[name][at + 1 :]
    return f"{name}: {files[name][:3000]!r}", lambda: _load(files, sealed)


def _load(files: Mapping[str, bytes], sealed: bool) -> None:
    for name, data in files.items():
        Path("run", name).parent.mkdir(parents=True, exist_ok=True)
        Path("run", name).write_bytes(data)
    model, optimizer, _ = _model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    try:
        found = ws.load("run", model=model, optimizer=optimizer)
    except ws.CheckpointError:
        now = model.state_dict()
        assert all(torch.equal(now[name], value) for name, value in before.items()), "changed before it was refused"
        assert not optimizer.state, "changed before it was refused"
    else:
        saved = _checkpoints()[1][found.number - 1] if found.number in (1, 2) else {}
        same = all(torch.equal(model.state_dict()[name], value) for name, value in saved.items())
        assert sealed or (saved and same), "other values than were saved"
    ws.save("run", model=model, optimizer=optimizer, number=3)


# -- texts ----------------------------------------------------------------------------------------------------
@kind(quick=50, full=900)
def meshes(draw: Draw) -> Case:
    text = mutated_text(draw, draw(st.sampled_from(("dp=8", "dp=4,tp=2", "auto=8", "a=1,b=1,c=3"))), ("=", ",", "dp"))

    def call() -> None:
        mesh = ws.Mesh(text)
        assert ws.Mesh(str(mesh)) == mesh
        mesh.coordinate(mesh.size - 1)
        if mesh.size < 10_000 and "auto" not in mesh.names:
            used(ws.plan(graph(), mesh, ws.DataParallel("replicate")))
        else:
            ws.plan(graph(), mesh, ws.DataParallel("zero1"))

    return text, call


@kind(quick=20, full=400)
def sizes(draw: Draw) -> Case:
    text = mutated_text(draw, draw(st.sampled_from(("3GiB", "500 MB", "1.5KiB", "17"))), ("GiB", ".", "e9"))
    return text, lambda: parse_bytes(text)


RULE_TEXTS = (
    "m k, k n -> m n", "..., ... -> ...", "... d!, d!, d! -> ... d!, ... 1, ... 1", "... x[dim]! -> ... x[dim]!",
    "(a b) c -> a b c", "[...], [...], () -> [...]", "n c, * -> (), *", "reduction=0: ...+ -> ... | ...+ -> ()",
    "{m n}, m k!, k! n -> m n", "... a! b! -> ..., ... c d*",
)  # fmt: skip
TOKENS = (
    "->",
    "...",
    "!",
    "?",
    "*",
    "|",
    "+",
    ":",
    "=",
    "[",
    "]",
    "{",
    "}",
    "(",
    ")",
    ",",
    "m",
    "k",
    "1",
    "x[dim]",
    " ",
)
OPS = (torch.ops.aten.mm.default, torch.ops.aten.add.Tensor, torch.ops.aten.sum.dim_IntList, "softmax.int", "sum relu")


@kind(quick=70, full=1500)
def rules(draw: Draw) -> Case:
    text = mutated_text(draw, draw(st.sampled_from(RULE_TEXTS)), TOKENS)
    options: dict[str, Any] = {}
    if draw(st.booleans()):
        options["linear"] = mutated_text(draw, draw(st.sampled_from(("0 | 1", "0+1", "0"))), ("|", "+", "7"))
    if draw(st.integers(0, 3)) == 3:
        options["reduces"] = {mutated_text(draw, "k", TOKENS): draw(st.sampled_from(("sum", "max", "", "x")))}
    if draw(st.integers(0, 3)) == 3:
        options = with_odd(draw, options, ("moves", "sizes", "local", "by_shape", "filled", "samples"), 1)
    op = draw(st.sampled_from(OPS))
    return f"{op}, {text!r}, {shown(options)}", lambda: _rule(op, text, options)


def _rule(op: Any, text: str, options: Mapping[str, Any]) -> None:
    """Register, use and check a rule; the table is as before after that."""
    before = dict(RULES), dict(SAMPLES)
    try:
        ws.rule(op, text, **options)
        ws.partition(graph(), ws.plan(graph(), "dp=2"))
        if op is OPS[0]:
            ws.check_rule(op, torch.randn(4, 6), torch.randn(6, 2))
    finally:
        for table, kept in zip((RULES, SAMPLES), before, strict=True):
            table.clear()
            table.update(kept)
        ws.rule("example::none.default", "... -> ...")  # what was bound is forgotten
        RULES.pop("example.none.default", None)


# -- values of wrong types -----------------------------------------------------------------------------------
@kind(quick=60, full=1200)
def options_of_compile(draw: Draw) -> Case:
    given = with_odd(draw, {}, [one.name for one in fields(CompileOptions)])

    def call() -> None:
        step = ws.compile(mean_square, **given)
        step(*_model())
        str(step)

    return shown(given), call


def _strategies() -> dict[Any, dict[str, Any]]:
    return {
        ws.DataParallel: {"style": "zero1", "axis": "dp", "semantics": "per_rank", "reduce": "mean"},
        ws.TensorParallel: {"plan": {"0": "colwise", "2": ColwiseParallel()}, "axis": "tp"},
        ws.Auto: {
            "memory_bytes": "1GiB",
            "solve": False,
            "styles": ["zero1"],
        },
    }


@kind(quick=50, full=1000)
def strategies(draw: Draw) -> Case:
    made, right = draw(st.sampled_from(sorted(_strategies().items(), key=lambda item: item[0].__name__)))
    if draw(st.integers(0, 2)) == 2:
        right = {"plan": "auto", "pinned": {"0.weight": Replicate()}} if made is ws.TensorParallel else right
    given = with_odd(draw, right, [one.name for one in fields(made)])

    def call() -> None:
        used(ws.plan(graph(), "dp=2,tp=2", made(**given)))

    return f"{made.__name__}({shown(given)})", call


def _values() -> dict[Any, dict[str, Any]]:
    level = {"name": "x", "ranks": 0, "bytes_per_us": 1e3, "latency_us": 2.0}
    device = {"name": "x", "memory_bytes": 1 << 30, "memory_bytes_per_us": 1e6, "ceilings": (Ceiling("float32", 1e6),)}
    rates = {"name": "x", "flops_per_us": 1e5, "memory_bytes_per_us": 1e4, "launch_us": 4.0}
    return {
        ws.MixedPrecision: {"param": torch.bfloat16, "reduce": torch.float32},
        ws.Recompute: {"budget_bytes": 1 << 30, "gathers": True},
        ws.Schedule: {"bucket_bytes": 1 << 20, "across_steps": False},
        ws.CaptureOptions: {"offload": "cpu", "fused": True},
        ws.Plan: dict(vars(plans()[0])),
        Decision: dict(vars(plans()[0].decisions["relu"])),
        ws.Axis: {"name": "dp", "size": 2},
        ws.Mesh: {"spec": (ws.Axis("dp", 2),)},
        ws.Layout: {"dims": (("dp",), ()), "partial": (), "varies": ()},
        ws.Hardware: {"name": "x", "device": Device(**device), "levels": (Level(**level),)},
        ws.Hardware.measured: {**rates, "collectives": (CollectiveCost("all_reduce", 1.0, 1.0),)},
        Level: {**level, "curves": (Curve("all_reduce", "ring", (Regime(1.0),)),)},
        Device: {**device, "processors": 4, "ceilings": (Ceiling("float32", 1e6, (Tile(64, 64, 0.5),)),)},
        MeasuredDevice: rates,
    }


@kind(quick=60, full=1200)
def values(draw: Draw) -> Case:
    made, right = draw(st.sampled_from(sorted(_values().items(), key=lambda item: item[0].__qualname__)))
    given = with_odd(draw, right, [one.name for one in fields(made)] if isinstance(made, type) else ())
    if made is ws.Mesh:
        given = {"spec": given["spec"]}
    return f"{made.__qualname__}({shown(given)})", lambda: _apply(made(**given))


def _apply(made: Any) -> None:
    """Use a value where it belongs."""
    if isinstance(made, ws.MixedPrecision):
        ws.capture(mean_square, *_model(), options=ws.CaptureOptions(mixed_precision=made))
    elif isinstance(made, ws.CaptureOptions):
        ws.capture(mean_square, *_model(), options=made)
    elif isinstance(made, (ws.Recompute, ws.Schedule)):
        str(ws.run_passes(local(), [made]))
    elif isinstance(made, ws.Plan):
        ws.compile(mean_square, parallel=made)
        ws.partition(graph(), made)
    elif isinstance(made, Decision):
        ws.partition(graph(), replace(plans()[0], decisions={**plans()[0].decisions, "relu": made}))
    elif isinstance(made, ws.Axis):
        _apply(ws.Mesh((made,)))
    elif isinstance(made, ws.Mesh):
        str(ws.plan(graph(), made, ws.DataParallel("replicate")))
    elif isinstance(made, ws.Layout):
        used(ws.plan(graph(), "dp=2", placed={"0.weight": made}))
        used(replace(plans()[0], storage={**plans()[0].storage, "0.weight": made}))
    elif isinstance(made, (Device, MeasuredDevice)):
        _apply(ws.Hardware("x", made, (Level("x", 0, 1e3, 1.0),)))
    elif isinstance(made, Level):
        _apply(ws.Hardware("x", MeasuredDevice("x", 1e5, 1e4, 1.0), (made,)))
    else:
        ws.simulate(local(), made), ws.plan(graph(), "dp=2", hardware=made)


def _doors() -> dict[str, tuple[Callable[..., Any], dict[str, Any]]]:
    model, optimizer, x = _model()
    hardware = ws.Hardware.default()
    return {
        "capture": (ws.capture, {"fn": mean_square, "model": model, "optimizer": optimizer, "x": x, "options": None}),
        "plan": (ws.plan, {"graph": graph(), "mesh": "dp=2", "parallel": None, "placed": {}, "hardware": None}),
        "partition": (ws.partition, {"graph": graph(), "plan": plans()[0]}),
        "simulate": (ws.simulate, {"local": local(), "hardware": hardware}),
        "timeline": (ws.timeline, {"local": local(), "hardware": hardware}),
        "peak_memory": (ws.peak_memory, {"local": local()}),
        "run_passes": (ws.run_passes, {"local": local(), "passes": list(ws.default_passes())}),
        "default_passes": (
            ws.default_passes,
            {"hardware": hardware, "schedule": "auto", "memory_bytes": None, "backend": "eager"},
        ),
        "rule": (ws.rule, {"op": torch.ops.aten.mm.default, "text": "m k, k n -> m n"}),
        "check_rule": (ws.check_rule, {"op": torch.ops.aten.mm.default}),
        "compile": (ws.compile, {"train_step": mean_square}),
        "Plan.from_json": (ws.Plan.from_json, {"text": "{}"}),
        "Plan.load": (ws.Plan.load, {"path": "nowhere.json"}),
        "Plan.save": (plans()[0].save, {"path": "/proc/nowhere/plan.json"}),
        "Plan.explain": (plans()[0].explain, {"name": "0.weight"}),
        "Plan.stored_bytes": (plans()[0].stored_bytes, {"role": "param"}),
        "Stored": (ws.Stored, {"param": plans()[0].storage["0.weight"], "state": plans()[0].storage["0.weight"]}),
        "BatchCut": (ws.BatchCut, {"dim": 0, "axes": ("dp",)}),
        "AxisState": (ws.AxisState, {"kind": "S", "dim": 1}),
        "Pins": (ws.Pins, {"results": {"mm": {"tp": AxisState("S", 1)}}}),
        "stage_order": (ws.stage_order, {"name": "of the fuzz test"}),
        "Hardware.load": (ws.Hardware.load, {"path": "nowhere.json"}),
        "Hardware.preset": (ws.Hardware.preset, {"name": "dgx-h100"}),
        "whole": (_whole, {"model": model}),
        "save": (ws.save, {"directory": "run", "model": model, "number": 3, "keep": 2, "extra": {}, "stateful": {}}),
        "load": (ws.load, {"directory": "/proc/nowhere", "model": model, "stateful": {}, "strict": False}),
        "export": (ws.export, {"directory": "out", "model": model, "format": "dcp", "max_file_bytes": "1GB"}),
        "MemoryCopies": (ws.MemoryCopies, {"folder": "copies", "every": 2}),
        "callback": (ws.callback, {"fn": print}),
    }


def _whole(model: Any) -> None:
    with ws.whole(model):
        pass


@kind(quick=60, full=1400)
def arguments(draw: Draw) -> Case:
    name = draw(st.sampled_from(sorted(_doors())))
    call, right = _doors()[name]
    given = with_odd(draw, right)
    if name == "rule":
        return f"{name}({shown(given)})", lambda: _rule(given.pop("op"), given.pop("text"), given)
    return f"{name}({shown(given)})", lambda: call(**given)


@kind(quick=50, full=10_000)
def public_calls(draw: Draw) -> Case:
    """Of whatever is public, by its annotations."""
    name = draw(st.sampled_from(sorted(doors.calls())))
    args, named = doors.drawn(draw, name)
    return doors.text_of(name, args, named), lambda: doors.calls()[name](*args, **named)


# -- the command -----------------------------------------------------------------------------------------------
STEP = """
import torch
from tests.steps import mean_square
from torch import nn


def build():
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    return mean_square, model, torch.optim.AdamW(model.parameters()), torch.randn(4, 4)


def number():
    return 3
"""
COMMANDS = (
    ["plan", "step.py:build", "--mesh", "dp=2", "--style", "zero1", "--explain", "0.weight"],
    ["plan", "step.py:build", "--mesh", "dp=2,tp=2", "--tp", "0=colwise", "--tp", "2=rowwise", "--semantics", "global"],
    ["plan", "step.py:build", "--mesh", "dp=2", "--auto", "--memory", "1GiB"],
    ["plan", "step.py:build", "--mesh", "dp=2", "--auto", "--hardware", "hardware.json"],
    ["plan", "step.py:build", "--mesh", "dp=2", "--program", "--stop-after", "Reinplace"],
    ["plan", "step.py:build", "--mesh", "dp=2", "--compare", "--json", "out.json"],
    ["plan", "--hf", "config", "--batch", "1", "--seq", "8", "--layers", "1", "--mesh", "dp=2"],
    ["simulate", "step.py:build", "--mesh", "dp=2", "--hardware", "loopback", "--trace", "trace.json"],
)
WORDS = (
    "", "-1", "0", "x", "dp", "dp=3", "=", ":", ",", "--mesh", "--help", "auto", "model", "zero2", "1e9", "nan",
    "9" * 5000, "a" * 5000, "step.py", "step.py:number", "step.py:nothing", "hardware.json", "config",
    "\ud800", "\0", "é",
)  # fmt: skip
CONFIG = {
    "model_type": "llama", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "vocab_size": 32, "max_position_embeddings": 16,
}  # fmt: skip


@kind(quick=20, full=500)
def command(draw: Draw) -> Case:
    args = list(draw(st.sampled_from([one for one in COMMANDS if "--hf" not in one])))
    for _ in range(draw(st.integers(0, 2))):
        at = draw(st.integers(1, len(args)))
        how = draw(st.sampled_from(("word", "word", "edit", "drop", "twice")))
        if how == "word" or at == len(args):
            args[at:] = [draw(st.sampled_from(WORDS)), *args[at + draw(st.integers(0, 1)) :]]
        elif how == "edit":
            args[at] = mutated_text(draw, args[at], ("=", ":", ","))[:5000]
        else:
            args[at:] = args[at + 1 :] if how == "drop" else [args[at], *args[at:]]
    machine = mutated_json(draw, json.loads(_saved(ws.Hardware.preset("loopback")))) if "hardware.json" in args else ""
    files = {"step.py": STEP, "hardware.json": machine}
    return shown(args), lambda: _invoke(args, files)


@kind(quick=0, full=60)
def configurations(draw: Draw) -> Case:
    """Of transformers models, for `--hf`."""
    text = mutated_json(draw, CONFIG)
    return text, lambda: _invoke(COMMANDS[6], {"config": text})


def _invoke(args: list[str], files: Mapping[str, str]) -> None:
    """A command ends well, or with a text that is no traceback."""
    for name, text in files.items():
        Path(name).write_text(text, errors="surrogatepass")
    path = list(sys.path)
    try:
        done = CliRunner().invoke(app, args)
    finally:
        sys.path[:] = path
        sys.modules.pop("step", None)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code in (0, 1, 2), done.exit_code
    assert done.output.strip() or done.exit_code == 0
