"""Saving and loading the state of a compiled step."""
