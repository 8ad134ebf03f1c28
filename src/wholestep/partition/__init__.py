"""Partitioning: TrainGraph and Plan -> LocalGraph, with local shapes, explicit collectives and waits."""
