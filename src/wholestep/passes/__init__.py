"""LocalGraph -> LocalGraph, one file for each pass."""
