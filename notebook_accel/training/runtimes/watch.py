"""What the ranks of a group are doing, for the case that one of them waits in vain.

Training pays nothing for it: a thread of each rank asks the store once a second whether there is trouble. Only when a
rank has given up, or has ended, do the others write down where they are, which the thread reads off their stacks.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # documented, not listed in __all__

from notebook_accel import code_places
from notebook_accel.environment import RankPlace
from notebook_accel.errors import CollectiveError
from notebook_accel.reporting import reporter

__all__ = ["Watch"]

_PERIOD_S = 1.0
# A rank may have the last bytes of a collective still to read when the other has ended already.
_GRACE_S = 4.0
_ANSWER_DEADLINE_S = 4.0
_POLL_S = 0.1


class Watch:
    """Lets a rank that waits in vain say what every rank was doing, and frees it when nobody will come any more.

    Args:
        store: The ranks' store, under a prefix of this group's own.
        place: This rank's place in the group.
        free: Makes whatever waits for other ranks raise.
        deadline_s: How long a collective may take, in seconds; ``None`` if that isn't known.
        warns: Whether to write what the ranks are doing to stderr shortly before the deadline, because a collective
            that passes it ends the process.
    """

    def __init__(
        self,
        store: Store,
        place: RankPlace,
        free: Callable[[], None],
        deadline_s: float | None = None,
        *,
        warns: bool = False,
    ) -> None:
        self._store = PrefixStore("watch", store.clone())  # type: ignore[attr-defined]  # a connection of its own: the other may be waiting
        self._place = place
        self._free = free
        self._deadline_s = deadline_s
        self._warns_after_s = 0.9 * deadline_s if warns and deadline_s else None
        self._watched_thread = threading.get_ident()
        self._pid = os.getpid()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="notebook-accel-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Says that this rank has left the group, and stops watching."""
        if os.getpid() != self._pid or self._stop.is_set():
            return
        self._stop.set()
        self._thread.join(_ANSWER_DEADLINE_S)
        position = reporter().position()
        self._say("ended", "has ended" + (f", after {position}" if position else ""))

    def explanation(self, *, timed_out: bool) -> CollectiveError:
        """The error for this thread's own collective, which has failed.

        Asks the other ranks where they are and waits some seconds for their answers.
        """
        position = reporter().position()
        # The caller's own frames are on top, and left out like all of this package.
        doing = code_places.describe(sys._getframe(1)) + (f", {position}" if position else "")
        self._say("failed", doing)
        doings = self._ask()
        by_rank = "\n".join(f"  rank {rank}: {doings[rank]}" for rank in sorted(doings))
        deadline = "" if self._deadline_s is None else f" of {self._deadline_s:g} s"
        what = f"waited in vain until the deadline{deadline}" if timed_out else "lost the connection to the others"
        return CollectiveError(
            f"Rank {self._place.rank} {what}. The ranks were here:\n{by_rank}",
            why="All ranks have to make the same calls in the same order, and to take as many steps.",
            fix="see that no rank leaves its loop alone and that no collective is inside "
            "`if accelerator.is_main_process:`; for slow work, "
            "kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(hours=2))]. To go on in these processes: "
            "accelerator.end_training() and a new Accelerator() on every rank",
            lost_peer=not timed_out,
        )

    def _run(self) -> None:
        position: object = None
        since = time.monotonic()
        while not self._stop.wait(_PERIOD_S):
            frame = sys._current_frames().get(self._watched_thread)
            if position != (position := (id(frame), frame and frame.f_lasti)):
                since = time.monotonic()
            standing_s = time.monotonic() - since
            del frame
            if self._warns_after_s is not None and standing_s > self._warns_after_s:
                self._warns_after_s = None
                self._warn()
            try:
                if self._store.check(["trouble"]) and self._answer(standing_s):
                    return
            except RuntimeError:  # the store has gone with the rank that served it, and so has its connection
                return

    def _answer(self, standing_s: float) -> bool:
        """Says where this rank is, and frees it if nobody will come; returns whether it did."""
        self._say("doing", self._doing())
        others = [rank for rank in range(self._place.world_size) if rank != self._place.rank]
        has_failed = any(self._store.check([f"{rank} failed"]) for rank in others)
        has_ended = any(self._store.check([f"{rank} ended"]) for rank in others)
        if has_failed or (has_ended and standing_s > _GRACE_S):
            self._free()
            return True
        return False

    def _doing(self) -> str:
        position = reporter().position()
        place = code_places.describe(sys._current_frames().get(self._watched_thread)) or "outside of Python"
        return f"{place}, {position}" if position else place

    def _say(self, what: str, text: str) -> None:
        try:
            self._store.set(f"{self._place.rank} {what}", text)
            if what != "doing":
                self._store.set("trouble", "")
        except RuntimeError:  # nobody is left to tell
            pass

    def _ask(self) -> dict[int, str]:
        """What each rank is doing, as far as they answer in time."""
        deadline = time.monotonic() + _ANSWER_DEADLINE_S
        doings: dict[int, str] = {}
        while len(doings) < self._place.world_size and time.monotonic() < deadline:
            try:
                doings = self._known()
            except RuntimeError:
                break
            time.sleep(_POLL_S)
        return {rank: doings.get(rank, "doesn't answer") for rank in range(self._place.world_size)}

    def _known(self) -> dict[int, str]:
        known = {}
        for rank in range(self._place.world_size):
            for what in ("failed", "ended", "doing"):
                key = f"{rank} {what}"
                if self._store.check([key]):
                    known[rank] = self._store.get(key).decode()
                    break
        return known

    def _warn(self) -> None:
        self._say("failed", self._doing())
        lines = "".join(f"  rank {rank}: {doing}\n" for rank, doing in self._ask().items())
        sys.stderr.write(f"Rank {self._place.rank} has been standing still for long. The ranks are here:\n{lines}")
