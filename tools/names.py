"""Hold names that say nothing (`found`, `made`, `one`) below a share of all names that the packages bind.

A name is bound where it is a parameter or is assigned, in loops and comprehensions too. Each such name is printed as
`file:line scope name`, with `--brief` only if there are too many. Exit status 1 when there are.
"""

import argparse
import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MOST_PERCENT = 1.0
GENERIC = {
    "asked", "done", "few", "found", "given", "held", "kept", "known", "left", "like", "made", "more", "one", "others",
    "own", "read", "said", "such", "taken", "these", "those", "told", "wanted", "whole",
}  # fmt: skip


def bindings(tree: ast.AST, scope: str = "") -> Iterator[tuple[int, str, str]]:
    """Line, scope and name of each parameter and assigned name below `tree`."""
    for node in ast.iter_child_nodes(tree):
        inner = scope
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner = f"{scope}.{node.name}".lstrip(".")
        elif isinstance(node, ast.arg):
            yield node.lineno, scope, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, scope, node.id
        yield from bindings(node, inner)


def main() -> int:
    """Print names and share; 1 when the share is over the limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--brief", action="store_true", help="print the names only if there are too many")
    both = [ROOT / "src" / "wholestep", ROOT / "foresight" / "src" / "wholestep_foresight"]
    parser.add_argument("folders", nargs="*", type=Path, default=both)
    parser.add_argument("--most", type=float, default=MOST_PERCENT, help="percent of all bound names")
    options = parser.parse_args()
    generic: list[str] = []
    count = 0
    files = [(path, folder) for folder in options.folders for path in sorted(folder.resolve().rglob("*.py"))]
    for path, folder in files:
        place = path.relative_to(folder.resolve().parent).as_posix()
        for line, scope, name in bindings(ast.parse(path.read_text())):
            count += 1
            if name.strip("_") in GENERIC:
                generic.append(f"{place}:{line} {scope or '<module>'} {name}")
    share = 100 * len(generic) / max(count, 1)
    over = share > options.most
    if generic and (over or not options.brief):
        print("\n".join(generic))
    verdict = "TOO MANY, the limit is" if over else "within the limit of"
    print(f"{len(generic)} of {count} bound names say nothing: {share:.2f} %, {verdict} {options.most:g} %")
    return int(over)


if __name__ == "__main__":
    sys.exit(main())
