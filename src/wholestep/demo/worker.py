"""One rank of the demo: `python -m wholestep.demo.worker`, started and told what to do by `wholestep demo`."""

import os
import sys
import traceback
from datetime import timedelta

from .channel import Channel, Refused
from .settings import Settings

HOST = "127.0.0.1"
TIMEOUT_SECONDS = 240.0


def join(channel: Channel, rank: int, ranks: int) -> None:
    """Form the process group. The system picks the port; rank 0 reports it and the others are told."""
    import torch
    import torch.distributed as dist
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    torch.set_num_threads(1)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    timeout = timedelta(seconds=TIMEOUT_SECONDS)
    if rank == 0:
        store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False, timeout=timeout)
        channel.send("port", port=store.port)
    else:
        store = TCPStore(HOST, channel.receive()["port"], is_master=False, timeout=timeout)
    os.environ |= {"MASTER_ADDR": HOST, "MASTER_PORT": str(store.port)}
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timeout)


def main() -> None:
    """Run one rank to its end; a failure is reported with its traceback."""
    channel = Channel()
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    try:
        settings = Settings.from_json(channel.receive()["settings"])
        join(channel, rank, ranks)
        from .loop import run

        run(settings, channel)
        channel.send("done")
        status = 0
    except Refused as refusal:
        channel.send("refused", text=str(refusal))
        status = 1
    except BaseException:
        text = traceback.format_exc()
        print(text, file=sys.stderr)
        channel.send("error", text=text)
        status = 1
    sys.stderr.flush()
    os._exit(status)  # peers may be gone already: a tidy end could wait for them


if __name__ == "__main__":
    main()
