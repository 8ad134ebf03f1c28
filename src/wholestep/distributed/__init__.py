"""Joining the job, and what ranks tell each other through its store."""
