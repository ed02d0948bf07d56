"""Progress bars of tqdm and rich in a rank: the rank's row counts them, and nothing draws them over its output."""

from __future__ import annotations

import functools
import io
import math
import sys
import types
from collections.abc import Sequence
from typing import Any

from notebook_accel import reporting
from notebook_accel.launching.ranks import loops
from notebook_accel.launching.ranks.import_hooks import when_imported

_FILE_POSITION = 4  # of tqdm's parameter `file`
_NOTEBOOK_METHODS = ("__init__", "__iter__", "clear", "close", "colour", "display", "reset", "status_printer", "update")
_MAX_COUNT = 2**62  # an event has 64 bits
# Times and counts in the logs of Transformers' Trainer, which the row has already.
_NO_METRICS = ("epoch", "_runtime", "_per_second", "total_flos")


def install() -> None:
    """Count the bars of tqdm and rich from now on, imported already or not. Notebook bars become plain ones."""
    bars = loops.LOOPS.bars = OpenBars()
    reporting.reporter().before_sample.append(bars.refresh)
    when_imported("tqdm.std", lambda module: _patch_tqdm(module.tqdm, bars))
    when_imported("tqdm.notebook", _patch_tqdm_notebook)
    when_imported("transformers.trainer_callback", lambda module: _patch_callbacks(module, bars))
    when_imported("transformers.trainer", lambda module: _patch_trainer(module.Trainer, bars))
    when_imported("rich.progress", _patch_rich)


class _NullFile(io.StringIO):
    """The file that bars draw to."""

    def write(self, text: str) -> int:
        return len(text)


_NULL_FILE = _NullFile()


class _BarCounter(reporting.Counter):
    """A counter that reads a bar's own count, so that the loop under the bar gets no slower.

    Attributes:
        bar: The bar, or a task of rich with its attributes.
        inner_bars: Number of the bars and loops over loaders that have begun inside it.
        counts_samples: True if it counts the samples of the loops inside it, whose batches are the steps.
    """

    __slots__ = ("bar", "counts_samples", "inner_bars", "inner_loop")

    def __init__(self, bar: Any) -> None:
        self.bar = bar
        self.inner_bars = 0
        self.counts_samples = False
        self.inner_loop: tuple[loops.LoopCounter, int, int] | None = None  # with its batch size, and this count before
        super().__init__()

    # Training increments these attributes of other counters. Here the bar has the values.

    @property
    def step(self) -> int:
        return _count(self.bar.n)

    @step.setter
    def step(self, value: int) -> None: ...

    @property
    def total(self) -> int | None:
        return None if self.bar.total is None else _count(self.bar.total)

    @total.setter
    def total(self, value: int | None) -> None: ...

    @property
    def label(self) -> str:
        return str(self.bar.desc or "")

    @label.setter
    def label(self, value: str) -> None: ...

    @property
    def counts_epochs(self) -> bool:
        """True if each step of this bar has at least one bar or loop over a loader inside it.

        A bar over all steps counts steps, even if an evaluation opens another bar inside it now and then.
        """
        return not self.counts_samples and 0 < self.inner_bars >= self.step - _count(self.bar.initial)

    def moves_by_samples(self) -> bool:
        """Return whether this bar has moved by a batch's size with each batch of the loop inside it."""
        if self.inner_loop is None:
            return False
        loop, batch_size, before = self.inner_loop
        batches = loop.step
        # A bar moves before or after its step, and less with a smaller last batch.
        return batches < batch_size * (batches - 1) <= self.step - before <= batch_size * batches


