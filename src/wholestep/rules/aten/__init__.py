"""The rules of ATen's ops: rows by family."""

from . import convolution as convolution
from . import elementwise as elementwise
from . import factories as factories
from . import indexing as indexing
from . import linalg as linalg
from . import losses as losses
from . import norms as norms
from . import reductions as reductions
from . import sequences as sequences
from . import views as views
