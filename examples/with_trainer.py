"""The Trainer of transformers, its loop, schedule, logs and evaluation, around a compiled `training_step`.

    python examples/with_trainer.py                                   # one process
    torchrun --nproc-per-node 2 examples/with_trainer.py              # two: the Trainer deals the data

The update is part of the step. The Trainer's own `optimizer.step()` finds no gradients then, and updates nothing;
clipping is written into the step too. The model comes from a config: nothing is downloaded.
"""

import argparse
import tempfile
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import wholestep as ws

STYLES = ["fully_shard", "replicate", "zero1", "zero2", "default"]


class StepTrainer(Trainer):
    """A Trainer that runs forward, backward, clipping and update as one compiled step."""

    def __init__(self, style: str, **options: Any) -> None:
        super().__init__(**options)
        self.accelerator.prepare_model = partial(self.accelerator.prepare_model, evaluation_mode=True)  # without DDP
        self.step = ws.compile(self.fitted, parallel=ws.DataParallel(style))

    def fitted(self, model: nn.Module, inputs: dict[str, Tensor], tokens: Tensor | None) -> Tensor:
        loss = self.compute_loss(model, inputs, num_items_in_batch=tokens)
        self.accelerator.backward(loss)
        if self.accelerator.sync_gradients:  # the last batch of an update; the optimizer asks for it by itself
            torch.nn.utils.clip_grad_norm_(model.parameters(), self.args.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def training_step(self, model: nn.Module, inputs: dict[str, Tensor], num_items_in_batch: Any = None) -> Tensor:
        model.train()
        return self.step(model, self._prepare_inputs(inputs), num_items_in_batch)


class Counting(Dataset):
    """Texts that count up by 1, 2 or 3."""

    def __init__(self, count: int) -> None:
        steps = 1 + torch.arange(count) % 3
        self.texts = (steps[:, None] * torch.arange(16) + torch.arange(count)[:, None]) % 64

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.texts[index], "labels": self.texts[index]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--style", choices=STYLES, default="fully_shard", help="where tensors rest")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--accumulate", type=int, default=2, help="batches for one update")
    parser.add_argument("--plain", action="store_true", help="without wholestep: as it is, in DDP on several processes")
    options = parser.parse_args()

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=64,
        n_positions=16,
        n_embd=32,
        n_layer=2,
        n_head=2,
        resid_pdrop=0,
        embd_pdrop=0,
        attn_pdrop=0,
        bos_token_id=0,
        eos_token_id=0,
    )
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=options.steps, per_device_train_batch_size=4, learning_rate=1e-2, logging_steps=1,
            gradient_accumulation_steps=options.accumulate,
            eval_strategy="steps", eval_steps=4, save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True,
        )  # fmt: skip
        common = {
            "model": GPT2LMHeadModel(config), "args": arguments,
            "train_dataset": Counting(256), "eval_dataset": Counting(32),
        }  # fmt: skip
        trainer = Trainer(**common) if options.plain else StepTrainer(options.style, **common)
        trainer.train()
        if trainer.is_world_process_zero():
            for line in trainer.state.log_history:
                found = {key: f"{line[key]:.4f}" for key in ("loss", "eval_loss", "learning_rate") if key in line}
                print(f"step {line['step']} {found}")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
