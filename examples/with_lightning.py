"""A LightningModule whose training step is compiled: manual optimization, `self.optimizers()`, `self.manual_backward`.

    python examples/with_lightning.py                                 # one process
    torchrun --nproc-per-node 2 examples/with_lightning.py            # two, each with its own data

`Plain` is Lightning's DDP strategy without DDP around the module: wholestep adds the communication.
"""

import argparse
import os

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import wholestep as ws

STYLES = ["fully_shard", "replicate", "zero1", "zero2"]


class Plain(DDPStrategy):
    """Processes, devices and samplers of Lightning's; the module stays as it is."""

    def configure_ddp(self) -> None:
        pass


class Regression(L.LightningModule):
    """Learns four sines; `fitted` is the step that is compiled."""

    def __init__(self, style: str | None) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.style = style
        self.net = nn.Sequential(nn.Linear(16, 33), nn.GELU(), nn.Linear(33, 4))
        self.seen: list[float] = []

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def on_fit_start(self) -> None:
        self.step = self.fitted
        if self.style is not None:
            options = {"model": self, "optimizer": self.optimizers(), "parallel": ws.DataParallel(self.style)}
            self.step = ws.compile(self.fitted, **options)

    def fitted(self, x: Tensor, y: Tensor) -> Tensor:
        optimizer = self.optimizers().optimizer  # the one inside Lightning's, which counts steps in Python
        loss = F.mse_loss(self.net(x), y)
        self.manual_backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        loss = self.step(*batch)
        self.optimizers().step()  # finds no gradients, so updates nothing: it counts `global_step`
        self.log("loss", loss, sync_dist=True)
        self.seen.append(self.all_gather(loss).mean().item())

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        self.log("validation", F.mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)


class Sines(Dataset):
    """Samples by number."""

    def __init__(self, count: int) -> None:
        self.x = torch.randn(count, 16, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.x[index, :4].sin()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--style", choices=STYLES, default="fully_shard", help="where tensors rest")
    parser.add_argument("--steps", type=int, default=8, help="batches of each process")
    parser.add_argument("--plain", action="store_true", help="without wholestep: as it is, in DDP on several processes")
    options = parser.parse_args()
    ranks = int(os.environ.get("WORLD_SIZE", "1"))

    L.seed_everything(0, verbose=False)
    module = Regression(None if options.plain else options.style)
    several = DDPStrategy() if options.plain else Plain()
    trainer = L.Trainer(
        accelerator="cpu", devices=ranks, strategy=several if ranks > 1 else "auto",
        max_epochs=2, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    train, test = (DataLoader(Sines(count), batch_size=8) for count in (4 * options.steps * ranks, 16 * ranks))
    trainer.fit(module, train, test)
    if trainer.is_global_zero:
        for number, loss in enumerate(module.seen, start=1):
            print(f"step {number} loss {loss:.6f}")
        print(f"{trainer.global_step} updates, validation {trainer.callback_metrics['validation']:.6f}")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
