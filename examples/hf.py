"""A transformers model, from a small configuration and random weights: nothing is downloaded.

    python examples/hf.py --model llama
    torchrun --nproc-per-node 2 examples/hf.py --model t5 --style zero2 --steps 5

Needs `transformers`. To add a model: a row in MODELS.
"""

import argparse
import os
from collections.abc import Callable

import torch
import transformers as hf
from torch import Tensor, nn

import wholestep as ws

STYLES = ["fully_shard", "replicate", "zero1", "zero2", "default"]
Batch = dict[str, Tensor]

WORDS, TOKENS = 256, 24
SMALL = {"vocab_size": WORDS, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
GATED = {**SMALL, "intermediate_size": 128, "num_key_value_heads": 2, "max_position_embeddings": 64}
BERT = {**SMALL, "intermediate_size": 128, "max_position_embeddings": 64, "hidden_dropout_prob": 0.0}
GPT2 = {"vocab_size": WORDS, "n_embd": 64, "n_layer": 2, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0}
T5 = {"vocab_size": WORDS, "d_model": 64, "d_ff": 128, "d_kv": 16, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
MAMBA = {"vocab_size": WORDS, "hidden_size": 64, "num_hidden_layers": 2}
IMAGE = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}


def causal(draw: torch.Generator, rows: int) -> Batch:
    """Text that predicts itself."""
    tokens = torch.randint(WORDS, (rows, TOKENS), generator=draw)
    return {"input_ids": tokens, "labels": tokens}


def translated(draw: torch.Generator, rows: int) -> Batch:
    """Text in, other text out."""
    source, target = (torch.randint(WORDS, (rows, TOKENS), generator=draw) for _ in range(2))
    return {"input_ids": source, "labels": target}


def images(draw: torch.Generator, rows: int) -> Batch:
    """Pictures of 32 x 32 with one of 10 labels each."""
    pixels = torch.randn(rows, 3, 32, 32, generator=draw)
    return {"pixel_values": pixels, "labels": torch.randint(10, (rows,), generator=draw)}


# name: (how to build it, what it is fed)
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[torch.Generator, int], Batch]]] = {
    "gpt2": (lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**GPT2)), causal),
    "llama": (lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**GATED)), causal),
    "qwen3": (lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**GATED, head_dim=16)), causal),
    "bert": (lambda: hf.BertForMaskedLM(hf.BertConfig(**BERT)), causal),
    "t5": (lambda: hf.T5ForConditionalGeneration(hf.T5Config(**T5, decoder_start_token_id=0)), translated),
    "vit": (
        lambda: hf.ViTForImageClassification(hf.ViTConfig(**IMAGE, image_size=32, patch_size=8, num_labels=10)),
        images,
    ),
    "mamba": (lambda: hf.MambaForCausalLM(hf.MambaConfig(**MAMBA)), causal),
}


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> Tensor:
    """The step as written for one device."""
    optimizer.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.detach()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(MODELS), default="gpt2")
    parser.add_argument("--style", choices=STYLES, default="fully_shard", help="where tensors rest")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rows", type=int, default=4, help="batch size of each rank")
    options = parser.parse_args()
    rank = int(os.environ.get("RANK", "0"))

    torch.manual_seed(0)
    build, feed = MODELS[options.model]
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    step = ws.compile(train_step, parallel=ws.DataParallel(options.style))
    draw = torch.Generator().manual_seed(1000 + rank)  # every rank has its own data
    for number in range(1, options.steps + 1):
        loss = step(model, optimizer, feed(draw, options.rows))
        if rank == 0:
            print(f"step {number} loss {loss:.6f}", flush=True)
    if rank == 0:
        print(step.plan)


if __name__ == "__main__":
    main()
