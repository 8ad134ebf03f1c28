"""Steps that many tests train: forward, backward and update for one device, by what the loss is."""

from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer


def mean_square(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    """The mean of the squared outputs."""
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def clipped(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    """`mean_square` with gradients of norm 1 at most."""
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.detach()


def mean_from_one(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    """The mean squared distance of outputs from one."""
    optimizer.zero_grad()
    loss = (model(x) - 1.0).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def sum_from_one(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    """The summed squared distance of outputs from one: more than one device computes on ranks that average."""
    optimizer.zero_grad()
    loss = (model(x) - 1.0).square().sum()
    loss.backward()
    optimizer.step()
    return loss.detach()


def mse(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    """The mean squared error."""
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.detach()


def model_file(layers: str, batch: str, optimizer: str = "AdamW(model.parameters())") -> str:
    """A file with the step `mean_square` and its `build`, for `wholestep` commands: texts of Python, on "meta"."""
    return f"""
import torch
from torch import nn

def train_step(model, optimizer, batch):
    optimizer.zero_grad()
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()

def build():
    with torch.device("meta"):
        model = nn.Sequential({layers})
        batch = torch.empty({batch})
    return train_step, model, torch.optim.{optimizer}, batch
"""
