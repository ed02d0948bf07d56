"""Where a loader stands, as a part of a checkpoint, and how it goes on from there.

To read the rest of an epoch as it would have been read, its order has to be drawn again, from random numbers as they
were when the epoch began. What is drawn after that comes from random numbers as they are now.
"""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from notebook_accel import environment
from notebook_accel.training import process_group, random_state
from notebook_accel.training.dataset_views import MarkedBatch
from notebook_accel.training.epochs import EpochClock
from notebook_accel.training.passes import PASSES, LoaderPass
from notebook_accel.training.sharding import Tail

__all__ = ["Position", "Resumption"]

_PLAIN = (torch.Tensor, bool, int, float, complex, str, bytes, type(None))
_NOTHING: Any = object()


@dataclasses.dataclass
class Resumption:
    """An epoch that goes on where a checkpoint was saved.

    Attributes:
        epoch: The epoch, from 0.
        batches: How many of its batches were out.
        length: How many it has, ``None`` if that isn't known.
        begun: Random numbers as they were when it began, ``None`` if it hasn't.
        generators: The states of the loader's own generators, then or, if it hasn't begun, now.
        ahead: In a list, the batch that was read and not out yet, if reading it again could give another one.
        is_told: Whether somebody has said from which batch to go on.
    """

    epoch: int
    batches: int = 0
    length: int | None = None
    begun: dict[str, Any] | None = None
    generators: list[torch.Tensor] = dataclasses.field(default_factory=list)
    ahead: list[Any] = dataclasses.field(default_factory=list)
    is_told: bool = False


class Position:
    """Where a loader stands. Loaders that skip its first batches share it.

    Args:
        clock: Counts its epochs.

    Attributes:
        ahead: The batch that was read and isn't out yet, where reading it again could give another one.
    """

    def __init__(self, clock: EpochClock) -> None:
        self.ahead: Any = _NOTHING
        self._clock = clock
        self._latest: LoaderPass | None = None
        self._begun: Any = None
        self._generators: list[torch.Tensor] = []
        self._resumption: Resumption | None = None

    @property
    def _running(self) -> LoaderPass | None:
        """The pass that is running. One that an exception has left may be kept by its traceback."""
        return self._latest if self._latest in PASSES.running else None

    @property
    def epoch(self) -> int:
        """The epoch that is running, or else the one that comes next."""
        return self._clock.following if self._running is None else self._clock.running

    def state_dict(self, generators: Sequence[torch.Generator], length: int | None) -> dict[str, Any]:
        """Made of what ``torch.load(weights_only=True)`` reads.

        Args:
            generators: The loader's own.
            length: Batches of an epoch.
        """
        if self._resumption is not None:  # loaded, and not iterated since
            return dict(vars(self._resumption))
        if self._running is None:
            states = [generator.get_state() for generator in generators]
            return vars(Resumption(self.epoch, length=length, generators=states))
        ahead = [_plain(self.ahead)] if _is_plain(self.ahead) else []
        begun = random_state.plain(self._begun)
        return vars(Resumption(self.epoch, self._running.counter.step, length, begun, self._generators, ahead))

    def load_state_dict(self, state: dict[str, Any], generators: Sequence[torch.Generator], length: int | None) -> None:
        """Lets the next pass go on where ``state_dict`` has stood.

        With ``NOTEBOOK_ACCEL_COMPAT=accelerate`` in the environment it begins its epoch anew, as with Accelerate.
        """
        resumption = Resumption(**state)
        self._clock.set(resumption.epoch)
        for generator, saved in zip(generators, resumption.generators, strict=False):
            generator.set_state(saved)
        fits = resumption.length == length
        if resumption.batches and not fits and process_group.rank_place().rank == 0:
            warnings.warn(
                f"A loader had {resumption.length} batches when it was saved and has {length} now: it begins epoch "
                f"{resumption.epoch} anew. Fix: the same data and batch size, or skip_first_batches",
                stacklevel=2,
            )
        begins_anew = not fits or environment.follows_accelerate()
        self._resumption = None if begins_anew or resumption.begun is None else resumption

    def set_epoch(self, epoch: int) -> None:
        """Makes ``epoch`` the next one; what was to be resumed is another epoch's, unless it is this one's."""
        self._clock.set(epoch)
        if self._resumption is not None and self._resumption.epoch != epoch:
            self._resumption = None

    def tell(self, num_batches: int) -> None:
        """Somebody skips batches by hand, so nothing is skipped beyond that.

        Programs count batches over all epochs: after the last batch of an epoch, none to skip means the next epoch.
        """
        resumption = self._resumption
        if resumption is None:
            return
        if num_batches == 0 and resumption.batches == resumption.length:
            self.set_epoch(resumption.epoch + 1)
            return
        ahead = resumption.ahead if num_batches == resumption.batches else []
        self._resumption = dataclasses.replace(resumption, is_told=True, ahead=ahead)

    def take(self) -> Resumption | None:
        """What the pass that begins now goes on with, ``None`` if it begins an epoch."""
        resumption, self._resumption = self._resumption, None
        return resumption

    @contextlib.contextmanager
    def beginning(self, resumption: Resumption | None, generators: Sequence[torch.Generator]) -> Iterator[None]:
        """Around the beginning of a pass, until its first batch is read."""
        self.ahead = _NOTHING
        if resumption is None or resumption.begun is None:
            self._begun = random_state.snapshot()
            self._generators = [generator.get_state() for generator in generators]
            yield
            return
        now = random_state.snapshot()
        random_state.restore(resumption.begun)
        self._begun = random_state.snapshot()
        self._generators = resumption.generators
        try:
            yield
        finally:
            random_state.restore(random_state.plain(now))

    @contextlib.contextmanager
    def running(self, current: LoaderPass) -> Iterator[None]:
        """Around a pass. One that was abandoned may end when the next one is running."""
        self._latest = current
        try:
            yield
        finally:
            if self._latest is current:
                self._latest = None
                self.ahead = _NOTHING


def _is_plain(tree: Any) -> bool:
    """Return whether ``torch.load(weights_only=True)`` reads it, once it is ``_plain``."""
    if type(tree) in (list, tuple, MarkedBatch, Tail):
        return all(map(_is_plain, tree))
    if type(tree) is dict:
        return all(map(_is_plain, tree.values())) and all(type(key) in (str, int) for key in tree)
    return type(tree) in _PLAIN


def _plain(ahead: Any) -> Any:
    if not isinstance(ahead, MarkedBatch):
        return ahead
    return ahead.batch, None if ahead.tail is None else tuple(ahead.tail)
