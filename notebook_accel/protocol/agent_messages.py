"""What kernel, agent and template say to each other. Descriptors travel beside a message, in the order stated.

kernel -> agent      Prepare, Launch, Interrupt, Respawn, End, Release, Inspect, Quit
agent -> kernel      Said, Inspected, Starting, AboutNodes, RunEnded, Broken, Idle
agent -> template    Fork, ForkElastic
template -> agent    Ready, Unusable, Forked, NotForked, Exited

What the agent and a run's elastic process say to each other is in ``elastic_messages``.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from notebook_accel.environment import RankPlace

__all__ = [
    "ELASTIC",
    "AboutNodes",
    "Broken",
    "Elastic",
    "End",
    "Exited",
    "Failure",
    "Fork",
    "ForkElastic",
    "Forked",
    "FromTemplate",
    "Idle",
    "Inspect",
    "Inspected",
    "Interrupt",
    "Launch",
    "Meeting",
    "NotForked",
    "Place",
    "Prepare",
    "Quit",
    "RankDump",
    "Ready",
    "Release",
    "Respawn",
    "RunEnded",
    "Said",
    "Starting",
    "ToAgent",
    "ToKernel",
    "ToTemplate",
    "Unusable",
    "decode_for_agent",
    "decode_for_kernel",
    "decode_from_template",
    "encode",
]

How = Literal["interrupt", "stop", "kill"]
OnDeath = Literal["stop", "keep"]
Reason = Literal["", "failed", "interrupted", "stopped", "terminated", "timeout", "template lost", "elastic lost"]

Place: TypeAlias = tuple[RankPlace, dict[str, str]]
"""A rank's place among all, and what its environment has besides."""

ELASTIC = -1  # what stands in the place of a rank's number for the elastic process of a run

Condition = Literal["said", "stopped", "mute", "unarmed", "ended"]


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    pass


class Meeting(msgspec.Struct, frozen=True, kw_only=True):
    """The place and the way in which the nodes of a run meet.

    Attributes:
        num_nodes: Number of nodes as the user gave it: a number, or a range such as ``2:4``.
        least: Fewest nodes that can start.
        most: Most nodes that can take part.
        node_rank: This node's number, with the static backend.
        backend: Name of torch elastic's rendezvous backend.
        host: Host of the rendezvous.
        port: Its TCP port.
        timeout_s: How long nodes wait for each other.
        silence_s: A node that is silent for so long is taken as gone.
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


class Elastic(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a run's elastic process, with the names that they have in ``LaunchConfig``."""

    max_restarts: int
    monitor_interval_s: float
    run_id: str
    meeting: Meeting


class Prepare(_Message, frozen=True, kw_only=True):
    """Have a template ready that was started with this environment and import path. Later launches use it.

    Attributes:
        preload: Modules that it imports besides what every rank needs.
        idle_timeout_s: How long after the last run, or after this, the agent says that it is idle.
    """

    environment: dict[str, str]
    sys_path: list[str]
    preload: list[str]
    idle_timeout_s: float


class Launch(_Message, frozen=True, kw_only=True):
    """Start a run. ``log_folder`` may be empty. ``idle_timeout_s`` takes the place of what was said before.

    The agent starts the ranks again after a failure, up to ``max_restarts`` times. In a run with ``elastic``, which is
    this node's part of a run on several nodes, the elastic process decides that. A run with ``places`` is a part too:
    its ranks have these places and variables, and stay until ``Release``.

    Descriptors: the payload, then one result file for each rank. With a ``template_pid``, the process of a template for
    this run alone, also a connection to that template and its pidfd. With ``places`` that include rank 0, also the
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
    elastic: Elastic | None = None
    places: list[Place] = []


class Interrupt(_Message, frozen=True, kw_only=True):
    """Raise KeyboardInterrupt in the ranks of a run, and nothing more: they go on as they see fit."""

    job_id: str


class Respawn(_Message, frozen=True, kw_only=True):
    """Fork a rank that is gone once more."""

    job_id: str
    rank: int


class End(_Message, frozen=True, kw_only=True):
    """End a run: SIGINT first, or SIGTERM, or SIGKILL. The stronger ones follow by themselves after the grace."""

    job_id: str
    how: How


class Release(_Message, frozen=True):
    """Every rank of the run has finished, on all nodes: let those here go."""

    job_id: str


class Inspect(_Message, frozen=True):
    """Ask the ranks of a run where they stand. One answer may serve several askers."""

    job_id: str


class Quit(_Message, frozen=True):
    """Stop what runs, with its grace, and go."""


class Said(_Message, frozen=True, kw_only=True):
    """An encoded event of a rank."""

    job_id: str
    rank: int
    event: msgspec.Raw


class RankDump(msgspec.Struct, frozen=True, kw_only=True):
    """Where a rank stands.

    Attributes:
        rank: The rank.
        pid: Its process, ``None`` before it was forked.
        condition: ``said``: it has answered. ``stopped``: it has no stack until it goes on. ``mute``: it has not
            answered in time. ``unarmed``: it can't be asked yet, or no longer. ``ended``: it is gone.
        text: The stacks of its threads, as Python's fault handler writes them.
    """

    rank: int
    pid: int | None
    condition: Condition
    text: str = ""


class Inspected(_Message, frozen=True, kw_only=True):
    """Where the ranks stand."""

    job_id: str
    ranks: list[RankDump]


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's failure, in words: all that another node is told of it.

    Attributes:
        where: The node, as a message calls it; filled in by who hears of it.
        rank: The rank, over all nodes; ``None`` if it is the node that has gone.
        what: What happened to it.
        traceback: Its traceback; empty if it has none.
        lost_peer: Whether it only says that another rank has gone.
        is_wanted: Whether somebody has ended the run there, so that nothing is started again.
    """

    what: str
    where: str = ""
    rank: int | None = None
    traceback: str = ""
    lost_peer: bool = False
    is_wanted: bool = False

    @property
    def in_a_line(self) -> str:
        """What and where."""
        who = self.where if self.rank is None else f"rank {self.rank} on {self.where}"
        return f"{who}: {self.what}" if who else self.what


