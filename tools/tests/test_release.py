"""One version, complete metadata, and a page on a package index without dead links."""

import importlib.metadata
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

import wholestep as ws
import wholestep_foresight

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_version_is_written_once(project: dict[str, Any]) -> None:
    assert "version" not in project["project"]
    home = ROOT / project["tool"]["hatch"]["version"]["path"]
    assert re.findall(r'^__version__ = "(.+)"$', home.read_text(), re.MULTILINE) == [ws.__version__]
    assert importlib.metadata.version("wholestep") == ws.__version__, "the environment is older: make venv"


def test_both_distributions_have_one_version(project: dict[str, Any]) -> None:
    """Foresight imports more than the public names of wholestep."""
    other = tomllib.loads((ROOT / "foresight" / "pyproject.toml").read_text())
    assert f"wholestep=={ws.__version__}" in other["project"]["dependencies"]
    assert f"wholestep-foresight=={ws.__version__}" in project["project"]["optional-dependencies"]["foresight"]
    assert wholestep_foresight.__version__ == ws.__version__


def test_metadata_is_complete(project: dict[str, Any]) -> None:
    about = project["project"]
    assert {"description", "requires-python", "license", "license-files", "keywords", "classifiers"} <= about.keys()
    assert all((ROOT / name).is_file() for name in about["license-files"])
    assert {"readme", "version"} == set(about["dynamic"])
    for links in about.get("urls", {}).values():
        assert links.startswith("https://")


def test_the_page_of_a_package_index_has_no_relative_link(project: dict[str, Any]) -> None:
    """Links into the repository become text: no address of the repository is known to the package."""
    text = (ROOT / "README.md").read_text()
    link = re.compile(r"\[[^\]]*\]\((?P<target>[^)\s]+)\)")
    relative = [m["target"] for m in link.finditer(text) if not re.match("[a-z]+:", m["target"])]
    assert relative, "there is something to replace"
    assert all((ROOT / target.partition("#")[0]).exists() for target in relative)
    for one in project["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]["substitutions"]:
        text = re.sub(one["pattern"], one["replacement"], text)
    code = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    assert [m["target"] for m in link.finditer(code) if not m["target"].startswith("https:")] == []


def test_the_check_of_the_wheel_refuses_a_package_of_the_repository() -> None:
    code = "import runpy, sys; sys.prefix = '/nowhere'; runpy.run_path(sys.argv[1], run_name='__main__')"
    tool = ROOT / "tools" / "first_step.py"
    done = subprocess.run([sys.executable, "-c", code, tool], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert "is not the installed package of /nowhere" in done.stderr
