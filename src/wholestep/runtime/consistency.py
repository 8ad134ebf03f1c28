"""What the ranks of one step have agreed on, program by program, and how they compare the next one.

Graphs follow from batches, and under per-rank semantics ranks may be given batches of other sizes. Then each captures
the step once more, for the first rank's call, so that what is compared is the function and not the batch.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, is_dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer

from .. import _torch
from ..capture.call_structure import Structure, put_together
from ..capture.capture import Capture
from ..distributed.agree import CONSTANTS, GRAPH, LAYOUTS, UNKNOWN, Section, agree, wait_for
from . import fingerprints
from .compile_options import StepOptions
from .fingerprints import CallInputs, GraphFingerprint, graph_fingerprint
from .rank_program import RankProgram

_MOST_BYTES = 4 << 20  # of a call's integers, which another rank may need to capture the step for it
_CANNOT = b"?"


@dataclass
class Agreement:
    """`label` is the same on all ranks for one step, `round` the number of comparisons so far."""

    timeout_s: float
    stage: Callable[[str], AbstractContextManager[None]]
    waiting: Callable[[list[int]], None]
    label: str = ""
    round: int = 0
    _agreed: set[str] = field(default_factory=set[str])
    _options: set[str] = field(default_factory=set[str])

    @property
    def is_new(self) -> bool:
        """True until ranks have agreed on something."""
        return not self._agreed

    def fail(self, failure: str) -> None:
        """Tell the others that this rank has no program."""
        self._compare({}, failure)

    def lines(self, lines: list[str]) -> None:
        """Compare a few lines, once."""
        section = Section.of(lines)
        if section.print not in self._agreed:
            self._compare({LAYOUTS: section}, "")
            self._agreed.add(section.print)

    def program(
        self,
        made: RankProgram,
        given: CallInputs,
        options: StepOptions,
        cached: bool,
        recapture: Callable[[Any, Any], Capture],
    ) -> None:
        """Compare a program with those of all ranks, unless its layouts, collectives and options were compared before.

        For a rank whose batch has another size captures alone, while the others run what they have. `recapture`
        captures the step for other arguments.

        Raises:
            RankMismatchError: on every rank, naming what differs.
        """
        state = made.capture.state
        baked, numbers = fingerprints.option_lines(state, made.capture.hypers, made.capture.effects.group_options())
        lasting = {
            fingerprints.VERSIONS: Section.of(fingerprints.versions()),
            fingerprints.STEP: Section.of(fingerprints.step_lines(options, cached)),
            LAYOUTS: Section.of(made.lines),
            fingerprints.MEMBERS: Section.of(fingerprints.member_lines(state)),
        }
        key = " ".join(section.print for section in lasting.values())
        if key in self._agreed and self._options.issuperset(baked):
            return
        told = graph_fingerprint(made.capture, given)
        said = {
            **lasting,
            fingerprints.OPTIMIZERS: Section.of(baked),
            fingerprints.NUMBERS: Section.of([*numbers, *fingerprints.state_lines(state)]),
            **told.sections,
        }
        others = self._compare({name: said[name] for name in fingerprints.ORDER}, "", told.call)
        if others.first:
            self._for_one_call(told, others.is_alike, given, made, recapture)
        self._agreed.add(key)
        self._options.update(baked)

    def _compare(self, said: Mapping[str, Section], failure: str, call: str = "") -> Any:
        with self.stage("agree"):
            self.round += 1
            return agree(f"{self.label}/{self.round}", said, failure, self.timeout_s, self.waiting, call)

    def _for_one_call(
        self,
        told: GraphFingerprint,
        is_alike: bool,
        given: CallInputs,
        made: RankProgram,
        recapture: Callable[[Any, Any], Capture],
    ) -> None:
        """Compare the graphs that all ranks have for the first rank's call."""
        key, store = f"{self.label}/{self.round}/call", _torch.default_store()
        if given.rank == 0:
            store.set(key, _written(given, bool(made.capture.values and made.capture.values.reads)))
        said = told.sections
        if not is_alike:
            wait_for(store, key, self.timeout_s)
            with self.stage("capture for the first rank's batch"):
                said = _recaptured(store.get(key), given, recapture)
        self._compare(said, "")


def _written(given: CallInputs, reads: bool) -> bytes:
    """A call for other ranks: shapes, Python values, and integers where the step `reads` some."""
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


def _recaptured(call: bytes, given: CallInputs, recapture: Callable[[Any, Any], Capture]) -> dict[str, Section]:
    """What this rank's step is for another rank's call; unknown where it cannot be captured for it."""
    unknown = {CONSTANTS: Section(UNKNOWN), GRAPH: Section(UNKNOWN)}
    if call == _CANNOT:
        return unknown
    try:
        said = torch.load(io.BytesIO(call), weights_only=True)
        own = dict(zip(given.names, given.leaves, strict=True))
        leaves = [_leaf(one, own, given.device) for one in said["leaves"]]
        args, kwargs = put_together(_read_structure(said["structure"]), leaves)
        capture = recapture(args, kwargs)
    except Exception:  # what this rank can do with its own batch it need not be able to do with that one
        return unknown
    return graph_fingerprint(capture, given).sections


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
