"""The rules of ATen's ops: rows by family."""

from . import advanced_indexing as advanced_indexing
from . import along_dim as along_dim
from . import attention as attention
from . import convolution as convolution
from . import elementwise as elementwise
from . import factories as factories
from . import foreach as foreach
from . import linalg as linalg
from . import losses as losses
from . import matmul as matmul
from . import norms as norms
from . import pooling as pooling
from . import random as random
from . import reductions as reductions
from . import rnn as rnn
from . import scatter as scatter
from . import slicing as slicing
from . import unshardable as unshardable
from . import views as views
