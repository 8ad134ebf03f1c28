"""Imports point one way, private torch names live in `_torch`, and `node.meta` is touched in `graph/meta.py` alone.

The order is that of docs/how-it-works.md. A module that `LEVEL` does not know fails: give it a place first.
"""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "src" / "wholestep"
SUPPORT = "units graph mesh layout precision rules hardware cost reshard dtensor errors tuning _torch"
STAGES = "capture plan partition passes backend planner ddp collectives distributed cache profiling runtime checkpoint"
READERS = "cli __main__"

# A unit imports units of a lower level; support units and readers also import each other.
LEVEL = (
    dict.fromkeys(SUPPORT.split(), 0)
    | {name: i + 1 for i, name in enumerate(STAGES.split())}
    | {"compile": 14, "report": 15, "__init__": 16}
    | dict.fromkeys(READERS.split(), 17)
)
DICT_METHODS = {"get", "update", "setdefault", "pop", "copy", "items", "keys", "values", "clear"}


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
    for line, name in imports(ast.parse(source), module):
        target = unit_of(name)
        peers = LEVEL[unit] == LEVEL[target]
        if name.split(".")[0] == "wholestep" and not peers and LEVEL[unit] < LEVEL[target]:
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
    tree = ast.parse(source)
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
    for node in ast.walk(ast.parse(source)):
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
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare):
            pairs = zip(node.ops, node.comparators, strict=True)
            if any(isinstance(op, (ast.In, ast.NotIn)) and is_text(side) for op, side in pairs):
                lines.add(node.lineno)
        elif isinstance(node, ast.Attribute) and node.attr in ("startswith", "endswith") and is_text(node.value):
            lines.add(node.lineno)
    return [f"{module}:{line}: a kind of op read from its text: see graph/op_kinds.py" for line in sorted(lines)]


CHECKS = [direction_faults, private_faults, meta_faults, op_name_faults]
MODULES = {path.relative_to(PACKAGE.parent).as_posix(): path for path in sorted(PACKAGE.rglob("*.py"))}


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_package(check) -> None:
    assert MODULES
    faults = [fault for module, path in MODULES.items() for fault in check(path.read_text(), module)]
    assert not faults, "\n".join(faults)


BAD = [
    (direction_faults, "plan/plan.py", "from wholestep.partition import lower"),
    (direction_faults, "plan/plan.py", "from ..runtime.step import CompiledStep"),
    (direction_faults, "plan/plan.py", "from .. import partition"),
    (direction_faults, "plan/auto/solve.py", "from ...passes import base"),
    (direction_faults, "layout.py", "from wholestep.capture.trace import capture"),
    (direction_faults, "layout.py", "import wholestep.plan"),
    (direction_faults, "runtime/step.py", "def f():\n    import wholestep as ws"),
    (direction_faults, "runtime/step.py", "from wholestep.compile import compile"),
    (direction_faults, "compile.py", "from wholestep.report import tables"),
    (direction_faults, "misc.py", ""),
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
