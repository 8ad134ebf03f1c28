"""A `torch.compile` backend for models wrapped in DDP: one compilation for each bucket of gradients."""
