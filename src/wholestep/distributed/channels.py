"""Process groups for messages between stages.

Gloo tells messages by tags, and carries those of all channels in one group. NCCL carries the messages of a communicator
in one stream, in the order in which they were started: a receive that waits holds up a send behind it. So each channel
has a communicator of its own there. torch makes one for each group that is bound to a device, and one for each pair of
ranks of any other group: groups in which no rank has two channels serve both.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from .. import _torch
from ..backend.recordable import transport
from ..mesh import channel
from .activity import ACTIVITY
from .launch import World

Channel = tuple[int, int]
"""The coordinates that a channel leads from and to."""
APART = ("nccl",)
"""Libraries that carry the messages of a group one after the other, whatever their tags are."""
_KNOWN_WARNING = "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING"  # that messages of a group are in one stream


def open_channels(world: World, axis: str, channels: Iterable[Channel]) -> None:
    """Make what `channels` along an axis need, and add it to the groups of `world`. All ranks call it.

    A library connects two ends at their first message, and both hosts wait for that. So a message goes through each
    channel here. All ranks take their channels in one order: the first that is not connected yet has both its ends.
    """
    library = transport(torch.device(world.device).type)
    closed = [pair for pair in sorted(channels) if channel(axis, *pair) not in world.groups]
    if library not in APART or not closed:
        return
    os.environ.setdefault(_KNOWN_WARNING, "false")
    with ACTIVITY.waiting("the opening of channels between stages"):
        for together in disjoint(closed):
            ours: Any = dist.new_subgroups_by_enumeration(list(map(list, world.mesh.groups(axis))), backend=library)[0]
            if world.timeout_s is not None:
                _torch.set_group_timeout(ours, world.timeout_s)
            world.groups.update({channel(axis, *pair): ours.group_name for pair in together})
        here, message = world.coordinate[axis], torch.zeros(1, device=world.device)
        for source, target in closed:
            group = world.groups[channel(axis, source, target)]
            if source == here:
                _torch.start_send(message, target, 0, group).wait()
            elif target == here:
                _torch.start_receive(message, source, 0, group).wait()


def disjoint(channels: Iterable[Channel]) -> list[list[Channel]]:
    """`channels` in few lists: in each, a coordinate is an end of at most one."""
    rows: list[list[Channel]] = []
    for pair in sorted(channels):
        free = (row for row in rows if not {end for other in row for end in other} & {*pair})
        if (row := next(free, None)) is None:
            rows.append(row := [])
        row.append(pair)
    return rows
