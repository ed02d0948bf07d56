"""The position of a loader: its epoch, the batch that is out, and how to resume from a checkpoint.

To read the rest of an epoch as it would have been read, its order is drawn again from the random numbers of the
epoch's beginning. Whatever is drawn later uses the current random numbers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from notebook_accel import environment
from notebook_accel.reporting import Counter, reporter
from notebook_accel.training import process_group, random_state
from notebook_accel.training.sharding import MarkedBatch, Tail

__all__ = [
    "ACTIVE_ITERATIONS",
    "ActiveIterations",
    "EpochCounter",
    "LoaderIteration",
    "LoaderPosition",
    "ResumePoint",
    "abandon_iterations",
]

_PLAIN = (torch.Tensor, bool, int, float, complex, str, bytes, type(None))
_NOTHING: Any = object()


class EpochCounter:
    """Counts the epochs of a loader, from 0.

    Args:
        is_shared: Keep the number in shared memory, for worker processes that outlive an epoch.
    """

    def __init__(self, *, is_shared: bool = False) -> None:
        self._following = 0
        self._running: Any = multiprocessing.RawValue("q", 0) if is_shared else types.SimpleNamespace(value=0)

    @property
    def running(self) -> int:
        """The epoch that began last; 0 before the first."""
        epoch: int = self._running.value
        return epoch

    @property
    def following(self) -> int:
        """The epoch that begins next."""
        return self._following

    def set(self, epoch: int) -> None:
        """Make ``epoch`` the one that begins next."""
        self._following = epoch

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch that begins next."""
        return {"following": self._following}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Begin next with the saved epoch."""
        self._following = state["following"]

    def begin(self) -> int:
        """Begin an epoch and return its number."""
        self._running.value = epoch = self._following
        self._following += 1
        return epoch


class LoaderIteration:
    """One iteration over a loader, from its first batch to its last or to a ``break``.

    Attributes:
        counter: Counts the batches that have come out in its ``step``.
        total: Number of batches, ``None`` if the loader has no length.
        is_last: True while the last batch is out.
        ends_window: True if an accumulation window ends with this batch: the last one, or the last that every rank has.
        tail: The round that is out, if it is a last one unlike the others.
        upload_next: Starts the transfer of the next batch to the device; ``None`` if there is nothing to start.
        moment: When its latest batch came out, as a count over all iterations.
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


class ActiveIterations:
    """The iterations that are running in this process.

    Attributes:
        running: All of them, the latest to begin at the end.
        current: The one whose batch came out last.
        training: The one whose batch came out last for a backward pass.
        moment: Counts iterations begun and batches handed out.
    """

    __slots__ = ("current", "moment", "running", "training")

    def __init__(self) -> None:
        self.moment = 0
        self.clear()

    def clear(self) -> None:
        """Forget them, such as those that an exception left and whose traceback a notebook keeps."""
        self.running: list[LoaderIteration] = []
        self.current: LoaderIteration | None = None
        self.training: LoaderIteration | None = None

    @contextlib.contextmanager
    def iterating(self, counter: Counter, total: int | None) -> Iterator[LoaderIteration]:
        """Register an iteration for as long as the body runs.

        Args:
            counter: The loader's own. An earlier iteration with the same counter counts as abandoned.
            total: Number of batches, ``None`` if unknown.
        """
        current = LoaderIteration(counter, total)
        self._stamp(current)
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
        """Start the transfer of the next batch: the device has been given work that hides it."""
        if self.current is not None and self.current.upload_next is not None:
            self.current.upload_next()

    def hand_out(self, current: LoaderIteration) -> None:
        """Note that a batch of this iteration comes out."""
        self._stamp(current)
        self.current = current
        # An evaluation in the middle of a window, for which the next batch may come from an iterator that was begun
        # before, says nothing about where training stands.
        if torch.is_grad_enabled():
            self.training = current

    def _stamp(self, current: LoaderIteration) -> None:
        self.moment += 1
        current.moment = self.moment


# One for the process: all its Accelerators share the batch that is out.
ACTIVE_ITERATIONS = ActiveIterations()


def abandon_iterations() -> None:
    """Forget iterations that a cell left by an error, and that its traceback keeps alive.

    An iteration that the user's code holds is registered again with its next batch.
    """
    ACTIVE_ITERATIONS.clear()


@dataclasses.dataclass
class ResumePoint:
    """The point at which an epoch was when a checkpoint was saved. A checkpoint has these field names.

    Attributes:
        epoch: The epoch, from 0.
        batches: Number of its batches that had come out.
        length: Number of its batches, ``None`` if unknown.
        begun: Random numbers as they were when it began, ``None`` if it hasn't.
        generators: The states of the loader's own generators when it began, or now if it hasn't.
        ahead: In a list, the batch that was read but not out yet, if reading it again could give another one.
        is_told: True once ``skip_first_batches`` has said from which batch to go on.
    """

    epoch: int
    batches: int = 0
    length: int | None = None
    begun: dict[str, Any] | None = None
    generators: list[torch.Tensor] = dataclasses.field(default_factory=list)
    ahead: list[Any] = dataclasses.field(default_factory=list)
    is_told: bool = False


