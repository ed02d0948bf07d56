"""The progress of a rank: the counter that its row shows.

The shown counter is that of a prepared loader; else that of the open bar of tqdm or rich that has opened or moved last,
the inner one of two; else that of the loop over a ``DataLoader``; else that of the optimizer's steps. A bar over a
sequence that has a loop or another bar inside each of its steps counts epochs: what runs inside it is shown instead,
with the epoch of the outermost bar.

The row keeps the last count until something else begins. ``torch_hooks`` calls this for loops and optimizers, whichever
library runs them. Bars are patched here, so that nothing is drawn over the rank's output.
"""

from __future__ import annotations

import contextlib
import functools
import io
import math
import sys
import types
import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from notebook_accel import reporting
from notebook_accel.launching.ranks.import_hooks import when_imported
from notebook_accel.protocol import events

if TYPE_CHECKING:
    from notebook_accel.launching.ranks.phases import StepClock

ATTRIBUTE = "_notebook_accel_loop"
"""The attribute of a DataLoader's iterator that holds its ``LoopCounter``."""
LOSSES_PER_SAMPLE = 20
"""Losses that are reported between two looks at them, and at the end of each epoch: reporting all would cost fast steps
a few hundredths of their time."""
_LENGTH_CALLED = "_IterableDataset_len_called"  # attribute of a DataLoader: the length that ``len`` has returned
_FILE_POSITION = 4  # of tqdm's parameter `file`
_NOTEBOOK_METHODS = ("__init__", "__iter__", "clear", "close", "colour", "display", "reset", "status_printer", "update")
_MAX_COUNT = 2**62  # an event has 64 bits
# Times and counts in the logs of Transformers' Trainer, which the row has already.
_NO_METRICS = ("epoch", "_runtime", "_per_second", "total_flos")


class LoopCounter(reporting.Counter):
    """The steps of one loop: one iteration over a loader, or optimizer steps without a loader.

    Attributes:
        known: The counter of a prepared loader, ``None`` for others.
        is_evaluation: True if the loop takes batches and doesn't train.
        has_ended: True once the loader has no more batches, or its iterator is gone.
        trains: True once gradients were computed or an optimizer has stepped during this loop.
        epoch_number: The number of the epoch from 1. ``epoch``, which is shown, is ``None`` for loops without epochs.
        training_before: The value of ``Progress.trained`` when this loop was last entered.
        iterator: A weak reference to the iterator.
        beside: The loop that was current, and its step, when this loop last took a batch beside it.
    """

    __slots__ = (
        "beside", "epoch_number", "has_ended", "is_evaluation", "iterator", "known", "training_before", "trains",
    )  # fmt: skip

    def __init__(self, total: int | None = None, known: reporting.Counter | None = None) -> None:
        super().__init__(total=total)
        self.epoch_number = 1
        self.known = known
        self.has_ended = self.trains = self.is_evaluation = False
        self.training_before = 0
        self.iterator: weakref.ref[Any] | None = None
        self.beside: tuple[LoopCounter, int] | None = None

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


class BarCounter(reporting.Counter):
    """A counter that reads a bar's own count, so that the loop under the bar gets no slower.

    Args:
        bar: A bar of tqdm, or another object that counts.
        step, total, label: Names of the bar's attributes with these values; an empty name if there is none.

    Attributes:
        inner: Number of the bars and loops that have begun directly inside it.
    """

    __slots__ = ("_names", "_seen", "bar", "inner")

    def __init__(self, bar: Any, step: str = "n", total: str = "total", label: str = "desc") -> None:
        self.bar = bar
        self.inner = 0
        self.epoch = None
        self._names = step, total, label
        self._seen = self.step

    @property
    def step(self) -> int:  # type: ignore[override]  # only the bar changes it
        return _count(getattr(self.bar, self._names[0]) or 0)

    @property
    def total(self) -> int | None:  # type: ignore[override]
        total = getattr(self.bar, self._names[1])
        return None if total is None else _count(total)

    @property
    def label(self) -> str:  # type: ignore[override]
        return str(getattr(self.bar, self._names[2], None) or "")

    def has_moved(self) -> bool:
        """Return whether it has counted on since the last call. A bar that starts anew hasn't."""
        before, self._seen = self._seen, self.step
        return self._seen > before

    @property
    def counts_epochs(self) -> bool:
        """True if it goes over a sequence, such as a range, and each of its steps has a bar or a loop inside.

        A bar over all steps counts steps, even if an evaluation opens another bar inside it now and then.
        """
        is_over_sequence = isinstance(getattr(self.bar, "iterable", None), Sequence)
        return is_over_sequence and 0 < self.inner >= self.step - _count(self.bar.initial)


