"""Every error that this package raises on purpose.

    NotebookAccelError
    ├── ConfigError (ValueError)        an option is unknown, or its value isn't allowed
    ├── LaunchError                     the run could not be started
    │   ├── PreflightError              the checks before a launch refused it; lists every finding
    │   ├── CellError                   the cell can't be run in a rank as it is written
    │   │   └── CellSyntaxError         it is not Python
    │   ├── PayloadError                an object can't be sent to the ranks; names the path to it
    │   └── ProcessStartError           a process of ours could not be started
    ├── RunError                        the run was started and did not end well
    │   ├── ResultError (PayloadError)  a rank's value, or a name to be pulled, can't be read
    │   ├── RankFailedError             a rank raised or died; reports the first, with its traceback
    │   ├── RunStoppedError             somebody stopped the run
    │   ├── RunTimeoutError (TimeoutError)   ``timeout_s`` ran out
    │   ├── NodeLostError               another node of the run is gone, or has ended the run
    │   └── SupervisorLostError         the process that supervises the ranks is gone
    └── TrainingError                   misuse of the training runtime inside a rank
        ├── CheckpointError             a checkpoint can't be written or read, or doesn't fit
        └── CollectiveError             ranks disagree about a collective, or one didn't join it

A message has the event, the reason and a fix to type; attributes have the context. Every error can be pickled, since
errors travel from ranks to the notebook.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import signal
from typing import Any

from notebook_accel.formatting import coloured, wants_colours

__all__ = [
    "CellError",
    "CellSyntaxError",
    "CheckpointError",
    "CollectiveError",
    "ConfigError",
    "Finding",
    "LaunchError",
    "NodeLostError",
    "NotebookAccelError",
    "PayloadError",
    "PreflightError",
    "ProcessStartError",
    "RankEnd",
    "RankFailedError",
    "ResultError",
    "RunError",
    "RunStoppedError",
    "RunTimeoutError",
    "SupervisorLostError",
    "TrainingError",
]


class NotebookAccelError(Exception):
    """The base class.

    Args:
        what: The event, in one sentence.
        why: The reason, where ``what`` doesn't have it.
        fix: The text to type, or the thing to change.
    """

    def __init__(self, what: str, *, why: str = "", fix: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.why = why
        self.fix = fix

    def __str__(self) -> str:
        return "\n".join(part for part in (self.what, self.why, self.fix and f"Fix: {self.fix}") if part)

    def _render_traceback_(self) -> list[str]:
        """Return the error for IPython, without a traceback: all of the kernel's frames are ours."""
        parts = [f"{type(self).__name__}: {self}", self._advice_in_notebook(), documentation_of(self)]
        text = "\n".join(filter(None, parts))
        return [coloured(text) if wants_colours() else text]

    def _advice_in_notebook(self) -> str:
        """Return the commands to type next in a notebook; empty where the error itself has them."""
        return ""

    def __reduce__(self) -> tuple[Any, ...]:
        # The constructors differ, so rebuild from the attributes instead of calling them.
        return _rebuild, (type(self), self.args, self.__dict__)


def documentation_of(error: NotebookAccelError) -> str:
    """Return a line with the address of an error's section in the documentation.

    It is empty unless the installed package has a project URL named ``Documentation``, as a published one has.
    """
    address = _documentation_address()
    known = next((kind.__name__ for kind in type(error).__mro__ if kind.__name__ in __all__), "")
    return f"More: {address}/errors.html#{known.lower()}" if address and known else ""


@functools.cache
def _documentation_address() -> str:
    """Return the address of the documentation that the installed package names, or an empty string."""
    import importlib.metadata  # a slow import

    with contextlib.suppress(Exception):  # damaged metadata mustn't hide the error that is being shown
        for url in importlib.metadata.metadata("notebook-accel").get_all("Project-URL") or []:
            label, _, address = url.partition(",")
            if label.strip().lower() == "documentation":
                return str(address.strip().rstrip("/"))
    return ""


def _rebuild(kind: type[NotebookAccelError], args: tuple[Any, ...], attributes: dict[str, Any]) -> NotebookAccelError:
    error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(attributes)
    return error


class ConfigError(NotebookAccelError, ValueError):
    """An option is unknown, or its value isn't allowed."""


