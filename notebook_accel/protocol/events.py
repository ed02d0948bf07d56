"""What a rank can say while it runs. The only vocabulary between a rank and whoever watches it.

Events are small, typed and encoded with msgpack, never pickled: whoever reads them executes nothing. The one pickle in
here, ``Failed.exception``, stays bytes until the job that owns the rank opens it.

Times are seconds of ``time.monotonic()``, which on Linux is one clock for all processes of a machine, so that events of
different ranks can be ordered. Those of ranks on another machine are put by the kernel's clock as they reach it.
"""

from __future__ import annotations

import time
from typing import Any, Literal, TypeAlias

import msgspec

from notebook_accel.formatting import plain_text

__all__ = [
    "SAMPLES",
    "Display",
    "Ended",
    "Event",
    "Failed",
    "Finished",
    "Memory",
    "MemoryShortage",
    "Metrics",
    "Nodes",
    "Numbered",
    "Output",
    "Progress",
    "Respawning",
    "Restarting",
    "Silent",
    "Started",
    "Working",
    "decode",
    "encode",
]


class _Event(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    time_s: float = msgspec.field(default_factory=time.monotonic)


class Started(_Event, frozen=True, kw_only=True):
    """The rank is about to run the user's code.

    Attributes:
        pid: Its process.
        node: Which of the run's nodes it is on, from 0.
    """

    pid: int
    node: int = 0


class Progress(_Event, frozen=True, kw_only=True):
    """Where the rank stands.

    Attributes:
        step: Steps done in this epoch (or of this bar).
        total: Steps of this epoch, ``None`` if it isn't known.
        epoch: The epoch that is running, from 1; ``None`` if the source has no epochs.
        epochs: How many epochs there will be, ``None`` if it isn't known.
        steps: Steps done since the rank was started, over all epochs and loaders. The rate is made from this.
        label: What is being counted, such as a bar's description.
        device: The device that the rank computes on, such as ``cpu`` or ``cuda:0``; empty if not known yet.
        compiling: Whether the device's compiler is at work on the running step, which says nothing of how long later
            steps take.
    """

    step: int
    total: int | None = None
    epoch: int | None = None
    epochs: int | None = None
    steps: int = 0
    label: str = ""
    device: str = ""
    compiling: bool = False


class Metrics(_Event, frozen=True, kw_only=True):
    """The latest reported value of each metric, and the step (over all epochs) that they belong to."""

    step: int
    values: dict[str, float]


class Output(_Event, frozen=True, kw_only=True):
    """Whole lines that the rank wrote, to whichever stream, without the last newline.

    Attributes:
        text: The lines.
        left_out: How many lines before them are in the rank's log only, since they were too many for a notebook.
    """

    text: str
    left_out: int = 0


class Display(_Event, frozen=True, kw_only=True):
    """Something the rank displayed.

    Attributes:
        data: A mime bundle. Binary data is base64 text, as Jupyter has it.
        metadata: What Jupyter is to know about it, such as an image's width.
        display_id: Under which it can be changed later; empty if it can't.
        is_update: Whether it takes the place of what was displayed with that id.
        log_bytes: How long the rank's log was then: what stands in it before comes before.
    """

    data: dict[str, Any]
    metadata: dict[str, Any] = {}
    display_id: str = ""
    is_update: bool = False
    log_bytes: int = 0


class Memory(_Event, frozen=True, kw_only=True):
    """Memory in use by the rank, of what its device has, in bytes.

    Attributes:
        used_bytes: What is in use.
        total_bytes: What there is.
        kind: Which memory that is.
        utilisation: Per cent of the last second in which the device computed, ``None`` where nothing measures it.
    """

    used_bytes: int
    total_bytes: int
    kind: Literal["host", "device"]
    utilisation: float | None = None


class Failed(_Event, frozen=True, kw_only=True):
    """The user's code raised.

    Attributes:
        kind: The exception's class name, such as ``ValueError``.
        message: The exception's text.
        traceback: The formatted traceback, the user's frames only.
        line: The innermost line of the user's, such as ``In[7], line 12``; empty if there is none.
        exception: The exception pickled, empty if it can't be.
        lost_peer: Whether it only says that another rank has gone, so that the cause is elsewhere.
        saved: Whether the names that were to be pulled are in the rank's result file, as they were at the failure.
    """

    kind: str
    message: str
    traceback: str
    line: str = ""
    exception: bytes = b""
    lost_peer: bool = False
    saved: bool = False


class Finished(_Event, frozen=True, kw_only=True):
    """The user's code returned. The result, of ``result_bytes`` bytes, is in the rank's result file."""

    result_bytes: int


class MemoryShortage(msgspec.Struct, frozen=True, kw_only=True):
    """How little host memory there was, in the seconds before a rank's end.

    Attributes:
        free_bytes: The least that was free.
        limit_bytes: What there is in all.
        is_machine: Whether that is the machine's memory, or what the container may have of it.
        was_seen: Whether the system has counted a process that it killed for want of memory.
    """

    free_bytes: int
    limit_bytes: int
    is_machine: bool
    was_seen: bool


class Ended(_Event, frozen=True, kw_only=True):
    """The rank's process is gone. Said by the agent, since a rank that is killed can't say it.

    Attributes:
        exit_code: Its exit status, ``None`` if a signal ended it.
        signal: The signal's number, ``None`` if it exited.
        stopped: Whether the agent had sent the signal, because the run was to end.
        peak_bytes: The most host memory that it had, 0 if not known.
        shortage: If there was hardly any left.
    """

    exit_code: int | None = None
    signal: int | None = None
    stopped: bool = False
    peak_bytes: int = 0
    shortage: MemoryShortage | None = None


class Silent(_Event, frozen=True, kw_only=True):
    """The rank has done no step for long, and ranks wait for each other. Said by the job, which asks where they stand.

    Attributes:
        since_s: When it did its last step.
        at: Where it stands, such as ``In[7], line 12 in evaluate``; empty if that isn't known.
        waits_in: The collective that it waits in for the others; empty if it is one that others wait for.
    """

    since_s: float
    at: str = ""
    waits_in: str = ""


class Restarting(_Event, frozen=True, kw_only=True):
    """All ranks are started once more, since this one has failed. Said by the job, which has heard why.

    Attributes:
        number: Which restart of the run it is, from 1; 0 if it counts as none, since no rank has failed.
        of: How many there may be.
        why: Which rank failed first, and of what; or what else is the reason.
    """

    number: int
    of: int
    why: str

    @property
    def in_words(self) -> str:
        """In a line."""
        what = f"restart {self.number} of {self.of}" if self.number else "all ranks are started again"
        return f"{what}: {plain_text(self.why)}"


class Nodes(_Event, frozen=True, kw_only=True):
    """How the other nodes of the run stand, a line for each, or whom this one waits for.

    Attributes:
        is_news: Whether more has changed than the steps that they have done.
    """

    lines: list[str]
    is_news: bool


class Respawning(_Event, frozen=True, kw_only=True):
    """A rank that has died is started once more while the others go on. Sent by the job, which orders it."""


class Numbered(_Event, frozen=True, kw_only=True):
    """The place of this node's ranks among all. Sent by the job, when the nodes have agreed on it.

    Attributes:
        first_rank: The number of this node's first rank.
        world_size: The number of ranks on all nodes.
    """

    first_rank: int
    world_size: int


class Working(_Event, frozen=True, kw_only=True):
    """The ranks that have something to do from now on; the others wait for work. Sent by the job of a session.

    Attributes:
        ranks: Their numbers on this node.
    """

    ranks: list[int]


Event: TypeAlias = (
    Started
    | Progress
    | Metrics
    | Output
    | Display
    | Memory
    | Failed
    | Finished
    | Ended
    | Silent
    | Respawning
    | Restarting
    | Numbered
    | Nodes
    | Working
)

SAMPLES = (Progress, Metrics, Memory)
"""What there is much of, of which only the newest matters, and nothing is urgent."""

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event)


def encode(event: Event) -> bytes:
    """The event as bytes. Text that UTF-8 can't hold, such as parts of some file names, is written with escapes."""
    try:
        return _encoder.encode(event)
    except UnicodeEncodeError:
        return _encoder.encode(_without_surrogates(msgspec.to_builtins(event, builtin_types=(bytes,))))


def _without_surrogates(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {_without_surrogates(name): _without_surrogates(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_without_surrogates(item) for item in value]
    return value


def decode(data: bytes) -> Event:
    """The event that ``encode`` made these bytes from.

    Raises:
        msgspec.DecodeError: The bytes are no event.
    """
    return _decoder.decode(data)
