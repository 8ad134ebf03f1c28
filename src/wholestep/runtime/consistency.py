"""Compares the program of each compile with those of the other ranks.

A graph depends on the sizes of the batch, which may differ between ranks under per-rank semantics. Then each rank
captures the step once more, for the first rank's call, so that ranks compare functions and not batches.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer

from .. import _torch
from ..capture.call_structure import Structure, put_together
from ..capture.capture import Capture
from ..distributed.launch import World
from ..distributed.rendezvous import Calls, Rendezvous
from ..distributed.sections import CONSTANTS, GRAPH, LAYOUTS, UNKNOWN, Section
from ..tuning import TUNING
from . import fingerprints
from .compile_options import StepOptions
from .fingerprints import GraphFingerprint, graph_fingerprint
from .progress import Stages
from .rank_program import RankProgram
from .step_inputs import StepInputs

_MOST_BYTES = TUNING.guarded_call_bytes
_CANNOT = b"?"


@dataclass
class ConsistencyCheck:
    """The comparisons of one step. `label` is the step's, the same on all ranks; `round` counts the comparisons."""

    rendezvous: Rendezvous
    stages: Stages
    label: str
    round: int = 0
    _agreed: set[str] = field(default_factory=set[str])
    _options: set[str] = field(default_factory=set[str])

    @property
    def is_new(self) -> bool:
        """True until ranks have agreed on something."""
        return not self._agreed

    @property
    def round_label(self) -> str:
        """The label of what ranks exchange in this round."""
        return f"{self.label}/{self.round}"

    def fail(self, failure: str) -> None:
        """Stop the other ranks: this rank has no program."""
        self._compare({}, failure)

    def lines(self, lines: list[str]) -> None:
        """Compare a few lines, once."""
        section = Section.of(lines)
        if section.fingerprint not in self._agreed:
            self._compare({LAYOUTS: section})
            self._agreed.add(section.fingerprint)

    def program(
        self, made: RankProgram, inputs: StepInputs, world: World, options: StepOptions,
        recapture: Callable[[Any, Any], Capture],
    ) -> None:  # fmt: skip
        """Compare a program with those of all ranks, unless its layouts, collectives and options were compared before.

        A program that differs only in the batch is not compared: the other ranks do not compile when one rank gets a
        batch of another size. `recapture` captures the step for other arguments.

        Raises:
            RankMismatchError: on every rank, naming what differs.
        """
        state = made.capture.state
        baked, numbers = fingerprints.option_lines(state, made.capture.hypers, made.capture.effects.group_options())
        lasting = {
            fingerprints.VERSIONS: Section.of(fingerprints.versions()),
            fingerprints.STEP: Section.of(fingerprints.step_lines(options)),
            LAYOUTS: Section.of(made.lines),
            fingerprints.MEMBERS: Section.of(fingerprints.member_lines(state)),
        }
        key = " ".join(section.fingerprint for section in lasting.values())
        if key in self._agreed and self._options.issuperset(baked):
            return
        own = graph_fingerprint(made.capture, inputs, world)
        sections = {
            **lasting,
            fingerprints.OPTIMIZERS: Section.of(baked),
            fingerprints.NUMBERS: Section.of([*numbers, *fingerprints.state_lines(state)]),
            **own.sections,
        }
        calls = self._compare({name: sections[name] for name in fingerprints.ORDER}, call=own.call)
        if calls.first_other:
            reads = bool(made.capture.values and made.capture.values.reads)
            self._for_first_call(own if calls.same else None, inputs, world, reads, recapture)
        self._agreed.add(key)
        self._options.update(baked)

    def _compare(self, sections: Mapping[str, Section], failure: str = "", call: str = "") -> Calls:
        with self.stages.stage("agree"):
            self.round += 1
            return self.rendezvous.all_equal(self.round_label, sections, failure, call)

    def _for_first_call(
        self, own: GraphFingerprint | None, inputs: StepInputs, world: World, reads: bool,
        recapture: Callable[[Any, Any], Capture],
    ) -> None:  # fmt: skip
        """Compare the graphs that all ranks have for the first rank's call; `own` is there where it is this rank's."""
        call = _written(inputs, reads) if world.rank == 0 else b""
        if world.rank == 0 or own is None:
            what = "for which call it compiled its step"
            call = self.rendezvous.broadcast(f"{self.round_label}/call", call, what)
        if own is None:
            with self.stages.stage("capture for the first rank's batch"):
                sections = _recaptured(call, inputs, world, recapture)
        else:
            sections = own.sections
        self._compare(sections)


