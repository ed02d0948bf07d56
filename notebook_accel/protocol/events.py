"""Events of a run, from which all views and errors derive. Ranks send most of them, the agent and the job a few.

Events are small, typed and encoded with msgpack, never pickled, so reading them executes nothing. The only pickle,
``Failed.exception``, stays bytes until the job that owns the rank unpickles it.

Times are seconds of ``time.monotonic()``, which on Linux is one clock for all processes of a machine, so that events of
different ranks can be ordered. The kernel converts the times of ranks on another machine to its own clock.
"""

from __future__ import annotations

import collections
import time
from typing import Any, Literal, TypeAlias

import msgspec

from notebook_accel.formatting import format_number, format_size, plain_text


class _Event(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    time_s: float = msgspec.field(default_factory=time.monotonic)


class Started(_Event, frozen=True, kw_only=True):
    """The rank is about to run the user's code.

    Attributes:
        pid: The rank's process id.
        node: Number of its node in the run, from 0.
    """

    pid: int
    node: int = 0


_MOST_LINES = 100  # of several merged events
EVALUATION = "evaluation"
"""The label of a loop that takes batches and doesn't train."""


class Progress(_Event, frozen=True, kw_only=True):
    """The rank's progress.

    Attributes:
        step: Steps done in this epoch (or of this bar).
        total: Steps of this epoch, ``None`` if unknown.
        epoch: The running epoch, from 1; ``None`` if the source has no epochs.
        epochs: Number of epochs, ``None`` if unknown.
        steps: Steps since the rank was started, over all epochs and loaders. The rate comes from this.
        label: Name of the counted thing, such as a bar's description; ``EVALUATION`` for a loop that doesn't train.
        device: The device on which the rank computes, such as ``cpu`` or ``cuda:0``; empty if unknown yet.
        compiling: True while the device's compiler works on the running step, so that its duration is unusual.
    """

    step: int
    total: int | None = None
    epoch: int | None = None
    epochs: int | None = None
    steps: int = 0
    label: str = ""
    device: str = ""
    compiling: bool = False


PHASES = ("data", "copy", "forward", "backward", "communication", "optimizer", "evaluation", "other")
"""The phases of a step on one rank, in their order."""


class SampledLine(msgspec.Struct, frozen=True):
    """A line of the user's code that was running when the rank's main thread was sampled.

    Attributes:
        phase: The phase of the step.
        activity: The work of a library: ``communication``, ``copy``, ``compiling`` or ``saving``; else empty.
        place: The line, such as ``In[7], line 12``; empty if none of the user's code ran.
        text: The line's text.
        samples: Number of samples of this line.
    """

    phase: str
    activity: str
    place: str
    text: str
    samples: int


class StepTimes(_Event, frozen=True, kw_only=True):
    """Where the time of the rank's last steps went.

    Attributes:
        steps: Number of training steps. An event has at least one.
        seconds: The time of each phase in ``PHASES``. The times add up to the wall time since the last event.
        evaluations: Number of evaluations that began.
        collecting_s: Time of Python's garbage collections, in whichever phase they were.
        compilations: Number of graphs that ``torch.compile`` has compiled.
        rows: Mean number of rows of a batch, 0 if unknown.
        smallest_batch: Fewest elements of a batch's first tensor, 0 if unknown.
        largest_batch: Most elements of a batch's first tensor.
        workers: Number of the loader's worker processes, ``None`` without a loader.
        threads: Number of threads that torch computes with.
        cores: Number of processor cores that this rank's processes can use, together with other ranks'.
        gradient_bytes: Size of the gradients that ``DistributedDataParallel`` exchanges, 0 if unknown.
        is_on_device: True if CUDA has measured the phases.
        samples: Number of samples of the main thread.
        lines: The lines sampled most often.
    """

    steps: int
    seconds: dict[str, float]
    evaluations: int = 0
    collecting_s: float = 0.0
    compilations: int = 0
    rows: float = 0.0
    smallest_batch: int = 0
    largest_batch: int = 0
    workers: int | None = None
    threads: int = 0
    cores: int = 0
    gradient_bytes: int = 0
    is_on_device: bool = False
    samples: int = 0
    lines: list[SampledLine] = []

    def followed_by(self, *later: StepTimes) -> StepTimes:
        """Return one event for the steps of this one and of later ones."""
        parts = (self, *later)
        steps = sum(part.steps for part in parts)
        seconds: dict[str, float] = {}
        seen: collections.Counter[tuple[str, str, str, str]] = collections.Counter()
        for part in parts:
            for phase, phase_s in part.seconds.items():
                seconds[phase] = seconds.get(phase, 0.0) + phase_s
            for line in part.lines:
                seen[line.phase, line.activity, line.place, line.text] += line.samples
        return msgspec.structs.replace(
            parts[-1],  # fields that can't be added keep the last event's value
            steps=steps,
            seconds=seconds,
            evaluations=sum(part.evaluations for part in parts),
            collecting_s=sum(part.collecting_s for part in parts),
            compilations=sum(part.compilations for part in parts),
            rows=sum(part.rows * part.steps for part in parts) / max(steps, 1),
            smallest_batch=min((part.smallest_batch for part in parts if part.smallest_batch), default=0),
            largest_batch=max(part.largest_batch for part in parts),
            samples=sum(part.samples for part in parts),
            lines=[SampledLine(*line, samples) for line, samples in seen.most_common(_MOST_LINES)],
        )


SpanKind: TypeAlias = Literal["step", "phase", "operator", "collective", "kernel"]
"""What a span of a profile is. Kernels run on the device, everything else on the host."""


class Span(msgspec.Struct, frozen=True, array_like=True):
    """A named interval of a profile.

    Attributes:
        kind: The kind of work.
        name: Its name, such as ``aten::mm``.
        begin_us: Its start in microseconds, from the start of the profile.
        took_us: Its duration in microseconds.
    """

    kind: SpanKind
    name: str
    begin_us: float
    took_us: float


class OperatorTime(msgspec.Struct, frozen=True, array_like=True):
    """The time that an operator of the host, or a kernel of the device, took in all steps of a profile.

    Attributes:
        name: Its name.
        calls: How often it ran.
        self_us: Its own microseconds, without the operators that it called.
        is_kernel: True for a kernel of the device.
    """

    name: str
    calls: int
    self_us: float
    is_kernel: bool = False


class HeldMemory(msgspec.Struct, frozen=True, array_like=True):
    """Memory that the tensors made by one line held when a profile's memory was at its peak.

    Attributes:
        place: The user's line, such as ``In[7], line 12``; empty for tensors made before the profile.
        text: The line's text.
        size_bytes: The tensors' size.
    """

    place: str
    text: str
    size_bytes: int


class Profiled(_Event, frozen=True, kw_only=True):
    """The rank's answer to a request for a profile of its next steps.

    Attributes:
        number: The number of the request.
        why: The reason why there are fewer steps than were asked for; empty if there is none.
        steps: Number of profiled steps, 0 if there are none.
        age_s: Seconds from the start of the profile to this event.
        spans: Its spans; of each kind only the longest.
        operators: The operators and kernels that took most time.
        lines: The lines of the user's code sampled most often.
        samples: Number of samples of the main thread.
        trace: Path of the trace on the rank's machine; empty if there is none.
        peak_bytes: Peak memory of all tensors, if memory was asked for.
        held: The lines whose tensors held most memory at the peak.
    """

    number: str
    why: str = ""
    steps: int = 0
    age_s: float = 0.0
    spans: list[Span] = []
    operators: list[OperatorTime] = []
    lines: list[SampledLine] = []
    samples: int = 0
    trace: str = ""
    peak_bytes: int = 0
    held: list[HeldMemory] = []


class Metrics(_Event, frozen=True, kw_only=True):
    """The latest value of each metric, and the step (over all epochs) to which they belong."""

    step: int
    values: dict[str, float]


class Output(_Event, frozen=True, kw_only=True):
    """Whole lines that the rank wrote to its standard output or error, without the last newline.

    Attributes:
        text: The lines.
        left_out: Number of earlier lines that are only in the rank's log, because a notebook couldn't take so many.
    """

    text: str
    left_out: int = 0


class Display(_Event, frozen=True, kw_only=True):
    """An object that the rank displayed.

    Attributes:
        data: A MIME bundle. Binary data is base64 text, as in Jupyter.
        metadata: Jupyter's metadata, such as an image's width.
        display_id: The id for later updates; empty if there is none.
        is_update: True if it replaces the earlier display with that id.
        log_bytes: Length of the rank's log at that time: lines before it come before the display.
    """

    data: dict[str, Any]
    metadata: dict[str, Any] = {}
    display_id: str = ""
    is_update: bool = False
    log_bytes: int = 0


class Memory(_Event, frozen=True, kw_only=True):
    """Memory that the rank uses.

    Attributes:
        used_bytes: Bytes in use.
        total_bytes: Bytes that the device or host has.
        kind: The host's or the device's memory.
        utilisation: Per cent of the last second in which the device computed, ``None`` where nothing measures it.
    """

    used_bytes: int
    total_bytes: int
    kind: Literal["host", "device"]
    utilisation: float | None = None


class ModelMemory(_Event, frozen=True, kw_only=True):
    """The part of its memory that a rank's models take.

    Attributes:
        parameters: Number of all parameters of the models.
        held_parameters: Number of parameters that the rank holds; fewer where models are sharded.
        parameter_bytes: Bytes of the parameters that the rank holds.
        gradient_bytes: Bytes of their gradients, 0 before the first step.
        optimizer_bytes: Bytes of the optimizers' state, 0 before the first step.
        peak_bytes: Most bytes that the device has held of all tensors, 0 where nothing measures it.
    """

    parameters: int
    held_parameters: int
    parameter_bytes: int
    gradient_bytes: int = 0
    optimizer_bytes: int = 0
    peak_bytes: int = 0

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
    """The user's code raised.

    Attributes:
        kind: The exception's class name, such as ``ValueError``.
        message: The exception's text.
        traceback: The formatted traceback, the user's frames only.
        line: The user's innermost line, such as ``In[7], line 12``; empty if there is none.
        exception: The pickled exception; empty if it can't be pickled.
        lost_peer: True if the exception only reports that another rank has gone, so the cause is elsewhere.
        saved: True if the rank's result file has the variables to pull, with their values at the failure.
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


class TimeLimitReached(_Event, frozen=True, kw_only=True):
    """The rank was told to stop training, since the run's time limit is near.

    Attributes:
        limit: The time limit in seconds since the epoch.
    """

    limit: float


class MemoryShortage(msgspec.Struct, frozen=True, kw_only=True):
    """The shortage of host memory in the seconds before a rank's end.

    Attributes:
        free_bytes: The fewest free bytes.
        limit_bytes: The limit.
        is_machine: True if the limit is the machine's memory, false if it is the container's.
        was_seen: True if the system has counted an out-of-memory kill.
    """

    free_bytes: int
    limit_bytes: int
    is_machine: bool
    was_seen: bool


class Ended(_Event, frozen=True, kw_only=True):
    """The rank's process is gone. The agent sends this, since a killed rank can't.

    Attributes:
        exit_code: Its exit status, ``None`` if a signal ended it.
        signal: The signal's number, ``None`` if it exited.
        stopped: True if the agent sent the signal, to end the run.
        peak_bytes: Its peak host memory, 0 if unknown.
        shortage: The shortage of memory, if there was one.
    """

    exit_code: int | None = None
    signal: int | None = None
    stopped: bool = False
    peak_bytes: int = 0
    shortage: MemoryShortage | None = None


class Silent(_Event, frozen=True, kw_only=True):
    """The rank has done no step for long, and ranks wait for each other. The job sends this after reading stacks.

    Attributes:
        since_s: Time of its last step.
        at: Its position, such as ``In[7], line 12 in evaluate``; empty if unknown.
        waits_in: The collective in which it waits for other ranks; empty if others wait for it.
    """

    since_s: float
    at: str = ""
    waits_in: str = ""


class Restarting(_Event, frozen=True, kw_only=True):
    """All ranks are started again because this one has failed. The job sends this.

    Attributes:
        number: Number of this restart, from 1; 0 if no rank has failed, so that it doesn't count.
        of: Most restarts of the run.
        why: The reason, such as the rank that failed first and its exception.
    """

    number: int
    of: int
    why: str

    @property
    def in_words(self) -> str:
        """The restart in one line."""
        what = f"restart {self.number} of {self.of}" if self.number else "all ranks are started again"
        return f"{what}: {plain_text(self.why)}"


class Nodes(_Event, frozen=True, kw_only=True):
    """The status of the run's other nodes, one line for each, or the nodes for which this one waits.

    Attributes:
        is_news: True if more has changed than their steps.
    """

    lines: list[str]
    is_news: bool


class Respawning(_Event, frozen=True, kw_only=True):
    """A dead rank is started once more while the others go on. The job, which orders the start, sends this."""


class Numbered(_Event, frozen=True, kw_only=True):
    """The place of this node's ranks among all ranks. The job sends it once the nodes have agreed.

    Attributes:
        first_rank: The number of this node's first rank.
        world_size: The number of ranks on all nodes.
    """

    first_rank: int
    world_size: int


class Working(_Event, frozen=True, kw_only=True):
    """The ranks that have work from now on; the others wait for work. A session's job sends this.

    Attributes:
        ranks: Their numbers on this node.
    """

    ranks: list[int]


class Serving(_Event, frozen=True, kw_only=True):
    """The rank of a detached session has begun or ended a request.

    Attributes:
        cell: The request in words, such as ``In[7]``; empty if the rank waits for one.
    """

    cell: str


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
    | Ended
    | Silent
    | Respawning
    | Restarting
    | Numbered
    | Nodes
    | Working
    | Serving
)

SAMPLES = (Progress, StepTimes, Metrics, Memory, Serving)
"""Events that are many and not urgent, of which only the newest matters."""

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event)


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


def decode(data: bytes) -> Event:
    """Decode an event.

    Raises:
        msgspec.DecodeError: The bytes are no event.
    """
    return _decoder.decode(data)
