"""Report the code lines of the package, per file and per function, and hold them to the house limits.

A code line is a line that is not blank, not only a comment and not part of a docstring. The budget of the whole package
counts all lines (decision 0045). Without a folder, each distribution of the repository is held to its own budget.
`--brief` prints what is over a limit and the totals only.
Exit status 1 when a file, a function or the package is over its hard limit.
"""

import argparse
import ast
import io
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WARN_FILE, MAX_FILE = 400, 500
WARN_FUNCTION, MAX_FUNCTION = 60, 80
ROOMS = {
    "": 2_266, "_torch": 3_433, "backend": 2_643, "cache": 366, "capture": 9_041, "checkpoint": 3_262, "cli": 1_700,
    "collectives": 485, "cost": 3_151, "ddp": 569, "distributed": 2_382, "graph": 4_310, "hardware": 1_303,
    "partition": 3_365, "passes": 5_349, "plan": 7_758, "planner": 4_260, "profiling": 729, "proof": 889,
    "report": 593, "rules": 4_059, "runtime": 5_793,
}  # fmt: skip
"""The budget of each folder of the package, and of the modules beside them: what one needs it gives up elsewhere in
itself.
"""
FORESIGHT_BUDGET = 2_538
LONGEST_SHOWN = 10
LAYOUT_TOKENS = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


@dataclass(frozen=True)
class Size:
    """Code lines of one file or function, and where it is."""

    place: str
    lines: int

    def verdict(self, warn: int, limit: int) -> str:
        """Empty, or what is wrong with it."""
        if self.lines > limit:
            return f"TOO LONG (limit {limit})"
        return f"long (aim below {warn})" if self.lines > warn else ""


def code_lines(source: str, tree: ast.Module) -> set[int]:
    """Numbers of the lines that hold code."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in LAYOUT_TOKENS:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Every function below `tree` with its dotted name, outer ones first."""
    for node in ast.iter_child_nodes(tree):
        name = prefix
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = f"{prefix}{node.name}."
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield name.rstrip("."), node
        yield from functions(node, name)


def measure(source: str, place: str) -> tuple[Size, list[Size]]:
    """Size of one file and of each of its functions."""
    tree = ast.parse(source)
    lines = code_lines(source, tree)
    sizes: list[Size] = []
    for name, node in functions(tree):
        span = range(node.lineno, (node.end_lineno or node.lineno) + 1)
        sizes.append(Size(f"{place}:{node.lineno} {name}", len(lines.intersection(span))))
    return Size(place, len(lines)), sizes


def row(size: Size, verdict: str) -> str:
    """One line of a table."""
    return f"{size.lines:6d}  {size.place}{'  ' + verdict if verdict else ''}"


def main() -> int:
    """Print the tables of each folder; 1 when something is over its limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--brief", action="store_true", help="print what is over a limit and the totals only")
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--budget", type=int, default=100_000, help="lines of all files, with prose and blank lines")
    options = parser.parse_args()
    if options.folder is not None:
        return held(options.folder.resolve(), {"": options.budget}, options.brief)
    engine, foresight = ROOT / "src" / "wholestep", ROOT / "foresight" / "src" / "wholestep_foresight"
    return max(held(engine, ROOMS, options.brief), held(foresight, {"": FORESIGHT_BUDGET}, options.brief))


def held(folder: Path, budgets: Mapping[str, int], brief: bool) -> int:
    """Print the table of a folder; 1 when something is over its limit. Folders inside without a budget share that of
    the folder.
    """
    files: list[Size] = []
    bodies: list[Size] = []
    lines = Counter[str]()
    for path in sorted(folder.rglob("*.py")):
        source = path.read_text()
        first = path.relative_to(folder).parts[0]
        lines[first if first in budgets else ""] += len(source.splitlines())
        size, inner = measure(source, path.relative_to(folder.parent).as_posix())
        files.append(size)
        bodies.extend(inner)
    if not files:
        print(f"no Python file below {folder}")
        return 1
    bodies.sort(key=lambda size: -size.lines)
    file_rows = [(size, size.verdict(WARN_FILE, MAX_FILE)) for size in files]
    body_rows = [(size, size.verdict(WARN_FUNCTION, MAX_FUNCTION)) for size in bodies]
    shown = [r for r in file_rows if r[1] or not brief]
    longest = [r for i, r in enumerate(body_rows) if r[1] or (i < LONGEST_SHOWN and not brief)]
    print("\n".join(row(*r) for r in shown + longest))
    total = sum(size.lines for size in files)
    print(f"{total} code lines in {len(files)} files, {len(bodies)} functions")
    over = [room for room, n in lines.items() if n > budgets[room]]
    state = "TOO MANY for the" if over else "within the"
    print(f"{lines.total()} lines in all, {state} budget of {sum(budgets.values())}")
    for room in over:
        print(f"{lines[room]:6d}  {room or folder.name}  TOO LONG (limit {budgets[room]})")
    return int(bool(over) or any(verdict.startswith("TOO") for _, verdict in file_rows + body_rows))


if __name__ == "__main__":
    sys.exit(main())
