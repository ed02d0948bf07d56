"""The training loops of a rank, and the choice of the loop that its row shows.

A loop over a ``DataLoader`` counts its batches, whichever library runs it. A loop without a loader counts its optimizer
steps. Sources that know more, a prepared loader or a progress bar, keep the rank's row. ``torch_hooks`` calls this.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from notebook_accel import reporting
from notebook_accel.protocol import events

if TYPE_CHECKING:
    from notebook_accel.launching.ranks.bars import OpenBars
    from notebook_accel.launching.ranks.phases import StepClock

ATTRIBUTE = "_notebook_accel_loop"
"""The attribute of a DataLoader's iterator that holds its ``LoopCounter``."""
LOSSES_PER_SAMPLE = 20
"""Losses that are reported between two looks at them, and at the end of each epoch: reporting all would cost fast steps
a few hundredths of their time."""
_LENGTH_CALLED = "_IterableDataset_len_called"  # attribute of a DataLoader: the length that ``len`` has returned
# Loaders that read ahead take two batches before the first is trained on.
_BATCHES_READ_AHEAD = 3


class LoopCounter(reporting.Counter):
    """The steps of one loop: one iteration over a loader, or optimizer steps without a loader.

    Attributes:
        known: The better counter of a loader that counts itself, ``None`` for others.
        is_evaluation: True if the loop takes batches and doesn't train.
        has_ended: True once the loader has no more batches, or its iterator is gone.
        trains: True once gradients were computed or an optimizer has stepped during this loop.
        has_gradients: False if gradients were disabled when this loop was last entered.
        epoch_number: The number of the epoch from 1. ``epoch``, which is shown, is ``None`` for loops without epochs.
        training_before: The value of ``Loops.trained`` when this loop was last entered.
        iterator: A weak reference to the iterator.
        dataset: A weak reference to the loader's dataset, ``None`` if it has none or can't be referred to.
        rival: The loop that was current, and its step, when this loop last took a batch beside it.
    """

    __slots__ = (
        "dataset", "epoch_number", "has_ended", "has_gradients", "is_evaluation", "iterator", "known", "rival",
        "training_before", "trains",
    )  # fmt: skip

    def __init__(self, total: int | None = None, known: reporting.Counter | None = None) -> None:
        super().__init__(total=total)
        self.epoch_number = 1
        self.known = known
        self.has_ended = self.trains = self.is_evaluation = False
        self.has_gradients = True
        self.training_before = 0
        self.iterator: weakref.ref[Any] | None = None
        self.dataset: weakref.ref[Any] | None = None
        self.rival: tuple[LoopCounter | None, int] = (None, 0)

    @property
    def is_over(self) -> bool:
        """True if no more batches are to come. Some libraries count batches and never ask for one after the last."""
        return self.has_ended or (self.total is not None and self.step >= self.total)

    def end(self, _: object = None) -> None:
        """Mark the loop as ended."""
        self.has_ended = True

    def set_evaluation(self, is_evaluation: bool) -> None:
        """Label the loop as an evaluation, which has no epochs, or as training."""
        shown, self.is_evaluation = self.known or self, is_evaluation
        shown.label = events.EVALUATION if is_evaluation else ""
        self.epoch = None if is_evaluation else self.epoch_number


