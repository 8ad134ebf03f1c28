"""Sharding rules: which dims of an operation's tensors are cut together."""

from . import elementwise as elementwise
from . import lists as lists
from . import matmul as matmul
from . import reduce as reduce
from . import views as views
