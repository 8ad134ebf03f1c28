"""The graphs that pass between stages, and what works on any of them: metadata, checks, text."""
