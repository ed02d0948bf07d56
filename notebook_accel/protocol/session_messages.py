"""Messages between a session's kernel and its ranks. Descriptors travel beside a message, as its class states.

kernel -> rank       Welcome, Execute, Call, Push, Pull, CountAsPulled, LookUp, Debug, Input, InspectGroup,
                     RenewGroup, Settle, Detach, Leave
rank -> kernel       Hello, Displayed, Prompt, Reply

Each side unpickles only memory files that the other has sealed. A rank opens nothing before the kernel has
accepted its ``Hello``, and the kernel opens nothing before it has checked the ``Hello``.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from notebook_accel.protocol.events import Display, Failed


class _SessionMessage(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    pass


class Delivery(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of the sealed file beside a message, with the numbers by which later messages refer to them.

    Attributes:
        shared: Numbers of the objects that are listed in the file, in order.
        by_value: Numbers of the functions and classes that travel in it by value, in order; -1 for one that no later
            message refers to.
        by_force: Names whose values replace the rank's own.
        same_statistics: Numbers of optimizers whose statistics, such as momenta, haven't changed in the notebook. They
            get those of the rank's optimizers.
        forgotten: Numbers of earlier objects that the notebook no longer has.
        sources: Source texts by the file name in their code, each with its label for tracebacks.
    """

    shared: list[int] = []
    by_value: list[int] = []
    by_force: list[str] = []
    same_statistics: list[int] = []
    forgotten: list[int] = []
    sources: dict[str, tuple[str, str]] = {}


class Welcome(_SessionMessage, frozen=True, kw_only=True):
    """Accept a rank into the session. ``renewals`` is the number of process groups given up so far."""

    renewals: int


class _Request(_SessionMessage, frozen=True, kw_only=True):
    """A request, which the rank answers with a ``Reply`` of the same number.

    ``sent_s`` is the time of sending, in seconds of ``time.monotonic()``. Earlier interrupts don't concern the request.
    """

    number: int
    sent_s: float


class Execute(_Request, frozen=True, kw_only=True):
    """Run a cell in the rank's ``__main__``.

    Descriptors: the sealed names that the cell needs, if there is a ``delivery``.

    Attributes:
        source: The cell as plain Python.
        label: Its name in tracebacks; the file name of its code.
        wants_value: Whether to send back the value of its last expression itself, besides how it is shown.
    """

    source: str
    label: str
    wants_value: bool = False
    delivery: Delivery | None = None


class Call(_Request, frozen=True, kw_only=True):
    """Call a function and send back its result. Descriptors: the function and its arguments, sealed."""

    delivery: Delivery


class Push(_Request, frozen=True, kw_only=True):
    """Bind names. Descriptors: the names, sealed."""

    delivery: Delivery


class Pull(_Request, frozen=True, kw_only=True):
    """Send back the values of names, whole where they are sharded over the ranks.

    Attributes:
        names: The names.
        answering: The ranks that send values. All others only help to gather them.
        gathers: Whether all ranks have the request, so that they can gather.
    """

    names: list[str]
    answering: list[int]
    gathers: bool


class CountAsPulled(_Request, frozen=True, kw_only=True):
    """Give variables the numbers of the notebook's copies of them, which a pull has made.

    Attributes:
        numbers: Numbers for the parts of each variable, by its name.
    """

    numbers: dict[str, list[int]]


class LookUp(_Request, frozen=True, kw_only=True):
    """Complete the end of ``text``; if it ``describes``, describe the value of ``text``. Run no user code."""

    text: str
    describes: bool = False


class Debug(_Request, frozen=True, kw_only=True):
    """Open a debugger at the last error. Until its ``Reply``, the kernel answers each ``Prompt`` with an ``Input``."""


class Input(_SessionMessage, frozen=True, kw_only=True):
    """A line for the debugger, with its newline; empty when there will be no more.

    ``number`` is the number of its ``Debug``.
    """

    number: int
    line: str


class InspectGroup(_Request, frozen=True, kw_only=True):
    """Send back the rank's position in its process groups, after a cell that did not end well."""


