"""Simulated beside measured steps on this machine: `python -m benchmarks.truth`.

`worker` is one rank: it trains every style in turns and simulates each. `results` are the values that it writes and
what follows from them, `command` starts ranks in shaped networks and shows tables.
"""
