"""What a step and a plan look like at a prompt and in a notebook."""

import re
from html.parser import HTMLParser

import pytest
import torch
from torch import nn

import wholestep as ws
from tests.steps import mean_square


def made(layers: int = 1) -> tuple[nn.Module, torch.optim.Optimizer, torch.Tensor]:
    model = nn.Sequential(*[nn.Linear(3, 3) for _ in range(layers)])
    return model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(2, 3)


@pytest.mark.smoke
def test_a_step() -> None:
    step = ws.compile(mean_square, parallel=ws.DataParallel("zero1"))
    assert repr(step) == "<CompiledStep mean_square: zero1; backend eager; not compiled yet>"
    model, optimizer, x = made()
    step(model, optimizer, x)
    line = "CompiledStep mean_square: zero1 on dp, mean over ranks; mesh dp=1; backend eager; {}"
    assert repr(step) == f"<{line.format('1 call, 1 capture')}>"
    step(model, optimizer, torch.randn(5, 3))
    assert str(step) == f"<{line.format('2 calls, 2 captures')}>"
    assert step._repr_html_().startswith(f"<p>{line.format('2 calls, 2 captures')}</p>\n<p>Plan ")
    other = ws.compile(mean_square, parallel=[ws.TensorParallel({"0": "colwise"})], mesh="tp=2")
    assert repr(other) == "<CompiledStep mean_square: TensorParallel; mesh tp=2; backend eager; not compiled yet>"
    assert repr(ws.compile(mean_square, parallel=ws.Auto())).startswith("<CompiledStep mean_square: Auto; ")


@pytest.mark.smoke
def test_a_plan() -> None:
    plan = ws.plan(ws.capture(mean_square, *made()), "dp=4", ws.DataParallel("fully_shard"))
    assert repr(plan) == "<Plan fully_shard on dp, mean over ranks; mesh dp=4; 2 parameters, 16 B stored per rank>"
    assert str(plan).startswith("plan  fully_shard on dp")
    assert len(str(plan).splitlines()) > 4


class Rows(HTMLParser):
    """Counts rows and checks that every tag is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.open = 0, list[str]()

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.rows += tag == "tr"
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_a_plan_in_a_notebook() -> None:
    html = ws.plan(ws.capture(mean_square, *made(30)), "dp=4")._repr_html_()
    found = Rows()
    found.feed(html)
    assert found.open == []
    assert found.rows == 21
    assert "and 40 more" in html


def test_names_are_escaped() -> None:
    model = nn.Module()
    model.register_parameter("<b>&", nn.Parameter(torch.ones(3)))

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
        (getattr(model, "<b>&") * x).sum().backward()
        optimizer.step()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    html = ws.plan(ws.capture(step, model, optimizer, torch.randn(3)), "dp=2")._repr_html_()
    assert "&lt;b&gt;&amp;" in html
    assert not re.search("<b>", html)
