"""Predicts what other software takes, how many GPUs train a model, and what a machine measures."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .stack import Stack as Stack

__version__ = "0.1.0.dev0"
__all__ = ["Stack"]


def __getattr__(name: str) -> Any:
    """Imports torch with the first public name, as wholestep does."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    public = {"Stack": import_module(".stack", __name__).Stack}
    import_module("wholestep.typed_values").check_arguments_of(public, __all__)
    globals().update(public)
    return public[name]
