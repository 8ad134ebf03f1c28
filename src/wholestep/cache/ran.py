"""Watches which Python code runs while a step is compiled, and what that code reads outside of its arguments.

A program follows from its key (`cache.key`: the step, its arguments, modules and optimizers) and from the code that
ran. Code whose fingerprint is part of the key is known already. For all other code the file it is in counts, whole. Of
globals that ran functions name, the values count, as they were when the function was first called.
"""

from __future__ import annotations

import dis
import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
import time
from collections.abc import Collection, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any

import torch

from .. import _torch
from .origin import code_digest, origin_of_file, origin_of_module
from .values import UnknownValueError, Values

_BEGAN = time.time()  # source that is newer than this process may not be the source that it runs
_NAMEDTUPLE = "namedtuple_"  # what the generated methods of one call their module
_READ_TORCH = ("torch.nn.", "torch.optim.")


@contextmanager
def unwatched() -> Generator[None]:
    """Code that runs inside is not noted: it has no say in the program."""
    before = sys.getprofile()
    sys.setprofile(None)
    try:
        yield
    finally:
        sys.setprofile(before)


@dataclass(frozen=True)
class Global:
    """The fingerprint that `name`, an attribute of `module`, had."""

    module: str
    name: str
    digest: str
    strict: bool


@dataclass(frozen=True)
class Witness:
    """What must be as it was for a program to be used again: whole files by module, globals."""

    files: Mapping[str, str] = field(default_factory=dict[str, str])
    globals: tuple[Global, ...] = ()

    def changed(self, values: Values) -> str:
        """The first thing that is another one now; empty when none is."""
        for name, digest in self.files.items():
            found = _file_digest(_file_of(name))
            if found != digest:
                return f"the source of module {name} is another one"
        for known in self.globals:
            where = f"{known.module}.{known.name}"
            if not known.strict and known.module not in sys.modules:
                continue  # nobody has changed what is not imported yet
            scope = vars(_module(known.module) or ModuleType("none"))
            try:
                same = known.name in scope and values.digest(where, scope[known.name], known.strict) == known.digest
            except UnknownValueError:
                same = False
            if not same:
                return f"the global {where} is another one"
        return ""

    def to_json(self) -> Any:
        """As JSON values."""
        return [dict(self.files), [[g.module, g.name, g.digest, g.strict] for g in self.globals]]

    @staticmethod
    def from_json(data: Any) -> Witness:
        """Inverse of `to_json`."""
        files, found = data
        return Witness({str(k): str(v) for k, v in files.items()}, tuple(Global(*row) for row in found))


@dataclass
class Ran:
    """Code that ran, with the globals that it reads. `unknown` says why the program cannot be kept."""

    values: Values
    unknown: str = ""
    _codes: dict[int, tuple[CodeType, str, str]] = field(default_factory=dict[int, tuple[CodeType, str, str]])
    _globals: dict[tuple[str, str], Global] = field(default_factory=dict[tuple[str, str], Global])

    @contextmanager
    def watching(self) -> Generator[None]:
        """Code that runs inside is noted; a profiler that is on waits so long."""
        before = sys.getprofile()
        with torch.autograd.set_multithreading_enabled(False):  # backwards of the user's run where they are seen
            sys.setprofile(self._saw)
            try:
                yield
            finally:
                sys.setprofile(before)

    def _saw(self, frame: FrameType, event: str, arg: object) -> None:
        if event == "call" and id(frame.f_code) not in self._codes:
            module = str(frame.f_globals.get("__name__", ""))
            origin = _origin(frame)
            if origin != "user" and _is_importing(frame):
                return
            self._codes[id(frame.f_code)] = frame.f_code, module, origin
            if not self.unknown:
                try:
                    self._read(frame.f_code, frame.f_globals, module, origin)
                except UnknownValueError as error:
                    self.unknown = str(error)

    def _read(self, code: CodeType, scope: dict[str, Any], module: str, origin: str) -> None:
        if not code.co_flags & inspect.CO_OPTIMIZED:
            return  # a module or a class being made: what its functions will find there counts when they run
        ours = origin in ("python", "wholestep") or (origin == "torch" and not module.startswith(_READ_TORCH))
        if ours or (origin == "generated" and origin_of_module(module) != "user"):
            return
        if vars(_module(module) or ModuleType("none")) is not scope:
            if origin in ("user", "generated") and not module.startswith(_NAMEDTUPLE):
                raise UnknownValueError(f"{code.co_qualname} ran with globals of no module ({module or 'nameless'})")
            return
        with _torch.unobserved():
            self._take(module, scope, _globals_of(code), code.co_names, origin == "user", {module})

    def _take(
        self, module: str, scope: Mapping[str, Any], names: Iterable[str], attributes: Iterable[str], strict: bool,
        been: set[str],
    ) -> None:  # fmt: skip
        """What is called `names` in a module, and of modules among it what is called `attributes`."""
        for name in names:
            if name not in scope or (module, name) in self._globals:
                continue
            value = _torch.behind(scope[name])
            if isinstance(value, ModuleType):
                if value.__name__ not in been:
                    been.add(value.__name__)
                    here = origin_of_module(value.__name__) == "user"
                    self._take(value.__name__, vars(value), attributes, attributes, here, been)
            else:
                digest = self.values.digest(f"{module}.{name}", value, strict)
                self._globals[module, name] = Global(module, name, digest, strict)

    def witness(self, known: Collection[str]) -> Witness:
        """What the program follows from beside its key, which has code of the fingerprints `known`.

        Raises:
            UnknownValueError: code ran that no file of this process holds, or whose file has changed since.
        """
        if self.unknown:
            raise UnknownValueError(self.unknown)
        files: dict[str, str] = {}
        for code, module, origin in self._codes.values():
            if origin in ("user", "library", "generated") and code_digest(code) not in known:
                if origin == "generated" and not _is_of_module(code, module):
                    raise UnknownValueError(f"{code.co_qualname} ran, whose code is in no file ({code.co_filename})")
                generated = origin == "generated" and origin_of_module(module) != "user"
                if module not in files and not generated and not module.startswith(_NAMEDTUPLE):
                    files[module] = _checked(code, module, origin)
        return Witness(files, tuple(self._globals.values()))


