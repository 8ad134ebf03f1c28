"""Writes out, in the program of a stage, the runs of blocks beside which collectives can run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import torch
from torch.fx import Node

from .. import _torch
from ..graph import meta
from ..graph.graph import LocalGraph
from ..graph.loop import bodies_of
from ..graph.meta import TensorMeta, contiguous
from ..graph.nodes import add_call, copy_node, is_collective, is_wait, operands
from ..graph.stage_part import Action, Held, StageBlock, StagePart, part_of
from ..partition.batch_dependent import batch_dependent
from .base import InPlace

Key = tuple[str, int]
"""A value of a piece."""


@dataclass(frozen=True)
class PeelPieces(InPlace):
    """Writes out the last run of each block that completes gradients which ranks of a stage reduce, and the first run
    of each that reads parameters which they gather: the passes that follow merge and overlap these collectives as in
    a program without pieces. Bitwise the same.

    A block is still compiled once for all other pieces, so that the program grows by one run of it, whatever their
    number.
    """

    def change(self, local: LocalGraph) -> LocalGraph:
        """Write out runs of blocks in `local`."""
        for node in list(local.graph.nodes):
            part = part_of(node)
            if part is not None and part.begins and part.ends:
                peeled = {*_last_runs(local, node, part), *_first_runs(local, node, part)}
                if peeled:
                    _Peel(local, node, part, peeled).run()
        if any(bodies_of(node)[1] for node in local.graph.nodes):
            _start_early(local)
        return local


def _start_early(local: LocalGraph) -> None:
    """Start collectives as soon as what they send is there, as a program without pieces does: what a loop has
    accumulated was waited for where it is first read.
    """
    place = {node: number for number, node in enumerate(local.graph.nodes)}

    def raised(node: Node) -> None:
        reads = node.all_input_nodes
        if len(reads) == 1 and len(reads[0].users) == 1 and len(reads[0].all_input_nodes) == 1 and _moves(reads[0]):
            raised(reads[0])
        last = max(reads, key=place.__getitem__)
        if last.op == "call_function":
            place[node] = place[last]
            last.append(node)

    for node in list(local.graph.nodes):
        if is_collective(node) and _is_shared(local, node):
            raised(node)


def _moves(node: Node) -> bool:
    return node.op == "call_function" and not is_wait(node) and not is_collective(node) and not bodies_of(node)[1]


def _last_runs(local: LocalGraph, node: Node, part: StagePart) -> Iterable[int]:
    """The actions that complete what ranks of the stage reduce."""
    items = {cast(int, item.args[1]): item for item in node.users}
    ends = dict(part.totals)
    reduced = {
        ends[before] for number, before in enumerate(part.returned)
        if number in items and _is_exchanged(local, items[number])
    }  # fmt: skip
    blocks = {block.name for block in part.blocks if not reduced.isdisjoint(block.gives)}
    last = {action.name: at for at, action in enumerate(part.actions) if action.kind == "run" and action.name in blocks}
    return last.values()


def _is_exchanged(local: LocalGraph, item: Node) -> bool:
    """True if the first collectives that read a value are of ranks of this stage."""
    todo, seen = [item], set[Node]()
    while todo:
        for user in todo.pop().users:
            if user in seen:
                continue
            seen.add(user)
            if not is_collective(user):
                todo.append(user)
            elif _is_shared(local, user):
                return True
    return False


def _is_shared(local: LocalGraph, node: Node) -> bool:
    axis = str(node.args[-1])
    return axis != local.stage_axis and local.mesh.axis_size(axis) > 1


def _first_runs(local: LocalGraph, node: Node, part: StagePart) -> list[int]:
    """The actions that are the first to read what ranks of the stage gather."""
    varying, gathered = batch_dependent(local), set[str]()
    for name, operand in zip(part.operands, operands(node), strict=True):
        todo, seen = [operand], set[Node]()
        while todo and operand not in varying:
            source = todo.pop()
            if is_collective(source) and _is_shared(local, source):
                gathered.add(name)
                break
            todo += [other for other in source.all_input_nodes if other not in seen]
            seen.update(source.all_input_nodes)
    blocks, runs = {block.name: block for block in part.blocks}, list[int]()
    for at, action in enumerate(part.actions):
        if action.kind == "run" and not gathered.isdisjoint(blocks[action.name].takes):
            runs.append(at)
            gathered -= set(blocks[action.name].takes)
    return runs


def _ends(block: StageBlock) -> list[Node]:
    """The nodes that are the values which a block gives."""
    return operands(next(iter(reversed(block.body.nodes))))


@dataclass
class _Peel:
    """Replaces `node` by parts and, in between, by the runs of blocks that are actions number `peeled`.

    `state`: what the part that was written last leaves. `at`: values that parts hand out, and complete accumulators.
    `new`: values that the next part is given. `held`, `totals`: what the state has, of
    pieces and accumulated; `out`: bytes of it that the next run of a block is handed.
    """

    local: LocalGraph
    node: Node
    part: StagePart
    peeled: set[int]
    state: Node | None = None
    at: dict[Key, Node] = field(default_factory=dict[Key, Node])
    new: dict[Key, Node] = field(default_factory=dict[Key, Node])
    totals: dict[str, int] = field(default_factory=dict[str, int])
    out: int = 0

    def __post_init__(self) -> None:
        self.graph, actions = self.local.graph, self.part.actions
        self.blocks = {block.name: block for block in self.part.blocks}
        self.fixed = dict(zip(self.part.operands, operands(self.node), strict=True))
        self.ends, self.befores = dict(self.part.totals), {end: before for before, end in self.part.totals}
        self.readers = self.part.readers
        self.gives = {block.name: dict(zip(_ends(block), block.gives, strict=True)) for block in self.part.blocks}
        inner = [(node.name, node) for block in self.part.blocks for node in block.body.nodes]
        inner += [(name, node) for ends in self.gives.values() for node, name in ends.items()]
        self.metas = {name: tensor for name, node in inner if (tensor := meta.tensor(node)) is not None}
        runs = [at for at, action in enumerate(actions) if action.kind == "run"]
        self.last = {actions[at].name: at for at in runs}
        self.first = {actions[at].name: at for at in reversed(runs)}
        complete = {end for name, at in self.last.items() if at in self.peeled for end in self.blocks[name].gives}
        self.returned = tuple(name for name in self.part.returned if self.ends[name] not in complete)
        self.held = Held(self.blocks, self.part.messages)

    def run(self) -> None:
        actions, begin = self.part.actions, 0
        with self.graph.inserting_before(self.node):
            for at in sorted(self.peeled):
                self._write_part(actions[begin:at], list(self.new), self._takes(at))
                begin = at + 1
                while actions[begin].kind in ("send", "post"):
                    begin += 1
                self._write_block(at, actions[at + 1 : begin])
            last = self._write_part(actions[begin:], list(self.new), (), ends=True)
        self._redirect(last)

    def _takes(self, at: int) -> tuple[Key, ...]:
        """What the run of a block reads of the state."""
        action = self.part.actions[at]
        names = (name for name in self.blocks[action.name].takes if name not in self.fixed)
        return tuple((name, action.piece) for name in names if not self._is_nothing_yet(name, at))

    def _is_nothing_yet(self, name: str, at: int) -> bool:
        """True for an accumulator before the first run of its block."""
        return name in self.ends and self.first[self.part.actions[at].name] == at

    def _write_part(
        self, actions: Sequence[Action], entering: Sequence[Key], leaving: Sequence[Key], ends: bool = False
    ) -> Node:
        names = {name for action in actions if action.kind == "run" for name in self.blocks[action.name].takes}
        fixed = tuple(name for name in self.part.operands if name in names)
        returned = self.returned if ends else ()
        most = self._advance(actions, entering)
        self._hand_out(leaving, returned)
        handed = [self.metas[name] for name, _ in leaving]
        tensors = [self.metas[self.ends[name]] for name in returned] + handed
        extra_bytes = most - self._state_bytes - sum(tensor.size_bytes for tensor in tensors)
        target = replace(
            self.part, actions=tuple(actions), operands=fixed, entering=tuple(entering), leaving=tuple(leaving),
            begins=self.state is None, ends=ends, returned=returned, peak_bytes=max(0, extra_bytes),
        )  # fmt: skip
        state = [] if self.state is None else [self.state]
        args = (*state, *(self.fixed[name] for name in fixed), *(self.new.pop(key) for key in entering))
        tensors += [] if ends else [self._state_meta()]
        node = add_call(self.graph, target, args, self._state_meta(), self.node, self.node.name)
        meta.set_tensors(node, tensors)
        meta.set_kept(node)
        for number, key in enumerate(leaving):
            self.at[key] = self._item(node, number, key[0])
        self.state = None if ends else self._item(node, len(leaving), f"{self.node.name}_state")
        return node

    def _item(self, node: Node, number: int, name: str) -> Node:
        item = self.graph.create_node("call_function", _torch.GETITEM, (node, number), name=name)
        meta.copy(node, item)
        meta.set_kept(item, False)
        meta.set_tensors(item, (meta.tensors(node)[number],))
        return item

    def _state_meta(self) -> TensorMeta:
        """A state counts as memory of as many bytes as it holds of pieces in flight."""
        template = next(iter(self.metas.values()))
        return replace(contiguous((self._state_bytes,), template), dtype=torch.uint8)

    @property
    def _state_bytes(self) -> int:
        return self.held.now + sum(self.totals.values())

    def _advance(self, actions: Sequence[Action], entering: Sequence[Key]) -> int:
        """Do `actions` of a part that is given values, for the most bytes that its state has meanwhile."""
        self.totals |= {name: self.metas[self.ends[name]].size_bytes for name, _ in entering if name in self.ends}
        most = self._state_bytes
        for action in actions:
            ends = self.blocks[action.name].gives if action.kind == "run" else ()
            self.totals |= {self.befores[end]: self.metas[end].size_bytes for end in ends if end in self.befores}
            most = max(most, self.held.after(action) + sum(self.totals.values()))
        return most

    def _hand_out(self, leaving: Sequence[Key], returned: Sequence[str]) -> None:
        """Take out of the state what the next run of a block is handed, and accumulators that are returned."""
        for name, piece in leaving:
            piece_bytes = self.held.pieces.get(piece, 0)
            out = min(piece_bytes, self.metas[name].size_bytes) if name not in self.ends else 0
            self.held.pieces[piece], self.out = piece_bytes - out, self.out + out
        for name in (*returned, *(name for name, _ in leaving)):
            self.totals.pop(name, None)

    def _write_block(self, at: int, following: Sequence[Action]) -> None:
        """Write out the run of a block. What it sends leaves as soon as it is there, with the actions `following`."""
        action = self.part.actions[at]
        block, inside = self.blocks[action.name], dict[Node, Node | None]()
        unsent = {self.part.messages[later.name].value for later in following if later.kind == "send"}
        sent = [(name, action.piece) for name in sorted(unsent)]
        for node in block.body.nodes:
            if node.op == "placeholder":
                nothing = self._is_nothing_yet(node.name, at)
                fixed = self.fixed.get(node.name)
                inside[node] = fixed or (None if nothing else self.at[node.name, action.piece])
            elif node.op == "call_function":
                copied = inside[node] = copy_node(node, self.graph, cast("Callable[[Node], Node]", inside.__getitem__))
                meta.set_piece(copied, action.piece, action.name)
                if name := self.gives[block.name].get(node):
                    self._note(name, copied, at)
                    unsent.discard(name)
                if following and not unsent:
                    self._write_part(following, sent, ())
                    following = ()
        self.held.leave(action, self.out)
        self.out = 0

    def _note(self, name: str, node: Node, at: int) -> None:
        """Note a value that the run of a block gives."""
        action = self.part.actions[at]
        if name in self.befores and self.last[action.name] == at:
            self.at[name, -1] = node
        elif name in self.befores:
            self.new[self.befores[name], action.piece] = node
        if self.readers.get(name):
            self.new[name, action.piece] = node

    def _redirect(self, last: Node) -> None:
        """Let readers of the accumulators read what the blocks and the last part return."""
        for item in list(self.node.users):
            before = self.part.returned[cast(int, item.args[1])]
            end = self.at.get((self.ends[before], -1))
            if end is None:
                item.args = (last, self.returned.index(before))
            else:
                meta.copy(item, end)
                item.replace_all_uses_with(end)
                self.graph.erase_node(item)
        self.graph.erase_node(self.node)
