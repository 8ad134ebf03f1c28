"""A `torch.compile` backend for DDP models, which compiles one graph for each bucket of gradients."""
