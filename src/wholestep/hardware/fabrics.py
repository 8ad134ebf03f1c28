"""How nodes are wired: what leaves a leaf switch may share fewer links than it has senders."""

from __future__ import annotations

import re
from dataclasses import replace

from ..errors import PlanError, shown
from .hardware import Hardware, Level

_TEXT = re.compile(r"(?P<link>[a-z0-9-]+)(?::(?P<wired>rail|fat-tree))?(?:/(?P<times>[0-9]{1,3}(?:\.[0-9]{1,3})?))?")
_DOWN = 32  # ports of a leaf switch with 64 ports that go down to NICs, the usual half


def is_wired(text: str) -> bool:
    """True for the text of a link with a topology or an oversubscription."""
    return ":" in text or "/" in text


def wired(hardware: Hardware, text: str, links: dict[str, Level]) -> Hardware:
    """`hardware` with the link `LINK[:rail|:fat-tree][/K]` between its nodes.

    A leaf switch of 64 ports has 32 down. `rail` gives each rank of a node a leaf of its own, so that 32 nodes share
    their leaves; in a `fat-tree` all NICs of a node are on one leaf. What leaves the leaves has 1/K of the rate.
    Between ranks of different rails inside a leaf group, the library is assumed to cross the node's own links first.

    Raises:
        PlanError: the text is malformed, the link unknown, or K below 1.
    """
    match = _TEXT.fullmatch(text)
    times = float((match and match["times"]) or 1)
    if match is None or match["link"] not in links or times < 1:
        raise PlanError(
            f"link {shown(text)}", f"LINK[:rail|:fat-tree][/K] with K of at least 1 and one of {', '.join(links)}",
            "correct it, as infiniband-400:rail/2",
        )  # fmt: skip
    link, node = links[match["link"]], hardware.ranks_per_node
    nodes = _DOWN if match["wired"] == "rail" else max(_DOWN // node, 1)
    spine = replace(link, name=f"{link.name} spine {times:,.9g}:1", bytes_per_us=link.bytes_per_us / times)
    if nodes == 1:
        return replace(hardware, levels=(*hardware.levels[:-1], spine))
    leaf = replace(link, name=f"{link.name} leaf", ranks=nodes * node)
    return replace(hardware, levels=(*hardware.levels[:-1], leaf, spine))
