"""Plans that explain themselves, and `wholestep plan`, which prints them."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import wholestep as ws
from wholestep.cli import app

STEP = """
import torch
from torch import nn

class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w2 = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return self.w2(self.w1(x).relu())

def train_step(model, optimizer, x):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()

def build():
    model = Mlp()
    return train_step, (model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(8, 16))

def wrong():
    return 3
"""


@pytest.fixture(scope="module")
def plan() -> ws.Plan:
    scope: dict = {}
    exec(STEP, scope)
    step, args = scope["build"]()
    both = [
        ws.DataParallel("fully_shard", axis="dp", semantics="global"),
        ws.TensorParallel({"w1": "colwise", "w2": "rowwise"}),
    ]
    return ws.plan(ws.capture(step, *args), "dp=2,tp=2", both)


@pytest.mark.smoke
def test_a_parameter(plan: ws.Plan) -> None:
    text = plan.explain("w2.weight")
    assert text.startswith("w2.weight  param 16@dp 32@tp")
    assert "dp: fully_shard on dp, global" in text
    assert "tp: tensor parallel on tp" in text
    assert "16@dp 32@tp becomes 16 32@tp: all_gather over dp (" in text
    assert "16 32@tp +dp(sum) becomes 16@dp 32@tp: reduce_scatter over dp (" in text


@pytest.mark.smoke
def test_an_operation(plan: ws.Plan) -> None:
    text = plan.explain("mm")  # the gradient of the hidden layer
    assert "dp: cut along m of 'm k, k n -> m n', as " in text
    assert "tp: cut along n of 'm k, k n -> m n', as %w2_weight is" in text
    assert text == plan.explain("%mm")


def test_survives_json(plan: ws.Plan) -> None:
    again = ws.Plan.from_json(plan.to_json())
    assert again.explain("w1.bias") == plan.explain("w1.bias")


@pytest.mark.parametrize("name", ["w2.weigth", "w2_weight"])
def test_an_unknown_name(plan: ws.Plan, name: str) -> None:
    with pytest.raises(ws.PlanError, match="one of its names, as "):
        plan.explain(name)
    with pytest.raises(ws.PlanError, match="no input and no operation"):
        plan.explain(f"%{name}")


def test_an_op_that_takes_its_operand_whole_says_so() -> None:
    """A custom op that mixes rows: tried out, it may be cut along columns alone."""

    @torch.library.custom_op("tests::turned", mutates_args=())
    def turned(x: Tensor) -> Tensor:
        return x.flip(0) * torch.arange(len(x))[:, None]

    turned.register_fake(torch.empty_like)
    turned.register_autograd(lambda ctx, grad: grad.clone())

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = torch.ops.tests.turned(model(x)).sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    model = nn.Linear(3, 5)
    graph = ws.capture(train, model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(7, 3))
    plan = ws.plan(graph, "dp=2", ws.DataParallel("replicate", semantics="global"))
    assert plan.decisions["turned"].why == "discovered"
    assert not plan.decisions["turned"].outputs[0].axes
    assert "dp: whole: no operand is cut where '" in plan.explain("turned")
    assert "all_gather over dp (" in plan.explain("turned")
    assert "sharded by discovered rules" in str(plan)


def run(*args: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["plan", *args])
    return done.exit_code, done.output


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "a_step.py"
    path.write_text(STEP)
    return path


def test_command(file: Path, tmp_path: Path) -> None:
    out = tmp_path / "plans" / "plan.json"
    code, text = run(
        f"{file}:build", "--mesh", "dp=2,tp=2", "--semantics", "global", "--tp", "w1=colwise", "--tp", "w2=rowwise",
        "--explain", "w2.weight", "--explain", "mm", "--program", "--out", str(out),
    )  # fmt: skip
    assert code == 0, text
    assert "plan  fully_shard on dp, global; tensor parallel on tp; mesh dp=2,tp=2" in text
    assert "w2.weight  param 16@dp 32@tp" in text
    assert "local_graph  mesh dp=2,tp=2" in text
    assert ws.Plan.from_json(out.read_text()).storage["w1.weight"].dims == (("tp", "dp"), ())


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["nothing"], "names no function"),
        (["nowhere.py:build"], "there is no file nowhere.py"),
        (["no_such_module_here:build"], "cannot be imported"),
        (["FILE:missing"], "has no function 'missing'"),
        (["FILE:wrong"], "returned int: needed (train_step, model, optimizer, batch)"),
        (["FILE:build", "--mesh", "dp"], "cannot parse 'dp'"),
        (["FILE:build", "--tp", "colwise"], "needed pattern=colwise"),
        (["FILE:build", "--explain", "w3"], "the plan has no input and no operation 'w3'"),
    ],
)
def test_command_refuses(file: Path, args: list[str], message: str) -> None:
    code, text = run(*[a.replace("FILE", str(file)) for a in args])
    assert code == 2
    assert message in text