class Progress:
    """The open bars and the loops of this rank, and the choice of the counter that its row shows.

    Attributes:
        current: The loop that steps, ``None`` before the first batch.
        trained: Number of backward passes and optimizer steps so far.
        clock: The clock of the steps' phases, ``None`` if they aren't measured.
        trainer_epochs: The epochs of a Trainer of Transformers that trains now. Inside them loops count, and no bars.
        loss: The loss that Accelerate's ``Accelerator`` is dividing and computing gradients of.
        losses_left: Number of backward passes whose loss is still reported before the next sample.
    """

    def __init__(self) -> None:
        self.clock: StepClock | None = None
        self.loss: Any = None
        self.losses_left = LOSSES_PER_SAMPLE
        self._begin_count()

    def _begin_count(self) -> None:
        self.current: LoopCounter | None = None
        self.trained = 0
        self.trainer_epochs: BarCounter | None = None
        # From the outermost to the innermost. Never changed in place, since the sampling thread reads it too.
        self._bars: tuple[BarCounter, ...] = ()
        self._latest: BarCounter | None = None  # of these, the one that has opened or moved last
        self._epochs: weakref.WeakKeyDictionary[Any, LoopCounter] = weakref.WeakKeyDictionary()  # latest, by loader
        self._training: LoopCounter | None = None  # the latest loop that trains
        self._evaluated: weakref.ref[Any] | None = None  # the model whose `eval` was called last
        self._trained_before = 0  # `trained` at that call
        self._alone = LoopCounter()  # optimizer steps without a loader
        self._stepped: set[int] = set()  # the optimizers that have stepped since the latest step without a loader

    @contextlib.contextmanager
    def count_cell(self) -> Iterator[None]:
        """Start new counts for a session's cell. The clock stops between two cells."""
        self._begin_count()
        reporting.reporter().begin_cell()
        try:
            yield
        finally:
            if self.clock is not None:
                self.clock.stop()

    # The choice -------------------------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Tell training from evaluation, and choose the shown counter. Called before each sample."""
        self.losses_left = LOSSES_PER_SAMPLE
        loop = self.current
        if loop is not None and loop is not self._alone:
            self._note_training(loop)
            if loop.trains:
                loop.set_evaluation(False)
            elif self.evaluates(has_gradients=True):  # ignite calls `model.eval()` with each batch
                loop.set_evaluation(True)
        # Not always the innermost: many programs open a bar for each phase before their loops, and reset it by hand.
        for bar in self._bars:
            if bar.has_moved():
                self._latest = bar
        self._choose()

    def _choose(self, *, has_begun: bool = False) -> None:
        """Show the counter that is best now, if a bar or a loop runs.

        Args:
            has_begun: A bar or a loop has just begun. Otherwise a prepared loader that has ended keeps the row, since
                the next epoch may follow.
        """
        reporter = reporting.reporter()
        if not reporter.is_connected:  # a fork, such as a loader's worker, may lack the thread that holds a lock
            return
        shown, loop = reporter.shown, self.current
        bars, bar = ((), None) if self.trainer_epochs else (self._bars, self._latest)
        if loop is not None and loop.is_over:  # after an evaluation, training is shown again
            loop = self._training if shown is loop and not loop.trains else None
        counter: reporting.Counter
        if reporter.prepared is not None:
            counter = reporter.prepared
        elif type(shown) is reporting.Counter and not has_begun:
            return
        elif bar is not None and not bar.counts_epochs:
            counter = bar
        elif loop is not None:
            counter = loop.known or loop
        else:
            return
        reporter.outer = bars[0] if bars and bars[0].counts_epochs else self.trainer_epochs
        if counter is not shown:
            reporter.show(counter)

    # Bars -------------------------------------------------------------------------------------------------------------

    def open_bar(self, counter: BarCounter) -> None:
        """Add a bar that opens inside the open ones, unless it is open."""
        if not any(other.bar is counter.bar for other in self._bars):
            self._begin_inside()
            self._bars, self._latest = (*self._bars, counter), counter
            self._choose(has_begun=True)

    def close_bars(self, *closed: Any) -> None:
        """Remove bars that close."""
        self._bars = tuple(counter for counter in self._bars if not any(counter.bar is bar for bar in closed))
        if self._latest not in self._bars:
            self._latest = self._bars[-1] if self._bars else None
        self._choose()

    def _begin_inside(self) -> None:
        if self._bars:
            self._bars[-1].inner += 1

    # Loops ------------------------------------------------------------------------------------------------------------

    @property
    def is_alone(self) -> bool:
        """True while optimizer steps without a loader are counted."""
        return self.current is self._alone

    def begin_loop(self, loader: Any, iterator: Any) -> None:
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
        loop.iterator = weakref.ref(iterator, loop.end)
        setattr(iterator, ATTRIBUTE, loop)
        self._begin_inside()

    def turn_to(self, loop: LoopCounter, *, is_evaluation: bool) -> None:
        """Make ``loop``, which takes a batch, the current one, unless it only runs beside the current one.

        Of two loops that take their batches in turns, the first one counts. An evaluation interrupts training.
        """
        current = self.current
        if current is not None and not current.is_over and current.is_evaluation == is_evaluation:
            before, loop.beside = loop.beside, (current, current.step)
            if before != loop.beside:
                return
        if current is not None:
            self._note_training(current)
        self._stepped.clear()
        self.current = loop
        loop.training_before = self.trained
        loop.set_evaluation(is_evaluation and not loop.trains)
        self._choose(has_begun=True)

    def _note_training(self, loop: LoopCounter) -> None:
        if self.trained != loop.training_before:
            loop.trains, self._training = True, loop

    def note_evaluated(self, model: Any) -> None:
        """Record that a model is switched to evaluation."""
        self._evaluated, self._trained_before = weakref.ref(model), self.trained

    def evaluates(self, *, has_gradients: bool, trains: bool = False) -> bool:
        """Return whether a loop that takes a batch now interrupts training, which its gradients or a model tell.

        Before anything was trained, the batches of an evaluation are the program's steps.

        Args:
            has_gradients: Gradients are enabled.
            trains: The loop has trained before.
        """
        if not self.trained or not has_gradients:
            return bool(self.trained)
        if trains or self._evaluated is None or self._trained_before != self.trained:
            return False
        model = self._evaluated()
        return model is not None and not model.training

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
            self._choose(has_begun=True)
            alone.step = 1
        alone.step += 1
        return True


