"""`python -m benchmarks.peers run | report | clean | list`."""

import sys

from .command import app

if __name__ == "__main__":
    sys.exit(app())
