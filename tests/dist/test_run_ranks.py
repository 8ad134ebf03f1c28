"""The launcher itself: results in order, real collectives, failures with their text, hangs ended."""

import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.dist.launch import RankError, RankTimeout, run_ranks


def _describe(rank: int, world: int, *args: Any) -> tuple[Any, ...]:
    time.sleep(0.05 * (world - rank))  # the last rank answers first
    return rank, world, args, dist.get_rank(), dist.get_world_size(), torch.get_num_threads(), os.environ["RANK"]


def _sum(rank: int, world: int) -> torch.Tensor:
    value = torch.tensor([float(rank + 1)])
    dist.all_reduce(value)
    return value


def _raise_on(rank: int, world: int, bad: int) -> None:
    if rank == bad:
        raise ValueError(f"planted on rank {rank}")
    dist.barrier()  # never completes: the bad rank does not come


def _exit_on(rank: int, world: int, bad: int) -> None:
    if rank == bad:
        os._exit(7)
    dist.barrier()


def _sleep_on(rank: int, world: int, bad: int) -> int:
    if rank == bad:
        time.sleep(600)
    return os.getpid()


def _hang_up_early(rank: int, world: int) -> float:
    if rank == 0:
        time.sleep(0.5)
    value = torch.ones(1)
    dist.broadcast(value, src=world - 1)
    return value.item()


def _leave_no_group(rank: int, world: int) -> int:
    dist.barrier()  # a rank that leaves sooner breaks the connections that its peer is making
    dist.destroy_process_group()
    return rank


def _pid(rank: int, world: int) -> int:
    return os.getpid()


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_results_in_rank_order(world: int) -> None:
    got = run_ranks(_describe, world, "a", 2)
    assert got == [(rank, world, ("a", 2), rank, world, 1, str(rank)) for rank in range(world)]


@pytest.mark.smoke
def test_collectives_work() -> None:
    assert [value.item() for value in run_ranks(_sum, 3)] == [6.0, 6.0, 6.0]


def test_slow_ranks_keep_their_peers() -> None:
    assert run_ranks(_hang_up_early, 2) == [1.0, 1.0]


def test_fn_may_destroy_the_process_group() -> None:
    assert run_ranks(_leave_no_group, 2) == [0, 1]


@pytest.mark.parametrize("bad", [0, 1])
def test_failing_rank_is_named_with_its_traceback(bad: int) -> None:
    with pytest.raises(RankError) as error:
        run_ranks(_raise_on, 2, bad)
    text = str(error.value)
    assert text.startswith(f"rank {bad} of 2 failed:\nTraceback (most recent call last):")
    assert text.endswith(f"ValueError: planted on rank {bad}\n")


def test_dead_rank_is_named_with_its_exit_code() -> None:
    with pytest.raises(RankError) as error:
        run_ranks(_exit_on, 2, 1)
    assert str(error.value) == "rank 1 of 2 failed:\nthe process ended with exit code 7 and no result"


def test_hang_ends_and_shows_where() -> None:
    with pytest.raises(RankTimeout) as error:
        run_ranks(_sleep_on, 2, 1, timeout=3)
    text = str(error.value)
    assert text.startswith("ranks [1] of 2 had not finished after 3 s\nrank 1 was here:\n")
    assert "in _sleep_on" in text


def test_no_rank_outlives_the_call() -> None:
    pids = run_ranks(_pid, 2)
    assert not any(_alive(pid) for pid in pids)


def test_next_job_works_after_a_failure() -> None:
    with pytest.raises(RankError):
        run_ranks(_raise_on, 2, 0)
    assert [value.item() for value in run_ranks(_sum, 2)] == [3.0, 3.0]
