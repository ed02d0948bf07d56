"""Rich's progress bars, Lightning's among them, in a rank: counted in the rank's row, as tqdm's are."""

from __future__ import annotations

import functools
import sys
import types
from typing import Any

from notebook_accel import reporting
from notebook_accel.launching.ranks.bars import BarCounter
from notebook_accel.launching.ranks.import_hooks import when_imported

__all__ = ["adopt"]


def adopt() -> None:
    """From now on rich's bars are counted here, imported already or not."""
    when_imported("rich.progress", _adopt_progress)


class _Task:
    """One of rich's tasks, as tqdm would call what it has."""

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


def _adopt_progress(module: types.ModuleType) -> None:
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
            _show(self._tasks.get(task_id))

        return method

    progress_class.__init__ = init
    progress_class.update = shown_after(progress_class.update)
    progress_class.advance = shown_after(progress_class.advance)


def _show(task: Any) -> None:
    """Makes the task that counts just now the one in the row, unless a prepared loader counts itself."""
    reporter = reporting.reporter()
    shown = reporter.shown
    is_bar = isinstance(shown, BarCounter)
    if task is None or not task.visible or not (shown is None or is_bar):
        return
    if isinstance(shown, BarCounter) and isinstance(shown.bar, _Task) and shown.bar.task is task:
        return
    reporter.show_outer(None)
    reporter.show(BarCounter(_Task(task)))
