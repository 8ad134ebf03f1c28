"""The planner: `plan()`, and `Auto`, a branch and bound over candidate strategies by simulated step time."""