class OpenBars:
    """The open bars of this rank, from the outermost to the innermost."""

    def __init__(self) -> None:
        self._open: list[_BarCounter] = []
        self._shown: reporting.Counter | None = None
        self._totals_in_samples: set[int | None] = set()  # of bars so far

    def enter_loop(self, loop: loops.LoopCounter, batch_size: int | None) -> None:
        """Count a loop over a loader that begins inside the innermost bar.

        Only a bar over a sequence, such as a range, or one that is updated by hand can count epochs. Others go over a
        loader.
        """
        if not self._open:
            return
        innermost = self._open[-1]
        innermost.inner_loop = loop, batch_size or 0, innermost.step
        if isinstance(innermost.bar.iterable, Sequence | None):
            innermost.inner_bars += 1

    @property
    def count_steps(self) -> bool:
        """True if the innermost bar counts the running steps itself, instead of epochs around them.

        A loop over a loader is better than a bar that counts samples, or doesn't know its total, such as
        ``tqdm(enumerate(loader))``.
        """
        if self._open:
            innermost = self._open[-1]
            is_over_epochs = isinstance(innermost.bar.iterable, Sequence) and innermost.counts_epochs
            return innermost.bar.total is not None and not is_over_epochs and not innermost.counts_samples
        shown = reporting.reporter().shown
        return isinstance(shown, _BarCounter) and isinstance(shown.bar, _RichTask) and not shown.bar.task.finished

    def add(self, bar: Any) -> None:
        """Add a bar that opens inside the open ones. Inside the Trainer's epochs, loaders count, and no bars."""
        if any(isinstance(counter.bar, _TrainerEpochs) for counter in self._open):
            return
        if self._open:
            self._open[0].inner_bars += 1
        counter = _BarCounter(bar)
        counter.counts_samples = counter.total in self._totals_in_samples
        self._open.append(counter)
        if not counter.counts_samples:
            self._show(counter)
        loops.LOOPS.decide_again()

    def remove(self, bar: Any) -> None:
        """Remove a bar that closes. The row keeps its last count until another bar counts."""
        closed = [counter for counter in self._open if counter.bar is bar]
        if closed:
            self._open = [counter for counter in self._open if counter.bar is not bar]
            if self._open or not closed[0].counts_epochs:  # a complete count of epochs can stay in the row
                self._show(self._shown)
            self.refresh()
            loops.LOOPS.decide_again()

    def remove_epochs_of_trainer(self) -> None:
        """Remove the epochs of a Trainer that has ended or failed."""
        for counter in self._open[:]:
            if isinstance(counter.bar, _TrainerEpochs):
                self.remove(counter.bar)

    def refresh(self) -> None:
        """Show the innermost open bar if it counts steps. Called before each sample."""
        current = self._open[-1] if self._open else None
        if current is not None and not current.counts_samples and current.moves_by_samples():
            current.counts_samples = True
            self._totals_in_samples.add(current.total)
            loops.LOOPS.decide_again()
        shown = reporting.reporter().shown
        if isinstance(shown, loops.LoopCounter) and self.count_steps:  # the bar counts these steps after all
            self._shown = None
            self._show(current)
            loops.LOOPS.decide_again()
            return
        is_another_shown = self._shown is not shown
        if is_another_shown:  # its epochs are those of the outermost bar, unless that bar counts something else
            outermost = self._open[0] if self._open else None
            reporting.reporter().outer = outermost if outermost is not None and outermost.counts_epochs else None
        if current is None or current is self._shown or current.counts_samples or is_another_shown:
            return
        if not (current is self._open[0] and current.counts_epochs):
            self._show(current)

    def _show(self, counter: reporting.Counter | None) -> None:
        outer = self._open[0] if self._open else None
        is_alone = len(self._open) == 1 and outer is counter
        reporter = reporting.reporter()
        reporter.outer = outer if outer is not None and (is_alone or outer.counts_epochs) else None
        if counter is not None and counter is not self._shown:
            self._shown = counter
            reporter.show(counter)


def _patch_tqdm(bar_class: Any, bars: OpenBars) -> None:
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
            bars.add(self)

    def close(self: Any) -> None:
        bars.remove(self)
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