class Starting(_Message, frozen=True, kw_only=True):
    """The ranks of a run are started again, or those of a run on several nodes for the first time; none is left.

    Attributes:
        restarts: How often they have been started again because of a failure.
        first_rank: The number of the first one here among all.
        world_size: Of all nodes.
        cause: The failure on another node because of which they are started again, if it was there.
    """

    job_id: str
    restarts: int
    first_rank: int
    world_size: int
    cause: Failure | None = None


class AboutNodes(_Message, frozen=True, kw_only=True):
    """How the other nodes of a run stand, a line for each, or whom it waits for.

    Attributes:
        is_news: Whether more has changed than the steps that they have done.
    """

    job_id: str
    lines: list[str]
    is_news: bool


class RunEnded(_Message, frozen=True, kw_only=True):
    """Every process of the run is gone and everything that it said has been said.

    Attributes:
        elsewhere: The failure on another node that it has ended by, if it was there.
    """

    job_id: str
    reason: Reason
    elsewhere: Failure | None = None


class Broken(_Message, frozen=True, kw_only=True):
    """No template can be had, or a run could not be started or go on. ``why`` and ``fix`` are as an error's.

    Attributes:
        was_running: Whether ranks had come to the user's code.
    """

    text: str
    why: str = ""
    fix: str = ""
    job_id: str = ""
    was_running: bool = False


class Idle(_Message, frozen=True):
    """Nothing has run for so long that agent and template should go, unless a launch is on its way."""


class Fork(_Message, frozen=True, kw_only=True):
    """Fork one rank.

    Descriptors: payload, result file, connection, log, file for its stacks, and the store's listening socket if it
    ``listens``.

    Attributes:
        rank: Its number in this run's messages: its local rank.
        place: Its place among all.
        variables: What its environment has besides.
    """

    job_id: str
    rank: int
    place: RankPlace
    listens: bool
    variables: dict[str, str] = {}


class ForkElastic(_Message, frozen=True, kw_only=True):
    """Fork a run's elastic process. Messages about it have the rank ``ELASTIC``.

    Descriptor: its connection to the agent.

    Attributes:
        options: Its options.
        world_size: Number of ranks on this node.
        grace_s: Seconds between SIGTERM and SIGKILL for ranks that are stopped.
    """

    job_id: str
    options: Elastic
    world_size: int
    grace_s: float


class Ready(_Message, frozen=True, kw_only=True):
    """Ranks can be forked. Said again when more is imported.

    Attributes:
        files: The imported packages' own files, with modification time in ns and inode.
    """

    files: dict[str, tuple[int, int]]


class Unusable(_Message, frozen=True, kw_only=True):
    """What was to be preloaded can't be, and the template ends. ``why`` says which module and the reason."""

    why: str


class Forked(_Message, frozen=True, kw_only=True):
    """The rank exists and leads a process group of its own, of the same number."""

    job_id: str
    rank: int
    pid: int


class NotForked(_Message, frozen=True, kw_only=True):
    """The rank could not be forked. ``why`` is what the system says."""

    job_id: str
    rank: int
    why: str


class Exited(_Message, frozen=True, kw_only=True):
    """The rank is gone, and so is every process of its group.

    ``status`` is as from ``os.waitstatus_to_exitcode``; ``peak_bytes`` is the most memory that it had.
    """

    job_id: str
    rank: int
    status: int
    peak_bytes: int


ToAgent: TypeAlias = Prepare | Launch | Interrupt | Respawn | End | Release | Inspect | Quit
ToKernel: TypeAlias = Said | Inspected | Starting | AboutNodes | RunEnded | Broken | Idle
ToTemplate: TypeAlias = Fork | ForkElastic
FromTemplate: TypeAlias = Ready | Unusable | Forked | NotForked | Exited

_encoder = msgspec.msgpack.Encoder()
_for_agent: msgspec.msgpack.Decoder[ToAgent] = msgspec.msgpack.Decoder(ToAgent)
_for_kernel: msgspec.msgpack.Decoder[ToKernel] = msgspec.msgpack.Decoder(ToKernel)
_from_template: msgspec.msgpack.Decoder[FromTemplate] = msgspec.msgpack.Decoder(FromTemplate)
_for_template: msgspec.msgpack.Decoder[ToTemplate] = msgspec.msgpack.Decoder(ToTemplate)


def encode(message: msgspec.Struct) -> bytes:
    """The message as bytes."""
    return _encoder.encode(message)


def decode_for_agent(body: bytes) -> ToAgent:
    """What the kernel told the agent."""
    return _for_agent.decode(body)


def decode_for_kernel(body: bytes) -> ToKernel:
    """What the agent told the kernel."""
    return _for_kernel.decode(body)


def decode_from_template(body: bytes) -> FromTemplate:
    """What the template told the agent."""
    return _from_template.decode(body)


def decode_for_template(body: bytes) -> ToTemplate:
    """What the agent told the template."""
    return _for_template.decode(body)
