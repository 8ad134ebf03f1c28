"""A compiled program as bytes: the capture without what is live, the plan, and what the ranks run."""

from __future__ import annotations

import io
import json
import sys
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass, replace
from typing import Any, cast

import torch
from torch.fx import Graph, GraphModule

from .. import _torch
from ..capture.capture import Capture
from ..capture.effects import Effects
from ..capture.expect import looked_up, rows
from ..capture.find import Structure
from ..capture.reach import Reach
from ..capture.state import Hyper, StepState
from ..capture.trace import TensorLeaf
from ..capture.values import Read, ReadValues
from ..cost.machine import Machine
from ..graph.file import Reader, StoreError, Writer
from ..graph.graph import LocalGraph
from ..graph.quiet import collector_paused
from ..plan.file import decode, encode
from ..plan.plan import Plan


@dataclass(frozen=True)
class Compiled:
    """A program before it is installed. `lines` is what ranks compare, `machine` what its order was found for.

    `local` is what runs.
    """

    capture: Capture
    plan: Plan
    local: LocalGraph
    lines: tuple[str, ...] = ()
    machine: Machine | None = None


@collector_paused()
def write(made: Compiled, device: str, live: Mapping[str, torch.Tensor]) -> bytes:
    """The program as bytes. Constants that are tensors of `live` are kept by their name there, others by value.

    Raises:
        StoreError: it holds something that cannot be kept; says what.
    """
    if made.capture.effects.acts:
        raise StoreError(f"{made.capture.effects.acts}, which every call does again on the host")
    names = {id(tensor): name for name, tensor in live.items()}
    writer, capture = Writer(device), made.capture
    try:
        results = write_structure(capture.results)
    except NotImplementedError as error:
        raise StoreError(f"the step returns a container that torch cannot name: {error}") from error
    body = {
        "train": writer.train_graph(capture.graph),
        "hypers": [asdict(h) for h in capture.hypers],
        "results": results,
        "leaves": [None if v is TensorLeaf else [writer.value(v)] for v in capture.result_leaves],
        "fresh_grads": capture.fresh_grads,
        "cleared_grads": list(capture.cleared_grads),
        "reads": _write_reads(capture.values, writer),
        "expected": rows(capture.effects.expected),
        "plan": _plan_elsewhere(encode(made.plan), writer),
        "local": writer.local_graph(made.local),
        "across": [writer.local_graph(one) for one in made.local.across] if made.local.across else None,
        "lines": list(made.lines),
        "machine": asdict(made.machine) if made.machine else None,
    }
    body["tables"] = writer.tables()
    body["live"] = {key: names[id(t)] for key, t in writer.constants.items() if id(t) in names}
    body["devices"] = {key: writer.place(str(t.device)) for key, t in writer.constants.items()}
    tensors = io.BytesIO()
    torch.save({k: t.detach().cpu() for k, t in writer.constants.items() if id(t) not in names}, tensors)
    text = zlib.compress(json.dumps(body).encode(), 1)
    return len(text).to_bytes(8, "big") + text + tensors.getvalue()


@collector_paused()
def read(data: bytes, device: str, live: Mapping[str, torch.Tensor], state: StepState, found: Reach) -> Compiled:
    """Inverse of `write`, for what the step holds in this process, and can reach.

    Raises:
        StoreError: the bytes hold no program for it.
    """
    try:
        return _read(data, device, live, state, found)
    except StoreError:
        raise
    except Exception as error:
        raise StoreError(f"{type(error).__name__}: {error}") from error


