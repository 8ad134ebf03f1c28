"""What recordings of CUDA work need beside torch's public functions."""

# pyright: reportPrivateUsage=false
from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist


def end_failed_capture(pool: Any) -> None:
    """Undo what a failed capture into `pool` leaves behind (2.11 to 2.15): the allocator would go on to serve the
    stream from the pool, and the generator would refuse every draw. Recordings made before follow the old generator.
    """
    device, library = torch.cuda.current_device(), cast(Any, torch._C)
    with contextlib.suppress(RuntimeError):  # the capture ended by itself
        library._cuda_endAllocateToPool(device, pool.id)
        library._cuda_releasePool(device, pool.id)
    generator: Any = torch.cuda.default_generators[device]
    generator.graphsafe_set_state(generator.clone_state())


def before_groups_end(call: Callable[[], None]) -> None:
    """Call `call` before any process group is shut down: NCCL's waits for recordings of its collectives.

    `destroy_process_group` shuts groups down by this method, however it was imported, and has no hook.
    """
    group: Any = dist.ProcessGroup
    shut_down = group.shutdown
    if getattr(shut_down, "before", None) is call:
        return

    def shutdown(self: Any) -> None:
        call()
        shut_down(self)

    cast(Any, shutdown).before = call
    group.shutdown = shutdown
