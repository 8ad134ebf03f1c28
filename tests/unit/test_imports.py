"""Imports point one way, private torch names live in `_torch`, and `node.meta` is touched in `graph/meta.py` alone.

The order is that of docs/how-it-works.md. A module that `ORDER` does not name fails: give it a place first. Modules
import each other in no circle, not even inside functions. Two modules or two public classes never share a name.
"""

import ast
import subprocess
import sys
from collections import defaultdict
from functools import lru_cache
from pathlib import Path

import pytest

import wholestep as ws

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "wholestep"
FORESIGHT = ROOT / "foresight" / "src" / "wholestep_foresight"
SUPPORT = "errors typed_json typed_values precision units tuning sizes _torch mesh layout graph dtensor"
SUPPORT += " rules hardware cost reshard"
STAGES = "capture plan partition passes backend planner ddp collectives distributed cache profiling runtime checkpoint"
READERS = "proof compile report public __init__ cli __main__"

# A unit imports units that stand before it.
ORDER = [*SUPPORT.split(), *STAGES.split(), *READERS.split()]
LEVEL = {name: i for i, name in enumerate(ORDER)}
DICT_METHODS = {"get", "update", "setdefault", "pop", "copy", "items", "keys", "values", "clear"}


@lru_cache(maxsize=1)
def parsed(source: str) -> ast.Module:
    """The tree of a module's text, for the checks that read it in turn; nobody changes it."""
    return ast.parse(source)


