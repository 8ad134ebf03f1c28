"""`python -m examples.demo`: starts the ranks with torchrun, or is one of them."""

import os
import sys

from .options import Options, parse


def launch(options: Options) -> int:
    """Run this command under torchrun, on `options.ranks` processes. Returns the exit status."""
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    # Ranks share the cores: no idle thread spins, and each compiles in its own process.
    os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    words = ["--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", str(options.ranks)]
    try:
        torchrun.run(torchrun.parse_args([*words, "-m", "examples.demo", *sys.argv[1:]]))
    except SignalException as stopped:  # the ranks got the signal too; Ctrl-C has let them save
        return 128 + stopped.sigval
    except ChildFailedError as failed:
        print(failed, file=sys.stderr)
        return 1
    return 0


def main() -> int:
    """Read the options, then train, or start the ranks that do."""
    options = parse()
    if "RANK" not in os.environ:
        return launch(options)
    from .train import run

    run(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
