"""Whether products in blocks have the same bits as whole ones, on the kernels of this machine: both are run.

Which kernel a library takes, and in which order it adds up, depends on shapes. MKL does not always take the same one
for some rows as for all of them, and no library says when.
"""

from __future__ import annotations

from itertools import product
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from ..graph import meta
from ..graph.nodes import function_of, is_wait, node_at
from ..passes.async_tensor_parallel import WHOLE, alone
from ..passes.product_blocks import GATHER, SCATTER, GatheredRows, Site, factor

_COMPARED = 1 << 16
"""Numbers at least, in several draws if a product has fewer: roundings of a few may agree by chance."""


@torch.no_grad()
def same_bits(site: Site, parts: int, device: str) -> bool:
    """True if the products of `site` on `device` are equal to the last bit in `parts` blocks and whole. A factor whose
    strides are not known (`meta.is_strided`) may lie by rows or by columns: then they are for either.
    """
    strided = {place: any(meta.is_strided(factor(p, place)) for p in site.products) for place in (0, 1)}
    orders = product(*((False, True) if strided[place] else (False,) for place in (0, 1)))
    return all(_are_same(site, parts, device, columns) for columns in orders)


def _are_same(site: Site, parts: int, device: str, columns: tuple[bool, ...]) -> bool:
    generator, numbers = torch.Generator(device).manual_seed(0), 0  # the user's random numbers go on as they were
    while numbers < _COMPARED:
        drawn = _Drawn(site, generator, device, columns)
        pairs = [(drawn.run(WHOLE)[node], one) for node, one in drawn.run(parts).items()]
        if not all(torch.equal(whole, cut) for whole, cut in pairs):
            return False
        numbers += sum(whole.numel() for whole, _ in pairs)
    return True


class _Drawn:
    """Random numbers for what a place reads. Ranks are not asked: a gather returns random rows, and what a
    reduce-scatter would add up is compared.
    """

    def __init__(self, site: Site, generator: torch.Generator, device: str, columns: tuple[bool, ...]) -> None:
        self.site, self.generator, self.device = site, generator, device
        self.values = dict[Node, Tensor]()
        pairs = [(factor(one, place), by) for one in site.products for place, by in enumerate(columns)]
        self.by_columns = {node for node, by in pairs if by and meta.is_strided(node)}
        if isinstance(site, GatheredRows):
            self.gathered = self._draw(site.wait)
            rows = self.gathered if self.gathered.dim() == 2 else self.gathered.transpose(0, 1)
            for one in site.products:
                left = factor(one, 0)
                flat = rows.reshape(meta.one_tensor(left).shape).view(site.dtype)
                self.values[left] = flat.t().contiguous().t() if left in self.by_columns else flat

    def run(self, parts: int) -> dict[Node, Tensor]:
        """What the place computes of its products in so many blocks."""
        graph, given, made = alone(self.site, parts)
        values = dict[Node, Any]()
        for node, placeholder in given.items():
            if node not in self.values:
                self.values[node] = self._draw(node)
            values[placeholder] = self.values[node]
        self._run(graph, values)
        wanted = self.site.products if isinstance(self.site, GatheredRows) else (self.site.wait,)
        return {node: values[made[node]] for node in wanted}

    def _run(self, graph: Graph, values: dict[Node, Any]) -> None:
        for node in graph.nodes:
            if node.op != "call_function":
                continue
            args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
            if node.target is GATHER:
                values[node] = self._rows(node_at(node, 0))
            elif node.target is SCATTER or is_wait(node):
                values[node] = args[0]
            else:
                values[node] = function_of(node)(*args, **kwargs)

    def _rows(self, piece: Node) -> Tensor:
        """The rows that a gather of `piece` brings: of each rank all, or those that `piece` selects."""
        if piece.op == "placeholder":
            return self.gathered
        begin, end = cast("tuple[int, int]", piece.args[2:4])
        each = self.gathered.view(-1, cast(GatheredRows, self.site).rows, *self.gathered.shape[1:])
        return each[:, begin:end].flatten(0, 1).contiguous()

    def _draw(self, node: Node) -> Tensor:
        made = meta.one_tensor(node)
        sent_as_bytes = not made.dtype.is_floating_point
        dtype = cast(GatheredRows, self.site).dtype if sent_as_bytes else made.dtype
        stride = made.stride
        if meta.is_strided(node):
            stride = (1, made.shape[0]) if node in self.by_columns else meta.row_major(made.shape)
        drawn = torch.randn(made.shape, generator=self.generator, device=self.device).to(dtype).view(made.dtype)
        return torch.empty_strided(made.shape, stride, dtype=made.dtype, device=self.device).copy_(drawn)
