"""Sharding rules: which dims of an op's tensors are sharded together."""

from . import aten as aten