def _read(data: bytes, device: str, live: Mapping[str, torch.Tensor], state: StepState, found: Reach) -> Compiled:
    end = 8 + int.from_bytes(data[:8], "big")
    body = json.loads(zlib.decompress(data[8:end]))
    kept: dict[str, torch.Tensor] = torch.load(io.BytesIO(data[end:]), weights_only=True)
    where = {key: device if place == "@" else place for key, place in body["devices"].items()}
    constants = {key: tensor.to(where[key]) for key, tensor in kept.items()}
    constants |= {key: live[name] for key, name in body["live"].items()}
    reader = Reader(body["tables"], constants, device)
    plan = decode(body["plan"])
    here = [replace(i, meta=replace(i.meta, device=reader.place(i.meta.device))) for i in plan.inputs]
    capture = Capture(
        reader.train_graph(body["train"]),
        state,
        tuple(Hyper(**h) for h in body["hypers"]),
        read_structure(body["results"]),
        tuple(TensorLeaf if v is None else reader.value(v[0]) for v in body["leaves"]),
        body["fresh_grads"],
        tuple(body["cleared_grads"]),
        _read_reads(body["reads"], reader),
        Effects(expected=looked_up(body["expected"], found.containers)),
    )
    machine = Machine.of(body["machine"]) if body["machine"] else None
    local = reader.local_graph(body["local"])
    ends = [reader.local_graph(one) for one in body["across"] or ()]
    local = replace(local, across=(ends[0], ends[1])) if ends else local
    return Compiled(capture, replace(plan, inputs=tuple(here)), local, tuple(body["lines"]), machine)


def content(made: Compiled, device: str) -> dict[str, str]:
    """Each part of a program as text, the same for equal programs; where tensors lie does not count."""
    writer = Writer(device)
    return {
        "captured graph": json.dumps([writer.train_graph(made.capture.graph), writer.tables()]),
        "plan": made.plan.to_json(),
        "constants": repr([(k, t.dtype, _values(t)) for k, t in made.capture.graph.constants.items()]),
        "results": repr((made.capture.results, made.capture.result_leaves, made.capture.hypers)),
    }


def _values(tensor: torch.Tensor) -> list[Any]:
    return cast(list[Any], tensor.detach().cpu().flatten().tolist())


def _plan_elsewhere(data: dict[str, Any], writer: Writer) -> dict[str, Any]:
    for row in data["inputs"]:
        row["device"] = writer.place(row["device"])
    return data


def _write_reads(values: ReadValues | None, writer: Writer) -> Any:
    if values is None or not values.reads:
        return None
    attributes = {
        str(n.target): writer.constant(_torch.attribute(values.module, str(n.target)))
        for n in values.module.graph.nodes
        if n.op == "get_attr"
    }
    reads = [[writer.constant(r.expected), r.where] for r in values.reads]
    return [writer.nodes(values.module.graph), attributes, list(values.names), reads]


def _read_reads(data: Any, reader: Reader) -> ReadValues:
    if data is None:
        return ReadValues(GraphModule({}, Graph()), (), ())
    rows, attributes, names, reads = data
    held = {target: reader.constants[key] for target, key in attributes.items()}
    module = GraphModule(held, reader.graph(rows))
    return ReadValues(module, tuple(names), tuple(Read(reader.constants[k], where) for k, where in reads))


def write_structure(structure: Structure) -> dict[str, Any]:
    """A structure as JSON takes it."""
    opened = [
        [i, kind.__module__, kind.__qualname__, list(names), write_structure(inner)]
        for i, kind, names, inner in structure.opened
    ]
    return {"spec": _torch.write_spec(structure.spec), "opened": opened}


def read_structure(data: Mapping[str, Any]) -> Structure:
    """Inverse of `write_structure`. Classes are looked up among those that are imported already, and made without being
    called.

    Raises:
        StoreError: a class is not here.
    """
    opened: list[tuple[int, type, tuple[str, ...], Structure]] = []
    for i, module, name, names, inner in cast(Sequence[Any], data["opened"]):
        kind = getattr(sys.modules.get(module), name, None)
        if not isinstance(kind, type) or not (is_dataclass(kind) or issubclass(kind, Mapping)):
            raise StoreError(f"results of the class {module}.{name}, which is not here")
        opened.append((i, cast(type, kind), tuple(names), read_structure(inner)))
    return Structure(_torch.read_spec(data["spec"]), tuple(opened))
