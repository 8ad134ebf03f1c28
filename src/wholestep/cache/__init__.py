"""The compile cache: measurements and choices of a first call, under a key of everything they depend on."""