class Loops:
    """The loops of this rank, and the choice of the loop that its row shows.

    Attributes:
        current: The loop that steps, ``None`` before the first batch and after a change of the bars.
        trained: Number of backward passes and optimizer steps so far.
        bars: The open bars.
        clock: The clock of the steps' phases, ``None`` if they aren't measured.
        loss: The loss that Accelerate's ``Accelerator`` is dividing and computing gradients of.
        losses_left: Number of backward passes whose loss is still reported before the next sample.
    """

    def __init__(self) -> None:
        self.current: LoopCounter | None = None
        self.bars: OpenBars | None = None
        self.clock: StepClock | None = None
        self.loss: Any = None
        self.losses_left = LOSSES_PER_SAMPLE
        self._begin_count()

    def _begin_count(self) -> None:
        self.trained = 0
        self._epochs: weakref.WeakKeyDictionary[Any, LoopCounter] = weakref.WeakKeyDictionary()  # latest, by loader
        self._purposes: dict[int, tuple[weakref.ref[Any], bool]] = {}  # by dataset id: True if it is for evaluation
        self._training: LoopCounter | None = None  # the latest loop that trains
        self._alone = LoopCounter()  # optimizer steps without a loader
        self._stepped: set[int] = set()  # the optimizers that have stepped since the latest step without a loader

    @contextlib.contextmanager
    def count_cell(self) -> Iterator[None]:
        """Start new counts for a session's cell. The clock stops between two cells."""
        self.current = None
        self._begin_count()
        reporting.reporter().begin_cell()
        try:
            yield
        finally:
            if self.clock is not None:
                self.clock.stop()

    @property
    def is_alone(self) -> bool:
        """True while optimizer steps without a loader are counted."""
        return self.current is self._alone

    def decide_again(self) -> None:
        """Choose the shown counter anew at the next batch, since a bar was opened or closed."""
        self.current = None

    def begin(self, loader: Any, iterator: Any) -> None:
        """Begin a loop over a loader."""
        known = getattr(loader, "counter", None)
        loop = LoopCounter(length_of(loader), known=known if isinstance(known, reporting.Counter) else None)
        with contextlib.suppress(TypeError):  # a loader of the user's that can't be hashed
            last = self._epochs.get(loader)
            # A single batch, taken for example to inspect its shape, is no epoch.
            is_epoch = last is not None and (last.step > 1 or last.step == last.total)
            loop.epoch = loop.epoch_number = (last.epoch_number if last else 1) + is_epoch
            self._epochs[loader] = loop
            if last is not None:  # left early, while its iterator is still there, or in a frame that is being sampled
                last.end()
        with contextlib.suppress(AttributeError, TypeError):  # a dataset without weak references, such as a list
            loop.dataset = weakref.ref(loader.dataset)
            # Many libraries make a new loader for each evaluation, which may end before it can be told from training.
            loop.is_evaluation = self.is_for_evaluation(loader.dataset)
        loop.iterator = weakref.ref(iterator, loop.end)
        setattr(iterator, ATTRIBUTE, loop)
        if self.bars is not None:
            self.bars.enter_loop(loop, getattr(loader, "batch_size", None))

    def turn_to(self, loop: LoopCounter, has_gradients: bool) -> None:
        """Make ``loop``, which takes a batch, the current one, unless it only runs beside the current one.

        Of two loops that take their batches in turns, the first one counts. An evaluation that was left early, as after
        some batches of each step, only interrupts the loop that trains.
        """
        current = self.current
        if current is not None and not current.is_over and not (current.is_evaluation and loop.trains):
            rival, loop.rival = loop.rival, (current, current.step)
            if rival != loop.rival:
                return
        if current is not None:
            self._judge(current)
        self._stepped.clear()
        self.current = loop
        loop.training_before = self.trained
        loop.has_gradients = has_gradients
        if not loop.trains:
            loop.set_evaluation((loop.is_evaluation and not loop.step) or not loop.has_gradients)
        if loop.known is None:
            self._show(loop)
        elif isinstance(reporting.reporter().shown, LoopCounter):  # another loop has displaced the loader's counter
            self._show(loop.known)

    def _judge(self, loop: LoopCounter) -> None:
        """Decide whether a loop that another one interrupts or follows has trained; remember this for its dataset."""
        if self.trained != loop.training_before:
            loop.trains, self._training = True, loop
        dataset = None if loop.dataset is None else loop.dataset()
        if dataset is not None and (loop.trains or (loop.is_over and self._training is not None)):
            is_evaluation = not loop.trains and self.is_for_evaluation(dataset, otherwise=True)
            self._purposes[id(dataset)] = weakref.ref(dataset), is_evaluation

    def is_for_evaluation(self, dataset: Any, *, otherwise: bool = False) -> bool:
        """Return whether loops over a dataset have evaluated so far and none has trained."""
        of, is_evaluation = self._purposes.get(id(dataset), (None, otherwise))
        return is_evaluation if of is not None and of() is dataset else otherwise  # else another dataset had the id

    def evaluates(self, *, has_gradients: bool, is_known: bool) -> bool:
        """Return whether a loop without gradients, or known to be an evaluation, interrupts training.

        Before anything was trained, its batches are the program's steps.
        """
        return bool(self.trained) and (is_known or not has_gradients)

    def _show(self, loop: reporting.Counter) -> None:
        reporter = reporting.reporter()
        # A fork, such as a worker of a loader, may lack the thread that holds a lock of the reporter.
        if reporter.is_connected and (self.bars is None or not self.bars.count_steps):
            reporter.show(loop)

    def step_optimizer(self, optimizer: Any) -> bool:
        """Count a step of an optimizer. Only steps without a running loader reach the row.

        Of several optimizers, the most frequent one counts. A loader that reads ahead has ended when the last batch is
        trained on, so only the second step after its end shows that there is a loop without a loader.

        Returns:
            True if this ends a step of a loop without a loader.
        """
        self.trained += 1
        current, alone = self.current, self._alone
        if current is not None and current is not alone and not current.has_ended:
            return False
        if id(optimizer) not in self._stepped:
            self._stepped.add(id(optimizer))
            return False
        self._stepped = {id(optimizer)}
        if current is not alone:
            alone = self._alone = LoopCounter()
            self.current = alone
            self._show(alone)
            alone.step = 1
        alone.step += 1
        return True

    def refresh(self) -> None:
        """Tell training from evaluation, and show training again after one. Called before each sample."""
        self.losses_left = LOSSES_PER_SAMPLE
        loop = self.current
        if loop is None or loop is self._alone:
            return
        if loop.trains or self.trained != loop.training_before:
            loop.trains, self._training = True, loop
            loop.set_evaluation(False)
        elif loop.has_gradients and loop.step > _BATCHES_READ_AHEAD and self.trained:
            loop.set_evaluation(True)
        if loop.is_over and not loop.trains and loop.known is None and self._training is not None:
            self._show(self._training.known or self._training)


LOOPS = Loops()
"""The loops of this rank."""


def length_of(loader: Any) -> int | None:
    """Return the number of batches of an epoch, ``None`` if the loader doesn't know it.

    ``len(loader)`` sets an attribute with which torch warns of a longer stream, so the attribute is restored.
    """
    called = getattr(loader, _LENGTH_CALLED, None)
    try:
        return len(loader)
    except Exception:  # noqa: BLE001 - samplers are the user's
        return None
    finally:
        if called is not None or hasattr(loader, _LENGTH_CALLED):
            setattr(loader, _LENGTH_CALLED, called)
