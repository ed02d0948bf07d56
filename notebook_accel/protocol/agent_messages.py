"""Messages between kernel, agent and template. Descriptors travel beside a message, in the order stated.

kernel -> agent      Prepare, Launch, Interrupt, Respawn, End, Release, Inspect, Profile, Detach, Quit
agent -> kernel      Said, Inspected, Starting, AboutNodes, RunEnded, Broken, Idle, Detached
any kernel -> agent  Hello, then Interrupt, Respawn, End, Inspect, Profile; for a detached run
agent -> any kernel  Attached, then the same messages as to the launching kernel
agent -> template    Fork, ForkElastic
template -> agent    Ready, Unusable, Forked, NotForked, Exited
agent -> rank        Profile

Messages between the agent and a run's elastic process are in ``elastic_messages``.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from notebook_accel.environment import RankPlace

How = Literal["interrupt", "stop", "kill"]
OnDeath = Literal["stop", "keep"]
Reason = Literal["", "failed", "interrupted", "stopped", "terminated", "timeout", "template lost", "elastic lost"]

Place: TypeAlias = tuple[RankPlace, dict[str, str]]
"""A rank's place among all ranks, and its further environment variables."""

ELASTIC = -1  # the rank number of a run's elastic process in messages

Condition = Literal["answered", "stopped", "unresponsive", "not_ready", "ended"]


