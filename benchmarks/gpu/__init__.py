"""A whole training step on one GPU, beside eager torch, torch.compile and FSDP2: `python -m benchmarks.gpu`."""
