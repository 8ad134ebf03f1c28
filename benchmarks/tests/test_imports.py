"""Every module of the benchmarks can be imported: what it imports from wholestep is still there."""

import importlib
import pkgutil

import pytest

import benchmarks

OTHERS = ("jax", "matplotlib", "nullcuda")  # packages of single benchmarks
MODULES = [found.name for found in pkgutil.walk_packages(benchmarks.__path__, "benchmarks.")]


@pytest.mark.parametrize("name", [name for name in MODULES if ".tests" not in name and not name.endswith("__main__")])
def test_it_can_be_imported(name: str) -> None:
    missing = None
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name
    if missing in OTHERS:
        pytest.skip(f"needs {missing}")
    assert missing is None
