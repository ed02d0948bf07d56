"""Events of a run, from which all views and errors derive. Ranks send most of them, the agent and the job a few.

Events are small, typed and encoded with msgpack, never pickled, so reading them executes nothing. The only pickle,
``Failed.exception``, stays bytes until the job that owns the rank unpickles it.

Times are seconds of ``time.monotonic()``, which on Linux is one clock for all processes of a machine, so that events of
different ranks can be ordered. The kernel converts the times of ranks on another machine to its own clock.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import msgspec

from notebook_accel.formatting import first_line, format_number, format_size, plain_text


def _now_s() -> float:
    """Return the time of an event that is made now. Looks the clock up each time, since a test may replace it."""
    return time.monotonic()


class _Event(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    time_s: float = msgspec.field(default_factory=_now_s)


class Started(_Event, frozen=True, kw_only=True):
    """The rank is about to run the user's code."""

    pid: int
    node: int = 0  # number of its node in the run, from 0


_MOST_LINES = 100  # of several merged events
SUMMED = ("evaluations", "compilations", "compiling_s", "starting_s", "queued_s")
"""The fields of ``StepTimes`` whose values are added up over several events, besides steps, seconds and samples."""

REBUILDING = "the rebuilding of"
"""The beginning of ``Failed.line`` if a variable could be sent and not be rebuilt in the rank."""

EVALUATION = "evaluation"
"""The label of a loop that takes batches and doesn't train."""


class Progress(_Event, frozen=True, kw_only=True):
    """The rank's progress."""

    step: int  # steps done in this epoch (or of this bar)
    total: int | None = None  # steps of this epoch, ``None`` if unknown
    epoch: int | None = None  # the running epoch, from 1; ``None`` if the source has no epochs
    epochs: int | None = None  # number of epochs, ``None`` if unknown
    steps: int = 0  # steps since the rank was started, over all epochs and loaders; the rate comes from this
    label: str = ""  # name of the counted thing, such as a bar's description; or ``EVALUATION``
    device: str = ""  # the device on which the rank computes, such as ``cpu`` or ``cuda:0``; empty if unknown yet
    compiling: bool = False  # the device's compiler works on the running step, so that its duration is unusual


WAITING = "waiting"
PHASES = ("data", "copy", "forward", "backward", "communication", WAITING, "optimizer", "evaluation", "other")
"""The phases of a step on one rank, in their order."""
SPLIT_PHASES = tuple(name for name in PHASES if name not in ("backward", "evaluation"))
"""The phases whose collectives and copies to the device count as phases of their own."""


class SampledLine(msgspec.Struct, frozen=True):
    """A line of the user's code that was running when the rank's main thread was sampled."""

    phase: str
    activity: str  # the work of a library: ``communication``, ``copy``, ``compiling`` or ``saving``; else empty
    place: str  # the line, such as ``In[7], line 12``; empty if none of the user's code ran
    text: str
    samples: int


class StepTimes(_Event, frozen=True, kw_only=True):
    """Where the time of the rank's last steps went."""

    steps: int  # number of training steps, at least one
    seconds: dict[str, float]  # of each phase in ``PHASES``; they add up to the wall time since the last event
    evaluations: int = 0
    compilations: int = 0  # number of graphs that ``torch.compile`` or XLA has compiled
    compiling_s: float = 0.0  # time that this took
    recompiled: str = ""  # why the last of these was compiled anew, such as torch's words on another shape
    workers: int | None = None  # number of the loader's worker processes, ``None`` without a loader
    is_stream: bool = False  # the loader's dataset is an ``IterableDataset``, of which each worker yields everything
    starting_s: float = (
        0.0  # time in the phase ``data`` for workers that start anew in each epoch, to their first batch
    )
    cores: int = 0  # number of processor cores that this rank's processes can use, together with other ranks'
    gradient_bytes: int = 0  # size of the gradients that ``DistributedDataParallel`` exchanges, 0 if unknown
    is_on_device: bool = False  # CUDA has measured the phases
    queued_s: float = 0.0  # time in which a thread of this rank waited for a core, in whichever phase it was
    samples: int = 0  # of the main thread
    lines: list[SampledLine] = []  # sampled most often

    def followed_by(self, *later: StepTimes) -> StepTimes:
        """Return one event for the steps of this one and of later ones."""
        parts = (self, *later)
        seconds: dict[str, float] = {}
        seen: collections.Counter[tuple[str, str, str, str]] = collections.Counter()
        for part in parts:
            for phase, phase_s in part.seconds.items():
                seconds[phase] = seconds.get(phase, 0.0) + phase_s
            for line in part.lines:
                seen[line.phase, line.activity, line.place, line.text] += line.samples
        return msgspec.structs.replace(
            parts[-1],  # fields that can't be added keep the last event's value
            steps=sum(part.steps for part in parts),
            seconds=seconds,
            **{name: sum(getattr(part, name) for part in parts) for name in SUMMED},
            recompiled=next((part.recompiled for part in reversed(parts) if part.recompiled), ""),
            samples=sum(part.samples for part in parts),
            lines=[SampledLine(*line, samples) for line, samples in seen.most_common(_MOST_LINES)],
        )


