"""Sharding rules: which dims of an operation's tensors are cut together."""

from . import aten as aten
