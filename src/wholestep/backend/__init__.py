"""LocalGraph -> a callable: plain Python, or TorchInductor."""
