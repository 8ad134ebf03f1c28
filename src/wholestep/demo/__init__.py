"""What `wholestep demo` trains: a byte-level GPT on the source text of Python's standard library."""
