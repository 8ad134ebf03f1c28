"""Where code comes from: the user, a library, torch, Python or wholestep itself; and fingerprints of code."""

from __future__ import annotations

import hashlib
import os
import sys
import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import CodeType
from typing import cast

import torch

_ROOT = str(Path(__file__).resolve().parents[1]) + os.sep
_TORCH = str(Path(torch.__file__).resolve().parent) + os.sep
_PYTHON = tuple(str(Path(sysconfig.get_path(key)).resolve()) + os.sep for key in ("stdlib", "platstdlib"))
_INSTALLED = (os.sep + "site-packages" + os.sep, os.sep + "dist-packages" + os.sep)


@cache
def origin_of_file(file: str) -> str:
    """`user`, `library`, `torch`, `python`, `wholestep`, or `generated` for code that no file holds."""
    if file.startswith("<frozen"):
        return "python"
    if file.startswith("<"):
        return "generated"
    path = os.path.realpath(file)
    if path.startswith(_ROOT):
        return "wholestep"
    if path.startswith(_TORCH):
        return "torch"
    if any(part in path for part in _INSTALLED):
        return "library"
    return "python" if path.startswith(_PYTHON) else "user"


def origin_of_module(name: str) -> str:
    """The same of a module, by name; one without a file is part of Python, or the user's."""
    module = sys.modules.get(name)
    file = getattr(module, "__file__", None)
    if isinstance(file, str):
        return origin_of_file(file)
    return "python" if name in sys.builtin_module_names or name in sys.stdlib_module_names else "user"


def code_digest(code: CodeType) -> str:
    """What a code object does and on which lines, as a fingerprint that is the same in every process of one Python."""
    made = hashlib.sha256(code.co_code)
    made.update(code.co_linetable + str(code.co_firstlineno).encode())
    made.update(repr((code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)).encode())
    made.update(repr((code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)).encode())
    made.update(code.co_exceptiontable)
    for const in code.co_consts:
        made.update(_constant(const).encode() + b"\0")
    return made.hexdigest()


def _constant(value: object) -> str:
    if isinstance(value, CodeType):
        return f"code {value.co_qualname} {code_digest(value)}"
    if isinstance(value, frozenset):
        return f"frozenset {sorted(map(_constant, cast(frozenset[object], value)))}"
    if isinstance(value, tuple):
        return f"tuple {[_constant(item) for item in cast(tuple[object, ...], value)]}"
    return f"{type(value).__name__} {value!r}"


def inside(code: CodeType) -> Iterator[CodeType]:
    """`code` and every code object that is a constant of it."""
    yield code
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from inside(const)


@cache
def own_source() -> str:
    """A fingerprint of all of wholestep's source."""
    made = hashlib.sha256()
    for path in sorted(Path(_ROOT).rglob("*.py")):
        made.update(path.relative_to(_ROOT).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return made.hexdigest()
