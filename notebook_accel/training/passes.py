"""Which loaders are being iterated in this process, and which batch is out."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch

from notebook_accel.reporting import Counter, reporter
from notebook_accel.training.sharding import Tail

__all__ = ["PASSES", "LoaderPass", "LoaderPasses"]


class LoaderPass:
    """One pass over a loader, from its first batch to its last or to a ``break``.

    Attributes:
        counter: Its ``step`` says how many batches are out.
        total: How many there will be, ``None`` if the loader has no length.
        is_last: Whether the batch that is out is the last.
        ends_window: Whether an accumulation window ends with it: it is the last, or the last that every rank has.
        tail: The round that is out, if it is a last one unlike the others.
        upload_next: Begins to take the next batch to the device, ``None`` where there is nothing to begin.
        moment: When its latest batch came out, as a count of all passes' batches.
    """

    __slots__ = ("counter", "ends_window", "is_last", "moment", "tail", "total", "upload_next")

    def __init__(self, counter: Counter, total: int | None) -> None:
        self.counter = counter
        self.total = total
        self.is_last = False
        self.ends_window = False
        self.tail: Tail | None = None
        self.upload_next: Callable[[], None] | None = None
        self.moment = 0


class LoaderPasses:
    """The passes that are running.

    Attributes:
        running: All of them, the one that began last at the end.
        current: The one whose batch came out last.
        training: The one whose batch came out last for a backward pass.
        moment: How often a pass has begun or a batch has come out in this process.
    """

    __slots__ = ("current", "moment", "running", "training")

    def __init__(self) -> None:
        self.moment = 0
        self.clear()

    def clear(self) -> None:
        """Forgets them, such as those that an exception has left and whose traceback a notebook keeps."""
        self.running: list[LoaderPass] = []
        self.current: LoaderPass | None = None
        self.training: LoaderPass | None = None

    @contextlib.contextmanager
    def iterating(self, counter: Counter, total: int | None) -> Iterator[LoaderPass]:
        """A pass over a loader. However it is left, nothing of it stays.

        Args:
            counter: The loader's own. An earlier pass of the same loader has been abandoned.
            total: Batches in it.
        """
        current = LoaderPass(counter, total)
        self._note(current)
        self.running = [*(other for other in self.running if other.counter is not counter), current]
        try:
            yield current
        finally:
            self.running = [other for other in self.running if other is not current]
            outer = self.running[-1] if self.running else None
            if self.current is current:
                self.current = outer
            if self.training is current:
                self.training = outer
            if outer is not None:
                reporter().show(outer.counter)

    def upload_next(self) -> None:
        """Begin to take the next batch to the device: a step's work has been asked for that hides it."""
        if self.current is not None and self.current.upload_next is not None:
            self.current.upload_next()

    def hand_out(self, current: LoaderPass) -> None:
        """A batch of this pass comes out."""
        self._note(current)
        self.current = current
        # An evaluation in the middle of a window, for which the next batch may come from an iterator that was begun
        # before, says nothing about where training stands.
        if torch.is_grad_enabled():
            self.training = current

    def _note(self, current: LoaderPass) -> None:
        self.moment += 1
        current.moment = self.moment


# Those of this process: which batch is out is no matter of one ``Accelerator``.
PASSES = LoaderPasses()
