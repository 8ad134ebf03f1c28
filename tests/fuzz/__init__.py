"""Everything that a user can write, mutated: each case ends in a typed error or in a correct result, within a limit."""
