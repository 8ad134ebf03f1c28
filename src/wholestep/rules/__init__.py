"""Sharding rules: which dims of an operation's tensors are cut together."""

from . import attention as attention
from . import conv as conv
from . import elementwise as elementwise
from . import factories as factories
from . import gates as gates
from . import index as index
from . import indexing as indexing
from . import linalg as linalg
from . import lists as lists
from . import losses as losses
from . import matmul as matmul
from . import norms as norms
from . import order as order
from . import pooling as pooling
from . import random as random
from . import reduce as reduce
from . import scan as scan
from . import slices as slices
from . import softmax as softmax
from . import views as views
from . import whole as whole
