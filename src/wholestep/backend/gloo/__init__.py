"""Collectives of CPUs over gloo, where the cores that compute also send: buffers that are kept, and exchanges."""
