"""Counts the bytes of tensors that are alive while a program runs, by watching every op and every storage it makes."""

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """`peak` is the most bytes alive after any op since it began, those of `given` included."""

    def __init__(self, given: Iterable[Any] = ()) -> None:
        super().__init__()
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0
        self._see(list(given))

    def _see(self, made: Any) -> None:
        for leaf in tree_leaves(made):
            if isinstance(leaf, Tensor) and leaf.device.type != "meta":
                storage = leaf.untyped_storage()
                known = self.alive.get(storage._cdata)
                if known is None or known[0].expired():  # an address is used again
                    self.alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()

    def now(self) -> int:
        """Bytes alive."""
        self.alive = {key: held for key, held in self.alive.items() if not held[0].expired()}
        return sum(size for _, size in self.alive.values())

    def __torch_dispatch__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self._see(made)
        self.peak = max(self.peak, self.now())
        return made


def peak_of(run: Callable[[list[Any]], Any], inputs: list[Any]) -> int:
    """The peak of `run(inputs)`, its inputs included."""
    with LiveBytes(inputs) as watch:
        run(inputs)
    return watch.peak
