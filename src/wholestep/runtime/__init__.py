"""LocalGraph -> CompiledStep: places the state, guards each call and runs it."""
