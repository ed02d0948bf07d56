"""Messages between kernel, agent and template. Descriptors travel beside a message, in the order stated.

kernel -> agent      Prepare, Launch, Interrupt, Respawn, End, Release, Inspect, Profile, Detach, Quit
agent -> kernel      Said, Inspected, Starting, RunEnded, Broken, Detached
any kernel -> agent  Hello, then Interrupt, Respawn, End, Inspect, Profile; for a detached run
agent -> any kernel  Attached, then the same messages as to the launching kernel
agent -> template    Fork, ForkElastic
template -> agent    Ready, Unusable, Forked, NotForked, Exited
agent -> rank        Profile, PeersFinished, Named
rank -> agent        the events of ``events.py``, which the agent forwards in Said

Messages between the agent and a run's elastic process are in ``elastic_messages``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple, TypeAlias

import msgspec

from notebook_accel.environment import RankPlace

How = Literal["interrupt", "stop", "kill"]
OnDeath = Literal["stop", "keep"]
Reason = Literal["", "failed", "interrupted", "stopped", "terminated", "timeout", "template lost", "elastic lost"]

Place: TypeAlias = tuple[RankPlace, dict[str, str]]
"""A rank's place among all ranks, and its further environment variables."""

ELASTIC = -1  # the rank number of a run's elastic process in messages

Condition = Literal["answered", "stopped", "unresponsive", "not_ready", "ended"]
"""A rank that was asked for its stacks: ``stopped`` has none until it continues, ``not_ready`` can't be asked yet."""