def _is_importing(frame: FrameType | None) -> bool:
    """True where the step has a module imported: what a library keeps for itself may have another value then."""
    while frame is not None and origin_of_file(frame.f_code.co_filename) != "wholestep":
        if not frame.f_code.co_flags & inspect.CO_OPTIMIZED:
            return True
        frame = frame.f_back
    return False


def _globals_of(code: CodeType) -> list[str]:
    """Names of the globals that a function reads; `co_names` has those of attributes too."""
    reads = ("LOAD_GLOBAL", "LOAD_NAME")
    return list(dict.fromkeys(str(i.argval) for i in dis.get_instructions(code) if i.opname in reads))


def _origin(frame: FrameType) -> str:
    """Where the code of a frame comes from; text that was run by `exec` belongs to the code that had it run."""
    code = frame.f_code
    origin = origin_of_file(code.co_filename)
    nameless = code.co_name == "<module>" or "__name__" not in frame.f_globals
    if origin == "generated" and nameless and frame.f_back is not None:
        caller = _origin(frame.f_back)
        return "generated" if caller == "user" else caller
    return origin


def _is_of_module(code: CodeType, module: str) -> bool:
    """True for methods that dataclasses and their like generate: they follow from a class in the file of the module."""
    made = code.co_name.startswith("__") and code.co_name.endswith("__")
    return made or module.startswith(_NAMEDTUPLE) or origin_of_module(module) in ("python", "torch", "wholestep")


def _checked(code: CodeType, module: str, origin: str) -> str:
    """The digest of the file that `code` is in.

    Raises:
        UnknownValueError: it is not the file of its module, or newer than this process.
    """
    file = _file_of(module)
    digest = _file_digest(file)
    if not digest or (origin != "generated" and os.path.realpath(file) != os.path.realpath(code.co_filename)):
        raise UnknownValueError(f"{code.co_qualname} ran, whose code is not in the file of module {module}")
    if os.stat(file).st_mtime > _BEGAN:
        raise UnknownValueError(f"{file} has changed since this process began")
    return digest


def _module(name: str) -> ModuleType | None:
    """A module by its name; one that only the step imports is imported, as the step would."""
    if name not in sys.modules and name:
        try:
            importlib.import_module(name)
        except ImportError:
            return None
    return sys.modules.get(name)


def _file_of(name: str) -> str:
    """The source file of a module, imported or not; empty where there is none."""
    if name in sys.modules:
        return getattr(sys.modules[name], "__file__", None) or ""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return ""
    return (spec.origin if spec is not None else None) or ""


def _file_digest(file: str) -> str:
    """The fingerprint of a file; empty where there is none."""
    try:
        return hashlib.sha256(Path(file).read_bytes()).hexdigest() if file else ""
    except OSError:
        return ""