class LoaderPosition:
    """The position of a loader, shared with the loaders that skip its first batches.

    Args:
        epochs: Counts its epochs.

    Attributes:
        ahead: The batch that was read and isn't out yet, where reading it again could give another one.
    """

    def __init__(self, epochs: EpochCounter) -> None:
        self.ahead: Any = _NOTHING
        self._epochs = epochs
        self._latest: LoaderIteration | None = None
        self._begun: Any = None
        self._generators: list[torch.Tensor] = []
        self._resume_point: ResumePoint | None = None

    @property
    def _running(self) -> LoaderIteration | None:
        """The running iteration. A traceback may keep one that an exception left."""
        return self._latest if self._latest in ACTIVE_ITERATIONS.running else None

    @property
    def epoch(self) -> int:
        """The epoch that is running, or else the one that comes next."""
        return self._epochs.following if self._running is None else self._epochs.running

    def state_dict(self, generators: Sequence[torch.Generator], length: int | None) -> dict[str, Any]:
        """Return the fields of a ``ResumePoint``, which ``torch.load(weights_only=True)`` reads.

        Args:
            generators: The loader's own.
            length: Batches of an epoch.
        """
        if self._resume_point is not None:  # loaded, and not iterated since
            return dict(vars(self._resume_point))
        if self._running is None:
            states = [generator.get_state() for generator in generators]
            return vars(ResumePoint(self.epoch, length=length, generators=states))
        ahead = [_plain(self.ahead)] if _is_plain(self.ahead) else []
        begun = random_state.plain(self._begun)
        return vars(ResumePoint(self.epoch, self._running.counter.step, length, begun, self._generators, ahead))

    def load_state_dict(self, state: dict[str, Any], generators: Sequence[torch.Generator], length: int | None) -> None:
        """Have the next iteration go on where ``state_dict`` was taken.

        With ``NOTEBOOK_ACCEL_COMPAT=accelerate`` in the environment it begins its epoch anew, as with Accelerate.
        """
        resume_point = ResumePoint(**state)
        self._epochs.set(resume_point.epoch)
        for generator, saved in zip(generators, resume_point.generators, strict=False):
            generator.set_state(saved)
        fits = resume_point.length == length
        if resume_point.batches and not fits and process_group.rank_place().rank == 0:
            warnings.warn(
                f"A loader had {resume_point.length} batches when it was saved and has {length} now: it begins epoch "
                f"{resume_point.epoch} anew. Fix: the same data and batch size, or skip_first_batches",
                stacklevel=2,
            )
        begins_anew = not fits or environment.follows_accelerate()
        self._resume_point = None if begins_anew or resume_point.begun is None else resume_point

    def set_epoch(self, epoch: int) -> None:
        """Make ``epoch`` the next one. A resume point in another epoch is dropped."""
        self._epochs.set(epoch)
        if self._resume_point is not None and self._resume_point.epoch != epoch:
            self._resume_point = None

    def skip_by_hand(self, num_batches: int) -> None:
        """Note that the program skips batches itself, so that nothing is skipped beyond that.

        Programs count batches over all epochs: after the last batch of an epoch, none to skip means the next epoch.
        """
        resume_point = self._resume_point
        if resume_point is None:
            return
        if num_batches == 0 and resume_point.batches == resume_point.length:
            self.set_epoch(resume_point.epoch + 1)
            return
        ahead = resume_point.ahead if num_batches == resume_point.batches else []
        self._resume_point = dataclasses.replace(resume_point, is_told=True, ahead=ahead)

    def take_resume_point(self) -> ResumePoint | None:
        """Return and forget where the iteration that begins now goes on, ``None`` if it begins an epoch."""
        resume_point, self._resume_point = self._resume_point, None
        return resume_point

    @contextlib.contextmanager
    def beginning(self, resume_point: ResumePoint | None, generators: Sequence[torch.Generator]) -> Iterator[None]:
        """Set the random numbers for the beginning of an iteration, until its first batch is read."""
        self.ahead = _NOTHING
        if resume_point is None or resume_point.begun is None:
            self._begun = random_state.snapshot()
            self._generators = [generator.get_state() for generator in generators]
            yield
            return
        now = random_state.snapshot()
        random_state.restore(resume_point.begun)
        self._begun = random_state.snapshot()
        self._generators = resume_point.generators
        try:
            yield
        finally:
            random_state.restore(random_state.plain(now))

    @contextlib.contextmanager
    def running(self, current: LoaderIteration) -> Iterator[None]:
        """Follow an iteration. An abandoned one may end while the next one is running."""
        self._latest = current
        try:
            yield
        finally:
            if self._latest is current:
                self._latest = None
                self.ahead = _NOTHING


def _is_plain(tree: Any) -> bool:
    """Return whether ``torch.load(weights_only=True)`` reads ``_plain(tree)``."""
    if type(tree) in (list, tuple, MarkedBatch, Tail):
        return all(map(_is_plain, tree))
    if type(tree) is dict:
        return all(map(_is_plain, tree.values())) and all(type(key) in (str, int) for key in tree)
    return type(tree) in _PLAIN


def _plain(ahead: Any) -> Any:
    if not isinstance(ahead, MarkedBatch):
        return ahead
    return ahead.batch, None if ahead.tail is None else tuple(ahead.tail)
