"""Compiles the parts of a split graph in order, each with fakes that have the strides of the earlier parts' results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from torch import nn
from torch.fx import GraphModule, Node

from .. import _torch
from ..graph import meta

Compiler = Callable[[GraphModule, list[Any]], Callable[..., Any]]


class CompiledPart(nn.Module):
    """A compiled part; `single` if the part returns one value instead of a tuple."""

    def __init__(self, run: Callable[..., Any], single: bool) -> None:
        super().__init__()
        self.run, self.single = run, single

    def forward(self, *args: Any) -> Any:
        """Run the part."""
        made = self.run(*args)
        return made[0] if self.single else made


def compile_parts(whole: GraphModule, outer: GraphModule, compiler: Compiler) -> None:
    """Compile each part of `outer`, the split of dynamo's graph `whole`, in place."""
    fakes: dict[Node, Any] = {}
    for node in outer.graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            fakes[node] = meta.example(node)
        elif node.op == "call_function":  # one of several results
            source, item = cast("tuple[Node, int]", node.args)
            fakes[node] = fakes[source][item]
        elif node.op == "call_method":  # detach, of a parameter
            fakes[node] = fakes[node.all_input_nodes[0]].detach()
        elif node.op == "call_module":
            name, part = str(node.target), outer.get_submodule(str(node.target))
            assert isinstance(part, GraphModule)
            meta.share_notes(whole, part)
            _torch.give_origin(whole, part)
            compiled, fakes[node] = _compile_part(part, [fakes[a] for a in node.all_input_nodes], compiler)
            outer.delete_submodule(name)
            outer.add_submodule(name, compiled)
    outer.recompile()


def _compile_part(part: GraphModule, fakes: list[Any], compiler: Compiler) -> tuple[CompiledPart, Any]:
    single = _return_a_tuple(part)
    context = _torch.PartContext()
    with context.compiling():
        compiled = CompiledPart(compiler(part, fakes), single)
        if context.through_aot:  # the compiler may have changed strides
            return compiled, context.call(compiled, fakes)
    recorded = [meta.example(node) for node in _results(part)]
    return compiled, recorded[0] if single else tuple(recorded)


def _results(part: GraphModule) -> Sequence[Node]:
    return cast(Sequence[Node], part.graph.output_node().args[0])


def _return_a_tuple(part: GraphModule) -> bool:
    """Make `part` return a tuple, which compilers require; return whether it returned a single value."""
    output = part.graph.output_node()
    single = not isinstance(output.args[0], tuple)
    if single:
        output.args = ((output.args[0],),)
        part.recompile()
    return single
