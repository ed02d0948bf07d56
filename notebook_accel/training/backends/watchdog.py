"""A watchdog that reports what the ranks of a group are doing when one of them hangs in a collective.

On each rank a thread checks the store once a second for trouble or a question, which costs training nothing. Only when
a rank has failed, has ended, or asks, do the other ranks' threads write to the store where their training thread is.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import types
from collections.abc import Callable

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # documented, not listed in __all__

from notebook_accel import code_places, environment, nccl, torch_internals
from notebook_accel.environment import RankPlace
from notebook_accel.errors import CollectiveError, TrainingError
from notebook_accel.reporting import reporter

_PERIOD_S = 1.0
_GRACE_S = 4.0  # after another rank has ended, this one may still have the last bytes of a collective to read
_ANSWER_DEADLINE_S = 4.0
_POLL_S = 0.1
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.00005, 0.05  # between two looks whether the other ranks have come
_DEADLINE_S = 1800.0  # of a rank that waits for the others to come, where a collective's deadline is unknown


class CollectiveWatchdog:
    """Reports what every rank was doing when this one hangs, and frees this rank when a peer has failed or ended.

    Args:
        store: The ranks' store, under a prefix of this group's own.
        place: This rank's place in the group.
        free: A function that makes every wait for other ranks raise, except NCCL's.
        deadline_s: Deadline of a collective in seconds, ``None`` if unknown.
        warns_before_s: A deadline in seconds, after which a collective raises no error. Shortly before it, the watchdog
            writes to stderr what the ranks are doing. The warning frees no rank.
        progress: A function that returns counts which never decrease, and which are equal on all ranks wherever these
            have come to the same call. The list itself may grow.
    """

    def __init__(
        self,
        store: Store,
        place: RankPlace,
        free: Callable[[], None],
        deadline_s: float | None = None,
        *,
        warns_before_s: float | None = None,
        progress: Callable[[], list[int]] = list,
    ) -> None:
        self._store = PrefixStore("watch", store.clone())  # type: ignore[attr-defined]  # its own connection: the other may be waiting
        self._place = place
        self._others = [rank for rank in range(place.world_size) if rank != place.rank]
        self._free = free
        self._deadline_s = deadline_s
        self._progress = progress
        self._warns_after_s = 0.9 * warns_before_s if warns_before_s else None
        self._answered = 0  # number of questions that this rank has answered
        # Without aborts nothing would follow from it.
        self._status = torch_internals.nccl_status if environment.is_on(environment.NCCL_ABORT) else dict
        self._initial_status = self._status()  # of earlier broken groups, whose collectives never complete
        self._watched_thread = threading.get_ident()
        self._pid = os.getpid()
        self._stop = threading.Event()
        # A thread of its own, since the store blocks as long as the process that serves it is stopped.
        self._thread = threading.Thread(target=self._run, name="notebook-accel-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Tell the other ranks that this one has left the group, and stop."""
        if os.getpid() != self._pid or self._stop.is_set():
            return
        self._stop.set()
        self._thread.join(_ANSWER_DEADLINE_S)
        position = reporter().position()
        if not (reporter().has_failed or (not reporter().is_connected and hasattr(sys, "last_value"))):
            self._publish("left", "")
        self._publish("ended", "has ended" + (f", after {position}" if position else ""))

    def explanation(self, *, timed_out: bool) -> CollectiveError:
        """Return the error for a collective of this thread that has failed.

        Asks the other ranks where they are and waits some seconds for their answers.
        """
        position = reporter().position()
        # The caller's own frames are on top, and left out like all of this package.
        self._publish("failed", code_places.describe(sys._getframe(1)) + (f", {position}" if position else ""))
        by_rank = self._collect("doing").rstrip("\n")
        deadline = "" if self._deadline_s is None else f" of {self._deadline_s:g} s"
        what = f"waited in vain until the deadline{deadline}" if timed_out else "lost the connection to the others"
        return CollectiveError(
            f"Rank {self._place.rank} {what}. The ranks were here:\n{by_rank}",
            why="All ranks have to make the same calls in the same order, and to take as many steps.",
            fix="check that no rank leaves its loop before the others and that no collective is inside "
            "`if accelerator.is_main_process:`; for slow work, "
            "kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(hours=2))]. To go on in these processes: "
            "accelerator.end_training() and a new Accelerator() on every rank",
            lost_peer=not timed_out,
        )

    def has_memory_run_out(self) -> bool:
        """Return whether another rank has announced that memory has run out."""
        try:
            return any(self._store.check([f"{rank} memory"]) for rank in self._others)
        except RuntimeError:  # the rank that served the store has ended
            return False

    def give_up(self) -> None:
        """Make this rank's waits for other ranks raise, and the others do so too, since memory has run out.

        Each rank calls this when memory runs out on it, or when it knows of another. Afterwards the group can only be
        destroyed. Rank 0, which may serve the store, returns when all ranks have called this.

        Raises:
            TrainingError: On rank 0, a rank didn't call this until the deadline of a collective.
        """
        self._publish("memory", "")  # before the others' waits fail
        self._end_waits()
        awaited = [f"{rank} memory" for rank in self._others] if self._place.rank == 0 else []
        deadline = time.monotonic() + (self._deadline_s or _DEADLINE_S)
        while not all(self._store.check([key]) for key in awaited):
            if time.monotonic() > deadline:
                raise TrainingError(
                    "Memory ran out on a rank, and others still haven't come to a call in which they wait for it.",
                    fix="make every rank call the function, and take as many steps as the others",
                )
            time.sleep(_POLL_S)

    def _end_waits(self) -> None:
        self._free()
        nccl.abort()

    def absent_ranks(self) -> list[int]:
        """Wait until each other rank has come to this call or has passed it, and return those that have passed it.

        A rank has passed it if it hasn't said that it is here, and has begun a collective that this rank hasn't begun,
        has returned from the user's code, or has left the group. So slow ranks are waited for, and those that have
        failed, since the run ends then. All ranks that are here get the same list.

        Raises:
            CollectiveError: Ranks did neither until the deadline of a collective.
        """
        own = self._progress()
        awaited = {rank: f"{rank} has come to {own}" for rank in range(self._place.world_size)}
        self._store.set(awaited[self._place.rank], "")
        deadline = time.monotonic() + (self._deadline_s or _DEADLINE_S)
        absent: list[int] = []
        pause_s, asked = _SHORTEST_PAUSE_S, -1
        while not self._store.check(list(awaited.values())):
            for rank in [*awaited]:
                if self._has_passed(rank, own) and not self._store.check([awaited[rank]]):  # in this order
                    absent.append(rank)
                    del awaited[rank]
            if time.monotonic() > deadline:
                raise self.explanation(timed_out=True)
            if pause_s == _LONGEST_PAUSE_S and asked != self._answered:  # the ranks answer about once a second
                asked = self._answered
                self._store.set(f"question {asked}", "")
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, _LONGEST_PAUSE_S)
        return sorted(absent)

    def _has_passed(self, rank: int, own: list[int]) -> bool:
        """Return whether a rank has begun what this one hasn't, or has left, as far as its last answer says."""
        if self._store.check([f"{rank} left"]):
            return True
        key = f"{rank} progress"
        theirs: list[int] = json.loads(self._store.get(key)) if self._store.check([key]) else []
        return len(theirs) > len(own) or any(begun > known for begun, known in zip(theirs, own, strict=False))

    def _run(self) -> None:
        position: object = None
        since = warned_since = time.monotonic()
        while not self._stop.wait(_PERIOD_S):
            frame = sys._current_frames().get(self._watched_thread)
            if position != (position := (id(frame), frame and frame.f_lasti)):
                since = time.monotonic()
            standing_s = time.monotonic() - since
            if self._warns_after_s is not None and standing_s > self._warns_after_s and since != warned_since:
                if self._is_in_a_collective(frame):
                    warned_since = since
                    self._warn()
                else:
                    since = time.monotonic()  # it is busy with long work of its own
            del frame
            try:
                self._answer_questions()
                if self._store.check(["trouble"]) and self._handle_trouble(standing_s):
                    return
            except RuntimeError:  # the rank that served the store has ended
                return

    def _is_in_a_collective(self, frame: types.FrameType | None) -> bool:
        """Return whether the watched thread waits for other ranks, or for a GPU that waits for them."""
        if code_places.runs_only_ours(frame):  # as between two cells of a session
            return False
        if code_places.waits_for_ranks(frame):
            return True
        # A stack doesn't show which calls wait for a GPU, but NCCL knows whether it has completed all enqueued work.
        changed = self._status().items() - self._initial_status.items()
        return any(enqueued != completed for _, (enqueued, completed) in changed)

    def _handle_trouble(self, standing_s: float) -> bool:
        """Publish where this rank is, and free it if a peer has failed or ended; return whether it was freed."""
        self._publish("doing", self._position())
        if self.has_memory_run_out():
            self._end_waits()
            return True
        has_failed = any(self._store.check([f"{rank} failed"]) for rank in self._others)
        has_ended = any(self._store.check([f"{rank} ended"]) for rank in self._others)
        if has_failed or (has_ended and standing_s > _GRACE_S):
            self._free()
            return True
        return False

    def _position(self) -> str:
        """Return where in the user's code the watched thread is."""
        position = reporter().position()
        frame = sys._current_frames().get(self._watched_thread)
        if frame is not None and code_places.runs_only_ours(frame):
            return "runs none of your code"
        place = code_places.describe(frame) or "outside of Python"
        return f"{place}, {position}" if position else place

    def _publish(self, kind: str, text: str) -> None:
        try:
            self._store.set(f"{self._place.rank} {kind}", text)
            if kind != "doing":
                self._store.set("trouble", "")
        except RuntimeError:  # no rank serves the store any more
            pass

    def _answer_questions(self) -> None:
        while self._store.check([f"question {self._answered}"]):
            self._answer(self._answered)

    def _answer(self, question: int) -> None:
        self._store.set(f"{self._place.rank} doing in {question}", self._position())
        self._store.set(f"{self._place.rank} progress", json.dumps(self._progress()))
        self._answered = question + 1

    def _collect(self, kind: str) -> str:
        """Wait some seconds for the ranks' keys of this kind, and return a line for each rank with its activity."""
        deadline = time.monotonic() + _ANSWER_DEADLINE_S
        ranks = range(self._place.world_size)
        texts: dict[int, str] = {}
        while len(texts) < len(ranks) and time.monotonic() < deadline:
            try:
                self._answer_questions()  # others may ask too, and this is the thread that answers
                texts = self._published(kind)
            except RuntimeError:
                break
            time.sleep(_POLL_S)
        return "".join(f"  rank {rank}: {texts.get(rank, 'does not answer')}\n" for rank in ranks)

    def _published(self, kind: str) -> dict[int, str]:
        texts = {}
        for rank in range(self._place.world_size):
            for key in (f"{rank} failed", f"{rank} ended", f"{rank} {kind}"):
                if self._store.check([key]):
                    texts[rank] = self._store.get(key).decode()
                    break
        return texts

    def _warn(self) -> None:
        question = self._answered  # the same one where several ranks ask at once
        try:
            self._store.set(f"question {question}", "")
            self._answer(question)
        except RuntimeError:  # no rank serves the store any more
            return
        lines = self._collect(f"doing in {question}")
        sys.stderr.write(f"Rank {self._place.rank} has been standing still for long. The ranks are here:\n{lines}")