class _AgentMessage(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    pass


class Meeting(msgspec.Struct, frozen=True, kw_only=True):
    """Where and how the nodes of a run meet.

    Attributes:
        num_nodes: Number of nodes as the user gave it: a number, or a range such as ``2:4``.
        least: Fewest nodes that can start.
        most: Most nodes that can take part.
        node_rank: This node's number, with the static backend.
        backend: Name of torch elastic's rendezvous backend.
        host: Host of the rendezvous.
        port: Its TCP port.
        timeout_s: How long nodes wait for each other.
        silence_s: Seconds of silence after which a node counts as gone.
        settings: Further settings of torch elastic's rendezvous.
    """

    num_nodes: str
    least: int
    most: int
    node_rank: int
    backend: str
    host: str
    port: int
    timeout_s: float
    silence_s: float
    settings: dict[str, str] = {}


class ElasticOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a run's elastic process, with the names that they have in ``LaunchConfig``."""

    max_restarts: int
    monitor_interval_s: float
    run_id: str
    meeting: Meeting


class Prepare(_AgentMessage, frozen=True, kw_only=True):
    """Get a template ready, started with this environment and import path. Later launches use it.

    Attributes:
        preload: Modules for the template to import, besides those that every rank needs.
        idle_timeout_s: Seconds after the last run, or after this message, until the agent reports that it is idle.
    """

    environment: dict[str, str]
    sys_path: list[str]
    preload: list[str]
    idle_timeout_s: float


class Launch(_AgentMessage, frozen=True, kw_only=True):
    """Start a run. ``log_folder`` may be empty. ``idle_timeout_s`` replaces the earlier one.

    The agent starts the ranks again after a failure, up to ``max_restarts`` times. With ``elastic``, this is one node's
    part of a run on several nodes, and the elastic process decides about restarts. With ``places``, it is also a part
    of a run: the ranks get these places and variables, and stay until ``Release``. ``variables`` are for all ranks;
    they aren't in the payload, since the payload may be launched again. With ``saves``, the first rank of each node
    has variables to send back, so a failure of another rank interrupts it instead of terminating it.

    Descriptors: the payload, then one result file for each rank. With ``template_pid``, the process id of a template
    for this run alone, also a connection to that template and its pidfd. With ``places`` that include rank 0, also the
    listening socket of the ranks' store.
    """

    job_id: str
    world_size: int
    port: int
    grace_s: float
    timeout_s: float | None
    log_folder: str
    idle_timeout_s: float
    on_death: OnDeath = "stop"
    template_pid: int = 0
    max_restarts: int = 0
    elastic: ElasticOptions | None = None
    places: list[Place] = []
    variables: dict[str, str] = {}
    saves: bool = False


class Interrupt(_AgentMessage, frozen=True, kw_only=True):
    """Raise KeyboardInterrupt in the ranks of a run. No stronger signal follows."""

    job_id: str


class Respawn(_AgentMessage, frozen=True, kw_only=True):
    """Fork a dead rank once more."""

    job_id: str
    rank: int


class End(_AgentMessage, frozen=True, kw_only=True):
    """End a run by SIGINT, SIGTERM or SIGKILL. After the grace the agent sends the stronger signals by itself."""

    job_id: str
    how: How


class Release(_AgentMessage, frozen=True):
    """Release the ranks of a run here: every rank on all nodes has finished."""

    job_id: str


class Inspect(_AgentMessage, frozen=True):
    """Ask the ranks of a run for their stacks. One answer may serve several requests."""

    job_id: str


class Profile(_AgentMessage, frozen=True, kw_only=True):
    """Profile the next steps of the ranks of a run. Each rank answers with an event ``Profiled``.

    Attributes:
        number: The request's number in the answers.
        steps: Number of steps.
        begin_s: The time of ``time.monotonic()`` after which ranks on the sender's machine begin at their next step, so
            that all profile the same steps. Ranks on another machine, with another clock, begin soon.
        deadline_s: Seconds after which a rank that has not done these steps gives up.
        trace: Path of the rank's trace file, filled in by the agent; empty for none.
        memory: True to profile memory instead of time, without a trace.
    """

    job_id: str
    number: str
    steps: int
    begin_s: float
    deadline_s: float
    trace: str = ""
    memory: bool = False


class PeersFinished(_AgentMessage, frozen=True, kw_only=True):
    """Other ranks of the run have finished. They stay until all have, but join no more collectives."""

    ranks: list[int]


class Detach(_AgentMessage, frozen=True, kw_only=True):
    """Detach the agent's only run, so that it goes on without the kernel.

    Descriptors: the lock of the run's folder, then each rank's result file.
    """

    job_id: str
    folder: str


class Detached(_AgentMessage, frozen=True, kw_only=True):
    """The answer to ``Detach``: the agent's last message to the kernel, unless ``why`` has the reason of a refusal.

    Attributes:
        sent_log_bytes: Length of the part of each rank's log that the kernel has received.
    """

    job_id: str
    why: str = ""
    sent_log_bytes: list[int] = []


class Quit(_AgentMessage, frozen=True):
    """Stop all runs, with their grace, and exit."""


class Hello(_AgentMessage, frozen=True, kw_only=True):
    """The first message to the agent of a detached run.

    Attributes:
        who: The sender in words, to tell other kernels who has stopped the run.
        follows: True if the sender wants the run's messages, not only to give orders.
    """

    who: str
    follows: bool


class Attached(_AgentMessage, frozen=True, kw_only=True):
    """The agent takes orders from the sender of ``Hello``, and sends it all further messages if it ``follows``.

    Each message after this one is preceded by its number, in eight bytes: see ``launching/journal.py``. The messages
    before it are in the journal, up to ``size_bytes``.

    Descriptor: the journal, for a sender that follows.
    """

    size_bytes: int


class Said(_AgentMessage, frozen=True, kw_only=True):
    """An encoded event of a rank."""

    job_id: str
    rank: int
    event: msgspec.Raw


class RankDump(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's stacks.

    Attributes:
        rank: The rank.
        pid: Its process id, ``None`` before it was forked.
        condition: ``said``: the rank has answered. ``stopped``: it has no stack until it continues. ``mute``: it has
            not answered in time. ``unarmed``: it can't be asked yet, or no longer. ``ended``: it is gone.
        text: The stacks of its threads, in the format of Python's fault handler.
    """

    rank: int
    pid: int | None
    condition: Condition
    text: str = ""


class Inspected(_AgentMessage, frozen=True, kw_only=True):
    """The stacks of a run's ranks."""

    job_id: str
    ranks: list[RankDump]


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's failure in words, as other nodes receive it.

    Attributes:
        where: The node's name in messages, which the receiver fills in.
        rank: The rank among all nodes; ``None`` if the node itself has gone.
        what: The exception with its message, or how the process ended.
        traceback: Its traceback; empty if it has none.
        lost_peer: True if the exception only reports that another rank has gone.
        is_wanted: True if a user has ended the run there, so that nothing is started again.
    """

    what: str
    where: str = ""
    rank: int | None = None
    traceback: str = ""
    lost_peer: bool = False
    is_wanted: bool = False

    @property
    def in_a_line(self) -> str:
        """The failure and its place in one line."""
        who = self.where if self.rank is None else f"rank {self.rank} on {self.where}"
        return f"{who}: {self.what}" if who else self.what


class Starting(_AgentMessage, frozen=True, kw_only=True):
    """All ranks of a run are started again or, on several nodes, for the first time. No earlier rank is left.

    Attributes:
        restarts: Number of restarts so far that a failure caused.
        first_rank: The number of this node's first rank among all.
        world_size: Number of ranks on all nodes.
        cause: The failure that caused this restart, if it was on another node.
    """

    job_id: str
    restarts: int
    first_rank: int
    world_size: int
    cause: Failure | None = None


class AboutNodes(_AgentMessage, frozen=True, kw_only=True):
    """The status of a run's other nodes, one line for each, or the nodes for which this one waits.

    Attributes:
        is_news: True if more has changed than their steps.
    """

    job_id: str
    lines: list[str]
    is_news: bool


class RunEnded(_AgentMessage, frozen=True, kw_only=True):
    """Every process of the run is gone, and all its events and output were sent.

    Attributes:
        elsewhere: The failure on another node that has ended the run, if there is one.
        by: The attached kernel or command that has ended a detached run, in words; else empty.
    """

    job_id: str
    reason: Reason
    elsewhere: Failure | None = None
    by: str = ""


class Broken(_AgentMessage, frozen=True, kw_only=True):
    """There is no template, or a run couldn't be started or go on. ``why`` and ``fix`` are those of an error.

    Attributes:
        was_running: True if ranks had reached the user's code.
    """

    text: str
    why: str = ""
    fix: str = ""
    job_id: str = ""
    was_running: bool = False


class Idle(_AgentMessage, frozen=True):
    """Nothing has run for the idle timeout: agent and template should end, unless a launch is on its way."""


class Fork(_AgentMessage, frozen=True, kw_only=True):
    """Fork one rank.

    Descriptors: payload, result file, connection, log, file for its stacks, and the store's listening socket if it
    ``listens``.

    Attributes:
        rank: Its local rank, as in all messages of this run.
        place: Its place among all ranks.
        variables: Its further environment variables.
    """

    job_id: str
    rank: int
    place: RankPlace
    listens: bool
    variables: dict[str, str] = {}


class ForkElastic(_AgentMessage, frozen=True, kw_only=True):
    """Fork a run's elastic process. Messages about it have the rank ``ELASTIC``.

    Descriptor: its connection to the agent.

    Attributes:
        options: Its options.
        world_size: Number of ranks on this node.
        grace_s: Seconds between SIGTERM and SIGKILL for ranks that are stopped.
    """

    job_id: str
    options: ElasticOptions
    world_size: int
    grace_s: float


class Ready(_AgentMessage, frozen=True, kw_only=True):
    """Ranks can be forked. The template sends it again when it has imported more.

    Attributes:
        files: The imported packages' own files, with modification time in ns and inode.
    """

    files: dict[str, tuple[int, int]]


class Unusable(_AgentMessage, frozen=True, kw_only=True):
    """The template ends because a module can't be preloaded. ``why`` names the module and the reason."""

    why: str


class Forked(_AgentMessage, frozen=True, kw_only=True):
    """The rank exists and leads a process group of its own, of the same number."""

    job_id: str
    rank: int
    pid: int


class NotForked(_AgentMessage, frozen=True, kw_only=True):
    """The rank couldn't be forked. ``why`` is the system's message."""

    job_id: str
    rank: int
    why: str


class Exited(_AgentMessage, frozen=True, kw_only=True):
    """The rank is gone, and so is every process of its group.

    ``status`` is that of ``os.waitstatus_to_exitcode``; ``peak_bytes`` is its peak memory.
    """

    job_id: str
    rank: int
    status: int
    peak_bytes: int


ToAgent: TypeAlias = Prepare | Launch | Interrupt | Respawn | End | Release | Inspect | Profile | Detach | Quit
Order: TypeAlias = Hello | Interrupt | Respawn | End | Inspect | Profile
ToKernel: TypeAlias = Said | Inspected | Starting | AboutNodes | RunEnded | Broken | Idle | Detached
ToTemplate: TypeAlias = Fork | ForkElastic
ToRank: TypeAlias = Profile | PeersFinished
FromTemplate: TypeAlias = Ready | Unusable | Forked | NotForked | Exited

_encoder = msgspec.msgpack.Encoder()
_for_agent: msgspec.msgpack.Decoder[ToAgent] = msgspec.msgpack.Decoder(ToAgent)
_for_detached: msgspec.msgpack.Decoder[Order] = msgspec.msgpack.Decoder(Order)
_attached: msgspec.msgpack.Decoder[Attached] = msgspec.msgpack.Decoder(Attached)
_for_kernel: msgspec.msgpack.Decoder[ToKernel] = msgspec.msgpack.Decoder(ToKernel)
_for_rank: msgspec.msgpack.Decoder[ToRank] = msgspec.msgpack.Decoder(ToRank)
_from_template: msgspec.msgpack.Decoder[FromTemplate] = msgspec.msgpack.Decoder(FromTemplate)
_for_template: msgspec.msgpack.Decoder[ToTemplate] = msgspec.msgpack.Decoder(ToTemplate)


def encode(message: msgspec.Struct) -> bytes:
    """Return the message as bytes."""
    return _encoder.encode(message)


def decode_for_agent(body: bytes) -> ToAgent:
    """Decode the kernel's message to the agent."""
    return _for_agent.decode(body)


def decode_order(body: bytes) -> Order:
    """Decode the message of a kernel that is attached to a detached run.

    Raises:
        msgspec.DecodeError: The bytes are no such message.
    """
    return _for_detached.decode(body)


def decode_attached(body: bytes) -> Attached:
    """Decode the answer of a detached run's agent to ``Hello``.

    Raises:
        msgspec.DecodeError: The bytes are no such message.
    """
    return _attached.decode(body)


def decode_for_kernel(body: bytes) -> ToKernel:
    """Decode the agent's message to the kernel."""
    return _for_kernel.decode(body)


def decode_for_rank(body: bytes) -> ToRank:
    """Decode the agent's message to a rank."""
    return _for_rank.decode(body)


def decode_from_template(body: bytes) -> FromTemplate:
    """Decode the template's message to the agent."""
    return _from_template.decode(body)


def decode_for_template(body: bytes) -> ToTemplate:
    """Decode the agent's message to the template."""
    return _for_template.decode(body)
