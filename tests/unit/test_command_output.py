"""Files of a command that cannot be written, and input that cannot be read: known before any work is done."""

import errno
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from wholestep.cli import app

STEP = f"{Path(__file__).parents[2] / 'examples' / 'mlp.py'}:build"
WORK = ("build the step", "capture")


def run(*args: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, args)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.output


FILES = [
    *[("plan", option) for option in ("--json", "--html", "--trace")],
    *[("simulate", option) for option in ("--json", "--trace")],
]


@pytest.mark.parametrize(("command", "option"), FILES)
def test_where_nothing_can_be_written(tmp_path: Path, command: str, option: str) -> None:
    (tmp_path / "file").touch()
    for path, why in (
        (tmp_path / "file" / "x", f"folder {tmp_path / 'file'} cannot be created"),
        (tmp_path, "is a folder"),
    ):
        code, said = run(command, STEP, "--mesh", "dp=2", option, str(path))
        assert code == 2
        assert f"{option} {path}" in said
        assert why in said
        assert not any(stage in said for stage in WORK)


@pytest.mark.parametrize(("command", "option"), FILES)
def test_folders_on_the_way_are_made(tmp_path: Path, command: str, option: str) -> None:
    path = tmp_path / "a" / "b" / "x"
    code, said = run(command, STEP, "--mesh", "dp=2", option, str(path))
    assert code == 0, said
    assert f"written to {path}" in said
    assert path.stat().st_size


def test_two_files_in_one_place(tmp_path: Path) -> None:
    path = str(tmp_path / "x")
    code, said = run("plan", STEP, "--mesh", "dp=2", "--html", path, "--trace", path)
    assert code == 2
    assert f"--trace {path}: --html writes there already" in said


@pytest.mark.parametrize("option", ["--json", "--html", "--trace"])
def test_the_plan_is_said_though_it_cannot_be_kept(
    tmp_path: Path, option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Path, *_: Any, **__: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device", str(self))

    monkeypatch.setattr(Path, "write_text", full)
    code, said = run("plan", STEP, "--mesh", "dp=2", option, str(tmp_path / "x"))
    assert code == 2
    assert f"{str(tmp_path / 'x')!r} cannot be written: No space left on device" in said
    assert "stored as" in said


@pytest.mark.parametrize(
    ("command", "options", "found"),
    [
        ("plan", ["--mesh", "4"], "mesh '4'"),
        ("plan", ["--mesh", "dp=4", "--auto", "--memory", "1XB"], "--memory='1XB'"),
        ("plan", ["--mesh", "dp=4", "--auto", "--hardware", "nowhere"], "nowhere"),
        ("simulate", ["--mesh", "4"], "mesh '4'"),
        ("simulate", ["--hardware", "nowhere"], "nowhere"),
    ],
)
def test_what_cannot_be_read_is_said_before_the_step_is_captured(command: str, options: list[str], found: str) -> None:
    code, said = run(command, STEP, *options)
    assert code == 2
    assert found in said
    assert "needed" in said
    assert "capture" not in said


@pytest.mark.parametrize("command", ["plan", "simulate"])
def test_without_a_model(command: str) -> None:
    assert run(command, "--mesh", "dp=2") == (
        2, "wholestep: no model: needed MODEL, as my_script.py:build, or --hf, as --hf gpt2\n",
    )  # fmt: skip
