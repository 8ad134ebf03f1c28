"""wholestep: write a training step for one device, get the program that every rank of a mesh runs."""

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .public import *  # noqa: F403  # its `__all__` says which
    from .public import __all__ as __all__

__version__ = "0.1.0.dev0"
_NAMED_AS_ROOMS = {"capture", "collectives", "compile", "partition", "plan", "report"}
_ROOMS = {entry.stem for entry in Path(__file__).parent.iterdir()} - _NAMED_AS_ROOMS


class _Package(ModuleType):
    """Imports `public` where the first public name is asked for: `import wholestep` alone takes no time."""

    def __getattr__(self, name: str) -> Any:
        is_other = name in _ROOMS or (name.startswith("_") and name != "__all__")
        public = {} if is_other else vars(import_module(".public", self.__name__))
        if name not in public:
            install = ": wholestep_foresight has, pip install 'wholestep[foresight]'" if name == "Stack" else ""
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}{install}")
        return public[name]

    def __setattr__(self, name: str, value: object) -> None:
        """Python binds each room that is imported; a public name stays what it is."""
        if name not in _NAMED_AS_ROOMS or not isinstance(value, ModuleType):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self.__all__]


sys.modules[__name__].__class__ = _Package