class LaunchError(NotebookAccelError):
    """The run could not be started. No rank has run any user code."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """One finding of the checks before a launch. It is a warning unless it ``refuses`` the launch."""

    what: str
    why: str
    fix: str
    refuses: bool = True

    def __str__(self) -> str:
        return "\n".join(
            [self.what, *(f"  {word}: {text}" for word, text in (("Why", self.why), ("Fix", self.fix)) if text)]
        )


class PreflightError(LaunchError):
    """The checks before a launch refused it. ``findings`` has all of them."""

    def __init__(self, findings: tuple[Finding, ...]) -> None:
        refusing = [str(finding) for finding in findings if finding.refuses]
        if len(refusing) > 1:
            numbered = [f"{number}. {text}" for number, text in enumerate(refusing, 1)]
            refusing = [f"{len(refusing)} problems prevent this launch:", *numbered]
        super().__init__("\n".join(refusing))
        self.findings = findings


class CellError(LaunchError):
    """The cell uses something that a rank can't do, found before any process is started."""


class CellSyntaxError(CellError):
    """The cell is not Python. ``shown`` is how the notebook shows a syntax error."""

    def __init__(self, what: str, *, shown: tuple[str, ...]) -> None:
        super().__init__(what)
        self.shown = shown

    def _render_traceback_(self) -> list[str]:
        return list(self.shown)


class PayloadError(LaunchError):
    """An object can't be pickled, or the objects to send don't fit into memory.

    Attributes:
        path: The path to the object from a name that the user knows, for example
            ``global "loader" -> attribute "dataset" -> attribute "file"``.
    """

    def __init__(self, what: str, *, path: str, why: str = "", fix: str = "") -> None:
        super().__init__(what, why=why, fix=fix)
        self.path = path


class ProcessStartError(LaunchError):
    """The agent or the template, the processes that ranks are forked from, could not be started."""


class RunError(NotebookAccelError):
    """The run was started and did not end with every rank's result."""


class ResultError(PayloadError, RunError):
    """A rank's result, or a pulled variable, can't be read. The error has all other values.

    Attributes:
        values: The values that could be read, by rank.
        reasons: The reasons for the missing values, by their names in messages.
        pulled: The names that were bound in the notebook nevertheless.
        job: The run, to ask again; ``None`` for a session's cell, and in a copy.
    """

    def __init__(
        self,
        what: str,
        *,
        path: str,
        why: str = "",
        fix: str = "",
        values: dict[int, Any] | None = None,
        reasons: dict[str, str] | None = None,
        pulled: tuple[str, ...] = (),
    ) -> None:
        super().__init__(what, path=path, why=why, fix=fix)
        self.values = values or {}
        self.reasons = reasons or {}
        self.pulled = pulled
        self.job: Any = None

    def __str__(self) -> str:
        parts = [super().__str__()]
        if self.pulled:
            parts.append(f"Pulled all the same: {', '.join(self.pulled)}")
        ranks = ", ".join(str(rank) for rank, value in self.values.items() if value is not None)
        if ranks:
            parts.append(f"The values of rank {ranks} are in this error: sys.last_value.values")
        return "\n".join(parts)

    def __reduce__(self) -> tuple[Any, ...]:
        rebuild, (kind, args, attributes) = super().__reduce__()
        return rebuild, (kind, args, {**attributes, "job": None})


@dataclasses.dataclass(frozen=True)
class RankEnd:
    """The end of one rank.

    Attributes:
        rank: The rank.
        exit_code: Its exit status, or ``None`` if a signal ended it.
        signal: The signal's number, or ``None``.
        stopped: Whether the signal was ours, sent because another rank had failed or the run was stopped.
        error: The exception's type and message in one line, empty if there was none.
        finished: Whether its code had returned before that.
    """

    rank: int
    exit_code: int | None = None
    signal: int | None = None
    stopped: bool = False
    error: str = ""
    finished: bool = False

    def __str__(self) -> str:
        if self.finished:
            return f"rank {self.rank}: had finished"
        if self.error and not self.stopped:
            return f"rank {self.rank}: {self.error}"
        if self.stopped:
            went_on = self.signal == signal.SIGKILL
            return f"rank {self.rank}: stopped" + (" by SIGKILL, since it went on after the grace" if went_on else "")
        if self.signal is not None:
            return f"rank {self.rank}: killed by {signal_name(self.signal)}"
        return f"rank {self.rank}: exited with status {self.exit_code}"


