"""Checks of rules against the real ops, and the search for rules that nobody has written."""
