"""Joining the job, and exchanges of ranks through its store."""
