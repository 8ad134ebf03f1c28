"""Compares a plan with one device, op by op."""