class _AgentMessage(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    pass


class _OfRun(_AgentMessage, frozen=True, kw_only=True):
    """A message about one run."""

    job_id: str


class Meeting(msgspec.Struct, frozen=True, kw_only=True):
    """Where and how the nodes of a run meet."""

    num_nodes: int
    node_rank: int  # this node's number, with the static backend
    backend: str  # name of torch elastic's rendezvous backend
    host: str
    port: int
    timeout_s: float  # how long nodes wait for each other
    silence_s: float  # seconds of silence after which a node counts as gone
    settings: dict[str, str] = {}  # further settings of torch elastic's rendezvous

    @property
    def endpoint(self) -> str:
        """The address where the nodes meet, as torch elastic takes it."""
        return f"{self.host}:{self.port}"


class ElasticOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a run's elastic process, with the names that they have in ``LaunchConfig``."""

    max_restarts: int
    monitor_interval_s: float
    run_id: str
    meeting: Meeting
    training: dict[str, str] = {}  # options of the training, which must be the same on all nodes


class Prepare(_AgentMessage, frozen=True, kw_only=True):
    """Get a template ready, started with this environment and import path. Later launches use it."""

    environment: dict[str, str]
    sys_path: list[str]
    preload: list[str]  # modules for the template to import, besides those that every rank needs


class Launch(_OfRun, frozen=True, kw_only=True):
    """Start a run. ``log_folder`` may be empty.

    The agent starts the ranks again after a failure, up to ``max_restarts`` times. With ``elastic``, this is one node's
    part of a run on several nodes, and the elastic process decides about restarts. With ``places``, it is also a part
    of a run: the ranks get these places and variables, and stay until ``Release``. ``variables`` are for all ranks;
    they aren't in the payload, since the payload may be launched again. With ``saves``, the first rank of each node
    has variables to send back, so a failure of another rank interrupts it instead of terminating it. With a ``folder``,
    the run is detached before it starts, as by ``Detach``, or isn't started: ``Detached`` is the answer.

    Descriptors: the payload, then one result file for each rank. With ``template_pid``, the process id of a template
    for this run alone, also a connection to that template and its pidfd. With ``places`` that include rank 0, also the
    listening socket of the ranks' store. With a ``folder``, also its lock.
    """

    world_size: int
    port: int
    grace_s: float
    timeout_s: float | None
    log_folder: str
    on_death: OnDeath = "stop"
    template_pid: int = 0
    max_restarts: int = 0
    elastic: ElasticOptions | None = None
    places: list[Place] = []
    variables: dict[str, str] = {}
    saves: bool = False
    folder: str = ""


class Interrupt(_OfRun, frozen=True):
    """Raise KeyboardInterrupt in the ranks of a run. No stronger signal follows."""


class Respawn(_OfRun, frozen=True, kw_only=True):
    """Fork a dead rank once more."""

    rank: int


class End(_OfRun, frozen=True, kw_only=True):
    """End a run by SIGINT, SIGTERM or SIGKILL. After the grace the agent sends the stronger signals by itself."""

    how: How


class Release(_OfRun, frozen=True):
    """Release the ranks of a run here: every rank on all nodes has finished."""


class Inspect(_OfRun, frozen=True):
    """Ask the ranks of a run for their stacks. One answer may serve several requests."""


class Profile(_OfRun, frozen=True, kw_only=True):
    """Profile the next steps of the ranks of a run. Each rank answers with an event ``Profiled``."""

    number: str  # the request's number in the answers
    steps: int
    # The time of ``time.monotonic()`` after which ranks begin at their next step, so that all profile the same steps.
    # Ranks on another machine than the sender's, with another clock, begin soon.
    begin_s: float
    deadline_s: float  # seconds after which a rank that has not done these steps gives up
    file: str = ""  # path of the rank's trace or snapshot, filled in by the agent; empty for none
    memory: bool = False  # take a snapshot of the memory instead of a trace


class PeersFinished(_AgentMessage, frozen=True, kw_only=True):
    """Other ranks of the run have finished. They stay until all have, but join no more collectives."""

    ranks: list[int]


class Named(_AgentMessage, frozen=True, kw_only=True):
    """The rank's run was detached under this name, which ``ps`` and ``nvidia-smi`` should show."""

    name: str


class Detach(_OfRun, frozen=True, kw_only=True):
    """Detach the agent's only run, so that it goes on without the kernel.

    Descriptors: the lock of the run's folder, then each rank's result file.
    """

    folder: str


class Detached(_OfRun, frozen=True, kw_only=True):
    """The agent's last message to its kernel, unless ``why`` has the reason of a refusal."""

    why: str = ""


class Quit(_AgentMessage, frozen=True):
    """Stop all runs, with their grace, and exit."""


class Hello(_AgentMessage, frozen=True, kw_only=True):
    """The first message to the agent of a detached run."""

    who: str  # the sender in words, to tell other kernels who has stopped the run
    follows: bool  # the sender wants the run's messages, not only to give orders


class Attached(_AgentMessage, frozen=True, kw_only=True):
    """The agent takes orders from the sender of ``Hello``, and sends it all further messages if it ``follows``.

    Each message after this one is preceded by its number in the journal, in eight bytes: see ``launching/journal.py``.
    The messages before it are in the journal, up to ``size_bytes``.

    Descriptor: the journal, for a sender that follows.
    """

    size_bytes: int


class Said(_OfRun, frozen=True, kw_only=True):
    """An encoded event of a rank, or of the agent about it."""

    rank: int
    event: msgspec.Raw


class RankDump(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's stacks."""

    rank: int
    pid: int | None  # its process id, ``None`` before it was forked
    condition: Condition
    text: str = ""  # the stacks of its threads, in the format of Python's fault handler


class Inspected(_OfRun, frozen=True, kw_only=True):
    """The stacks of a run's ranks."""

    ranks: list[RankDump]


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's failure in words, as other nodes receive it."""

    what: str  # the exception with its message, or how the process ended
    where: str = ""  # the node's name in messages, which the receiver fills in
    rank: int | None = None  # the rank among all nodes; ``None`` if the node itself has gone
    traceback: str = ""  # its traceback; empty if it has none
    status: int = 1  # its exit status, or the negative number of the signal that ended it
    lost_peer: bool = False  # the exception only reports that another rank has gone
    is_wanted: bool = False  # a user has ended the run there, so that nothing is started again

    @property
    def in_a_line(self) -> str:
        """The failure and its place in one line."""
        who = self.where if self.rank is None else f"rank {self.rank} on {self.where}"
        return f"{who}: {self.what}" if who else self.what


class Starting(_OfRun, frozen=True, kw_only=True):
    """All ranks of a run are started again or, on several nodes, for the first time. No earlier rank is left."""

    restarts: int  # number of restarts so far that a failure caused
    first_rank: int
    world_size: int  # number of ranks on all nodes
    cause: Failure | None = None  # the failure that caused this restart, if it was on another node


class RunEnded(_OfRun, frozen=True, kw_only=True):
    """Every process of the run is gone, and all its events and output were sent."""

    reason: Reason
    elsewhere: Failure | None = None  # the failure on another node that has ended the run, if there is one
    by: str = ""  # the attached kernel or command that has ended a detached run, in words; else empty


class Broken(_AgentMessage, frozen=True, kw_only=True):
    """There is no template, or a run couldn't be started or go on. ``why`` and ``fix`` are those of an error."""

    text: str
    why: str = ""
    fix: str = ""
    job_id: str = ""
    was_running: bool = False  # ranks had reached the user's code


class Fork(_OfRun, frozen=True, kw_only=True):
    """Fork one rank. Descriptors: those of ``RankFiles``, in its order."""

    rank: int  # its local rank, as in all messages of this run
    place: RankPlace  # its place among all ranks
    variables: dict[str, str] = {}  # its further environment variables


class RankFiles(NamedTuple):
    """The descriptors beside ``Fork``, in order."""

    payload: int
    result: int
    connection: int  # the rank's end of its connection to the agent
    log: int
    dump: int  # of the file for its stacks
    store: int | None = None  # the listening socket of the ranks' store, for rank 0


class ForkElastic(_OfRun, frozen=True, kw_only=True):
    """Fork a run's elastic process. Messages about it have the rank ``ELASTIC``.

    Descriptor: its connection to the agent.
    """

    options: ElasticOptions
    world_size: int  # number of ranks on this node
    grace_s: float  # seconds between SIGTERM and SIGKILL for ranks that are stopped


class Ready(_AgentMessage, frozen=True, kw_only=True):
    """Ranks can be forked. The template sends it again when it has imported more."""

    files: dict[str, tuple[int, int]]  # the imported packages' own files, with modification time in ns and inode


class Unusable(_AgentMessage, frozen=True, kw_only=True):
    """The template ends because a module can't be preloaded. ``why`` names the module and the reason."""

    why: str


class Forked(_OfRun, frozen=True, kw_only=True):
    """The rank exists and leads a process group of its own, of the same number."""

    rank: int
    pid: int


class NotForked(_OfRun, frozen=True, kw_only=True):
    """The rank couldn't be forked. ``why`` is the system's message."""

    rank: int
    why: str


class Exited(_OfRun, frozen=True, kw_only=True):
    """The rank is gone, and so is every process of its group.

    ``status`` is that of ``os.waitstatus_to_exitcode``; ``peak_bytes`` is its peak memory.
    """

    rank: int
    status: int
    peak_bytes: int


RunOrder: TypeAlias = Interrupt | Respawn | End | Inspect | Profile  # by a job
ToAgent: TypeAlias = Prepare | Launch | RunOrder | Release | Detach | Quit
ToDetachedAgent: TypeAlias = Hello | RunOrder
ToKernel: TypeAlias = Said | Inspected | Starting | RunEnded | Broken | Detached
ToTemplate: TypeAlias = Fork | ForkElastic
ToRank: TypeAlias = Profile | PeersFinished | Named
FromTemplate: TypeAlias = Ready | Unusable | Forked | NotForked | Exited

encode = msgspec.msgpack.Encoder().encode

# Each raises ``msgspec.DecodeError`` if the bytes are no such message.
decode_for_agent: Callable[[bytes], ToAgent] = msgspec.msgpack.Decoder(ToAgent).decode
decode_for_detached_agent: Callable[[bytes], ToDetachedAgent] = msgspec.msgpack.Decoder(ToDetachedAgent).decode
decode_attached: Callable[[bytes], Attached] = msgspec.msgpack.Decoder(Attached).decode
decode_for_kernel: Callable[[bytes], ToKernel] = msgspec.msgpack.Decoder(ToKernel).decode
decode_for_rank: Callable[[bytes], ToRank] = msgspec.msgpack.Decoder(ToRank).decode
decode_from_template: Callable[[bytes], FromTemplate] = msgspec.msgpack.Decoder(FromTemplate).decode
decode_for_template: Callable[[bytes], ToTemplate] = msgspec.msgpack.Decoder(ToTemplate).decode
