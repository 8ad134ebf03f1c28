"""Whose code a source file is: the user's, which is watched, or a library's, whose inside needs no watching."""

from __future__ import annotations

import inspect
import os
import re
import sys
import sysconfig
import warnings
from functools import cache
from operator import is_
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch

_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_STAGES = (
    os.path.dirname(torch.__file__) + os.sep,
    os.path.dirname(np.__file__) + os.sep,
    *(os.path.join(_ROOT, d) + os.sep for d in ("_torch", "capture", "graph", "distributed", "runtime", "plan")),
)
_TYPED = "<stdin>", "<console>", "<python-input-", "<ipython-input-", "<doctest "  # files of what was typed
_STANDARD = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib")})
_INSTALLED = re.compile(r"[\\/](?:site|dist)-packages[\\/](\w+)")
_LIBRARIES = frozenset({
    "torch", "torchgen", "torchvision", "torchaudio", "triton", "functorch", "sympy", "mpmath", "networkx", "numpy",
    "scipy", "transformers", "tokenizers", "safetensors", "huggingface_hub", "accelerate", "diffusers", "lightning",
    "lightning_fabric", "pytorch_lightning", "lightning_utilities", "torchmetrics", "pytorch_optimizer", "schedulefree",
    "lion_pytorch", "tqdm", "pytest", "_pytest", "pluggy", "xdist", "execnet", "hypothesis",
})  # fmt: skip
"""Installed packages whose globals, classes and functions no step changes or reads differently: torch and what it is
built on, and those whose models and optimizers the tests capture and compare with eager for several steps. All other
installed code is watched as the user's is.
"""


@cache  # a trace asks for each frame of each call
def is_user_file(file: str) -> bool:
    """Return whether a source file, or what was typed, belongs neither to torch, numpy nor wholestep."""
    return not any(part in file for part in _STAGES) and (not file.startswith("<") or file.startswith(_TYPED))


def warn_once(text: str) -> None:
    """Warn at the user's line, which Python does once per line and text."""
    level, frame = 1, inspect.currentframe()
    while frame is not None and not is_user_file(frame.f_code.co_filename):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, stacklevel=level)


@cache
def is_of_python(file: str) -> bool:
    """Return whether a file belongs to the standard library."""
    return file.startswith(_STANDARD) and _INSTALLED.search(file) is None


@cache
def is_own_code(file: str) -> bool:
    """Return whether the code of a file is watched: it is not of torch, wholestep, the standard library or one of the
    `_LIBRARIES`. Where it is installed does not matter.
    """
    if not file or not is_user_file(file) or is_of_python(file):
        return False
    package = _INSTALLED.search(file)
    return package is None or package[1] not in _LIBRARIES


def is_installed(file: str) -> bool:
    """Return whether a file belongs to an installed package, of the user's or not."""
    return _INSTALLED.search(file) is not None


def is_own_function(value: object) -> bool:
    """Return whether a value is a function of Python whose code is watched."""
    return isinstance(value, FunctionType) and is_own_code(value.__code__.co_filename)


def is_own_module(value: object) -> bool:
    """Return whether a value is a module whose code is watched."""
    if type(value) is not ModuleType:
        return False
    names = vars(value)
    return is_own_code(names.get("__file__") or "") or not ("__file__" in names or names.get("__spec__"))


_last: tuple[list[Any], list[ModuleType]] = [], []  # modules that were loaded, and the watched ones of these


def own_modules() -> list[ModuleType]:
    """The modules that hold code that is watched, but those of wholestep: nothing of a step is patched there."""
    global _last
    loaded, main = list[Any](sys.modules.values()), sys.modules.get("__main__")  # a test may put anything there
    if len(loaded) != len(_last[0]) or not all(map(is_, loaded, _last[0])):
        here, own = _ROOT + os.sep, filter(is_own_module, loaded)
        watched = [m for m in own if not (vars(m).get("__file__") or "").startswith(here)]
        _last = loaded, [*watched, *(m for m in (main,) if isinstance(m, ModuleType) and m not in watched)]
    return _last[1]
