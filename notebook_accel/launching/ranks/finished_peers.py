"""Ends a rank's wait for finished ranks.

A finished rank stays until all have finished, since a group breaks when one of its ranks leaves. A collective that
needs a finished rank would wait until torch's deadline, half an hour with gloo. The agent tells each rank which others
have finished. If this rank then stays in one collective for long, and each of its process groups has a finished rank,
the collective can't complete: the rank's connections to the others are shut down, so that the call raises. Making a
group or an ``Accelerator`` waits for the others too, in the store. The watcher of ``interruption`` looks whether it is
so, once a rank has finished.

The group of an ``Accelerator`` does this by itself, and sooner (``training.backends.watchdog``).
"""

from __future__ import annotations

import os
import sys
import threading
import time
import types
from collections.abc import Sequence

from notebook_accel import code_places, nccl, torch_internals
from notebook_accel.errors import CollectiveError, TrainingError
from notebook_accel.formatting import ranks_in_words
from notebook_accel.launching import processes
from notebook_accel.launching.ranks import interruption

_PATIENCE_S = 10.0  # the last bytes of a collective may still be on their way
_ASLEEP = {"S", "D"}  # states of a process, which are those of its main thread
_BETWEEN_TWO = {"send", "recv", "send_object_list", "recv_object_list"}  # the other rank may not have finished


class FinishedPeers:
    """The finished ranks that this rank knows, and the look whether it waits for them."""

    def __init__(self) -> None:
        self._finished: set[int] = set()
        self._call: tuple[int, int] | None = None  # where the main thread was at the last look
        self._since_s = 0.0
        self._has_left = False  # True once disconnected from the other ranks; this rank may then wait in the store
        self._ended_wait = ""  # the collective whose wait was ended

    def take(self, ranks: Sequence[int]) -> None:
        """Add finished ranks, and look from now on whether this rank waits for one."""
        self._finished.update(ranks)
        interruption.look_each_second(self._look)

    def explain(self, error: BaseException) -> BaseException:
        """Return a ``CollectiveError`` if ``error`` is from a wait that was ended here, else ``error`` itself."""
        if not self._ended_wait or not isinstance(error, (RuntimeError, TrainingError)):
            return error
        explained = CollectiveError(
            f"This rank waited for {ranks_in_words(self._finished)}, which had finished: {self._ended_wait}.",
            why="All ranks have to call the same collectives, and to take as many steps.",
            fix="give all ranks as many batches, as accelerator.prepare(loader) and DistributedSampler do; "
            "keep collectives out of `if rank == 0:`",
        )
        return explained.with_traceback(error.__traceback__)

    def _look(self) -> None:
        """End the main thread's wait if it is in one collective for long, and no group can complete it."""
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        before, self._call = self._call, (id(frame), frame.f_lasti) if frame else None
        if self._call != before or processes.state(os.getpid()) not in _ASLEEP:  # the main thread computes
            self._since_s = time.monotonic()
        elif (
            time.monotonic() - self._since_s > _PATIENCE_S
            and _is_in_a_collective(frame)
            and self._are_all_groups_short()
        ):
            self._ended_wait = code_places.describe(frame)
            nccl.abort()
            interruption.disconnect(is_of_store=self._has_left)
            self._has_left, self._since_s = True, time.monotonic()

    def _are_all_groups_short(self) -> bool:
        """Return whether each process group that this rank is in has a rank that has finished."""
        groups = torch_internals.ranks_of_groups()
        if groups is None:
            return False
        # Without such groups, the first one is being made.
        return all(ranks & self._finished for ranks in groups if len(ranks) > 1)


def _is_in_a_collective(frame: types.FrameType | None) -> bool:
    calls = code_places.library_calls(frame)
    return code_places.waits_for_ranks(frame) and not any(call.f_code.co_name in _BETWEEN_TWO for call in calls)


FINISHED_PEERS = FinishedPeers()
"""The finished peers that this process knows."""
