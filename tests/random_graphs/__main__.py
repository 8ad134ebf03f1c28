"""Run cases by seed; the first that fails is made smaller and printed: `python -m tests.random_graphs --seed 17`."""

from __future__ import annotations

import argparse
import sys
import warnings

import torch

from tests.random_graphs.case import case
from tests.random_graphs.run import problem
from tests.random_graphs.shrink import show, shrink


def main() -> int:
    """1 where a case fails."""
    parser = argparse.ArgumentParser(prog="python -m tests.random_graphs", description=__doc__)
    parser.add_argument("--seed", type=int, required=True, help="the first seed")
    parser.add_argument("--count", type=int, default=1, help="how many seeds")
    parser.add_argument("--whole", action="store_true", help="print the case as it is, without making it smaller")
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for seed in range(given.seed, given.seed + given.count):
        made = case(seed)
        found = problem(made)
        if found is not None:
            print(f"seed {seed}: {found.kind}")
            made = made if given.whole else shrink(made, found)
            print(show(made, problem(made) or found))
            return 1
    print(f"{given.count} cases, all ranks compute what one device does")
    return 0


if __name__ == "__main__":
    sys.exit(main())