class RenewGroup(_Request, frozen=True, kw_only=True):
    """Leave the process group, which is broken.

    Attributes:
        renewals: Number of groups given up, with this one. It is the prefix of the next group's keys in the store.
        rejoins: Whether to form a new group now. Otherwise the next code that needs one forms it.
    """

    renewals: int
    rejoins: bool = True


class Settle(_Request, frozen=True, kw_only=True):
    """Do nothing but answer. By then earlier interrupts have arrived, so that they can't hit later requests."""


class Detach(_Request, frozen=True, kw_only=True):
    """Outlive this kernel: once it has gone, wait for the next kernel in ``folder``, under the session's new ``name``.

    An empty ``folder`` cancels an earlier ``Detach``.
    """

    folder: str
    name: str


class Leave(_SessionMessage, frozen=True):
    """Exit, since the session is over. Without this message, a detached session's rank waits for another kernel."""


class RetainedState(msgspec.Struct, frozen=True, kw_only=True):
    """State that a rank of a detached session has kept from the kernels that it has served before.

    Attributes:
        own: Names that the rank has bound itself.
        sent: Names that have values from an earlier notebook, without those of modules.
        requests: Number of its last request.
        renewals: Number of process groups given up so far.
        group: ``unchecked`` if code has failed since the process group was last inspected; ``broken`` if the group
            can't be trusted any more.
        failed: The failure of its last request, which may have reached no kernel.
        title: The last request in words.
    """

    own: list[str]
    sent: list[str]
    requests: int
    renewals: int
    group: Literal["sound", "unchecked", "broken"]
    failed: Failed | None
    title: str


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's first message.

    Attributes:
        secret: The session's secret, from a file in a folder that only this user can open.
        rank: The rank's number.
        kept: The state from earlier kernels; ``None`` for a fresh process.
    """

    secret: bytes
    rank: int
    kept: RetainedState | None = None


class Displayed(_SessionMessage, frozen=True, kw_only=True):
    """A display of the code that runs for the request of this number."""

    number: int
    display: Display


class Prompt(_SessionMessage, frozen=True, kw_only=True):
    """The debugger waits for a line.

    Attributes:
        number: Number of its ``Debug``.
        text: The debugger's output since the last line, with the prompt at its end.
        log_bytes: Length of the rank's log so far.
    """

    number: int
    text: str
    log_bytes: int


class Reply(_SessionMessage, frozen=True, kw_only=True):
    """The end of a request.

    Descriptors: the sealed value, if there is one.

    Attributes:
        number: Number of the request.
        shown: The value as it is shown, by mime type; empty if there is none.
        failed: The exception that ended the request, if any.
        lacks_delivery: Whether the rank could not open the delivery of the request.
        breaks_group: Whether the process group can't be trusted any more.
        bound: Names that have become the rank's own since its last reply.
        unbound: Names that were the rank's own and no longer are.
        missing: The name that the rank doesn't have, if it failed with a NameError.
        log_bytes: Length of the rank's log so far.
        steps: Number of steps that the rank has counted so far.
        group_calls: For ``InspectGroup``: number of calls in each process group; ``None`` without a group.
        lines: The answer to a ``LookUp``, the names of a ``CountAsPulled`` that the rank has, the losses of a
            ``RenewGroup``, or the reason why a ``Debug`` is refused.
    """

    number: int
    shown: dict[str, str] = {}
    failed: Failed | None = None
    lacks_delivery: bool = False
    breaks_group: bool = False
    bound: list[str] = []
    unbound: list[str] = []
    missing: str = ""
    log_bytes: int = 0
    steps: int = 0
    group_calls: list[int] | None = None
    lines: list[str] = []


ToRank: TypeAlias = (
    Welcome
    | Execute
    | Call
    | Push
    | Pull
    | CountAsPulled
    | LookUp
    | Debug
    | Input
    | InspectGroup
    | RenewGroup
    | Settle
    | Detach
    | Leave
)
FromRank: TypeAlias = Displayed | Prompt | Reply

encode = msgspec.msgpack.Encoder().encode
for_rank: msgspec.msgpack.Decoder[ToRank] = msgspec.msgpack.Decoder(ToRank)
from_rank: msgspec.msgpack.Decoder[FromRank] = msgspec.msgpack.Decoder(FromRank)
hello = msgspec.msgpack.Decoder(Hello)
