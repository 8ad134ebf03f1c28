"""What survives a fault: `python -m benchmarks.faults`.

`cases` draws jobs and kills from seeds, `training` is what a rank of such a job does, `ranks` starts processes and ends
them, `kills` plays a case and compares each resumed curve with an uninterrupted one. `two_jobs`, `save_blocking` and
`restart` are modes of their own. `results` keeps a line of JSON for each start of a job and makes the tables; `command`
is the command line.
"""
