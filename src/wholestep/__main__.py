"""`python -m wholestep` is the `wholestep` command."""

from .cli import main

if __name__ == "__main__":
    main()
