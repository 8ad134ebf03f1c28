"""The start of the `wholestep` command: torch is imported where a command runs, not to show help."""

import importlib.util
import sys


def main() -> None:
    """Entry point of the `wholestep` command.

    The package is known from here on, and its own code, which imports all of it, waits for `wholestep.cli.loaded`.
    """
    spec = importlib.util.find_spec("wholestep")
    if spec is not None and "wholestep" not in sys.modules:
        sys.modules["wholestep"] = importlib.util.module_from_spec(spec)
    from wholestep.cli import main as run

    run()