SpanKind: TypeAlias = Literal["step", "phase", "operator", "collective", "kernel"]
"""What a span of a profile is. Kernels run on the device, everything else on the host."""


class Span(msgspec.Struct, frozen=True, array_like=True):
    """A named interval of a profile."""

    kind: SpanKind
    name: str  # its name, such as ``aten::mm``
    begin_us: float  # from the start of the profile
    took_us: float


class OperatorTime(msgspec.Struct, frozen=True, array_like=True):
    """The time that an operator of the host, or a kernel of the device, took in all steps of a profile."""

    name: str
    calls: int
    self_us: float  # its own microseconds, without the operators that it called
    is_kernel: bool = False


class Profiled(_Event, frozen=True, kw_only=True):
    """The rank's answer to a request for a profile of its next steps."""

    number: str
    why: str = ""  # why there are fewer steps than were asked for; else empty
    steps: int = 0
    age_s: float = 0.0  # seconds from the start of the profile to this event
    spans: list[Span] = []  # its spans; of each kind only the longest
    operators: list[OperatorTime] = []  # the operators and kernels that took most time
    lines: list[SampledLine] = []  # sampled most often
    samples: int = 0  # of the main thread
    file: str = ""  # path of the trace, or of the memory's snapshot, on the rank's machine; empty if there is none


MOST_METRICS = 32
"""The most metrics of a rank that are shown. A rank reports no others."""


class Metrics(_Event, frozen=True, kw_only=True):
    """The latest value of each metric that was reported since the last event."""

    step: int  # the latest step (over all epochs) at which one of them was reported
    values: dict[str, float]
    earlier: dict[str, int] = {}  # the steps of the metrics that were reported before ``step``

    def step_of(self, name: str) -> int:
        """Return the step at which a metric was reported."""
        return self.earlier.get(name, self.step)

    def followed_by(self, later: Metrics) -> Metrics:
        """Return one event with the values of this one and of a later one."""
        values = {**self.values, **later.values}
        steps = {name: (later if name in later.values else self).step_of(name) for name in values}
        earlier = {name: step for name, step in steps.items() if step != later.step}
        return msgspec.structs.replace(later, values=values, earlier=earlier)


class Output(_Event, frozen=True, kw_only=True):
    """Whole lines that the rank wrote to its standard output or error, without the last newline."""

    text: str
    left_out: int = 0  # earlier lines that are only in the rank's log, because a notebook couldn't take so many


class Display(_Event, frozen=True, kw_only=True):
    """An object that the rank displayed."""

    data: dict[str, Any]  # a MIME bundle, with binary data as base64 text, as in Jupyter
    metadata: dict[str, Any] = {}  # Jupyter's metadata, such as an image's width
    display_id: str = ""  # the id for later updates; empty if there is none
    is_update: bool = False  # it replaces the earlier display with that id
    log_bytes: int = 0  # length of the rank's log at that time: lines before it come before the display


class Memory(_Event, frozen=True, kw_only=True):
    """Memory that the rank uses."""

    used_bytes: int
    total_bytes: int
    kind: Literal["host", "device"]
    utilisation: float | None = None  # per cent of the last second in which the device computed, where it is measured
    clock: float | None = None  # per cent of the device's highest clock, where it is known


class ModelMemory(_Event, frozen=True, kw_only=True):
    """The part of its memory that a rank's models take."""

    parameters: int  # number of all parameters of the models
    held_parameters: int  # number of parameters that the rank holds; fewer where models are sharded
    parameter_bytes: int
    gradient_bytes: int = 0  # bytes of their gradients, 0 before the first step
    optimizer_bytes: int = 0  # bytes of the optimizers' state, 0 before the first step
    peak_bytes: int = 0  # most bytes that the device has held of all tensors, 0 where nothing measures it

    @property
    def is_sharded(self) -> bool:
        """True if other ranks hold parameters that this one doesn't."""
        return self.held_parameters < self.parameters

    @property
    def share(self) -> str:
        """The parameters that the rank holds, such as ``3.6 B of 7.2 B parameters``."""
        of = f" of {format_number(self.parameters)}" if self.is_sharded else ""
        return f"{format_number(self.held_parameters)}{of} parameters"

    @property
    def in_words(self) -> str:
        """The memory in one line. The rest of the peak is activations and other tensors of the program."""
        known_bytes = self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes
        parts = {
            "parameters": self.parameter_bytes,
            "gradients": self.gradient_bytes,
            "optimizer": self.optimizer_bytes,
            "activations and others at the peak": max(self.peak_bytes - known_bytes, 0),
        }
        return f"{self.share}: {', '.join(f'{name} {format_size(size)}' for name, size in parts.items() if size)}"


