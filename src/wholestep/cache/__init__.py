"""Compiled programs kept in a folder, found again by all that they follow from."""