class RankFailedError(RunError):
    """A rank failed. The first rank to fail is reported, and its exception, if it had one, is ``__cause__``.

    Attributes:
        rank: The rank that failed first.
        world_size: Number of ranks in the run.
        exit_code: The rank's exit status, ``None`` if a signal ended it or it was still alive.
        signal: The number of the signal that ended it, or ``None``.
        remote_traceback: The rank's traceback as text, the user's frames only; empty if it died without one.
        last_output: The last lines that the rank wrote.
        local_rank: The rank's number on this node.
        log_file: The file with the rank's whole output, empty if there is none.
        others: The ends of the other ranks.
        pulled: The names that were bound in the notebook nevertheless, with the values that rank 0 had then.
        not_pulled: The reasons for the names that could not be pulled.
        restarts: The reason of each earlier restart of all ranks.
    """

    def __init__(
        self,
        what: str,
        *,
        rank: int,
        world_size: int,
        why: str = "",
        fix: str = "",
        exit_code: int | None = None,
        signal: int | None = None,
        remote_traceback: str = "",
        last_output: tuple[str, ...] = (),
        others: tuple[RankEnd, ...] = (),
    ) -> None:
        super().__init__(what, why=why, fix=fix)
        self.rank = rank
        self.world_size = world_size
        self.exit_code = exit_code
        self.signal = signal
        self.remote_traceback = remote_traceback
        self.last_output = last_output
        self.others = others
        self.log_file = ""
        self.local_rank = rank
        self.pulled: tuple[str, ...] = ()
        self.not_pulled: dict[str, str] = {}
        self.restarts: tuple[str, ...] = ()

    def __str__(self) -> str:
        parts = [super().__str__()]
        if self.remote_traceback:
            parts.append(f"Traceback of rank {self.rank}:\n{self.remote_traceback.rstrip()}")
        if self.last_output:
            lines = "\n".join(f"  {line}" for line in self.last_output)
            parts.append(f"Last output of rank {self.rank}:\n{lines}")
        if self.log_file:
            parts.append(f"Its whole output: {self.log_file}")
        if self.others:
            parts.append("The others:\n" + "\n".join(f"  {end}" for end in self.others))
        if self.restarts:
            reasons = "\n".join(f"  {number}. {why}" for number, why in enumerate(self.restarts, 1))
            times = "once" if len(self.restarts) == 1 else f"{len(self.restarts)} times"
            parts.append(f"All ranks had been started again {times} before:\n{reasons}")
        if self.pulled:
            parts.append(f"Pulled all the same, as it was then in rank 0: {', '.join(self.pulled)}")
        if self.not_pulled:
            parts.append("Not pulled:\n" + "\n".join(f"  {why}" for why in self.not_pulled.values()))
        return "\n".join(parts)

    def _advice_in_notebook(self) -> str:
        if not self.log_file:
            return ""
        logs = f"%distributed logs {self.rank} shows more of its output"
        was_raised = bool(self.remote_traceback) and self.signal is None
        return f"Next: {logs}" + ("; after a run with --start_method inline, %debug works" if was_raised else "")


class RunStoppedError(RunError):
    """The run was stopped: by ``Job.stop()``, the panel's button, the extension's unloading, SIGTERM to its agent."""


class RunTimeoutError(RunError, TimeoutError):
    """The run took longer than its ``timeout_s``, or a result was not there in time."""


class NodeLostError(RunError):
    """Another node of the run is gone, or a user has ended the run there. The ranks here were stopped."""


class SupervisorLostError(RunError):
    """The agent, the process that supervises the ranks, is gone. Its ranks were killed with it."""


class TrainingError(NotebookAccelError):
    """The training library was used in a way that can't work."""


class CheckpointError(TrainingError):
    """A checkpoint can't be written or read, or doesn't fit the ranks or the model. All ranks raise this."""


class CollectiveError(TrainingError):
    """Ranks disagree about a collective, or one of them didn't join it.

    Attributes:
        lost_peer: Whether another rank ended or failed before, so that its own error explains more.
    """

    def __init__(self, what: str, *, why: str = "", fix: str = "", lost_peer: bool = False) -> None:
        super().__init__(what, why=why, fix=fix)
        self.lost_peer = lost_peer


def signal_name(number: int) -> str:
    """Return ``SIGKILL`` for 9, and ``signal 99`` for a number without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