class Failed(_Event, frozen=True, kw_only=True):
    """The user's code raised."""

    kind: str  # the exception's class name, such as ``ValueError``
    message: str
    traceback: str  # the formatted traceback, the user's frames only
    # The user's innermost line, such as ``In[7], line 12``; empty if there is none. Or ``REBUILDING`` and the variable.
    line: str = ""
    exception: bytes = b""  # the pickled exception; empty if it can't be pickled
    lost_peer: bool = False  # the exception only reports that another rank has gone: the cause is elsewhere
    saved: bool = False  # the rank's result file has the variables to pull, with their values at the failure

    @property
    def in_words(self) -> str:
        """The exception in one line, such as ``ValueError: no images in data/``."""
        message = first_line(self.message)
        return f"{self.kind}: {message}" if message else self.kind


class Finished(_Event, frozen=True, kw_only=True):
    """The user's code returned. The result is in the rank's result file."""


class TimeLimitReached(_Event, frozen=True, kw_only=True):
    """The rank was told to stop training, since the run's time limit is near."""

    limit: float  # the time limit in seconds since the epoch


class CheckpointSaved(_Event, frozen=True, kw_only=True):
    """A checkpoint of all ranks is complete. Rank 0 sends this."""

    folder: str


class MemoryShortage(msgspec.Struct, frozen=True, kw_only=True):
    """The shortage of host memory in the seconds before a rank's end."""

    free_bytes: int  # the fewest free bytes
    limit_bytes: int
    is_machine: bool  # the limit is the machine's memory, not the container's
    was_seen: bool  # the system has counted an out-of-memory kill


class Ended(_Event, frozen=True, kw_only=True):
    """The rank's process is gone. The agent sends this, since a killed rank can't."""

    exit_code: int | None = None  # its exit status, ``None`` if a signal ended it
    signal: int | None = None
    stopped: bool = False  # the agent sent the signal, to end the run
    peak_bytes: int = 0  # its peak host memory, 0 if unknown
    shortage: MemoryShortage | None = None


class Silent(_Event, frozen=True, kw_only=True):
    """The rank has done no step for long, and ranks wait for each other. The job sends this after reading stacks."""

    since_s: float  # time of its last step
    at: str = ""  # its position, such as ``In[7], line 12 in evaluate``; empty if unknown
    waits_in: str = ""  # the collective in which it waits for other ranks; empty if others wait for it


class Restarting(_Event, frozen=True, kw_only=True):
    """All ranks are started again because this one has failed. The job sends this."""

    number: int  # number of this restart, from 1
    of: int  # most restarts of the run
    why: str  # the reason, such as the rank that failed first and its exception

    @property
    def in_words(self) -> str:
        """The restart in one line."""
        return f"restart {self.number} of {self.of}: {plain_text(self.why)}"


class Nodes(_Event, frozen=True, kw_only=True):
    """The status of the run's other nodes, one line for each, or the nodes for which this one waits.

    The elastic process sends this, or the job of a run on a cluster.
    """

    lines: list[str]
    is_news: bool  # more has changed than their steps


class Respawning(_Event, frozen=True, kw_only=True):
    """A dead rank is started once more while the others go on. The job, which orders the start, sends this."""


class Numbered(_Event, frozen=True, kw_only=True):
    """The place of this node's ranks among all ranks. The job sends it once the nodes have agreed."""

    first_rank: int
    world_size: int  # the number of ranks on all nodes


class Working(_Event, frozen=True, kw_only=True):
    """The ranks that have work from now on; the others wait for work. A session's job sends this."""

    ranks: list[int]  # their numbers on this node


class Serving(_Event, frozen=True, kw_only=True):
    """The rank of a detached session has begun or ended a request."""

    cell: str  # the request in words, such as ``In[7]``; empty if the rank waits for one


Event: TypeAlias = (
    Started
    | Progress
    | StepTimes
    | Profiled
    | Metrics
    | Output
    | Display
    | Memory
    | ModelMemory
    | Failed
    | Finished
    | TimeLimitReached
    | CheckpointSaved
    | Ended
    | Silent
    | Respawning
    | Restarting
    | Numbered
    | Nodes
    | Working
    | Serving
)

SAMPLES = (Progress, StepTimes, Metrics, Memory, CheckpointSaved, Serving)
"""Events that are many and not urgent, of which only the newest matters."""

_encoder = msgspec.msgpack.Encoder()
decode: Callable[[bytes], Event] = msgspec.msgpack.Decoder(Event).decode
"""Decode an event. Raises ``msgspec.DecodeError`` if the bytes are none."""


def encode(event: Event) -> bytes:
    """Return the event as bytes. Text that UTF-8 can't hold, as in some file names, gets escapes."""
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
