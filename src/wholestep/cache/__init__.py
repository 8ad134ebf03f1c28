"""What the first call of a step measured and searched for, kept in a folder under a key of all that it follows from."""
