"""Check the installed wheels: `make test-wheel` runs this file in an environment that holds nothing else."""

import subprocess
import sys
from importlib.metadata import distribution
from importlib.resources import files
from pathlib import Path

import torch
from torch import nn

import wholestep as ws


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    """One step, as its user writes it."""
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer, the same each time."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    return model, torch.optim.AdamW(model.parameters())


def main() -> None:
    """Train two steps compiled and in eager, start the command, look for the files that are no code."""
    folder = Path(ws.__file__).parent
    assert folder.is_relative_to(sys.prefix), f"{folder} is not the installed package of {sys.prefix}"
    about = distribution("wholestep")
    assert about.version == ws.__version__, f"metadata says {about.version}, the package {ws.__version__}"

    step, (model, optimizer), (twin, other) = ws.compile(train_step), made(), made()
    for _ in range(2):
        x = torch.randn(4, 8)
        torch.testing.assert_close(step(model, optimizer, x), train_step(twin, other, x))
    torch.testing.assert_close(list(model.parameters()), list(twin.parameters()))

    for name in ("py.typed", "report/templates/page.html", "cli/models/gpt2.json"):
        assert files("wholestep").joinpath(name).is_file(), f"{name} is not in the wheel"
    for entry in (*about.entry_points, *distribution("wholestep-foresight").entry_points):
        entry.load()
    command = [str(Path(sys.prefix) / "bin" / "wholestep"), "--help"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "Usage: wholestep" in said
    assert " gpus " in said, "wholestep-foresight has no commands"
    assert files("wholestep_foresight").joinpath("templates/sweep.html").is_file()
    print(f"wholestep {ws.__version__} with torch {torch.__version__}: two steps as in eager, the command starts")


if __name__ == "__main__":
    main()