class _TrainerEpochs:
    """The epochs of Transformers' Trainer, with the attributes of a tqdm bar over a range of them.

    Args:
        state: The ``TrainerState``.
    """

    desc = ""

    def __init__(self, state: Any) -> None:
        self._state = state
        self.initial = self.n
        self.iterable = range(self.total)

    @property
    def n(self) -> int:
        return int(self._state.epoch or 0)

    @property
    def total(self) -> int:
        return int(self._state.num_train_epochs)


def _patch_callbacks(module: types.ModuleType, bars: OpenBars) -> None:
    """Report what Transformers' Trainer logs as the rank's metrics, and count its epochs on every rank.

    Only rank 0 has the Trainer's bars, for the steps of all epochs and for evaluations. Where the epochs are known, the
    loaders count on rank 0 too, so that all rows count alike.
    """
    handler_class = module.CallbackHandler
    on_log, on_train_begin = handler_class.on_log, handler_class.on_train_begin

    def log(self: Any, args: Any, state: Any, control: Any, logs: dict[str, Any]) -> Any:
        metrics = {name: value for name, value in logs.items() if not name.endswith(_NO_METRICS)}
        reporting.reporter().set_metrics(metrics)
        return on_log(self, args, state, control, logs)

    def begin(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        bars.remove_epochs_of_trainer()  # of a try whose batch was too large
        begun = on_train_begin(self, args, state, control, **kwargs)
        if args.max_steps <= 0 and args.num_train_epochs % 1 == 0 and loops.length_of(self.train_dataloader):
            for callback in self.callbacks:
                bars.remove(getattr(callback, "training_bar", None))
            bars.add(_TrainerEpochs(state))
        return begun

    handler_class.on_log, handler_class.on_train_begin = log, begin
    module.ProgressCallback.on_prediction_step = module.TrainerCallback.on_prediction_step


def _patch_trainer(trainer_class: Any, bars: OpenBars) -> None:
    original = trainer_class.train

    @functools.wraps(original)
    def train(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(self, *args, **kwargs)
        finally:
            bars.remove_epochs_of_trainer()

    trainer_class.train = train


def _count(number: Any) -> int:
    return max(0, min(int(number), _MAX_COUNT)) if math.isfinite(number) else 0


class _RichTask:
    """A task of rich with the attributes of a tqdm bar. Lightning's bars are such tasks."""

    initial = 0

    def __init__(self, task: Any) -> None:
        self.task = task

    @property
    def n(self) -> float:
        return float(self.task.completed)

    @property
    def total(self) -> float | None:
        return None if self.task.total is None else float(self.task.total)

    @property
    def desc(self) -> str:
        return str(self.task.description)


def _patch_rich(module: types.ModuleType) -> None:
    progress_class = module.Progress
    original_init = progress_class.__init__

    @functools.wraps(original_init)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original_init(self, *args, **kwargs)
        if self.console.file in (sys.stdout, sys.stderr):
            self.live.refresh = lambda: None  # draws nothing, and counts as before

    def shown_after(original: Any) -> Any:
        @functools.wraps(original)
        def method(self: Any, task_id: Any, *args: Any, **kwargs: Any) -> None:
            original(self, task_id, *args, **kwargs)
            _show_task(self._tasks.get(task_id))

        return method

    progress_class.__init__ = init
    progress_class.update = shown_after(progress_class.update)
    progress_class.advance = shown_after(progress_class.advance)


def _show_task(task: Any) -> None:
    """Show a task that was just updated in the rank's row, unless a prepared loader has the row."""
    reporter = reporting.reporter()
    shown = reporter.shown
    if task is None or not task.visible or type(shown) not in (type(None), _BarCounter, loops.LoopCounter):
        return
    if isinstance(shown, _BarCounter) and isinstance(shown.bar, _RichTask) and shown.bar.task is task:
        return
    reporter.outer = None
    reporter.show(_BarCounter(_RichTask(task)))
