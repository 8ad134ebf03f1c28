"""ws.MemoryCopies: a restart on nodes that hold copies, one of which was lost, computes the same bits."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import wholestep as ws
from tests.dist.launch import run_ranks
from tests.dist.test_checkpoint import Training, equal, everywhere
from wholestep.checkpoint.memory_restore import VALUES
from wholestep.errors import CheckpointError

NOISY = True  # with dropout, and with buffers that differ between ranks


def number_of(path: Path) -> int:
    return torch.load(path)["copy"]["number"]


def node(root: str, rank: int) -> str:
    """Each rank is a node of its own."""
    return f"{root}/node-{rank}"


def _train(rank: int, world: int, style: str, root: str, noisy: bool) -> tuple[Any, list[list[float]]]:
    """Three calls, each copied; then what an uninterrupted run computes."""
    training, copies = Training(style, "adamw", noisy=noisy), ws.MemoryCopies(node(root, rank))
    for number in range(3):
        training.train(range(number, number + 1))
        copies.save(training.step, extra={"epoch": number})
    losses = everywhere(training.train(range(3, 6)))
    return training.state(), losses


def _resume(rank: int, world: int, style: str, root: str, noisy: bool) -> tuple[Any, list[list[float]], Any]:
    training, copies = Training(style, "adamw", noisy=noisy, seed=5), ws.MemoryCopies(node(root, rank))
    found = copies.load(training.step)
    assert found is not None
    first = found.number
    losses = everywhere(training.train(range(first, 6)))
    return training.state(), losses, (first, found.extra)


def test_a_lost_node_gets_its_state_from_a_replica(tmp_path: Path) -> None:
    """Buffers and random streams of the lost rank too, of which its replica has others."""
    run_lost(2, "replicate", tmp_path, lost=[1])


@pytest.mark.full
@pytest.mark.parametrize("lost", [[0], [3], [0, 3], [1, 2]])
def test_a_lost_node_gets_its_shard_from_a_replica(lost: list[int], tmp_path: Path) -> None:
    run_lost(4, "hybrid", tmp_path, lost)


def run_lost(world: int, style: str, tmp_path: Path, lost: list[int]) -> None:
    trained = run_ranks(_train, world, style, str(tmp_path), NOISY)
    for rank in lost:
        shutil.rmtree(node(str(tmp_path), rank))
    resumed = run_ranks(_resume, world, style, str(tmp_path), NOISY)
    for (state, losses), (same, again, found) in zip(trained, resumed, strict=True):
        assert found == (3, {"epoch": 2})
        assert again == losses
        assert len({tuple(of_rank) for of_rank in losses}) == world, "ranks have different data"
        equal(same, state)
    assert not torch.equal(*(state["1.running_mean"] for state, _ in trained[:2])), "and buffers"


def test_a_copy_that_was_being_written_is_not_used(tmp_path: Path) -> None:
    """One rank died within its third copy: all go back to the second."""
    _, losses = run_ranks(_train, 2, "fully_shard", str(tmp_path), NOISY)[0]
    slots = [
        slot for slot in Path(node(str(tmp_path), 1)).iterdir() if torch.load(slot / VALUES)["copy"]["number"] == 3
    ]
    (slots[0] / VALUES).unlink()
    _, again, found = run_ranks(_resume, 2, "fully_shard", str(tmp_path), NOISY)[0]
    assert found == (2, {"epoch": 1})
    assert [of_rank[1:] for of_rank in again] == losses


def _nothing(rank: int, world: int, style: str, root: str) -> None:
    training, copies = Training(style, "adamw"), ws.MemoryCopies(node(root, rank))
    assert copies.load(training.step) is None
    training.train(range(1))
    assert training.step.calls == 1


@pytest.mark.full
def test_a_shard_that_no_node_holds_leaves_the_checkpoint_on_disk(tmp_path: Path) -> None:
    run_ranks(_train, 2, "fully_shard", str(tmp_path), False)
    shutil.rmtree(node(str(tmp_path), 1))
    run_ranks(_nothing, 2, "fully_shard", str(tmp_path))


def _state_after(rank: int, world: int, style: str, root: str) -> Any:
    """The state that a called step gets from copies of another mesh."""
    training, copies = Training(style, "adamw", seed=5), ws.MemoryCopies(node(root, rank))
    training.train(range(1))
    assert copies.load(training.step) is not None
    return training.state()


def _state(rank: int, world: int, style: str, root: str) -> Any:
    training, copies = Training(style, "adamw"), ws.MemoryCopies(node(root, rank))
    training.train(range(2))
    copies.save(training.step)
    return training.state()


@pytest.mark.parametrize(("before", "after"), [(("zero1", 2), ("fully_shard", 1))])
def test_other_ranks_and_styles_get_the_same_state(
    before: tuple[str, int], after: tuple[str, int], tmp_path: Path
) -> None:
    reshard(before, after, tmp_path, lost=[])


@pytest.mark.full
@pytest.mark.parametrize("after", [("hybrid", 2), ("fully_shard", 3), ("replicate", 2), ("zero1", 3)])
def test_the_ranks_that_are_left_get_the_same_state(after: tuple[str, int], tmp_path: Path) -> None:
    reshard(("hybrid", 4), after, tmp_path, lost=[3])


def reshard(before: tuple[str, int], after: tuple[str, int], tmp_path: Path, lost: list[int]) -> None:
    state = run_ranks(_state, before[1], before[0], str(tmp_path))[0]
    left = [rank for rank in range(before[1]) if rank not in lost]
    for rank in lost:
        shutil.rmtree(node(str(tmp_path), rank))
    for rank in left[after[1] :]:  # these nodes are still there; one rank sees what two nodes hold
        for slot in Path(node(str(tmp_path), rank)).iterdir():
            slot.rename(Path(node(str(tmp_path), 0)) / slot.name)
    equal(run_ranks(_state_after, after[1], after[0], str(tmp_path))[0], state)


def _twice(rank: int, world: int, root: str) -> None:
    folder = Path(node(root, 0))  # both ranks are on one node
    training = Training("zero1", "adamw")
    copies = ws.MemoryCopies(folder, every=2)
    for number in range(4):
        training.train(range(number, number + 1))
        copies.save(training.step)
    assert sorted(number_of(path) for path in folder.glob(f"*/{VALUES}")) == [2, 2, 4, 4]
    fresh, restarted = Training("zero1", "adamw", seed=5), ws.MemoryCopies(folder)
    found = restarted.load(fresh.step)
    assert found is not None
    assert found.number == 4
    fresh.train(range(1))
    restarted.save(fresh.step)
    everywhere(0)
    assert len(list(folder.iterdir())) == 6
    fresh.train(range(1))
    restarted.save(fresh.step)
    everywhere(0)
    assert sorted(number_of(path) for path in folder.glob(f"*/{VALUES}")) == [5, 5, 6, 6]
    other = ws.compile(lambda model, optimizer: optimizer.step(), progress=None)
    with pytest.raises(CheckpointError, match="a copy of a step that was not called"):
        restarted.save(other)
    everywhere(0)
    restarted.remove()
    assert not folder.exists()


@pytest.mark.full
def test_a_restart_frees_what_the_start_before_it_left(tmp_path: Path) -> None:
    run_ranks(_twice, 2, str(tmp_path))


def _fails(rank: int, world: int, root: str) -> None:
    training = Training("replicate", "adamw")
    copies = ws.MemoryCopies(node(root, rank))
    for number in range(2):
        training.train(range(number, number + 1))
        copies.save(training.step)
    if rank == 1:
        shutil.rmtree(node(root, 1))
        Path(node(root, 1)).write_text("no folder any more")
    copies.save(training.step)
    with pytest.raises(CheckpointError, match="on rank 1, NotADirectoryError"):
        copies.save(training.step)


def test_a_copy_that_fails_on_one_rank_is_an_error_on_all(tmp_path: Path) -> None:
    run_ranks(_fails, 2, str(tmp_path))


def test_options_are_checked(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="every=0"):
        ws.MemoryCopies(tmp_path, every=0)


def _beside(rank: int, world: int, root: str) -> tuple[int, str]:
    training, copies = Training("replicate", "adamw"), ws.MemoryCopies(node(root, rank))
    for number in range(4):
        training.train(range(number, number + 1))
        ws.save(f"{root}/disk", training.step, wait=False)
        copies.save(training.step)
        ws.export(f"{root}/export{number}", training.model)
    numbers = ws.load(f"{root}/disk", training.step).number
    text = ""
    try:  # rank 1 saves them in the other order
        for name in ("a", "b") if rank == 0 else ("b", "a"):
            ws.save(f"{root}/{name}", training.step)
    except CheckpointError as error:
        text = str(error)
    return numbers, text.replace(root, "ROOT").splitlines()[0]


def test_saves_in_the_background_go_on_beside_other_exchanges(tmp_path: Path) -> None:
    """What docs/elastic.md shows, and exports: calls have labels of their own. Two saves in another order are named."""
    (number, text), other = run_ranks(_beside, 2, str(tmp_path))
    assert (number, text) == other
    assert number == 4
    assert len(list(tmp_path.glob("export*"))) == 4
    assert "ranks are at different calls: rank 0 at save(ROOT/a, " in text
    assert "; rank 1 at save(ROOT/b, " in text
