"""Measurements of the machine: compute, links, collectives."""
