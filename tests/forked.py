"""Run a script in a process forked from the rank server, which has imported torch and wholestep: that saves seconds."""

import multiprocessing
import os
import runpy
import sys
import warnings
from pathlib import Path


def run_script(script: Path, timeout: float) -> tuple[int, str]:
    """Exit status and output of `script`, which runs in its folder; TimeoutError after `timeout` seconds."""
    output = script.with_suffix(".out")
    process = multiprocessing.get_context("forkserver").Process(target=_main, args=(script, output))
    process.start()
    try:
        process.join(timeout)
        if process.exitcode is None:
            raise TimeoutError(f"{script.name} ran longer than {timeout:g} s:\n{output.read_text()}")
        return process.exitcode, output.read_text()
    finally:
        process.kill()
        process.join()


def _main(script: Path, output: Path) -> None:
    with output.open("w") as out:
        for stream in (1, 2):
            os.dup2(out.fileno(), stream)
    warnings.simplefilter("default")
    os.chdir(script.parent)
    sys.argv = [str(script)]
    sys.path.insert(0, str(script.parent))
    runpy.run_path(str(script), run_name="__main__")
