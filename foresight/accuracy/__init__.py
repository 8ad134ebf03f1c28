"""How far the cost model is from published measurements."""
