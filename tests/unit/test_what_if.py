"""What a plan would cost elsewhere, as a table and on the page."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import AdamW
from typer.testing import CliRunner

import wholestep as ws
from tests.steps import mean_square as train
from wholestep.cli import app
from wholestep.report.compare import costs
from wholestep.report.what_if import WhatIfCase, other_sizes, show, what_if

H100 = ws.Hardware.preset("dgx-h100")


def graph_of(rows: int = 64) -> ws.TrainGraph:
    with torch.device("meta"):
        model, x = nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)]), torch.empty(rows, 256)
    return ws.capture(train, model, AdamW(model.parameters(), fused=True), x)


def test_a_case_costs_what_a_plan_of_it_does() -> None:
    graph, larger = graph_of(), graph_of(128)
    made = ws.plan(graph, "dp=4", ws.DataParallel("fully_shard"))
    cases = [WhatIfCase("more", mesh=ws.Mesh("dp=8")), WhatIfCase("larger", graph=larger, batch_parts=2),
             WhatIfCase("slow", hardware=ws.Hardware.default())]  # fmt: skip
    own, more, large, slow = what_if(made, graph, H100, cases)
    for row, source, mesh, hardware in (
        (own, graph, "dp=4", H100), (more, graph, "dp=8", H100), (large, larger, "dp=4", H100),
        (slow, graph, "dp=4", ws.Hardware.default()),
    ):  # fmt: skip
        again = ws.plan(source, mesh, ws.DataParallel("fully_shard"))
        assert row.row.costs == costs(ws.partition(source, again), again, hardware)
        assert str(row.mesh) == mesh
    assert own.times == 1.0
    assert own.row.costs is not None
    assert large.row.costs is not None
    assert more.row.costs is not None
    assert large.batch_s == pytest.approx(large.row.costs.step_s / 8)
    assert more.times == pytest.approx(more.row.costs.step_s / 8 / (own.row.costs.step_s / 4))
    table = show([own, more, large, slow]).splitlines()
    assert [line.split("  ")[0] for line in table[1:]] == ["this plan", "more", "larger", "slow"]
    assert [line.split()[-4] for line in table[1:4]] == ["4", "8", "8"]


def test_what_cannot_be_planned_says_why(tmp_path: Path) -> None:
    graph = graph_of()
    made = ws.plan(graph, "dp=2,shard=2", ws.DataParallel("hybrid"))
    own, failed = what_if(made, graph, H100, [WhatIfCase("flat", mesh=ws.Mesh("dp=4"))])
    assert own.row.costs is not None
    assert failed.row.costs is None
    assert "flat on dp=4: no plan: " in show([own, failed])
    ws.report(tmp_path / "page.html", made, graph, H100, what_if=[own, failed])
    assert f"no plan: {failed.row.error[:20]}" in (tmp_path / "page.html").read_text().replace("&#39;", "'")


def test_sizes_beside_a_mesh() -> None:
    assert [str(case.mesh) for case in other_sizes(ws.Mesh("one=1,dp=4,tp=2"))] == [
        "one=1,dp=8,tp=2",
        "one=1,dp=2,tp=2",
    ]
    assert [str(case.mesh) for case in other_sizes(ws.Mesh("dp=1"))] == ["dp=2"]


STEP = f"{Path(__file__).parents[2] / 'examples' / 'mlp.py'}:build"


def planned(*args: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["plan", *args])
    return done.exit_code, done.output


def test_the_command(tmp_path: Path) -> None:
    page_file = tmp_path / "plan.html"
    code, said = planned(STEP, "--what-if", "mesh=dp=4", "--what-if", "hardware=dgx-a100", "--hardware", "dgx-h100")
    assert code == 0, said
    rows = [line for line in said.splitlines() if line.startswith(("this plan", "mesh=dp=4", "hardware=dgx-a100"))]
    assert len(rows) == 3
    code, said = planned(STEP, "--html", str(page_file))
    assert code == 0, said
    text = page_file.read_text()
    assert 'id="what-if-table"' in text
    assert "twice the ranks on dp" in text


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("ranks=4", "--what-if ranks=4: needed mesh=AXES, hardware=NAME, or with --hf batch=N or seq=N"),
        ("batch=2", "--what-if batch=2 without --hf"),
        ("mesh", "--what-if mesh: needed mesh=AXES"),
    ],
)
def test_what_cannot_be_asked(asked: str, said: str) -> None:
    code, found = planned(STEP, "--what-if", asked)
    assert code == 2
    assert said in found
