"""Accelerate's loop around a compiled step: prepare, backward, accumulate, as in a script for one device.

    python examples/with_accelerate.py                                # one process
    torchrun --nproc-per-node 2 examples/with_accelerate.py           # two: Accelerate deals the data

Accelerate would put the model into DDP: `prepare_model(model, evaluation_mode=True)` leaves it as it is, since
wholestep adds the communication. All else is prepared as usual.
"""

import argparse

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import wholestep as ws

STYLES = ["fully_shard", "replicate", "zero1", "zero2"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--style", choices=STYLES, default="fully_shard", help="where tensors rest")
    parser.add_argument("--steps", type=int, default=8, help="batches of each process")
    parser.add_argument("--accumulate", type=int, default=2, help="batches for one update")
    parser.add_argument("--plain", action="store_true", help="without wholestep: as it is, in DDP on several processes")
    options = parser.parse_args()

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=options.accumulate)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 33), nn.GELU(), nn.Linear(33, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    count = 8 * options.steps * accelerator.num_processes
    x = torch.randn(count, 16)
    loader = DataLoader(TensorDataset(x, x[:, :4].sin()), batch_size=8)

    model = accelerator.prepare_model(model, evaluation_mode=not options.plain)
    optimizer, loader, scheduler = accelerator.prepare(optimizer, loader, scheduler)

    def train_step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(model(x), y)
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    step = train_step if options.plain else ws.compile(train_step, parallel=ws.DataParallel(options.style))
    for number, (x, y) in enumerate(loader, start=1):
        with accelerator.accumulate(model):  # says whether this batch completes the gradients
            loss = step(x, y)
            scheduler.step()
        accelerator.print(f"step {number} loss {accelerator.reduce(loss, 'mean'):.6f}", flush=True)
    accelerator.print(f"learning rate {scheduler.get_last_lr()[0]:g}", flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