PROGRESS = Progress()
"""The progress of this rank."""


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


def _count(number: Any) -> int:
    return max(0, min(int(number), _MAX_COUNT)) if math.isfinite(number) else 0


def install() -> None:
    """Count the bars of tqdm and rich from now on, imported already or not. Notebook bars become plain ones."""
    reporting.reporter().before_sample.append(PROGRESS.refresh)
    when_imported("tqdm.std", lambda module: _patch_tqdm(module.tqdm))
    when_imported("tqdm.notebook", _patch_tqdm_notebook)
    when_imported("transformers.trainer_callback", _patch_callbacks)
    when_imported("rich.progress", _patch_rich)


class _NullFile(io.StringIO):
    """The file that bars draw to."""

    def write(self, text: str) -> int:
        return len(text)


_NULL_FILE = _NullFile()


def _patch_tqdm(bar_class: Any) -> None:
    original_init, original_close, set_postfix = bar_class.__init__, bar_class.close, bar_class.set_postfix

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        if not reporting.reporter().is_connected and _redirected(kwargs.get("file")) is _NULL_FILE:
            # In a pool's process, which has no row: draw the beginning and the end.
            kwargs.pop("position", None)
            original_init(self, *args, **kwargs)
            self.mininterval = math.inf
            return
        if len(args) > _FILE_POSITION:
            args = (*args[:_FILE_POSITION], _redirected(args[_FILE_POSITION]), *args[_FILE_POSITION + 1 :])
        else:
            kwargs["file"] = _redirected(kwargs.get("file"))
        original_init(self, *args, **kwargs)
        counts_itself = isinstance(getattr(self.iterable, "counter", None), reporting.Counter)
        if not self.disable and not counts_itself:  # a prepared loader's own count is the better one
            PROGRESS.open_bar(BarCounter(self))

    def close(self: Any) -> None:
        PROGRESS.close_bars(self)
        original_close(self)

    def show_postfix(self: Any, ordered_dict: Any = None, refresh: bool = True, **values: Any) -> None:
        reporting.reporter().set_metrics({**dict(ordered_dict or {}), **values})
        set_postfix(self, ordered_dict, refresh, **values)

    bar_class.__init__, bar_class.close, bar_class.set_postfix = init, close, show_postfix


