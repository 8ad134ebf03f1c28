"""TrainGraph and Plan -> LocalGraph: local shapes, explicit collectives and waits."""
