"""tqdm's bars in a rank: they are counted in the rank's row instead of being drawn over its output."""

from __future__ import annotations

import io
import math
import sys
import types
from typing import Any

from notebook_accel import reporting
from notebook_accel.launching.ranks.import_hooks import when_imported

__all__ = ["BarCounter", "adopt"]

_FILE_POSITION = 4  # of tqdm's parameter `file`
_NOTEBOOK_METHODS = ("__init__", "__iter__", "clear", "close", "colour", "display", "reset", "status_printer", "update")
_MOST = 2**62
# Of what Transformers' Trainer logs: times and counts, which the row has already.
_NO_METRICS = ("epoch", "_runtime", "_per_second", "total_flos")


def adopt() -> None:
    """From now on tqdm's bars are counted here, imported already or not; those for notebooks are the plain ones."""
    when_imported("tqdm.std", lambda module: _adopt_bars(module.tqdm))
    when_imported("tqdm.notebook", _adopt_notebook)
    when_imported("transformers.trainer_callback", _adopt_trainer)


class _Nowhere(io.StringIO):
    """What bars draw to."""

    def write(self, text: str) -> int:
        return len(text)


_NOWHERE = _Nowhere()


class BarCounter(reporting.Counter):
    """Reads a bar's own count, so that the loop under it costs what it costs without us."""

    __slots__ = ("bar", "inner_bars")

    def __init__(self, bar: Any) -> None:
        self.bar = bar
        self.inner_bars = 0
        super().__init__()

    # Plain attributes elsewhere, so that training can increment them; here the bar knows better.

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
        """True if its steps are the bars inside it: at least one for each.

        A bar over all steps, in which one for an evaluation is opened every now and then, counts its own.
        """
        return 0 < self.inner_bars >= self.step - _count(self.bar.initial)


class _Bars:
    """The bars of this rank that are open, from the outermost to the innermost."""

    def __init__(self) -> None:
        self._open: list[BarCounter] = []
        self._shown: reporting.Counter | None = None

    def opened(self, bar: Any) -> None:
        """A bar begins to count, inside those that are open."""
        if self._open:
            self._open[0].inner_bars += 1
        counter = BarCounter(bar)
        self._open.append(counter)
        self._show(counter)

    def closed(self, bar: Any) -> None:
        """A bar has counted all. Its end stays in the row until another one counts, or the one around it goes on."""
        closed = [counter for counter in self._open if counter.bar is bar]
        if closed:
            self._open = [counter for counter in self._open if counter.bar is not bar]
            if self._open or not closed[0].counts_epochs:  # that all epochs are done can stay in the row
                self._show(self._shown)
            self.look_again()

    def look_again(self) -> None:
        """Shows the bar around the last one, if it counts without one. Called before each look at the counters."""
        current = self._open[-1] if self._open else None
        is_another_shown = self._shown is not reporting.reporter().shown
        if current is None and is_another_shown:
            reporting.reporter().show_outer(None)  # which had nothing to do with what is counted now
        if current is None or current is self._shown or is_another_shown:
            return
        if not (current is self._open[0] and current.counts_epochs):
            self._show(current)

    def _show(self, counter: reporting.Counter | None) -> None:
        outer = self._open[0] if self._open else None
        is_alone = len(self._open) == 1 and outer is counter
        reporter = reporting.reporter()
        reporter.show_outer(outer if outer is not None and (is_alone or outer.counts_epochs) else None)
        if counter is not None and counter is not self._shown:
            self._shown = counter
            reporter.show(counter)


def _adopt_bars(bar_class: Any) -> None:
    bars = _Bars()
    reporting.reporter().before_sample(bars.look_again)
    original_init, original_close, set_postfix = bar_class.__init__, bar_class.close, bar_class.set_postfix

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        if len(args) > _FILE_POSITION:
            args = (*args[:_FILE_POSITION], _redirected(args[_FILE_POSITION]), *args[_FILE_POSITION + 1 :])
        else:
            kwargs["file"] = _redirected(kwargs.get("file"))
        original_init(self, *args, **kwargs)
        counts_itself = isinstance(getattr(self.iterable, "counter", None), reporting.Counter)
        if not self.disable and not counts_itself:  # a prepared loader's own count is the better one
            bars.opened(self)

    def close(self: Any) -> None:
        bars.closed(self)
        original_close(self)

    def show_postfix(self: Any, ordered_dict: Any = None, refresh: bool = True, **values: Any) -> None:
        reporting.reporter().set_metrics({**dict(ordered_dict or {}), **values})
        set_postfix(self, ordered_dict, refresh, **values)

    bar_class.__init__, bar_class.close, bar_class.set_postfix = init, close, show_postfix


def _redirected(file: Any) -> Any:
    """Where a bar draws instead of to the rank's output. A file of the user's own stays."""
    standard = (None, sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
    return _NOWHERE if any(file is stream for stream in standard) else file


def _adopt_notebook(module: types.ModuleType) -> None:
    """Makes the bars for notebooks plain ones: their widgets would be a rank's, which no front end can reach."""
    bar_class = module.tqdm_notebook
    for name in _NOTEBOOK_METHODS:
        if name in vars(bar_class):
            delattr(bar_class, name)
    plain_init = bar_class.__init__

    def init(self: Any, *args: Any, display: bool = True, **kwargs: Any) -> None:  # noqa: ARG001 - there is no widget
        plain_init(self, *args, **{**kwargs, "disable": bool(kwargs.get("disable"))})

    bar_class.__init__ = init


def _adopt_trainer(module: types.ModuleType) -> None:
    """What Transformers' Trainer logs beside its bar becomes the rank's metrics."""
    handler_class = module.CallbackHandler
    on_log = handler_class.on_log

    def log(self: Any, args: Any, state: Any, control: Any, logs: dict[str, Any]) -> Any:
        reporting.reporter().set_metrics(
            {name: value for name, value in logs.items() if not name.endswith(_NO_METRICS)}
        )
        return on_log(self, args, state, control, logs)

    handler_class.on_log = log


def _count(number: Any) -> int:
    """A bar may count anything; an event has 64 bits."""
    return max(0, min(int(number), _MOST)) if math.isfinite(number) else 0
