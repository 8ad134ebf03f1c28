"""`wholestep plan` with an axis of stages: the plan, the page, and comparisons of styles and orders."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.unit.test_simulate_command import DEEP
from wholestep.cli import app


def run(tmp_path: Path, *args: str) -> tuple[int, str]:
    (tmp_path / "deep.py").write_text(DEEP)
    done = CliRunner().invoke(app, ["plan", f"{tmp_path / 'deep.py'}:build", "--hardware", "dgx-h100", *args])
    return done.exit_code, done.output


def test_a_plan_its_figures_and_its_page(tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    code, said = run(tmp_path, "--mesh", "dp=2,pp=2", "--micro-batches", "4", "--html", str(page))
    assert code == 0, said
    assert "zero1 on dp, mean over ranks; 2 stages on pp, 1f1b" in said
    assert "2 stages, 1f1b, 4 micro-batches" in said
    assert "bubble" in said
    assert 'id="stages"' in page.read_text()


@pytest.mark.parametrize("given", ["1f1b", pytest.param("", marks=pytest.mark.full)])
def test_styles_and_orders_are_ranked(tmp_path: Path, given: str) -> None:
    table, order = tmp_path / "table.json", ["--schedule", given] if given else []
    code, said = run(tmp_path, "--mesh", "dp=2,pp=2", "--micro-batches", "4", "--compare", "--json", str(table), *order)
    assert code == 0, said
    assert "bubble" in said
    rows = {row["template"]: row for row in json.loads(table.read_text())["rows"]}
    steps = [row["step_s"] for row in rows.values()]
    assert steps == sorted(steps)
    orders = [given] if given else ["1f1b", "interleaved", "zero_bubble", "auto"]
    assert rows.keys() == {f"{style}, {one}" for style in ("replicate", "zero1", "zero2") for one in orders}
    assert rows["zero1, 1f1b"]["rest_bytes"] < rows["replicate, 1f1b"]["rest_bytes"]
    if not given:
        assert rows["zero1, auto"]["step_s"] <= rows["zero1, 1f1b"]["step_s"]


@pytest.mark.parametrize(("args", "says"), [
    (("--tile-rows", "4"), "--tile-rows with an axis pp: needed one of them"),
    (("--offload-saved", "1"), "--offload-saved with an axis pp: needed one of them"),
    (("--compare", "--html", "plan.html"), "--html with an axis pp and --compare: needed one of them"),
])  # fmt: skip
def test_what_is_not_there(tmp_path: Path, args: tuple[str, ...], says: str) -> None:
    code, said = run(tmp_path, "--mesh", "pp=2", *args)
    assert code == 2
    assert says in said
