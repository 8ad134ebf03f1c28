"""One compiled program with the tensors it works on: maps the leaves of a call to the results of the step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from operator import is_
from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor

from .. import _torch
from ..backend.eager import finished
from ..backend.protocol import Run
from ..capture.branches import is_behind_branch, other_branch
from ..capture.call_structure import Structure, put_together
from ..capture.capture import Capture
from ..capture.effects import Extra
from ..capture.host_numbers import At
from ..capture.locations import MISSING, Location, same_kind, shown
from ..capture.optimizer_entries import Entry
from ..capture.state import put_back, tensor_attributes
from ..capture.trace import TensorLeaf
from ..distributed.launch import World
from ..distributed.owned_tensors import wrap
from ..dtensor import placements
from ..errors import StateError
from ..graph import meta
from ..graph.graph import BRANCHES, EXPERT_ROWS, NONFINITE, Input, LocalGraph, Role
from ..graph.loop import with_bodies
from ..graph.nodes import communicates
from ..layout import REPLICATED
from ..plan.plan import Plan
from .guards import Condition, Guards, Miss
from .placement import Primed, entry_of, find_input, is_apart, place_entry
from .random_state import SharedRng, draws_random, kept_if_it_raises


class Phase(Enum):
    """What a call of a program does. It computes while it `RUNS`; then it puts what it has computed where it belongs
    (`KEEPS`), calls what Python does in each call (`ACTS`), and puts results together (`AFTER`).
    """

    BEFORE, RUNS, KEEPS, ACTS, AFTER, DONE = range(6)


@dataclass
class Program:
    """A compiled step for one kind of call. `shard_batch` makes this rank's part of the batch of a call.

    `Installer.finish` sets `run`, which maps the flat list from `gather_inputs` to results, followed by state that the
    step creates; it keeps values that are carried to the next call itself (`CrossStepRunner`). `check` is called before
    each call. Ranks remember to have compared it as `compared`. `before`: the program before passes, of all stages.
    `nonfinite` is whether the last call was skipped, and which of `capture.checked` were not finite.
    """

    capture: Capture
    plan: Plan
    local: LocalGraph
    world: World
    guards: Guards
    names: Sequence[str]
    primed: Primed
    shard_batch: Callable[[Sequence[Any]], Sequence[Any]] | None = None
    stream: SharedRng | None = None
    compared: str = ""
    before: LocalGraph | None = None
    run: Run = field(init=False)
    check: Callable[[Program, Sequence[Any]], None] | None = None
    nonfinite: Sequence[torch.Tensor] = ()
    phase: Phase = Phase.BEFORE

    def __post_init__(self) -> None:
        at = {name: i for i, name in enumerate(self.names)}
        inputs = self.local.inputs
        self._kept = [i for i in inputs if i.role in (Role.PARAM, Role.BUFFER, Role.STATE)]
        self._grads = [i for i in inputs if i.role is Role.GRAD]
        self._batch = [at[i.name] for i in inputs if i.role is Role.BATCH]
        self._constants = [self.local.constants[i.name] for i in inputs if i.role is Role.CONST]
        effects = self.capture.effects
        self.key = int(self.compared[:15] or "0", 16)
        self.meets = any(communicates(node) for node, _ in with_bodies(self.local.graph))  # ranks, in each call
        self.acts = effects.acts  # a call does more than compute tensors
        self._gradients = [write.place for write in effects.writes if write.adds]
        self._bind_numbers([i for i in inputs if i.role is Role.HYPER])
        self._rebound = [n for n, i in enumerate(self._kept) if i.name in effects.rebound]
        results = [o.target for o in self.local.outputs if o.kind == "result"]
        rows = {i: text.removeprefix(EXPERT_ROWS) for i, text in enumerate(results) if text.startswith(EXPERT_ROWS)}
        self._layers, self.expert_rows = rows, dict[str, torch.Tensor]()
        self._end_nonfinite = len(results) - len(rows)
        self._first_nonfinite = self._end_nonfinite - results.count(NONFINITE)
        self._all_results = self._first_nonfinite - results.count(BRANCHES)
        self._count = self._all_results - effects.extra
        self._first_created = len(results)
        self._created = {o.target: o for o in self.local.outputs if o.kind == "update"}
        ends = [(out, node) for out, node in self.capture.graph.results() if out.target in self._created]
        self._created_shapes = {out.target: meta.one_tensor(node).shape for out, node in ends}
        self._single = list(self.capture.result_leaves) == [TensorLeaf] and self.capture.results.is_leaf
        drawing = kept_if_it_raises if draws_random(self.local) else None
        self._drawing = drawing if self.stream is None else self.stream.drawing
        self._makes = [o for o in self._created.values() if o.optimizer is not None]
        params = self.capture.state.params
        self._params = [
            h.tensor for n, h in params.items() if self.capture.fresh_grads or n in self.capture.cleared_grads
        ]
        self._built = self._structures()
        self._before: list[tuple[dict[Any, Any], dict[Any, Any]]] = []
        self._empty = {param for _, param, had_entry, _ in self.primed.entries if had_entry}
        leaves = (leaf for write in effects.writes if write.recipe for leaf in write.recipe.leaves)
        self._in_containers = {leaf.index for leaf in leaves if isinstance(leaf, Extra)}
        self.bind_state()

    def _bind_numbers(self, inputs: Sequence[Input]) -> None:
        """Where each number comes from: an option of a parameter group, or the host's program."""
        self._numbers = [torch.zeros((), dtype=i.meta.dtype) for i in inputs]
        optimizers = list(self.capture.state.optimizers.values())
        hypers, computed = {h.name: h for h in self.capture.hypers}, self.capture.effects.program.inputs
        sources = [(at, hypers[i.name]) for at, i in enumerate(inputs) if i.name not in computed]
        self._sources = [(at, optimizers[h.optimizer], h.group, h.key, h.index) for at, h in sources]
        self._computed = [(at, computed[i.name]) for at, i in enumerate(inputs) if i.name in computed]
        self._last: list[Any] = [None] * len(inputs)
        self._host: list[Any] = []
        self._read_numbers()

    def bind_state(self) -> None:
        """Look up every tensor the program updates; those that someone replaced are placed as planned."""
        state = self.capture.state
        labels = list(state.optimizers)
        for spec in self._kept:
            if spec.role is Role.STATE:
                entry, number = entry_of(spec, state), spec.optimizer
                place_entry(entry, number, labels[number], spec.owner, self.plan, self.world)
        self._slots = [(holder, key, holder[key]) for holder, key in (find_input(spec, state) for spec in self._kept)]
        tensors = [tensor for _, _, tensor in self._slots]  # not detached: the program sees `t.data = ...`
        self._held = [_torch.local_tensor(t) if isinstance(t, DTensor) else t for t in tensors]
        for i in self._rebound:
            self._held[i] = self._held[i].clone()  # the program's own: each call leaves another tensor at the place
        condition, stay = Condition(), {i: tensor for i, tensor in enumerate(tensors) if i not in self._rebound}
        ids, holders = {id(None), *map(id, stay.values())}, {id(holder): holder for holder, *_ in self._slots}
        dicts: dict[int, dict[Any, Any]] = {at: holder for at, holder in holders.items() if type(holder) is dict}
        dicts = {at: holder for at, holder in dicts.items() if ids.issuperset(map(id, holder.values()))}
        entries_alike = [*dicts.values()], [holder.copy() for holder in dicts.values()]
        condition.add("{}({}, {})", _torch.same_tensors, *entries_alike)
        for i, (holder, key, tensor) in enumerate(self._slots):
            if i in self._rebound:  # the tensor that the last call has put there
                condition.add("{}[{}] is {}[{}][2]", holder, key, self._slots, i)
            elif id(holder) not in dicts:
                condition.add("{}[{}] is {}", holder, key, tensor)
        cut = [i for i, tensor in stay.items() if isinstance(tensor, DTensor)]  # `module.to(...)` swaps what is inside
        pieces = [_torch.holder_of_local(tensors[i]) for i in cut], [self._held[i] for i in cut]
        if cut:
            condition.add("{}([*{}({})], {})", _torch.same_tensors, _torch.local_tensors, *pieces)
        for optimizer in state.optimizers.values():
            entries = optimizer.state
            condition.add("{}.state is {} and len({}) == {}", optimizer, entries, entries, len(entries))
            condition.add("all(map({}, {}.values(), {}))", is_, entries, [*entries.values()])
        for optimizer in state.optimizers.values() if self._built else ():
            for entry in optimizer.state.values():
                for holder, key, container in Entry(entry).containers():  # the program has their items
                    condition.add("{}[{}] is {} and len({}) == {}", holder, key, container, container, len(container))
        self._holds = condition.compiled()
        self._check_pieces()

    def alike_along(self, axis: str) -> dict[str, torch.Tensor]:
        """What outlasts a call and is the same along `axis` of the mesh, by name."""
        rest = self.plan.storage
        return {
            spec.name: _torch.local_tensor(holder[key])
            for spec, (holder, key, _) in zip(self._kept, self._slots, strict=True)
            if rest[spec.name].state(axis) == REPLICATED
        }

    def shared_along(self, axis: str, leaves: Sequence[Any], with_parts: bool) -> dict[str, torch.Tensor]:
        """Tensors of a batch, by name, that ranks along `axis` are all given; `with_parts`: those that they cut too."""
        by_name = dict(zip(self.names, leaves, strict=True))
        states = {i.name: self.plan.storage[i.name].state(axis) for i in self.plan.inputs if i.role is Role.BATCH}
        shared = [n for n, at in states.items() if at == REPLICATED or (with_parts and at.kind == "S")]
        return {f"argument {name}": by_name[name] for name in shared}

    def _check_pieces(self) -> None:
        """Every rank's piece has the shape that the plan gives it."""
        for spec, piece in zip(self._kept, self._held, strict=True):
            layout = self.plan.storage[spec.name]
            here = self.world.coordinate
            planned = layout.local_shape(spec.meta.shape, self.world.mesh, here) if layout.is_held_at(here) else (0,)
            if tuple(piece.shape) != planned:
                needed = f"{list(planned)}: the plan lays it out as {layout.show(spec.meta.shape)}"
                next_step = "leave the placing of what a compiled step holds to wholestep, or load whole tensors"
                raise StateError(f"{spec.name!r} rests on this rank as {list(piece.shape)}", needed, next_step)

    def refresh(self) -> Miss | None:
        """Find replaced state again; what came or went, so that the step must be captured again, or None."""
        if self._holds() and not self._makes and not self.capture.unmade:
            return None
        unmade = ((optimizer.state.get(param), param) for optimizer, param in self.capture.unmade)
        if any(entry or (entry is not None and param not in self._empty) for entry, param in unmade):
            return Miss("optimizer state exists now, for which the step asks")
        with self.primed:
            if self.primed.is_late:
                return Miss("an option has changed, with which optimizer state begins")
            if changed := self._changed() or self._appeared():
                return Miss(changed)
            self.bind_state()
        return None

    def _changed(self) -> str:
        """Which tensor that the program takes was replaced; empty if none was."""
        state = self.capture.state
        for spec, (_, _, tensor) in zip(self._kept, self._slots, strict=True):
            if spec.role is Role.PARAM and Location("", *find_input(spec, state)).get() is not tensor:
                return f"parameter {spec.name!r} was replaced"
            if spec.role is Role.STATE and not self._entry(spec.optimizer, spec.owner).has(spec.key):
                return f"optimizer state {spec.key!r} of {spec.owner!r} is gone"
            if spec.role is not Role.PARAM:
                now = Location("", *find_input(spec, state)).get()
                if not isinstance(now, torch.Tensor) or not same_kind(now, tensor):
                    return f"{spec.name!r} is {shown(now)}, it was {shown(tensor)}"
                if now is not tensor and (tensor_attributes(now) or tensor_attributes(tensor)):  # of which a guard is
                    return f"{spec.name!r} is another tensor with attributes"
        return ""

    def _appeared(self) -> str:
        """Which optimizer state the program does not expect, and has perhaps created; empty if there is none."""
        for out in self._makes:
            if self._entry(out.optimizer or 0, out.owner).has(out.key):
                return f"optimizer state {out.key!r} of {out.owner!r} exists now"
        return "" if self._structures() == self._built else "a list, tuple or dict of optimizer state holds other items"

    def _entry(self, optimizer: int, owner: str) -> Entry:
        state = self.capture.state
        return Entry([*state.optimizers.values()][optimizer].state.get(state.params[owner].tensor, {}))

    def _structures(self) -> dict[tuple[str, str], dict[Any, Structure]]:
        """How the containers in the state of optimizers are built, by optimizer and parameter."""
        optimizers, params = self.capture.state.optimizers.items(), self.capture.state.params.items()
        structures = {
            (label, name): Entry(optimizer.state.get(param.tensor, {})).structures()
            for label, optimizer in optimizers for name, param in params
        }  # fmt: skip
        return {at: built for at, built in structures.items() if built}

    def gather_inputs(self, leaves: Sequence[Any]) -> list[Any]:
        """The flat inputs of `run` for a call with these leaves."""
        leaves = leaves if self.shard_batch is None else self.shard_batch(leaves)
        params = self.capture.state.params
        grads = [_torch.local_tensor(cast(torch.Tensor, params[g.owner].tensor.grad)) for g in self._grads]
        return [*self._held, *grads, *self._numbers, *[leaves[i] for i in self._batch], *self._constants]

    def _read_numbers(self) -> None:
        """Scheduled numbers as they are before the step, whose own schedulers come later."""
        for i, optimizer, number, key, index in self._sources:
            value = optimizer.param_groups[number][key]
            value = value if index is None else value[index]
            if isinstance(value, torch.Tensor) or value != self._last[i]:
                self._numbers[i].fill_(float(value))
                self._last[i] = value

    def gather_lasting(self) -> list[Any]:
        """Those of the flat inputs that outlast a call. Raises StateError: some were replaced meanwhile."""
        if not self._holds():
            if changed := self._changed():
                problem = f"the end of the last step, which was left to the next one, cannot run: {changed}"
                needed = "the parameters and the state that it began with"
                raise StateError(problem, needed, "call step.flush() before replacing them")
            self.bind_state()
        return self.lasting()

    def lasting(self) -> list[Any]:
        """Those of the flat inputs that outlast a call, as they were found last."""
        return [*self._held, *self._constants]

    def __call__(self, leaves: Sequence[Any]) -> Any:
        """Run one step."""
        self.phase = Phase.BEFORE
        self._read_numbers()
        if self.acts:
            self._prepare(leaves)
        if self.check is not None:
            self.check(self, leaves)
        stale = [param for param in self._params if param.grad is not None]
        inputs = self.gather_inputs(leaves)
        if self.primed.entries:
            self.primed.put()
        self.phase = Phase.RUNS
        if self._drawing is None:
            out = self._run(inputs)
        else:
            with self._drawing():
                out = self._run(inputs)
        self.phase = Phase.KEEPS
        self.primed.entries.clear()
        for param in stale:
            param.grad = None
        created = dict(zip(self._created, out[self._first_created :], strict=True))
        created = self._keep_created(created) if created else {}
        if self.acts:
            self._act({**created, **dict(enumerate(out[self._count : self._all_results]))})
        if self.capture.checked:
            self.nonfinite = out[self._first_nonfinite : self._end_nonfinite]
        self.expert_rows = {layer: out[i] for i, layer in self._layers.items()}
        self.phase = Phase.AFTER
        if self._single:
            return out[0]
        results = iter(out)
        returned = [
            next(results) if leaf is TensorLeaf else self._host[leaf.index] if type(leaf) is At else leaf
            for leaf in self.capture.result_leaves
        ]
        return put_together(self.capture.results, returned)

    def _run(self, inputs: list[Any]) -> Sequence[Any]:
        """Run the program. Raises OtherBranchError: another one has to, and this one has changed nothing."""
        try:
            out = self.run(inputs)
        except Exception as error:  # of another branch, perhaps, which rows that are counted do not fit
            if not is_behind_branch(error, self.capture.branches):
                raise
            self._refuse_other(finished(error))
            raise
        if self.capture.branches:
            self._refuse_other(out)
        return out

    def _refuse_other(self, out: Sequence[Any]) -> None:
        differ, same = cast("list[list[float]]", out[self._all_results].tolist())
        number = next((i for i, count in enumerate(differ) if count), None)
        if number is not None:
            for items, before in self._before:
                put_back(items, before)
            self.primed.take_away()
            self.phase = Phase.BEFORE
            raise other_branch(self.capture.branches, number, differ, bool(same[number]))

    def follows(self, branches: tuple[bool, ...]) -> bool:
        """Whether the program takes these branches, and may take others behind them."""
        return tuple(branch.expected for branch in self.capture.branches[: len(branches)]) == branches

    def _prepare(self, leaves: Sequence[Any]) -> None:
        """Compute the host's numbers, and take the values of tensors that the step replaces."""
        for i in self.capture.effects.open_arguments:
            self.capture.effects.open_arguments[i] = leaves[i]
        for place in self._gradients:
            if place.get() is not None:
                problem = f"{place.path} is set before a step that adds to it"
                needed = "a tensor of the batch without a gradient"
                raise StateError(problem, needed, f"set `{place.path} = None` before the call, or at the step's begin")
        if self.capture.branches:
            self._before = self.capture.effects.program.saved()
        self._host = self.capture.effects.program.run()
        for i, at in self._computed:
            self._numbers[i].fill_(self._host[at])
        for i in self._rebound:
            self._held[i].copy_(self._slots[i][2])

    def _act(self, extra: Mapping[int | str, Any]) -> None:
        """Replace the tensors that the step replaces; then make its assignments, and its callbacks in order."""
        for i in self._rebound:
            container, key = find_input(self._kept[i], self.capture.state)
            container[key] = tensor = self._held[i].clone()
            self._slots[i] = container, key, tensor
        effects = self.capture.effects
        for write in effects.writes:
            write.place.set(MISSING if write.recipe is None else write.recipe.value(self._host, extra))
        for name, flag in effects.flags:
            self.capture.state.params[name].tensor.requires_grad_(flag)
        self.phase = Phase.ACTS
        for called in effects.calls:
            args, kwargs = called.recipe.value(self._host, extra)
            called.fn(*args, **kwargs)
        effects.arguments.clear()

    def _keep_created(self, created: dict[str, torch.Tensor]) -> dict[int | str, Any]:
        """State and gradients that this step created go where the optimizer would have put them; those inside of lists,
        tuples and dicts, which are made later, are returned.
        """
        inside: dict[int | str, Any] = {}
        state = self.capture.state
        optimizers = list(state.optimizers.values())
        for name, tensor in created.items():
            value, out = tensor, self._created[name]
            param = state.params[out.owner].tensor
            layout = self.plan.created_storage[name]
            as_param = isinstance(param, DTensor) and tensor.dim()
            if self.world.devices_of_state is not None and (is_apart(layout) or as_param):
                shape = torch.Size(self._created_shapes[name])
                value = wrap(tensor, self.world.devices_of_state, placements(layout, self.world.mesh), shape)
            if out.optimizer is None:
                param.grad = value
            elif name in self._in_containers:
                inside[name] = value
                first = out.key.partition(".")[0]
                optimizers[out.optimizer].state[param].setdefault(first)  # in the order of the optimizer
            else:
                optimizers[out.optimizer].state[param][out.key] = value
        return inside
