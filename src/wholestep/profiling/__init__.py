"""Measurements: compute, links, collectives, and the nodes of a step."""
