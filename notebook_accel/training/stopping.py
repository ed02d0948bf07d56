"""Stopping before the time limit, on all ranks at the same step.

Each rank counts how often it has asked whether to stop. When the time has come, a thread of each rank reads the count,
and further questions of its rank wait. The threads exchange their counts through the ranks' store. The first question
that no rank has asked yet is the first that every rank answers with yes.

So a question costs a lock and an addition until then, and about half a millisecond at the end. No rank waits for
another one's training: the threads answer whatever their ranks do, even after a rank has left its loop.

Ranks whose counts differ by more than ``_MOST_APART`` don't train together. Each of them stops by itself.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # documented, not listed in __all__

from notebook_accel import reporting, time_limit, torch_internals
from notebook_accel.environment import RankPlace
from notebook_accel.errors import ConfigError
from notebook_accel.training.backends.backend import Backend
from notebook_accel.training.backends.single_process import WorkerProcess
from notebook_accel.training.checkpoint_folders import ProjectConfiguration

_LOOK_PERIOD_S = 30.0  # between two looks at the clock, which may be set
_ANSWER_DEADLINE_S = 60.0
_MOST_APART = 1000  # questions; a GPU's queue lets ranks that train together be a few steps apart

_logger = logging.getLogger(__name__)
_numbers: weakref.WeakKeyDictionary[Any, Iterator[int]] = weakref.WeakKeyDictionary()  # for each default group


class Stopping:
    """Answers whether a rank should stop, since its time limit ``end_s`` (in seconds since the epoch) is near."""

    def __init__(self, place: RankPlace, store: Any, end_s: float | None, *, saves_on_end: bool) -> None:
        self.has_backward = False  # True once ``Accelerator.backward`` was called
        self._saves_on_end = saves_on_end  # prepared loops ask by themselves, so warn if none has asked at the end
        self._place = place
        self._store = store  # a connection for this object alone; ``None`` for a single rank
        self._end_s = end_s
        self._lock = threading.Lock()
        self._questions = 0
        self._is_time = False
        self._first_yes = 0
        self._is_agreed = threading.Event()
        self._has_reported = False

    def ask(self) -> bool:
        """Return whether to stop. All ranks ask equally often, and get the same answer to the same question."""
        with self._lock:
            self._questions += 1
            number = self._questions
            if not self._is_time:
                return False
        self._is_agreed.wait(2 * _ANSWER_DEADLINE_S)
        if number < self._first_yes:
            return False
        if not self._has_reported and self._end_s is not None:
            self._has_reported = True
            reporting.reporter().report_time_limit(self._end_s)
            if self._place.rank == 0:
                end = time_limit.in_words(self._end_s)
                print(f"[training stops here, since the time limit is {end}]", file=sys.stderr, flush=True)
        return True

    def leave(self) -> None:
        """Publish this rank's final count, so that other ranks don't wait for it."""
        with contextlib.suppress(RuntimeError):  # the rank that served the store has ended
            self._publish(self._free_questions())

    def agree(self) -> None:
        """Agree with the other ranks on the first question to answer with yes."""
        own = self._free_questions()
        if own == 0 and self._saves_on_end:
            self._warn_of_no_question()
        try:
            numbers = self._exchange(own)
            trains_alone = max(numbers) - min(numbers) > _MOST_APART
            self._first_yes = 1 + (own if trains_alone else max(numbers))
        except RuntimeError as error:  # a rank hasn't answered, or the one that serves the store has ended
            _logger.warning(
                "Rank %d stops before the time limit without knowing when the others do: %s", self._place.rank, error
            )
            self._first_yes = 1 + own
        self._is_agreed.set()

    def _free_questions(self) -> int:
        """Return the number of questions so far, and make further ones wait until the ranks have agreed."""
        with self._lock:
            self._is_time = True
            return self._questions

    def _publish(self, number: int) -> None:
        if self._store is not None:
            self._store.set(str(self._place.rank), str(number))

    def _exchange(self, number: int) -> list[int]:
        """Return how many questions each rank had asked when its time came."""
        self._publish(number)
        if self._store is None:
            return [number]
        keys = [str(rank) for rank in range(self._place.world_size)]
        self._store.wait(keys, datetime.timedelta(seconds=_ANSWER_DEADLINE_S))
        return [int(self._store.get(key)) for key in keys]

    def _warn_of_no_question(self) -> None:
        if self._place.rank != 0 or self._end_s is None:
            return
        if self.has_backward:
            missing, fix = "taken no batch from a prepared loader", "loader = accelerator.prepare(loader)"
        else:
            missing, fix = "not called accelerator.backward", "accelerator.backward(loss) instead of loss.backward()"
        _logger.warning(
            "save_on_end has had no effect so far, and the time limit is %s: training has %s, so it doesn't save and "
            "stop by itself. Fix: %s; or, once a step, if accelerator.should_stop: accelerator.save_state(); break",
            time_limit.in_words(self._end_s),
            missing,
            fix,
        )


def check_folder(save_on_end: str | os.PathLike[str] | bool, project: ProjectConfiguration) -> str | None:
    """Return the folder that ``save_on_end`` names: ``""`` for the next numbered one, ``None`` to save nothing."""
    if save_on_end is True and not project.automatic_checkpoint_naming:
        raise ConfigError(
            "save_on_end=True has no folder to save to.",
            fix='save_on_end="runs/first", or project_config=ProjectConfiguration("runs/first", '
            "automatic_checkpoint_naming=True)",
        )
    if isinstance(save_on_end, bool):
        return "" if save_on_end else None
    return os.fspath(save_on_end)


def _answer_in_time(stopping: Stopping, stop_s: float, owner: weakref.ref[Any]) -> None:
    """Wait until it is time to stop, then agree with the other ranks. Runs in the thread."""
    while (left_s := stop_s - time.time()) > 0:
        time.sleep(min(left_s, _LOOK_PERIOD_S))
        if owner() is None:  # no further question will come
            stopping.leave()
            return
    stopping.agree()


def of_rank(backend: Backend, owner: object, *, saves_on_end: bool) -> Stopping:
    """Return the ``Stopping`` that answers ``owner``, for the environment's time limit. All ranks call this.

    Its thread ends when the time has come or ``owner`` is garbage-collected.
    """
    # The rank itself answers for its loaders' workers.
    end_s = None if isinstance(backend, WorkerProcess) else time_limit.end_of("")
    store = _own_connection() if end_s is not None and backend.place.world_size > 1 else None
    stopping = Stopping(backend.place, store, end_s, saves_on_end=saves_on_end)
    if end_s is not None:
        waits = (stopping, end_s - time_limit.margin_of(), weakref.ref(owner))
        # A thread of its own, since it waits in the store for the other ranks' counts.
        threading.Thread(target=_answer_in_time, args=waits, name="notebook-accel-end", daemon=True).start()
    return stopping


def _own_connection() -> Any:
    """Return a connection to the store of the default group, with keys that no other object of this process uses."""
    default = torch_internals.default_store()
    number = next(_numbers.setdefault(dist.group.WORLD, itertools.count()))
    own = default.clone()  # the other connection may be waiting
    return PrefixStore(f"notebook_accel/stopping/{number}", own)
