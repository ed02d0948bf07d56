"""The kernel's side of a detached session, whose ranks serve one kernel after the other.

The ranks belong to a detached run. They join the kernel that listens in the run's folder, and wait there for the next
kernel when it has gone. A lock in the folder keeps a second kernel out.
"""

from __future__ import annotations

import itertools
import shlex
import sys
import time
from collections.abc import Mapping

from notebook_accel import VERSION
from notebook_accel.config import LaunchConfig
from notebook_accel.errors import ConfigError, RunError
from notebook_accel.formatting import ranks_in_words
from notebook_accel.interrupts import Interrupts, held
from notebook_accel.launching import run_folders
from notebook_accel.launching.kernel import detached
from notebook_accel.launching.kernel.detached_job import DetachedJob
from notebook_accel.launching.run_folders import RunFolder
from notebook_accel.launching.state.first_failure import first_failed
from notebook_accel.protocol import session_messages as messages
from notebook_accel.protocol.channel import ClosedError
from notebook_accel.sessions.kernel.rank_pool import RankPool
from notebook_accel.sessions.listener import JoinedRank

_REPORT_S = 2.0  # that ranks may take to join before a message reports what they do
_REPORT_PERIOD_S = 60.0


class DetachedRankPool(RankPool):
    """All ranks of a session that outlives this process.

    Starts a new session with these options, or attaches to the one in the folder ``run``. Raises a ``RunError`` if that
    has ended, or belongs to another kernel.
    """

    outlives_kernel = True

    def __init__(self, config: LaunchConfig, run: RunFolder | None = None) -> None:
        self._earlier = run
        super().__init__(config)

    def _start(self, config: LaunchConfig, interrupts: Interrupts) -> None:
        if self._earlier is None:
            run = RunFolder(run_folders.root() / run_folders.new_id(config.name or "session"))
            self._launch(config, run.path, run.id)
            self._listen(run)
            self._welcome(range(self.job.world_size), interrupts.check)
            return
        self._listen(self._earlier)
        detached.attach_and_show(self._earlier.id, show=self._launched)
        self._set_up()
        self._output.skip_earlier()
        joined = self._wait_for_ranks(interrupts)
        self._take_over(joined)

    def leave(self, name: str = "") -> None:
        """Disconnect this process. The ranks go on."""
        if name and name != self.job.name:
            raise ConfigError(f"The detached session {self.job.name!r} keeps its name.", fix="%distributed detach")
        if not self._is_closed:
            with held():
                assert isinstance(self.job, DetachedJob)
                self.job.leave()
                self._close_here()

    def _give_up(self) -> None:
        """Undo a failed start: end a new session, or leave an attached one, whose run stays visible here."""
        if self._earlier is None:
            self.close()
            return
        if self._job is not None:
            state = self._job.state
            self._job.doing = lambda: state.serving
        self._close_here()

    @property
    def _closed_text(self) -> str:
        if self.job.status != "detached":
            return super()._closed_text
        return f"This notebook has left the session {self.job.name!r}. The code that runs in it goes on."

    # Attaching --------------------------------------------------------------------------------------------------------

    def _wait_for_ranks(self, interrupts: Interrupts) -> dict[int, JoinedRank]:
        """Wait until each living rank has joined. A rank joins when it has ended an earlier kernel's cell."""
        assert self._listener is not None
        joined: dict[int, JoinedRank] = {}
        report_s = time.monotonic() + _REPORT_S
        try:
            while missing := [rank.rank for rank in self.job.ranks if not rank.is_dead and rank.rank not in joined]:
                interrupts.check()
                self._refuse_ended()
                self._end_if_begun()
                if (came := self._listener.accept()) is not None:
                    if came.rank in joined:  # the rank has lost its first connection
                        joined[came.rank].close()
                    joined[came.rank] = came
                    continue
                self._output.show_new()
                if time.monotonic() > report_s:
                    report_s = time.monotonic() + _REPORT_PERIOD_S
                    self._report_wait(missing)
        except BaseException:
            for each in joined.values():
                each.close()
            raise
        return joined

    def _end_if_begun(self) -> None:
        """End a session whose end an earlier kernel has started, before it was killed. Some ranks are gone already."""
        if any(rank.has_result for rank in self.job.ranks):
            self.job.stop()
            raise RunError(
                f"The session {self.job.name!r} has been ended by an earlier notebook.",
                fix="%distributed start --detach, and run the cells again",
            )

    def _report_wait(self, missing: list[int]) -> None:
        cells = dict.fromkeys(cell for rank in missing if (cell := self.job.ranks[rank].cell))
        who, name = f"{ranks_in_words(missing)} {'is' if len(missing) == 1 else 'are'}", shlex.quote(self.job.name)
        if cells:
            sys.stderr.write(
                f"[{who} still busy with {', '.join(cells)} of the earlier notebook: this waits for the end. An "
                f"interrupt ends only the waiting; then %distributed interrupt --run {name} interrupts that, and "
                f"%distributed attach {name} attaches]\n"
            )
        else:
            sys.stderr.write(f"[{who} not there yet. An interrupt ends only the waiting]\n")

    def _take_over(self, joined: Mapping[int, JoinedRank]) -> None:
        """Take over the ranks with their state from earlier kernels."""
        kept = {rank: each.kept for rank, each in joined.items() if each.kept is not None}
        self._numbers = itertools.count(max((each.requests for each in kept.values()), default=0) + 1)
        renewals = {each.renewals for each in kept.values()}
        self._group_recovery.renewals = max(renewals, default=0)
        self.namespace_sync.take_over({rank: (each.own, each.sent) for rank, each in kept.items()})
        for each in joined.values():
            try:
                self._add(each)
            except ClosedError:  # the rank has died meanwhile; the next request reports it
                each.close()
        self._report_failure(kept)
        groups = {each.group for each in kept.values()}
        if groups - {"sound"} or len(renewals) > 1 or (kept and len(kept) < len(joined)):
            self._group_recovery.after(self.alive, is_broken="broken" in groups or len(renewals) > 1)

    def _report_failure(self, kept: Mapping[int, messages.RetainedState]) -> None:
        """Show the failure of the ranks' last code, which no kernel may have shown yet."""
        failed = {rank: each.failed for rank, each in kept.items() if each.failed is not None}
        first = first_failed(failed)
        if first is not None:
            self._failed_rank = first
            sys.stderr.write(
                f"[{kept[first].title}, the last code of the earlier notebook, has failed on rank {first}]\n"
                f"{failed[first].traceback.rstrip()}\n"
            )
        elif titles := list(dict.fromkeys(each.title for each in kept.values() if each.title)):
            sys.stderr.write(
                f"[the last code of the earlier notebook was {', '.join(titles)}; %distributed logs shows what the "
                "ranks have printed meanwhile]\n"
            )


def find(which: str) -> RunFolder:
    """Return the folder of a detached session that goes on, by its name or id."""
    run = run_folders.find_session(which)
    if run is None:
        named = f" {which!r}" if which else ""
        raise RunError(
            f"You have no detached session{named} in progress.",
            fix="%distributed runs lists what there is; %distributed start --detach --name NAME starts one",
        )
    facts = run.facts
    if facts.version != VERSION:  # the messages to ranks differ between versions
        raise RunError(
            f"The session {facts.name!r} can't be attached by notebook-accel {VERSION}.",
            why=f"notebook-accel {facts.version} has started it.",
            fix=f"attach with notebook-accel {facts.version}; "
            f"notebook-accel stop {shlex.quote(facts.name)} works with any",
        )
    return run
