"""A byte-level GPT on the source text of Python's standard library: four ways to train it, on the same data.

    python -m examples.demo                             # two processes of this machine (make demo)
    python -m examples.demo --style zero1 --ranks 3     # make demo ARGS="--style zero1 --ranks 3"
    python -m examples.demo --help

`step.py` holds the training step, written for one device. `ways.py` runs it on one process, in DDP, in FSDP2 and
compiled by wholestep; `train.py` is the loop, with checkpoints.
"""