def _written(given: StepInputs, reads: bool) -> bytes:
    """A call, encoded for other ranks: shapes, Python values, and values of integers where the step `reads` some."""
    leaves: list[Any] = []
    for name, leaf in zip(given.names, given.leaves, strict=True):
        if isinstance(leaf, torch.Tensor):
            integers, parts = not leaf.is_floating_point(), name in given.whole
            if leaf.layout != torch.strided or (reads and integers and parts):
                return _CANNOT
            shape = given.whole.get(name, tuple(leaf.shape))
            stride = torch.empty(shape, device="meta").stride() if parts else leaf.stride()
            values = leaf.detach().cpu() if reads and integers else None
            leaves.append(["tensor", shape, stride, leaf.dtype, leaf.device.type, leaf.requires_grad, values])
        elif isinstance(leaf, (nn.Module, Optimizer)):
            leaves.append(["own", name])
        else:
            leaves.append(["plain", leaf])
    data = io.BytesIO()
    try:
        torch.save({"structure": _write_structure(given.structure), "leaves": leaves}, data)
        torch.load(io.BytesIO(data.getvalue()), weights_only=True)
    except Exception:  # a container or a value of a kind that torch does not write
        return _CANNOT
    return data.getvalue() if data.tell() <= _MOST_BYTES else _CANNOT


def _recaptured(
    call: bytes, given: StepInputs, world: World, recapture: Callable[[Any, Any], Capture]
) -> dict[str, Section]:
    """Sections of this rank's step for another rank's call; UNKNOWN where it cannot be captured for that call."""
    unknown = {CONSTANTS: Section(UNKNOWN), GRAPH: Section(UNKNOWN)}
    if call == _CANNOT:
        return unknown
    try:
        said = torch.load(io.BytesIO(call), weights_only=True)
        own = dict(zip(given.names, given.leaves, strict=True))
        leaves = [_leaf(one, own, world.device) for one in said["leaves"]]
        args, kwargs = put_together(_read_structure(said["structure"]), leaves)
        capture = recapture(args, kwargs)
    except Exception:  # what this rank can do with its own batch it need not be able to do with that one
        return unknown
    return graph_fingerprint(capture, given, world).sections


def _leaf(said: Any, own: Mapping[str, Any], device: str) -> Any:
    if said[0] != "tensor":
        return own[said[1]] if said[0] == "own" else said[1]
    _, shape, stride, dtype, kind, requires_grad, values = said
    where = device if torch.device(device).type == kind else kind
    made = torch.empty_strided(shape, stride, dtype=dtype, device=where)
    if values is None:
        made.zero_()
    else:
        made.copy_(values)
    return made.requires_grad_(requires_grad)


def _write_structure(structure: Structure) -> dict[str, Any]:
    opened = [
        [i, kind.__module__, kind.__qualname__, list(names), _write_structure(inner)]
        for i, kind, names, inner in structure.opened
    ]
    return {"spec": _torch.write_spec(structure.spec), "opened": opened}


def _read_structure(data: Mapping[str, Any]) -> Structure:
    """Inverse of `_write_structure`. Classes are looked up among those that are imported already."""
    opened: list[tuple[int, type, tuple[str, ...], Structure]] = []
    for i, module, name, names, inner in cast(Sequence[Any], data["opened"]):
        kind = getattr(sys.modules.get(module), name, None)
        if not isinstance(kind, type) or not (is_dataclass(kind) or issubclass(kind, Mapping)):
            raise LookupError(f"the class {module}.{name} is not here")
        opened.append((i, cast(type, kind), tuple(names), _read_structure(inner)))
    return Structure(_torch.read_spec(data["spec"]), tuple(opened))
