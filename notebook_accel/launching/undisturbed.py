"""Doing something that an interrupt must not cut in two."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

__all__ = ["call"]

_T = TypeVar("_T")
_PATIENCE_S = 10.0


def call(act: Callable[[], _T], undo: Callable[[_T], Any] = lambda _: None) -> _T:
    """Does something in a thread, where no KeyboardInterrupt can come, and waits for its end.

    Args:
        act: What to do.
        undo: Takes its result back, should an interrupt have come meanwhile, so that nobody gets it.

    Raises:
        KeyboardInterrupt: An interrupt has come. What was done is undone, or will be as soon as it is done.
        Exception: What ``act`` has raised.
    """
    doing = _Doing(act, undo)
    thread = threading.Thread(target=doing.run, name="notebook-accel-undisturbed", daemon=True)
    try:
        thread.start()
        thread.join()
    except BaseException:
        doing.abandon()
        if thread.is_alive():  # it may not have come so far
            thread.join(_PATIENCE_S)
        raise
    return doing.result()


class _Doing(Generic[_T]):
    def __init__(self, act: Callable[[], _T], undo: Callable[[_T], Any]) -> None:
        self._act = act
        self._undo = undo
        self._context = contextvars.copy_context()  # whose cell it is that prints
        self._lock = threading.Lock()
        self._abandoned = threading.Event()
        self._results: list[_T] = []
        self._raised: BaseException | None = None

    def run(self) -> None:
        """In the thread."""
        if self._abandoned.is_set():
            return
        try:
            result = self._context.run(self._act)
        except BaseException as error:  # noqa: BLE001 - raised again by whoever waits
            self._raised = error
            return
        with self._lock:
            if not self._abandoned.is_set():
                self._results.append(result)
                return
        self._undo(result)

    def abandon(self) -> None:
        """Nobody waits for the result any more."""
        with self._lock:
            self._abandoned.set()
        for result in self._results:
            self._undo(result)

    def result(self) -> _T:
        """What has come of it."""
        if self._raised is not None:
            raise self._raised
        [result] = self._results
        return result
