"""The `wholestep` command starts without torch where it has nothing to compute, and its completion can be installed."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

START = """
import sys
from wholestep.cli import main
sys.argv[0] = "wholestep"
try:
    main()
finally:
    print("torch is here" if "torch" in sys.modules else "no torch", file=sys.stderr)
"""
COMMANDS = ["plan", "simulate", "checkpoint"]


STEP = f"{Path(__file__).parents[2] / 'examples' / 'mlp.py'}:build"


def run(*args: str, **env: str) -> tuple[str, str]:
    """What the command prints, and whether it has imported torch."""
    file = [sys.executable, "-c", START, *args]
    done = subprocess.run(file, capture_output=True, text=True, env={**os.environ, **env}, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr.splitlines()[-1]


@pytest.mark.parametrize("args", [["--help"], *([command, "--help"] for command in COMMANDS)])
def test_help_needs_no_torch(args: list[str]) -> None:
    said, torch = run(*args)
    assert "wholestep" in said
    assert torch == "no torch"


@pytest.mark.smoke
def test_version() -> None:
    assert re.fullmatch(r"wholestep \d+\.\d+\.\d+\S*\n", run("--version")[0])


def test_a_command_has_all_it_needs() -> None:
    said, torch = run("plan", STEP, "--mesh", "dp=2")
    assert "stored per rank" in said
    assert torch == "torch is here"


def test_words_are_completed_without_torch() -> None:
    asked = {"_WHOLESTEP_COMPLETE": "complete_bash", "COMP_WORDS": "wholestep sim", "COMP_CWORD": "1"}
    assert run(**asked) == ("simulate\n", "no torch")


def test_completion_can_be_installed(tmp_path: Path) -> None:
    env = {"HOME": str(tmp_path), "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    shown, _ = run("--show-completion", "bash", **env)
    assert "complete -o default -F _wholestep_completion wholestep" in shown
    said, torch = run("--install-completion", "bash", **env)
    assert "completion installed" in said
    assert torch == "no torch"
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any("_wholestep_completion" in path.read_text() for path in files)