def imports(tree: ast.AST, module: str) -> list[tuple[int, str]]:
    """(line, absolute dotted name) of everything that `module` (like "wholestep/plan/plan.py") imports."""
    package = module.split("/")[:-1]
    found: list[tuple[int, str]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            prefix = ".".join([*base, *([node.module] if node.module else [])])
            found += [(node.lineno, f"{prefix}.{alias.name}") for alias in node.names]
    return found


def unit_of(dotted: str) -> str:
    """The part of the package that a name belongs to; a public name of the package belongs to `__init__`."""
    second = dotted.split(".")[1:2]
    return second[0] if second and second[0] in LEVEL else "__init__"


def direction_faults(source: str, module: str) -> list[str]:
    unit = module.split("/")[1].removesuffix(".py")
    if unit not in LEVEL:
        return [f"{module}: {unit} has no place in the order of tests/unit/test_imports.py"]
    faults: list[str] = []
    for line, name in imports(parsed(source), module):
        target = unit_of(name)
        if name.split(".")[0] == FORESIGHT.name:
            faults.append(f"{module}:{line}: {unit} imports {name}: the core finds it by entry points")
        if name.split(".")[0] == "wholestep" and LEVEL[unit] < LEVEL[target]:
            faults.append(f"{module}:{line}: {unit} imports {name}, which comes later ({target})")
    return faults


def is_private(dotted: str) -> bool:
    parts = dotted.split(".")
    hidden = any(part.startswith("_") and not part.endswith("__") for part in parts[1:])
    return parts[0] == "torch" and hidden and parts[:2] != ["torch", "ops"]


def dotted_name(node: ast.AST) -> str:
    """`a.b.c` of an attribute chain on a plain name, else empty."""
    if isinstance(node, ast.Name):
        return node.id
    base = dotted_name(node.value) if isinstance(node, ast.Attribute) else ""
    return f"{base}.{node.attr}" if base and isinstance(node, ast.Attribute) else ""


def private_faults(source: str, module: str) -> list[str]:
    if module.startswith("wholestep/_torch/"):
        return []
    tree = parsed(source)
    found = {(line, name) for line, name in imports(tree, module) if is_private(name)}
    aliases = {"torch": "torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            aliases |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            aliases |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    for node in ast.walk(tree):
        first, _, rest = dotted_name(node).partition(".")
        name = f"{aliases.get(first, '')}.{rest}"
        if isinstance(node, ast.Attribute) and rest and is_private(name):
            found.add((node.lineno, name))
    return [f"{module}:{line}: {name} is private to torch: import it in _torch" for line, name in sorted(found)]


def meta_faults(source: str, module: str) -> list[str]:
    """`X.meta[...]`, `X.meta.get(...)` and its like, `... in X.meta` and `X.meta = ...`."""
    if module in ("wholestep/graph/meta.py", "wholestep/_torch/dispatch.py"):  # what reads it, and the tracer
        return []

    def is_meta(node: ast.AST) -> bool:
        return isinstance(node, ast.Attribute) and node.attr == "meta"

    lines: set[int] = set()
    for node in ast.walk(parsed(source)):
        touched = (
            (isinstance(node, ast.Subscript) and is_meta(node.value))
            or (isinstance(node, ast.Attribute) and node.attr in DICT_METHODS and is_meta(node.value))
            or (isinstance(node, ast.Compare) and any(is_meta(side) for side in node.comparators))
            or (isinstance(node, ast.Attribute) and is_meta(node) and not isinstance(node.ctx, ast.Load))
        )
        if touched:
            lines.add(node.lineno)
    return [f"{module}:{line}: node.meta is touched outside graph/meta.py" for line in sorted(lines)]


def op_name_faults(source: str, module: str) -> list[str]:
    """`"gather" in str(node.target)` and `str(target).startswith(...)`: kinds of ops are rows of graph/op_kinds.py."""

    def is_text(node: ast.AST) -> bool:
        called = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "str"
        return called and bool(node.args) and ast.unparse(node.args[0]).rpartition(".")[2] == "target"

    lines: set[int] = set()
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Compare):
            pairs = zip(node.ops, node.comparators, strict=True)
            if any(isinstance(op, (ast.In, ast.NotIn)) and is_text(side) for op, side in pairs):
                lines.add(node.lineno)
        elif isinstance(node, ast.Attribute) and node.attr in ("startswith", "endswith") and is_text(node.value):
            lines.add(node.lineno)
    return [f"{module}:{line}: a kind of op read from its text: see graph/op_kinds.py" for line in sorted(lines)]


CHECKS = [direction_faults, private_faults, meta_faults, op_name_faults]
MODULES = {path.relative_to(PACKAGE.parent).as_posix(): path for path in sorted(PACKAGE.rglob("*.py"))}


def test_package() -> None:
    assert MODULES
    faults = [f for module, path in MODULES.items() for check in CHECKS for f in check(path.read_text(), module)]
    assert not faults, "\n".join(faults)


def test_foresight() -> None:
    """Its modules are like those of the core, but that they have no order, and may import public names and the CLI."""
    sources = {
        path.relative_to(FORESIGHT.parent).as_posix(): path.read_text() for path in sorted(FORESIGHT.glob("*.py"))
    }
    faults = [f for module, text in sources.items() for check in CHECKS[1:] for f in check(text, module)]
    faults += shared_names(sources | {module: path.read_text() for module, path in MODULES.items()})
    assert sources
    assert not faults, "\n".join(faults)
    assert not circle(dependencies(sources))


class _RuntimeImports(ast.NodeTransformer):
    """Drops what runs for a type checker alone."""

    def visit_If(self, node: ast.If) -> ast.If | None:
        return None if dotted_name(node.test).endswith("TYPE_CHECKING") else node


def dependencies(sources: dict[str, str]) -> dict[str, set[str]]:
    """The modules that each module imports when it runs, at its top or in a function, without imports for types."""
    found: dict[str, set[str]] = {module: set() for module in sources}
    for module, source in sources.items():
        for _, name in imports(_RuntimeImports().visit(ast.parse(source)), module):
            for dotted in (name, name.rpartition(".")[0]):
                path = f"{dotted.replace('.', '/')}.py"
                if path in sources and path != module:
                    found[module].add(path)
    return found


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Modules that import each other in a circle, the first one twice; empty if there is none."""
    done: set[str] = set()

    def search(module: str, path: list[str]) -> list[str]:
        if module in path:
            return [*path[path.index(module) :], module]
        if module not in done:
            for target in sorted(graph[module]):
                found = search(target, [*path, module])
                if found:
                    return found
            done.add(module)
        return []

    return next((found for module in sorted(graph) if (found := search(module, []))), [])


def shared_names(sources: dict[str, str]) -> list[str]:
    """Modules with one file name, and public classes with one name."""
    places: dict[str, list[str]] = defaultdict(list)
    for module, source in sources.items():
        if not module.rpartition("/")[2].startswith("__"):
            places[module.rpartition("/")[2]].append(module)
        for node in parsed(source).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(module)
    return [f"{name} is in {', '.join(where)}" for name, where in sorted(places.items()) if len(where) > 1]


# `Hardware.preset` and `Hardware.load` are constructors of a value whose modules make that value.
CONSTRUCTORS = {
    "wholestep/hardware/hardware.py": {"wholestep/hardware/presets.py", "wholestep/hardware/hardware_file.py"}
}


def test_modules_import_each_other_in_no_circle() -> None:
    graph = dependencies({module: path.read_text() for module, path in MODULES.items()})
    for module, made_by in CONSTRUCTORS.items():
        assert made_by <= graph[module]
        graph[module] -= made_by
    found = circle(graph)
    assert not found, " -> ".join(found)


def test_no_two_modules_and_no_two_public_classes_share_a_name() -> None:
    faults = shared_names({module: path.read_text() for module, path in MODULES.items()})
    assert not faults, "\n".join(faults)


def test_a_circle_through_a_function_is_found_and_one_through_types_is_none() -> None:
    top = {"w/a.py": "from .b import x", "w/b.py": "def f():\n    from .a import y", "w/c.py": "from . import a"}
    assert circle(dependencies(top)) == ["w/a.py", "w/b.py", "w/a.py"]
    typed = top | {"w/b.py": "if TYPE_CHECKING:\n    from .a import y"}
    assert dependencies(typed)["w/c.py"] == {"w/a.py"}
    assert circle(dependencies(typed)) == []


def test_a_name_that_is_there_twice_is_found() -> None:
    twice = {"w/a/x.py": "class A: ...", "w/b/x.py": "class _P: ...", "w/b/y.py": "class A: ...\nclass _P: ..."}
    assert shared_names(twice) == ["A is in w/a/x.py, w/b/y.py", "x.py is in w/a/x.py, w/b/x.py"]


FIRST_LINES = """
import sys
before = set(sys.modules)
import wholestep as ws
print(sorted(n for n in set(sys.modules) - before if n.partition(".")[0] not in sys.stdlib_module_names))
import wholestep.capture.capture, wholestep.collectives, wholestep.compile, wholestep.partition.lower
import wholestep.plan.plan, wholestep.report.page
print("wholestep.public" in sys.modules)
print(sorted(name for name in ws.__all__ if type(getattr(ws, name)) is type(sys)))
print(ws.plan(1, "dp=1") if "wholestep.public" in sys.modules else "")
"""


def test_the_first_public_name_imports_the_others_and_torch() -> None:
    """`import wholestep` imports itself alone; that a room is imported hides no public name behind it."""
    ran = subprocess.run([sys.executable, "-c", FIRST_LINES], capture_output=True, text=True, check=False)
    assert ran.stdout.splitlines() == ["['wholestep']", "False", "['collectives']"], ran.stderr
    assert "needed: graph of type TrainGraph" in ran.stderr


def test_names_that_are_rooms_too_are_known() -> None:
    rooms = {path.stem for path in PACKAGE.iterdir()}
    assert vars(ws)["_NAMED_AS_ROOMS"] == rooms & set(ws.__all__)


BAD = [
    (direction_faults, "plan/plan.py", "from wholestep.partition import lower"),
    (direction_faults, "mesh.py", "from .layout import Layout"),
    (direction_faults, "graph/graph.py", "from ..rules import registry"),
    (direction_faults, "plan/plan.py", "from ..runtime.step import CompiledStep"),
    (direction_faults, "plan/plan.py", "from .. import partition"),
    (direction_faults, "plan/auto/solve.py", "from ...passes import base"),
    (direction_faults, "layout.py", "from wholestep.capture.trace import capture"),
    (direction_faults, "layout.py", "import wholestep.plan"),
    (direction_faults, "runtime/step.py", "def f():\n    import wholestep as ws"),
    (direction_faults, "runtime/step.py", "from wholestep.compile import compile"),
    (direction_faults, "compile.py", "from wholestep.report import tables"),
    (direction_faults, "misc.py", ""),
    (direction_faults, "cli/plan_command.py", "from wholestep_foresight import Stack"),
    (private_faults, "layout.py", "import torch._dynamo"),
    (private_faults, "layout.py", "from torch._subclasses import FakeTensorMode"),
    (private_faults, "layout.py", "from torch import _C"),
    (private_faults, "layout.py", "from torch.distributed.tensor import _utils"),
    (private_faults, "layout.py", "import torch\ntorch._C._autograd.x()"),
    (private_faults, "layout.py", "import torch.utils as u\nu._pytree.tree_map(f, x)"),
    (private_faults, "layout.py", "from torch import distributed as dist\ndist._functional_collectives"),
    (meta_faults, "plan/plan.py", "value = node.meta['val']"),
    (meta_faults, "plan/plan.py", "node.meta['val'] = 1"),
    (meta_faults, "plan/plan.py", "graph.nodes[0].meta.get('val')"),
    (meta_faults, "plan/plan.py", "found = 'val' in node.meta"),
    (meta_faults, "plan/plan.py", "node.meta = {}"),
    (op_name_faults, "cost/memory.py", "found = 'gather' in str(node.target)"),
    (op_name_faults, "cost/memory.py", "found = 'backward' not in str(target)"),
    (op_name_faults, "passes/saved_tensors.py", "str(n.target).startswith(('aten._foreach_', 'aten._fused_'))"),
]
GOOD = [
    (
        direction_faults,
        "partition/lower.py",
        "from wholestep.plan import Plan\nfrom ..layout import Layout\nimport torch",
    ),
    (direction_faults, "rules/rule.py", "from wholestep.errors import RuleError\nfrom .registry import rule"),
    (direction_faults, "__init__.py", "from wholestep.compile import compile\nfrom .runtime.step import CompiledStep"),
    (direction_faults, "cli/plan_command.py", "import wholestep as ws\nfrom wholestep.report import tables"),
    (private_faults, "_torch/dynamo.py", "import torch._dynamo"),
    (
        private_faults,
        "layout.py",
        "import torch\ntorch.ops._c10d_functional.wait_tensor(x)\ntorch.__version__\nself._x",
    ),
    (private_faults, "layout.py", "from wholestep._torch import FakeTensorMode"),
    (meta_faults, "graph/meta.py", "node.meta['val']"),
    (meta_faults, "plan/plan.py", "self.meta_value\nmeta.get(x)\nfrom wholestep.graph import meta"),
    (op_name_faults, "graph/text.py", "name = str(target).removesuffix('.default')\nfound = str(target) in NAMES"),
]


@pytest.mark.parametrize(("check", "module", "source"), BAD)
def test_check_finds_fault(check, module: str, source: str) -> None:
    assert len(check(source, f"wholestep/{module}")) >= 1


@pytest.mark.parametrize(("check", "module", "source"), GOOD)
def test_check_accepts(check, module: str, source: str) -> None:
    assert check(source, f"wholestep/{module}") == []