def _redirected(file: Any) -> Any:
    """Return the null file in place of the rank's output, and the user's own file unchanged."""
    standard = (None, sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
    return _NULL_FILE if any(file is stream for stream in standard) else file


def _patch_tqdm_notebook(module: types.ModuleType) -> None:
    """Make notebook bars plain ones: their widgets would live in a rank, which no front end can reach."""
    bar_class = module.tqdm_notebook
    for name in _NOTEBOOK_METHODS:
        if name in vars(bar_class):
            delattr(bar_class, name)
    plain_init = bar_class.__init__

    def init(self: Any, *args: Any, display: bool = True, **kwargs: Any) -> None:  # noqa: ARG001 - there is no widget
        plain_init(self, *args, **{**kwargs, "disable": bool(kwargs.get("disable"))})

    bar_class.__init__ = init


def _patch_callbacks(module: types.ModuleType) -> None:
    """Report what Transformers' Trainer logs as the rank's metrics, and count its epochs on every rank.

    Only rank 0 has the Trainer's bars, for the steps of all epochs and for evaluations. Where the epochs are known, the
    loaders count on rank 0 too, so that all rows count alike.
    """
    handler_class = module.CallbackHandler
    on_log, on_train_begin, on_train_end = (
        handler_class.on_log,
        handler_class.on_train_begin,
        handler_class.on_train_end,
    )

    def log(self: Any, args: Any, state: Any, control: Any, logs: dict[str, Any]) -> Any:
        metrics = {name: value for name, value in logs.items() if not name.endswith(_NO_METRICS)}
        reporting.reporter().set_metrics(metrics)
        return on_log(self, args, state, control, logs)

    def begin(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        are_known = args.max_steps <= 0 and args.num_train_epochs % 1 == 0 and length_of(self.train_dataloader)
        PROGRESS.trainer_epochs = BarCounter(state, "epoch", "num_train_epochs", "") if are_known else None
        return on_train_begin(self, args, state, control, **kwargs)

    def end(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        ended = on_train_end(self, args, state, control, **kwargs)
        PROGRESS.trainer_epochs = None
        return ended

    handler_class.on_log, handler_class.on_train_begin, handler_class.on_train_end = log, begin, end
    module.ProgressCallback.on_prediction_step = module.TrainerCallback.on_prediction_step


def _patch_rich(module: types.ModuleType) -> None:
    """Count the tasks of rich, as Lightning's bars are. A task is open from its first update until it is finished."""
    progress_class = module.Progress
    original_init, original_stop = progress_class.__init__, progress_class.stop

    @functools.wraps(original_init)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original_init(self, *args, **kwargs)
        if self.console.file in (sys.stdout, sys.stderr):
            self.live.refresh = lambda: None  # draws nothing, and counts as before

    @functools.wraps(original_stop)
    def stop(self: Any) -> None:
        PROGRESS.close_bars(*self._tasks.values())
        original_stop(self)

    def followed(original: Any) -> Any:
        @functools.wraps(original)
        def method(self: Any, task_id: Any, *args: Any, **kwargs: Any) -> None:
            original(self, task_id, *args, **kwargs)
            task = self._tasks[task_id]
            if task.visible:
                PROGRESS.open_bar(BarCounter(task, "completed", label="description"))
            if task.finished or not task.visible:
                PROGRESS.close_bars(task)

        return method

    progress_class.__init__, progress_class.stop = init, stop
    progress_class.update, progress_class.advance = followed(progress_class.update), followed(progress_class.advance)
